"""What a worker does to itself before it runs a cell: resource limits, no capabilities, Landlock, seccomp.

Standard library only. On systems other than Linux only the resource limits hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Rule = tuple[str | int, int]  # a path or an O_PATH descriptor, and the rights below it
    Instruction = tuple[int, int, int, int]  # of BPF: code, jump if true, jump if false, operand
    Numbers = tuple[int | None, int | None]  # of a system call: x86_64, aarch64

LINUX = sys.platform.startswith("linux")
MACHINE = os.uname().machine
_libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_SECUREBITS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 28, 36, 38
# SECBIT_NOROOT, _NO_SETUID_FIXUP, _NO_CAP_AMBIENT_RAISE and their locks, _KEEP_CAPS_LOCKED.
_NO_ROOT = 0xEF


def prctl(*args: int) -> int:
    """The C library's prctl; returns 0 or -1."""
    return _libc.prctl(*(ctypes.c_ulong(x) for x in (args + (0,) * 5)[:5]))


def failure(what: str) -> OSError:
    """The OSError of the last call through ctypes."""
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


# ---- Landlock --------------------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 5
_MAKE_CHAR, _MAKE_BLOCK, _TRUNCATE = 1 << 6, 1 << 11, 1 << 14
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE  # the rights a rule on a file may hold
SCOPE_ABSTRACT_SOCKET, SCOPE_SIGNAL = 1, 2


def _landlock_abi() -> int:
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)) if LINUX else 0


LANDLOCK_ABI = _landlock_abi()
_ALL_RIGHTS = (1 << (16 if LANDLOCK_ABI >= 5 else 15 if LANDLOCK_ABI >= 3 else 14 if LANDLOCK_ABI >= 2 else 13)) - 1
READ = _EXECUTE | _READ_FILE | _READ_DIR
USE = READ | _WRITE_FILE
TAKE = READ | _REMOVE_FILE
# Root without capabilities may still not make device nodes, but on an older kernel it is Landlock that says so.
WORK = _ALL_RIGHTS & ~(_MAKE_CHAR | _MAKE_BLOCK)


def restrict(rules: Iterable[Rule] = (), files: int = 0, net: int = 0, scope: int = 0) -> None:
    """Enter a Landlock domain. `rules` are (path, rights), of paths that are there, or what `open_rules` made."""
    attributes = struct.pack("QQQ", files, net, scope)[: 24 if LANDLOCK_ABI >= 6 else 16 if LANDLOCK_ABI >= 4 else 8]
    ruleset = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise failure("landlock_create_ruleset")
    try:
        for place, rights in rules:
            _add_rule(ruleset, place, rights)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        if _libc.syscall(_RESTRICT_SELF, ruleset, 0):
            raise failure("landlock_restrict_self")
    finally:
        os.close(ruleset)


def _add_rule(ruleset: int, place: str | int, rights: int) -> None:
    fd = place
    if isinstance(fd, str):
        try:
            fd = os.open(fd, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return
        rights = _rights_on(fd, rights)
    try:
        if _libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights & _ALL_RIGHTS, fd), 0):
            raise failure("landlock_add_rule")
    finally:
        if fd is not place:
            os.close(fd)


def _rights_on(fd: int, rights: int) -> int:
    """Those of `rights` that a rule on this may hold."""
    is_folder = os.fstat(fd).st_mode & 0o170000 == 0o040000
    return rights if is_folder else rights & _ON_FILES


_SYSTEM = (
    # Not /usr as a whole: images put applications, with their settings, in /usr/src and /usr/local/src.
    *(p + d for p in ("/usr/", "/usr/local/") for d in ("bin", "sbin", "lib", "lib32", "lib64", "libexec", "share")),
    *("/lib", "/lib64", "/bin", "/sbin", "/usr/include", "/usr/local/include"),
    # Not /etc/ssl as a whole: /etc/ssl/private holds keys that root can read.
    *(
        "/etc/ssl/certs",
        "/etc/ssl/openssl.cnf",
        "/etc/pki/tls/certs",
        "/etc/pki/ca-trust/extracted",
        "/etc/ca-certificates",
    ),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/timezone", "/etc/mime.types", "/etc/fonts", "/etc/os-release"),
    *("/sys/devices/system/cpu", "/dev/urandom", "/dev/random"),
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat"),
)


