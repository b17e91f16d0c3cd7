"""The warden: parent of one worker and of every orphan of its cells; when the worker ends, it ends all the rest.

Three ways to end them, told apart by `mode`: "pidns" (the warden is pid 1 of a pid namespace), "scope" (kill(-1) inside
a Landlock domain that scopes signals), "walk" (through /proc: best effort).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import time
import traceback
from typing import TYPE_CHECKING

from . import confine

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence
    from typing import Literal, NoReturn, TypedDict

    Mode = Literal["pidns", "scope", "walk"]

    class Facts(TypedDict):
        """What the template found in force on this machine."""

        python: str
        mode: Mode
        flags: int  # those of clone
        mounts: list[str]
        userns: bool
        landlock: int  # the version of its interface, 0 without it
        seccomp: bool
        pid_max: bool

    class Request(TypedDict):
        """What a worker is started with: the host's JSON, and the folders that `Template.start` adds."""

        token: str
        confine: bool
        read: list[str]
        work: str  # the host's may be null: a folder of the worker's own
        size: int | None
        limits: dict[str, int]
        pid_max: int | None
        env: dict[str, str]
        in_force: dict[str, str | None]
        folder: str
        files: str


NEWNS, NEWUSER, NEWPID = 0x20000, 0x10000000, 0x20000000
_CLONE = {"x86_64": 56, "aarch64": 220}.get(confine.MACHINE)
_libc = ctypes.CDLL(None, use_errno=True)
_holding_gil = ctypes.PyDLL(None, use_errno=True)  # the child must own the GIL
_READONLY = 1
_RECURSIVE, _AT_FDCWD = 0x8000, -100
_MOUNT_SETATTR = 442


def clone(flags: int) -> int:
    """os.fork with CLONE_NEW* flags. unshare(NEWPID) works once in a process, and would cost a process more."""
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
    if _libc.mount(source, os.fsencode(target), kind, ctypes.c_ulong(flags), data):
        raise confine.failure("mount " + target)


def _read_only(target: str, on: bool, flags: int = 0) -> None:
    attributes = (ctypes.c_uint64 * 4)(_READONLY if on else 0, 0 if on else _READONLY, 0, 0)
    path = os.fsencode(target)
    if _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path, ctypes.c_uint(flags), attributes, ctypes.c_size_t(32)):
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


def _tmpfs(folder: str, size: int) -> None:
    options = f"size={size},nr_inodes=65536,mode=0700"
    _mount(b"tmpfs", folder, b"tmpfs", 6, options.encode())


# ---- ending processes ------------------------------------------------------------------------------------------------


