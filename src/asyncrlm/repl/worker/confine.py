"""What a worker does to itself before it runs a cell: resource limits, no capabilities, Landlock.

`syscalls.py` has the fourth, seccomp. Standard library only. On systems other than Linux only the resource limits hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Rule = tuple[str | int, int]  # a path or an O_PATH descriptor, and the rights below it

LINUX = sys.platform.startswith("linux")
MACHINE = os.uname().machine
libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_SECUREBITS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = (
    1,
    4,
    22,
    28,
    36,
    38,
)
# SECBIT_NOROOT, _NO_SETUID_FIXUP, _NO_CAP_AMBIENT_RAISE and their locks, _KEEP_CAPS_LOCKED.
_NO_ROOT = 0xEF


def prctl(*args: int) -> int:
    """The C library's prctl; returns 0 or -1."""
    return libc.prctl(*(ctypes.c_ulong(x) for x in (args + (0,) * 5)[:5]))


def failure(what: str) -> OSError:
    """The OSError of the last call through ctypes."""
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


# ---- Landlock --------------------------------------------------------------------------------------------------------

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 5
_MAKE_CHAR, _MAKE_BLOCK, _TRUNCATE = 1 << 6, 1 << 11, 1 << 14
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE  # the rights a rule on a file may hold
_BIND_TCP, _CONNECT_TCP = 1, 2
SCOPE_ABSTRACT_SOCKET, SCOPE_SIGNAL = 1, 2


def _landlock_abi() -> int:
    return max(0, libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)) if LINUX else 0


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
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise failure("landlock_create_ruleset")
    try:
        for place, rights in rules:
            _add_rule(ruleset, place, rights)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        if libc.syscall(_RESTRICT_SELF, ruleset, 0):
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
        if libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights & _ALL_RIGHTS, fd), 0):
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


def landlock(rules: Iterable[Rule], network: bool = False) -> None:
    """Only what `rules` say may be opened; no TCP unless `network`; signals and abstract sockets reach this domain
    only."""
    scopes = SCOPE_ABSTRACT_SOCKET | SCOPE_SIGNAL if LANDLOCK_ABI >= 6 else 0
    restrict(rules, _ALL_RIGHTS, _BIND_TCP | _CONNECT_TCP if LANDLOCK_ABI >= 4 and not network else 0, scopes)


# ---- limits and capabilities -----------------------------------------------------------------------------------------


def limit(limits: Mapping[str, int]) -> None:
    """Set resource limits (name without RLIMIT_ → value), soft and hard, never above the hard limit there is.

    The soft limit of the stack is only ever lowered: threads of a program that is run take as much each.
    """
    for name, value in limits.items():
        which = getattr(resource, "RLIMIT_" + name, None)
        if which is None:
            continue
        soft, hard = resource.getrlimit(which)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        keeps = name == "STACK" and soft != resource.RLIM_INFINITY
        resource.setrlimit(which, (min(soft, value) if keeps else value, value))


def drop_capabilities() -> None:
    """Give up every capability, for good: no program that is run brings one back, whoever its owner is."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECUREBITS, _NO_ROOT)  # refused without CAP_SETPCAP, where there is nothing to give up
    if libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6)):
        raise failure("capset")
