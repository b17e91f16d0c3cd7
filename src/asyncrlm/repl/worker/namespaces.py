"""Namespaces of the kernel: processes cloned into new ones, and what is mounted there."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import struct
from typing import TYPE_CHECKING

from . import confine

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

NEWNS, NEWUSER, NEWPID, NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
_CLONE = {"x86_64": 56, "aarch64": 220}.get(confine.MACHINE)
_holding_gil = ctypes.PyDLL(None, use_errno=True)  # the child must own the GIL
_READONLY = 1
_RECURSIVE, _AT_FDCWD = 0x8000, -100
_MOUNT_SETATTR = 442
# What /proc tells of the whole machine, and no library reads.
_TELLTALES = (
    *(
        "cmdline",
        "diskstats",
        "fs",
        "key-users",
        "keys",
        "latency_stats",
        "locks",
        "mdstat",
        "partitions",
        "sched_debug",
    ),
    *("scsi", "swaps", "sysvipc", "timer_list"),
)


def clone(flags: int) -> int:
    """os.fork with CLONE_NEW* flags."""
    if not flags:
        return os.fork()
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _holding_gil.syscall(_CLONE, flags | signal.SIGCHLD, 0, 0, 0, 0)
    number = ctypes.get_errno()
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, os.strerror(number))
    return pid


def enter(namespace: int, kind: int) -> None:
    """Go into the namespace behind this descriptor."""
    if confine.libc.setns(namespace, kind):
        raise confine.failure("setns")


def _empty_network() -> int:
    own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        unshare(NEWNET)
        empty = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        enter(own, NEWNET)
        return empty
    finally:
        os.close(own)


def unshare(flags: int) -> None:
    """New namespaces for this process (mounts) or for those it forks (pids)."""
    if confine.libc.unshare(flags):
        raise confine.failure("unshare")


def map_ids(uid: int, gid: int) -> None:
    """In a new user namespace: be who we were, and nobody else."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open("/proc/self/" + name, "w") as f:
            f.write(text)


def _mount(source: bytes | None, target: str, kind: bytes | None, flags: int, data: bytes | None = None) -> None:
    if confine.libc.mount(source, os.fsencode(target), kind, ctypes.c_ulong(flags), data):
        raise confine.failure("mount " + target)


def _read_only(target: str, on: bool, flags: int = 0) -> None:
    attributes = (ctypes.c_uint64 * 4)(_READONLY if on else 0, 0 if on else _READONLY, 0, 0)
    path = os.fsencode(target)
    if confine.libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path, ctypes.c_uint(flags), attributes, ctypes.c_size_t(32)):
        raise confine.failure("mount_setattr " + target)


def mounts(plan: Container[str], folders: Iterable[str] = (), sized: tuple[str, int] | None = None) -> None:
    """In a new mount namespace, what `plan` names.

    "readonly": nothing but `folders` can be changed, be it content, mode, owner or times; the folder of `sized`
    (folder, bytes) is a memory file system of that size. "proc": a /proc with this namespace's processes only and a
    bounded /dev/shm of its own.
    """
    _mount(None, "/", None, 0x44000)  # MS_REC | MS_PRIVATE
    if "readonly" in plan:
        _read_only("/", True, _RECURSIVE)
        for folder in folders:
            _mount(os.fsencode(folder), folder, None, 0x1000)  # MS_BIND
            _read_only(folder, False)
        if sized:
            _tmpfs(*sized)
    if "proc" in plan:
        _mount(b"proc", "/proc", b"proc", 14)  # MS_NOSUID | MS_NODEV | MS_NOEXEC
        _mount(b"tmpfs", "/dev/shm", b"tmpfs", 6, b"size=64m,nr_inodes=4096,mode=1777")
        for path, is_folder in telltales():
            if is_folder:
                _mount(b"tmpfs", path, b"tmpfs", 15, b"size=4k,nr_inodes=1")  # the same, and MS_RDONLY
            else:
                _mount(b"/dev/null", path, None, 0x1000)