def signal_quietly(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def children() -> list[int]:
    """The pids of this process's children, ended ones included."""
    with open(f"/proc/self/task/{os.getpid()}/children") as f:
        return [int(pid) for pid in f.read().split()]


def _below(root: int) -> list[int]:
    by_parent: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as f:
                line = f.read()
        except OSError:
            continue
        state, parent = line[line.rindex(b")") + 2 :].split()[:2]
        if state not in b"ZX":
            by_parent.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    todo = [root]
    while todo:
        for pid in by_parent.get(todo.pop(), ()):
            found.append(pid)
            todo.append(pid)
    return found


def sweep(mode: Mode) -> None:
    """End and reap everything below this process, which must be pid 1 or a subreaper.

    kill(-1) is atomic against fork: the kernel holds the list of tasks while it walks it, and a fork whose parent has a
    SIGKILL pending fails. In a namespace or a signal scope it reaches what is inside only.
    """
    if mode == "walk":
        _hunt()
        return
    signal_quietly(-1, signal.SIGKILL)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _hunt() -> None:
    # Stop all until no new one shows, then kill; then race with what forked meanwhile, on the shortest list there is.
    end = time.monotonic() + 2
    seen: set[int] = set()
    new = set(_below(os.getpid()))
    while new - seen and time.monotonic() < end:
        for pid in new - seen:
            signal_quietly(pid, signal.SIGSTOP)
        seen |= new
        new = set(_below(os.getpid()))
    for pid in seen:
        signal_quietly(pid, signal.SIGKILL)
    while time.monotonic() < end:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in children():
            signal_quietly(pid, signal.SIGKILL)


# ---- the warden itself -----------------------------------------------------------------------------------------------


def say_exited(channel: socket.socket, status: int | None, reason: str = "") -> None:
    """The last frame of a worker's channel; best effort, since its reader may be gone or slow."""
    frame = "\n" + json.dumps({"t": "exited", "status": status, "reason": reason}) + "\n"
    with contextlib.suppress(OSError):
        channel.send(frame.encode(), socket.MSG_DONTWAIT)


def remove_folders(request: Request) -> None:
    """Remove what belongs to one worker; never the user's own working folder."""
    folder = request["folder"]
    try:  # most often they are empty
        if request["work"].startswith(folder):
            os.rmdir(request["work"])
        os.rmdir(request["files"])
        os.rmdir(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)


def guard(
    facts: Facts,
    request: Request,
    channel: socket.socket,
    out: int,
    err: int,
    shared_rules: Sequence[tuple[int, int]],
    program: bytes,
    parent: int,
    ids: tuple[int, int],
) -> NoReturn:
    """Run in the process cloned for one worker. Forks the worker, waits for its end, ends the rest. Never returns."""
    mode, confined = facts["mode"], request["confine"]
    if facts["userns"]:
        map_ids(*ids)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if mode == "pidns":
        # The template dies, so does pid 1, and the kernel ends the namespace.
        confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
        _prepare_namespace(facts, request)
    else:
        _prepare_scope(mode, request, parent)
    worker = os.fork()
    if worker == 0:
        _become_worker(facts, request, channel, out, err, shared_rules, program)
    os.close(out)
    os.close(err)
    for rule, _ in shared_rules:
        os.close(rule)
    while True:
        ended, status = os.wait()  # orphans are reaped here too
        if ended == worker:
            break
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sweep(mode)
    if not (confined and "readonly" in facts["mounts"]):  # there the folder is the template's to remove
        remove_folders(request)
    say_exited(channel, os.waitstatus_to_exitcode(status))
    os._exit(0)


def _prepare_namespace(facts: Facts, request: Request) -> None:
    if os.getpid() != 1:
        os._exit(72)
    if request["confine"] and facts["mounts"]:
        sized = (request["work"], request["size"]) if request["size"] else None
        mounts(facts["mounts"], [request["files"]] if sized else [request["files"], request["work"]], sized)
    if facts["pid_max"] and request["pid_max"]:
        with open("/proc/sys/kernel/pid_max", "w") as f:
            f.write(str(request["pid_max"]))


def _prepare_scope(mode: Mode, request: Request, parent: int) -> None:
    def template_is_gone(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sweep(mode)
        remove_folders(request)
        os._exit(0)

    signal.signal(signal.SIGTERM, template_is_gone)
    confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGTERM)
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:  # it died before the death signal was set
        template_is_gone()
    if mode == "scope":
        confine.restrict(scope=confine.SCOPE_SIGNAL)  # the domain that kill(-1) will empty


def _become_worker(
    facts: Facts,
    request: Request,
    channel: socket.socket,
    out: int,
    err: int,
    shared_rules: Sequence[tuple[int, int]],
    program: bytes,
) -> NoReturn:
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # SIGINT stays ignored until the worker sets its handler
        if facts["mode"] != "pidns":
            confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        # First of all, so that the host can end this process whatever it does later.
        pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(channel, [b"\n"], [pidfd])
        os.close(pidfd)
        fd = _take_descriptors(channel, out, err, [rule for rule, _ in shared_rules])
        os.chdir(request["work"])
        _set_environment(request["env"])
        confine.limit(request["limits"])
        if request["confine"]:
            _confine(facts, request, shared_rules, program)
        for rule, _ in shared_rules:
            os.close(rule)
        from . import main  # noqa: PLC0415 - it needs nothing of what is above

        main.serve(fd, request["in_force"], request["work"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def _take_descriptors(channel: socket.socket, out: int, err: int, keep: Iterable[int]) -> int:
    """Descriptors 0 to 2 as a program expects them, the channel above, everything else but `keep` closed."""
    null = os.open(os.devnull, os.O_RDWR)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)  # the worker opens its own streams on them; until then the template's do
    fd = channel.detach()
    close_others({fd, *keep})
    return fd


def _set_environment(wanted: Mapping[str, str]) -> None:
    # Most of it is as the template's already.
    for name in [name for name in os.environ if name not in wanted]:
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def close_others(keep: Iterable[int]) -> None:
    """Close every descriptor above 2 but those of `keep`."""
    last = 2
    for fd in sorted(keep):
        os.closerange(last + 1, fd)
        last = max(last, fd)
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))


def _confine(facts: Facts, request: Request, shared_rules: Iterable[tuple[int, int]], program: bytes) -> None:
    confine.drop_capabilities()
    if facts["landlock"]:
        rules: list[confine.Rule] = [
            *shared_rules,
            *((p, confine.READ) for p in request["read"]),
            ("/proc" if "proc" in facts["mounts"] else "/proc/self", confine.READ),
            (request["files"], confine.TAKE),
            (request["work"], confine.WORK),
        ]
        if "proc" in facts["mounts"]:
            rules.append(("/dev/shm", confine.WORK))
        confine.landlock(rules)
    if program:
        confine.seccomp(program)
