"""Which system calls a worker may make: a seccomp filter, written as raw BPF."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import TYPE_CHECKING

from . import confine

if TYPE_CHECKING:
    Instruction = tuple[int, int, int, int]  # of BPF: code, jump if true, jump if false, operand
    Body = list[Instruction]
    Numbers = tuple[int | None, int | None]  # of a system call: x86_64, aarch64

# System call numbers: x86_64, aarch64; None where the architecture has no such call.
# The network: every family of socket() passes Landlock but TCP, so none may be made.
_NETWORK: dict[str, Numbers] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "shutdown": (48, 210),  # of the channel, whose end the host would take for the worker's
}
_DENIED: dict[str, Numbers] = {
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
    # News of files: of any folder that can be named, readable or not.
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
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
# Landlock lets cells read the attributes of any file they can name. "Not supported" is what shutil and ls pass over;
# by a descriptor (fgetxattr) they stay, since that takes a file it may open.
_UNSUPPORTED: dict[str, Numbers] = {
    "getxattr": (191, 8),
    "lgetxattr": (192, 9),
    "listxattr": (194, 11),
    "llistxattr": (195, 12),
    "getxattrat": (464, 464),
    "listxattrat": (465, 465),
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
_SET_SCHEDULER = (144, 119)
# Allowed on the caller itself: (numbers, what the first arguments must be). A user's or a group's priority is not one's
# own.
_OWN_ONLY: tuple[tuple[tuple[int, int], tuple[int, ...]], ...] = (
    ((302, 261), (0,)),  # prlimit64
    ((203, 122), (0,)),  # sched_setaffinity
    (_SET_SCHEDULER, (0,)),
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
_SECCOMP_CALL = (317, 277)
_SET_FILTER, _ALL_THREADS = 1, 1
SECCOMP = confine.LINUX and confine.MACHINE in _ARCHITECTURES

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN, _JUMP = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06, 0x05
_ALLOW = (_RETURN, 0, 0, 0x7FFF0000)
_EPERM, _ENOSYS, _ENOTSUP, _SUCCESS = (1, 38, 95, 0)


def _errno(number: int) -> Instruction:
    return (_RETURN, 0, 0, 0x50000 | number)


def _argument(n: int) -> Instruction:
    # The kernel ignores the upper halves of these arguments, so the filter does too.
    return (_LOAD, 0, 0, 16 + 8 * n)


def _tree(rules: list[tuple[int, Body]]) -> Body:
    """What finds the rule of a system call among these, sorted by number, in a few steps. The kernel walks through the
    filter once for each number that there is whenever a worker enters it: along a list that took 0.3 ms."""
    if len(rules) == 1:
        [(number, body)] = rules
        return [(_EQUAL, 0, len(body), number), *body, _ALLOW]
    middle = len(rules) // 2
    below, above = _tree(rules[:middle]), _tree(rules[middle:])
    jump = (_AT_LEAST, len(below), 0, rules[middle][0])
    if len(below) < 256:
        return [jump, *below, *above]
    return [(_AT_LEAST, 0, 1, rules[middle][0]), (_JUMP, 0, 0, len(below)), *below, *above]


def filter_program(quiet_metadata: bool, network: bool = False, threads: bool = False) -> bytes:
    """The BPF program as bytes; `quiet_metadata`: chmod and utime succeed and do nothing. `network`: sockets may be
    made. `threads`: the scheduling of any process of the same user's may be set, as threads of libraries do with
    their own."""
    which, architecture = _ARCHITECTURES[confine.MACHINE]
    head: Body = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        _errno(_EPERM),  # a foreign ABI: i386 on x86_64
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, 0x40000000),
        _errno(_EPERM),  # x32
    ]
    rules: dict[int, Body] = {}
    for numbers in [*_DENIED.values(), *(() if network else _NETWORK.values())]:
        _rule(rules, numbers[which], _errno(_EPERM))
    for numbers in _UNSUPPORTED.values():
        _rule(rules, numbers[which], _errno(_ENOTSUP))
    if confine.LANDLOCK_ABI < 3:
        _rule(rules, _TRUNCATE_CALL[which], _errno(_EPERM))
    if quiet_metadata:
        for numbers in _METADATA.values():
            _rule(rules, numbers[which], _errno(_SUCCESS))
    for numbers, n in _MODES:
        _rule(rules, numbers[which], _argument(n), (_ANY_BIT, 0, 1, 0o6000), _errno(_EPERM), _ALLOW)
    for numbers, values in _OWN_ONLY:
        if threads and numbers == _SET_SCHEDULER:
            continue
        checks = [line for n, v in enumerate(values) for line in (_argument(n), (_EQUAL, 1, 0, v), _errno(_EPERM))]
        _rule(rules, numbers[which], *checks, _ALLOW)
    # ENOSYS makes the C library fall back to clone, whose flags a filter can read, and to openat.
    _rule(rules, _CLONE3[which], _errno(_ENOSYS))
    _rule(rules, _OPENAT2[which], _errno(_ENOSYS))
    _rule(rules, _CLONE[which], _argument(0), (_ANY_BIT, 0, 1, _CLONE_NEW), _errno(_EPERM), _ALLOW)
    # Memory that RLIMIT_DATA does not count: shared anonymous (0x20 is MAP_ANONYMOUS, 1 the bit of MAP_SHARED and
    # MAP_SHARED_VALIDATE) and MAP_GROWSDOWN (0x100).
    _rule(
        rules,
        _MMAP[which],
        *(_argument(3), (_ANY_BIT, 2, 0, 0x100), (_ANY_BIT, 0, 2, 0x20), (_ANY_BIT, 0, 1, 1), _errno(_EPERM), _ALLOW),
    )
    # A pair of datagram sockets (SOCK_RAW makes one too) could be aimed at any socket with a path: streams and
    # sequenced packets only.
    _rule(
        rules,
        _SOCKETPAIR[which],
        *(_argument(0), (_EQUAL, 1, 0, 1), _errno(_EPERM)),
        *(_argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 2, 0, 1), (_EQUAL, 1, 0, 5), _errno(_EPERM), _ALLOW),
    )
    ioctls = [(_EQUAL, len(_IOCTLS) - i, 0, request) for i, request in enumerate(_IOCTLS)]
    _rule(rules, _IOCTL[which], _argument(1), *ioctls, _ALLOW, _errno(_EPERM))
    return b"".join(struct.pack("HBBI", *line) for line in [*head, *_tree(sorted(rules.items()))])


def _rule(rules: dict[int, Body], number: int | None, *body: Instruction) -> None:
    """What is done on a system call, if there is one of that name here; of several rules the first holds."""
    if number is not None:
        rules.setdefault(number, list(body))


@functools.lru_cache(maxsize=1)
def filter_header(program: bytes) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]:
    """The struct sock_fprog for a program, and the copy of the program that it points to; a template makes it once."""
    code = ctypes.create_string_buffer(program, len(program))
    return ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))), code


def seccomp(program: bytes) -> None:
    """Enter a filter made by `filter_program`."""
    header, _ = filter_header(program)
    confine.prctl(confine.PR_SET_NO_NEW_PRIVS, 1)
    if confine.libc.prctl(confine.PR_SET_SECCOMP, ctypes.c_ulong(2), header, ctypes.c_ulong(0), ctypes.c_ulong(0)):
        raise confine.failure("seccomp")


def seccomp_threads(program: bytes) -> None:
    """Enter a filter with all the threads of this process."""
    header, _ = filter_header(program)
    confine.prctl(confine.PR_SET_NO_NEW_PRIVS, 1)
    call = _SECCOMP_CALL[_ARCHITECTURES[confine.MACHINE][0]]
    if confine.libc.syscall(call, _SET_FILTER, _ALL_THREADS, header):  # or the id of a thread that can't be taken along
        raise confine.failure("seccomp")