@functools.cache
def telltales() -> list[tuple[str, bool]]:
    """The files of /proc that cells find empty, and whether each is a folder; looked for once, by a template."""
    paths = ["/proc/" + name for name in _TELLTALES]
    return [(path, os.path.isdir(path)) for path in paths if os.path.exists(path)]


def _tmpfs(folder: str, size: int) -> None:
    options = f"size={size},nr_inodes=65536,mode=0700"
    _mount(b"tmpfs", folder, b"tmpfs", 6, options.encode())


# ---- a first process that is no Python -------------------------------------------------------------------------------

# It gives itself a name for lists of processes, ignores SIGCHLD, so that the kernel reaps orphans, then sleeps until
# the process behind descriptor 0, a pidfd, has ended. To read it: objdump -D -b binary -m i386:x86-64 (or aarch64).
_FIRST = {
    "x86_64": (
        62,
        "bf0f000000488d356f000000b89d0000000f05"  # prctl(PR_SET_NAME, name)
        "bf11000000488d353c00000031d241ba08000000b80d0000000f05"  # rt_sigaction(SIGCHLD, &ignore, NULL, 8)
        "48b80000000001000000504889e7be01000000baffffffffb8070000000f05"  # poll(&{0, POLLIN}, 1, -1)
        "31ffb8e70000000f05" + "0f1f440000"  # exit_group(0)
        "0100000000000000" + "00" * 24,  # ignore: SIG_IGN, no flags, no restorer, no mask
    ),
    "aarch64": (
        183,
        "c1030010e00180d2e81480d2010000d4"  # prctl(PR_SET_NAME, name)
        "200280d221020010020080d2030180d2c81080d2010000d4"  # rt_sigaction(SIGCHLD, &ignore, NULL, 8)
        "2900c0d2e90f1ff8e0030091210080d2020080d2030080d2280980d2010000d4"  # ppoll(&{0, POLLIN}, 1, NULL, NULL)
        "000080d2c80b80d2010000d4" + "1f2003d5"  # exit_group(0)
        "0100000000000000" + "00" * 24,
    ),
}
"""Machine → its number in an ELF header, and the code, which the name follows."""
_FIRST_NAME = "asyncrlm-warden"


def _elf(machine: int, code: bytes) -> bytes:
    """The least that Linux runs: one segment, at a fixed address, with its entry right after the headers."""
    base, head = 0x400000, 64 + 56
    code += _FIRST_NAME.encode() + b"\0"
    size = head + len(code)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, base + head, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000)
    return ident + header + segment + code


class Nests:
    """Makes pid namespaces whose first process is a page of machine code, and forks into them.

    `network` is a network namespace with nothing in it, which all that are confined can share. A warden is a copy of
    this process and costs as much as a worker; this costs a tenth of a millisecond. It takes CAP_SYS_ADMIN where this
    process was born.

    Raises:
        OSError: if this machine does not allow it.
    """

    def __init__(self, lock: int) -> None:
        self._lock = lock
        """Held open by each first process: until it is gone, all of its namespace is not."""
        self._program = os.memfd_create("first", os.MFD_CLOEXEC)
        machine, code = _FIRST[confine.MACHINE]
        os.write(self._program, _elf(machine, bytes.fromhex(code)))
        os.fchmod(self._program, 0o500)
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._self = os.pidfd_open(os.getpid())
        self.network = _empty_network()

    def fork(self) -> tuple[int, int]:
        """os.fork into a new pid namespace. Gives the pid of its first process, which when killed takes all of the
        namespace with it, and the child's; the child gets 0 for its own."""
        unshare(NEWPID)
        first = pid = -1
        try:
            first = os.posix_spawn(
                f"/proc/self/fd/{self._program}",
                [_FIRST_NAME],
                {},
                file_actions=[(os.POSIX_SPAWN_DUP2, self._self, 0), (os.POSIX_SPAWN_DUP2, self._lock, 1)],
                setsid=True,
            )
            pid = os.fork()
        finally:
            # unshare works once; but whoever comes back to where they were may do it again.
            if pid:
                enter(self._own, NEWPID)
            if pid < 0 < first:
                os.kill(first, signal.SIGKILL)
                os.waitpid(first, 0)
        return first, pid