def python_places() -> list[str]:
    """Where this interpreter, its library and its packages lie; never a whole prefix, which may be a project's root."""
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    inside = ("bin", "lib", "lib64", "libexec", "include", "share", "ssl", "pyvenv.cfg")
    return sorted({os.path.join(p, d) for p in prefixes for d in inside} | {os.path.realpath(sys.executable)})


def open_rules(packages: Iterable[str]) -> list[tuple[int, int]]:
    """The rules every worker of a template shares, as O_PATH descriptors opened once."""
    # Not /dev/zero for writing: mapped shared it is memory that no limit counts.
    readable = [os.path.realpath(p) for p in (*_SYSTEM, "/dev/zero", *python_places(), *packages) if os.path.exists(p)]
    # A rule costs time in every worker: none for what lies inside another's folder.
    kept: list[str] = []
    for path in sorted(set(readable)):
        if not (kept and path.startswith(kept[-1] + os.sep)):
            kept.append(path)
    rules: list[tuple[int, int]] = []
    for rights, paths in ((READ, kept), (USE, ("/dev/null", "/dev/full"))):
        for path in paths:
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
                rules.append((fd, _rights_on(fd, rights)))
    return rules


def landlock(rules: Iterable[Rule]) -> None:
    """Only what `rules` say may be opened; no TCP; signals and abstract sockets reach this domain only."""
    restrict(rules, _ALL_RIGHTS, 3 if LANDLOCK_ABI >= 4 else 0, 3 if LANDLOCK_ABI >= 6 else 0)


# ---- seccomp ---------------------------------------------------------------------------------------------------------

