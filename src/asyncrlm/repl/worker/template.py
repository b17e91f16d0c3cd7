"""The template: one warm process per interpreter and scope, which clones a warden for every worker asked for.

It reads requests (JSON with three descriptors: channel, standard output, standard error) from one SEQPACKET socket and
watches the host: when the host is gone, however it went, every worker goes, and so does the folder of the template.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import site
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING

from . import confine, warden

if TYPE_CHECKING:
    from typing import NoReturn, TypedDict

    class Options(TypedDict):
        """What the host starts a template with: its pid, and descriptors that it passes."""

        control: int
        host: int
        home: str
        lock: int
        mode: str
        packages: list[str]


# What cells and the worker use most, imported once for all workers. Not more: each megabyte slows every fork, and
# `random` seeds itself in each.
_WARM = """
ast asyncio base64 collections copy dataclasses datetime functools heapq inspect io itertools json linecache math
operator os pathlib pickle re shutil string struct subprocess textwrap threading time traceback types typing
"""


def _import_all() -> None:
    for name in _WARM.split():
        try:
            importlib.import_module(name)
        except ImportError:  # an interpreter built without it
            continue
    importlib.import_module(".main", __package__).prepare()  # the rest of the worker


def _only_packages(extra: list[str]) -> list[str]:
    """Keep the library and installed packages on sys.path: nothing that an editable install or a .pth file added."""
    installed = [*site.getsitepackages(), *extra]
    library = {os.path.dirname(os.__file__)}
    prefixes = (sys.base_prefix + os.sep, sys.base_exec_prefix + os.sep)

    def of_library(path: str) -> bool:
        inside = path.startswith(prefixes) and os.path.basename(path) not in ("site-packages", "dist-packages")
        return inside and (path in library or os.path.dirname(path) in library or path.endswith(".zip"))

    sys.path[:] = [p for p in sys.path if of_library(p)]
    sys.path += [p for p in dict.fromkeys(installed) if os.path.isdir(p)]
    own = ("BuiltinImporter", "FrozenImporter", "PathFinder")
    sys.meta_path[:] = [f for f in sys.meta_path if getattr(f, "__name__", "") in own]
    sys.path_importer_cache.clear()
    return [p for p in installed if os.path.isdir(p)]


# ---- what this machine allows ----------------------------------------------------------------------------------------


def _allowed(flags: int, ids: tuple[int, int], plan: list[str], home: str, pid_max: bool = False) -> bool:
    """Whether a child may have these namespaces and mounts. Container profiles, AppArmor and sysctls may say no."""
    try:
        pid = warden.clone(flags)
    except OSError:
        return False
    if pid == 0:
        try:
            if flags & warden.NEWUSER:
                warden.map_ids(*ids)
            if plan:
                warden.mounts(plan, [home], (os.path.join(home, "probe"), 1 << 20))
            if pid_max:
                with open("/proc/sys/kernel/pid_max", "w") as f:
                    f.write("400")
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def _pid_max_is_own() -> bool:
    # Before 6.14 this file is the whole system's, in every namespace.
    numbers = os.uname().release.split("-")[0].split(".")
    try:
        return (int(numbers[0]), int(numbers[1])) >= (6, 14)
    except (ValueError, IndexError):
        return False


def choose(wanted: str, home: str) -> warden.Facts:
    """What is in force here: the first of pidns, scope, walk that works, or the one `wanted`."""
    ids = os.getuid(), os.getgid()
    user = 0 if ids[0] == 0 else warden.NEWUSER  # in one of its own, RLIMIT_NPROC counts this worker alone
    facts: warden.Facts = {
        "python": sys.version.split()[0],
        "mode": "walk",
        "flags": 0,
        "mounts": [],
        "userns": False,
        "landlock": confine.LANDLOCK_ABI,
        "seccomp": confine.SECCOMP,
        "pid_max": False,
    }
    if not confine.SECCOMP:  # no table of numbers for this machine: clone can't be called either
        return facts
    os.mkdir(os.path.join(home, "probe"))
    if wanted in ("auto", "pidns"):
        for plan in (["readonly", "proc"], ["readonly"], ["proc"], []):
            flags = user | warden.NEWPID | (warden.NEWNS if plan else 0)
            if _allowed(flags, ids, plan, home):
                facts.update({"mode": "pidns", "flags": flags, "mounts": plan, "userns": bool(user)})
                if not user and "proc" in plan and _pid_max_is_own():
                    facts["pid_max"] = _allowed(flags, ids, plan, home, pid_max=True)
                return facts
    if wanted in ("auto", "scope") and confine.LANDLOCK_ABI >= 6:
        facts["mode"] = "scope"
        if user and _allowed(user, ids, [], home):
            facts.update({"flags": user, "userns": True})
    return facts


# ---- the process -----------------------------------------------------------------------------------------------------


class Template:
    """The state of the process: `jobs` is pid of a warden → (descriptor of its worker's channel, the request)."""

    def __init__(self, options: Options) -> None:
        self.home, self.lock = options["home"], options["lock"]
        self.control = socket.socket(fileno=options["control"])
        self.host = os.pidfd_open(options["host"])
        if os.getppid() != options["host"]:
            os._exit(0)
        self.packages = _only_packages(options["packages"])
        _import_all()
        self.facts = choose(options["mode"], self.home)
        self.rules = confine.open_rules(self.packages) if self.facts["landlock"] else []
        self.program = b""
        if self.facts["seccomp"]:
            self.program = confine.filter_program("readonly" not in self.facts["mounts"])
            confine.filter_header(self.program)
        self.jobs: dict[int, tuple[int, warden.Request]] = {}
        self.pid, self.ids = os.getpid(), (os.getuid(), os.getgid())
        self.ending = False

    def run(self) -> None:
        """Serve until the host is gone or hangs up; then end everything."""
        mode = self.facts["mode"]
        confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
        if mode == "scope":
            confine.restrict(scope=confine.SCOPE_SIGNAL)
        _raise_own_limit()
        _bound_arenas()
        wake, waker = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda _number, _frame: setattr(self, "ending", True))
        sys.argv[:] = [""]
        gc.collect()
        gc.freeze()
        self.control.send(json.dumps(self.facts).encode())
        poll = select.poll()
        for fd in (self.control.fileno(), self.host, wake):
            poll.register(fd, select.POLLIN)
        while not self.ending:
            for fd, _ in poll.poll():
                if fd == self.host:
                    self.ending = True
                elif fd == wake:
                    os.read(wake, 4096)
                    self.reap()
                elif not self.take_request():
                    self.ending = True
        self.end()

    def take_request(self) -> bool:
        """Start one worker; False if the host hung up."""
        try:
            data, fds, _, _ = socket.recv_fds(self.control, 1 << 18, 3)
        except OSError:
            return False
        if not data:
            return False
        request: warden.Request = json.loads(data)
        channel, out, err = socket.socket(fileno=fds[0]), fds[1], fds[2]
        try:
            self.start(request, channel, out, err)
        except OSError as e:
            self.remove(request)
            warden.say_exited(channel, None, f"the worker could not be started: {e}")
            channel.close()
        finally:
            os.close(out)
            os.close(err)
        return True

    def start(self, request: warden.Request, channel: socket.socket, out: int, err: int) -> None:
        """Clone the warden of one worker."""
        folder = request["folder"] = os.path.join(self.home, request["token"])
        request["files"] = os.path.join(folder, "files")
        own_work = not request["work"]
        if own_work:
            request["work"] = os.path.join(folder, "work")
        # Only now, with the request complete: if a folder can't be made, `remove` reads it.
        os.makedirs(request["files"], 0o700, exist_ok=True)  # the host may have put a file there already
        if own_work:
            os.mkdir(request["work"], 0o700)
        request["env"].update(HOME=request["work"], TMPDIR=request["work"], PWD=request["work"])
        pid = warden.clone(self.facts["flags"])
        if pid == 0:
            self.become_warden(request, channel, out, err)
        self.jobs[pid] = channel.detach(), request

    def become_warden(self, request: warden.Request, channel: socket.socket, out: int, err: int) -> NoReturn:
        try:
            self.control.detach()
            warden.close_others({channel.fileno(), out, err, self.lock, *(fd for fd, _ in self.rules)})
            warden.guard(self.facts, request, channel, out, err, self.rules, self.program, self.pid, self.ids)
        except BaseException as e:
            traceback.print_exc()
            warden.say_exited(channel, None, f"the worker could not be started: {e}")
        finally:
            os._exit(72)

    def reap(self) -> None:
        """Bury wardens that ended: what they could not end, their folders, and last of all their channels."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid not in self.jobs:
                continue
            fd, request = self.jobs.pop(pid)
            if os.WIFSIGNALED(status):
                self.end_strays()
            self.remove(request)
            with socket.socket(fileno=fd) as channel:
                if os.WIFSIGNALED(status):
                    warden.say_exited(channel, None, "its warden was killed")

    def remove(self, request: warden.Request) -> None:
        """Remove the folder of one worker."""
        if os.path.exists(request["folder"]):
            warden.remove_folders(request)

    def end_strays(self) -> None:
        """A warden was killed: what was below it is now below us, and what is no living warden was a dead one's."""
        end = time.monotonic() + 2
        while time.monotonic() < end:
            left = [pid for pid in warden.children() if pid not in self.jobs]
            if not left:
                return
            for pid in left:
                warden.signal_quietly(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def end(self) -> None:
        """End all workers and remove the folder of the template."""
        mode = self.facts["mode"]
        if mode == "walk":  # each warden sweeps its own; then what is left
            for pid in self.jobs:
                warden.signal_quietly(pid, signal.SIGTERM)
            end = time.monotonic() + 0.7
            while self.jobs and time.monotonic() < end:
                self.reap()
                time.sleep(0.005)
        elif mode == "pidns":
            for pid in self.jobs:
                warden.signal_quietly(pid, signal.SIGKILL)
        warden.sweep("walk" if mode == "pidns" else mode)
        shutil.rmtree(self.home, ignore_errors=True)


def _raise_own_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _bound_arenas() -> None:
    # Each arena of glibc reserves 64 MiB of address space; M_ARENA_MAX is -8. Other C libraries have no such call.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-8, 2)


def main(options: str) -> None:
    """Run the template; `options` is the host's JSON."""
    template = Template(json.loads(options))
    template.run()
