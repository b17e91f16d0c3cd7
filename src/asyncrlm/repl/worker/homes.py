"""Folders that outlive nobody: each is locked by whoever lives in it, and removed by the next who comes if nobody does.

On the host they are a template's, in a sandbox a keeper's.
"""

from __future__ import annotations

import fcntl
import os

from .removing import remove_tree

PREFIX = "asyncrlm-"


def above_standard(fd: int) -> int:
    """The same descriptor at a number above 2: at 0, 1 or 2 a program that it is passed to has its standard streams."""
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def lock_home(home: str) -> int:
    """Lock a new folder; gives the descriptor, whose copies hold the lock as well, and which no program inherits."""
    making = os.path.join(home, "making")
    # Locked before it has the name that a sweep looks for, or a sweep could take a home that is being made.
    lock = above_standard(os.open(making, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(making, os.path.join(home, "lock"))
    except BaseException:
        os.close(lock)
        raise
    return lock


def sweep_homes(folder: str) -> list[str]:
    """Remove the homes in `folder` whose users were all killed, so that nobody could: nobody holds their locks.

    Returns: those that were removed.
    """
    removed: list[str] = []
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if entry.name.startswith(PREFIX)]
    except OSError:
        return removed
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
            if not entry.is_dir(follow_symlinks=False) or status.st_uid != os.geteuid():
                continue
            lock = os.open(os.path.join(entry.path, "lock"), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if remove_tree(entry.path, last="lock"):
                removed.append(entry.path)
        except OSError:  # somebody holds it, or this file system has no locks
            continue
        finally:
            os.close(lock)
    return removed
