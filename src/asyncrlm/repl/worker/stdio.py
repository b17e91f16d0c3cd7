"""Standard streams of cells: file descriptors 0 to 2, made whole again after each cell."""

from __future__ import annotations

import fcntl
import io
import os
import sys
from typing import Any, cast


class Stdio:
    """Owns `sys.stdin`, `sys.stdout` and `sys.stderr`, and copies of the descriptors below them."""

    def __init__(self) -> None:
        self._saved: dict[int, int] = {}
        """Descriptor → a copy of it."""
        self._identity: dict[int, tuple[int, int]] = {}
        self._streams: list[Any] = [None, None, None]

    def attach(self) -> None:
        """Take descriptors 0 to 2 as they are now; once, in the process that will use them."""
        for fd in (0, 1, 2):
            try:
                self._saved[fd] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64)
            except OSError:  # so many there may not be here
                self._saved[fd] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
            self._identity[fd] = _identity(fd)
        self.restore()

    def restore(self) -> None:
        """After a cell that may have closed or replaced any of them."""
        for fd, saved in self._saved.items():
            if _identity(fd) != self._identity[fd]:
                try:
                    os.dup2(saved, fd, inheritable=True)
                except OSError:  # a cell that closes every descriptor has no streams either
                    continue
        for fd, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
            stream = self._streams[fd]
            if stream is None or stream.closed:
                stream = self._streams[fd] = _open(fd)
            if getattr(sys, name, None) is not stream:
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)

    def flush(self) -> None:
        """Write out what `print` holds back: of the cell's own streams and of ours."""
        for stream in (getattr(sys, "stdout", None), getattr(sys, "stderr", None), *self._streams[1:]):
            try:
                cast("Any", stream).flush()
            except Exception:  # closed or replaced by whatever the cell thought of; there is no one to tell
                continue


def _identity(fd: int) -> tuple[int, int]:
    try:
        status = os.fstat(fd)
    except OSError:
        return (-1, -1)
    return (status.st_dev, status.st_ino)


def _open(fd: int) -> Any:
    # Never closed with the stream: `sys.stdout.close()` in a cell must not close the pipe.
    if fd == 0:
        return io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), "utf-8", "replace")
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
