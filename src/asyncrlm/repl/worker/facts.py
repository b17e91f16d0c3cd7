"""What this machine allows: tried out once, when a template starts."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from . import confine, namespaces, syscalls

if TYPE_CHECKING:
    from .birth import Facts


class Plan:
    """A way to have pid namespaces, tried out in a child. Container profiles, AppArmor and sysctls may say no."""

    def __init__(self, flags: int, ids: tuple[int, int], home: str, nests: namespaces.Nests | None = None) -> None:
        self.flags = flags
        self.ids = ids
        self.home = home
        self.nests = nests

    def works(self, mounts: list[str], pid_max: bool = False) -> bool:
        """Whether a child may have all of this."""
        first = 0
        flags = self.flags | (namespaces.NEWNS if mounts else 0)
        try:
            if self.nests is not None:
                first, pid = self.nests.fork()
            else:
                pid = namespaces.clone(flags)
        except OSError:
            return False
        if pid == 0:
            try:
                self._try(mounts, pid_max)
                os._exit(0)
            except BaseException:
                os._exit(1)
        worked = os.waitpid(pid, 0)[1] == 0
        if first:
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
        return worked

    def _try(self, mounts: list[str], pid_max: bool) -> None:
        if self.flags & namespaces.NEWUSER:
            namespaces.map_ids(*self.ids)
        if mounts:
            if self.nests is not None:
                namespaces.unshare(namespaces.NEWNS)
            namespaces.mounts(mounts, [self.home], (os.path.join(self.home, "probe"), 1 << 20))
        if pid_max:
            with open("/proc/sys/kernel/pid_max", "w") as f:
                f.write("400")


def _pid_max_is_own() -> bool:
    # Before 6.14 this file is the whole system's, in every namespace.
    numbers = os.uname().release.split("-")[0].split(".")
    try:
        return (int(numbers[0]), int(numbers[1])) >= (6, 14)
    except (ValueError, IndexError):
        return False


def choose(wanted: str, home: str, lock: int) -> tuple[Facts, namespaces.Nests | None]:
    """What is in force here: the first of pidns, scope, walk that works, or the one `wanted`; and how to make pid
    namespaces without a warden, if that works. "warden" is pidns with one."""
    ids = os.getuid(), os.getgid()
    user = 0 if ids[0] == 0 else namespaces.NEWUSER  # in one of its own, RLIMIT_NPROC counts this worker alone
    facts: Facts = {
        "python": sys.version.split()[0],
        "mode": "walk",
        "flags": 0,
        "mounts": [],
        "userns": False,
        "landlock": confine.LANDLOCK_ABI,
        "seccomp": syscalls.SECCOMP,
        "pid_max": False,
        "ipython": "",
    }
    if not syscalls.SECCOMP:  # no table of numbers for this machine: clone can't be called either
        return facts, None
    os.mkdir(os.path.join(home, "probe"))
    namespaces.telltales()
    plans = [Plan(user | namespaces.NEWPID, ids, home)]
    if wanted in ("auto", "pidns") and not user:
        with contextlib.suppress(OSError):
            plans.insert(0, Plan(namespaces.NEWPID, ids, home, namespaces.Nests(lock)))
    if wanted in ("auto", "pidns", "warden"):
        for plan in plans:
            for mounts in (["readonly", "proc"], ["readonly"], ["proc"], []):
                if plan.works(mounts):
                    flags = plan.flags | (namespaces.NEWNS if mounts else 0)
                    facts.update({"mode": "pidns", "flags": flags, "mounts": mounts, "userns": bool(user)})
                    if not user and "proc" in mounts and _pid_max_is_own():
                        facts["pid_max"] = plan.works(mounts, pid_max=True)
                    return facts, plan.nests
    if wanted in ("auto", "scope") and confine.LANDLOCK_ABI >= 6:
        facts["mode"] = "scope"
        if user and Plan(user, ids, home).works([]):
            facts.update({"flags": user, "userns": True})
    return facts, None
