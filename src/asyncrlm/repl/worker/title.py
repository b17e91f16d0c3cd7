"""What `ps` and `top` call a process: what is forked from the template would else be shown as what started that."""

from __future__ import annotations

import ctypes
import functools

from . import confine

_PR_SET_NAME = 15


def entitle(name: str, *more: str) -> None:
    """Be shown under this name (15 characters in short lists), with `more` behind it instead of the arguments."""
    if not confine.LINUX:
        return
    confine.libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), *[ctypes.c_ulong(0)] * 3)
    start, size = _arguments()
    shown = " ".join((name, *more)).encode()[: max(0, size - 2)]
    if shown:
        # The kernel shows what stands there up to the first zero if the last byte, which was one, is none.
        ctypes.memmove(start, shown + bytes(size - 1 - len(shown)) + b".", size)


@functools.cache
def _arguments() -> tuple[int, int]:
    """Where the arguments of this process, and of all that are forked from it, stand in memory, and their size."""
    with open("/proc/self/stat", "rb") as f:
        fields = f.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    return start, end - start if start else 0