# System call numbers: x86_64, aarch64; None where the architecture has no such call.
_DENIED: dict[str, Numbers] = {
    # The network: every family of socket() passes Landlock but TCP, so none may be made.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    # System V and POSIX queues and memory: they outlive their maker and belong to the user, not to the worker.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # Memory that RLIMIT_DATA does not count.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # The kernel's wide doors.
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "syslog": (103, 116),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    # Owners and attributes of files: nothing here has a right to them, and Landlock does not look.
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
# Modes and times: needed by shutil, zipfile, tarfile. Where the mounts outside the working folder are read-only they
# work; elsewhere they succeed and change nothing, since a filter can't tell one path from another.
_METADATA: dict[str, Numbers] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
# Allowed on the caller itself: (numbers, what the first arguments must be). A user's or a group's priority is not one's
# own.
_OWN_ONLY: tuple[tuple[tuple[int, int], tuple[int, ...]], ...] = (
    ((302, 261), (0,)),  # prlimit64
    ((203, 122), (0,)),  # sched_setaffinity
    ((144, 119), (0,)),  # sched_setscheduler
    ((142, 118), (0,)),  # sched_setparam
    ((314, 274), (0,)),  # sched_setattr
    ((141, 140), (0, 0)),  # setpriority
    ((251, 30), (1, 0)),  # ioprio_set
)
# Where a mode is given: (numbers, which argument). None may make a file that runs as its owner.
_MODES: tuple[tuple[Numbers, int], ...] = (
    ((90, None), 1),  # chmod
    ((91, 52), 1),  # fchmod
    ((268, 53), 2),  # fchmodat
    ((452, 452), 2),  # fchmodat2
    ((2, None), 2),  # open
    ((85, None), 1),  # creat
    ((257, 56), 3),  # openat
    ((133, None), 1),  # mknod
    ((259, 33), 2),  # mknodat
)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_TRUNCATE_CALL, _CLONE, _CLONE3 = (76, 45), (56, 220), (435, 435)
_MMAP, _SOCKETPAIR, _IOCTL = (9, 222), (53, 199), (16, 29)
_OPENAT2 = (437, 437)
_CLONE_NEW = 0x7E020000
_IOCTLS = (
    0x40086602,  # FS_IOC_SETFLAGS, its 32-bit twin, FS_IOC_FSSETXATTR, FS_IOC_SETVERSION: a descriptor for reading is
    0x40046602,  # enough to change these attributes of a file
    0x401C5820,
    0x40087602,
    0x5412,  # TIOCSTI, TIOCLINUX: typing into a terminal
    0x541C,
)
SECCOMP = LINUX and MACHINE in _ARCHITECTURES

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW = (_RETURN, 0, 0, 0x7FFF0000)
_EPERM, _ENOSYS, _SUCCESS = (1, 38, 0)


def _errno(number: int) -> Instruction:
    return (_RETURN, 0, 0, 0x50000 | number)


def _argument(n: int) -> Instruction:
    # The kernel ignores the upper halves of these arguments, so the filter does too.
    return (_LOAD, 0, 0, 16 + 8 * n)


def _on(number: int, *body: Instruction) -> list[Instruction]:
    return [(_EQUAL, 0, len(body), number), *body]


def filter_program(quiet_metadata: bool) -> bytes:
    """The BPF program as bytes; `quiet_metadata`: chmod and utime succeed and do nothing."""
    which, architecture = _ARCHITECTURES[MACHINE]
    program = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        _errno(_EPERM),  # a foreign ABI: i386 on x86_64
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, 0x40000000),
        _errno(_EPERM),  # x32
    ]
    denied = [number for n in _DENIED.values() if (number := n[which]) is not None]
    if LANDLOCK_ABI < 3:
        denied.append(_TRUNCATE_CALL[which])
    for number in denied:
        program += _on(number, _errno(_EPERM))
    if quiet_metadata:
        for numbers in _METADATA.values():
            if (number := numbers[which]) is not None:
                program += _on(number, _errno(_SUCCESS))
    for numbers, n in _MODES:
        if (number := numbers[which]) is not None:
            program += _on(number, _argument(n), (_ANY_BIT, 0, 1, 0o6000), _errno(_EPERM), _ALLOW)
    for numbers, values in _OWN_ONLY:
        checks = [line for n, v in enumerate(values) for line in (_argument(n), (_EQUAL, 1, 0, v), _errno(_EPERM))]
        program += _on(numbers[which], *checks, _ALLOW)
    # ENOSYS makes the C library fall back to clone, whose flags a filter can read, and to openat.
    program += _on(_CLONE3[which], _errno(_ENOSYS))
    program += _on(_OPENAT2[which], _errno(_ENOSYS))
    program += _on(_CLONE[which], _argument(0), (_ANY_BIT, 0, 1, _CLONE_NEW), _errno(_EPERM), _ALLOW)
    # Memory that RLIMIT_DATA does not count: shared anonymous (0x20 is MAP_ANONYMOUS, 1 the bit of MAP_SHARED and
    # MAP_SHARED_VALIDATE) and MAP_GROWSDOWN (0x100).
    program += _on(
        _MMAP[which],
        *(_argument(3), (_ANY_BIT, 2, 0, 0x100), (_ANY_BIT, 0, 2, 0x20), (_ANY_BIT, 0, 1, 1), _errno(_EPERM), _ALLOW),
    )
    # A pair of datagram sockets (SOCK_RAW makes one too) could be aimed at any socket with a path: streams and
    # sequenced packets only.
    program += _on(
        _SOCKETPAIR[which],
        *(_argument(0), (_EQUAL, 1, 0, 1), _errno(_EPERM)),
        *(_argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 2, 0, 1), (_EQUAL, 1, 0, 5), _errno(_EPERM), _ALLOW),
    )
    ioctls = [(_EQUAL, len(_IOCTLS) - i, 0, request) for i, request in enumerate(_IOCTLS)]
    program += _on(_IOCTL[which], _argument(1), *ioctls, _ALLOW, _errno(_EPERM))
    program.append(_ALLOW)
    return b"".join(struct.pack("HBBI", *line) for line in program)


@functools.lru_cache(maxsize=1)
def filter_header(program: bytes) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]:
    """The struct sock_fprog for a program, and the copy of the program that it points to; a template makes it once."""
    code = ctypes.create_string_buffer(program, len(program))
    return ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))), code


def seccomp(program: bytes) -> None:
    """Enter a filter made by `filter_program`."""
    header, _ = filter_header(program)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if _libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), header, ctypes.c_ulong(0), ctypes.c_ulong(0)):
        raise failure("seccomp")


# ---- limits and capabilities -----------------------------------------------------------------------------------------


def limit(limits: Mapping[str, int]) -> None:
    """Set resource limits (name without RLIMIT_ → value), soft and hard, never above the hard limit there is."""
    for name, value in limits.items():
        which = getattr(resource, "RLIMIT_" + name, None)
        if which is None:
            continue
        hard = resource.getrlimit(which)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(which, (value, value))


def drop_capabilities() -> None:
    """Give up every capability, for good: no program that is run brings one back, whoever its owner is."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECUREBITS, _NO_ROOT)  # refused without CAP_SETPCAP, where there is nothing to give up
    if _libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6)):
        raise failure("capset")
