"""The template: one warm process per interpreter and scope, from which every worker asked for is forked.

Where it may, it forks a worker into a pid namespace whose first process is a page of machine code (`namespaces.Nests`)
and ends that when the worker has ended; elsewhere it clones a warden, a copy of itself that does the same.

It reads requests (JSON with three descriptors: channel, standard output, standard error) from one SEQPACKET socket and
watches the host: when the host is gone, however it went, every worker goes, and so does the folder of the template.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import site
import socket
import stat
import sys
import time
import traceback
from typing import TYPE_CHECKING

from . import confine, facts, namespaces, syscalls, warden
from .birth import NICE, Birth, close_others
from .removing import remove_tree
from .title import entitle

if TYPE_CHECKING:
    from typing import NoReturn, TypedDict

    from .birth import Request

    class Options(TypedDict):
        """What the host starts a template with: its pid, and descriptors that it passes."""

        control: int
        host: int
        home: str
        lock: int
        mode: str
        packages: list[str]
        shell: bool


# What cells and the worker use most, imported once for all workers. Not more: each megabyte slows every fork, and
# `random` seeds itself in each.
_WARM = """
ast asyncio base64 collections copy dataclasses datetime functools heapq inspect io itertools json linecache math
multiprocessing operator os pathlib pickle re shutil string struct subprocess textwrap threading time traceback types
typing
"""


def _import_all(with_shell: bool) -> str:
    """Make all that workers need; the version of the shell, if one is wanted and there."""
    for name in _WARM.split():
        try:
            importlib.import_module(name)
        except ImportError:  # an interpreter built without it
            continue
    worker = importlib.import_module(".main", __package__).prepare()  # the rest of the worker
    version = ""
    if with_shell:
        shell = importlib.import_module(".shell", __package__)
        version = shell.available()
        if version:
            shell.install(worker)
    return version


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


# ---- the process -----------------------------------------------------------------------------------------------------


class Job:
    """One worker: `pids` are those of its processes that are children of the template and not buried yet."""

    def __init__(self, request: Request, channel: int, out: int, worker: int | None, pids: set[int]) -> None:
        self.request = request
        self.channel = channel
        self.out = out
        """Its standard output, held until all is buried: by the end of it the host knows."""
        self.worker = worker
        """None where a warden has it."""
        self.pids = pids
        self.status: int | None = None


class Template:
    """The state of the process."""

    def __init__(self, options: Options) -> None:
        self.home, self.lock = options["home"], options["lock"]
        self.control = socket.socket(fileno=options["control"])
        for fd in (options["control"], self.lock):
            os.set_inheritable(fd, False)
        self.host = os.pidfd_open(options["host"])
        if os.getppid() != options["host"]:
            raise ProcessLookupError("the host is gone")
        self.packages = _only_packages(options["packages"])
        version = _import_all(options["shell"])
        self.facts, self.nests = facts.choose(options["mode"], self.home, self.lock)
        self.facts["ipython"] = version
        os.mkdir(os.path.join(self.home, "work"), 0o700)
        self.rules = confine.open_rules(self.packages) if self.facts["landlock"] else []
        self.program = b""
        if self.facts["seccomp"]:
            self.program = syscalls.filter_program("readonly" not in self.facts["mounts"])
            syscalls.filter_header(self.program)
        self.jobs: dict[int, Job] = {}
        """By each of its pids."""
        self.vacant: set[str] = set()
        """Folders of ended workers, as good as new: making and removing some takes up to a millisecond on ext4."""
        self.pid, self.ids = os.getpid(), (os.getuid(), os.getgid())
        self.ending = False

    def run(self) -> None:
        """Serve until the host is gone or hangs up; then end everything."""
        mode = self.facts["mode"]
        confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
        if mode == "scope":
            confine.restrict(scope=confine.SCOPE_SIGNAL)
        _raise_own_limit()
        os.nice(NICE)
        _bound_arenas()
        wake, waker = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda _number, _frame: setattr(self, "ending", True))
        sys.argv[:] = [""]
        entitle("asyncrlm-template", self.home)
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
            data, fds = self.receive()
        except OSError:
            return False
        if not data:
            return False
        request: Request = json.loads(data)
        try:
            self.start(request, (fds[0], fds[1], fds[2]))
        except OSError as e:
            self.remove(request)
            warden.say_exited(fds[0], None, f"the worker could not be started: {e}")
            os.close(fds[0])
            os.close(fds[1])
        finally:
            os.close(fds[2])
        return True

    def receive(self) -> tuple[bytes, array.array[int]]:
        """A request and its three descriptors, which no program that is executed inherits."""
        fds = array.array("i")
        # socket.recv_fds drops the flag.
        data, extra, _, _ = self.control.recvmsg(1 << 18, socket.CMSG_LEN(3 * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
        for level, kind, raw in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(raw)
        return data, fds

    def start(self, request: Request, ends: tuple[int, int, int]) -> None:
        """Fork one worker, or clone its warden."""
        folder = request["folder"] = os.path.join(self.home, request["token"])
        own_work = not request["work"]
        if own_work:
            # Where each worker mounts a file system of its own on it, all can have the same.
            request["work"] = os.path.join(self.home if request["size"] else folder, "work")
        # Only now, with the request complete: if a folder can't be made, `remove` reads it.
        if folder in self.vacant:
            self.vacant.remove(folder)
        else:
            os.makedirs(folder, 0o700, exist_ok=True)  # the host may have put a file there already
        if own_work and not request["size"]:
            os.mkdir(request["work"], 0o700)
        request["env"].update(HOME=request["work"], TMPDIR=request["work"], PWD=request["work"])
        worker = None
        if self.nests is not None:
            first, worker = self.nests.fork()
            pids = {first, worker}
        else:
            pids = {namespaces.clone(self.facts["flags"])}
        if 0 in pids:
            self.leave(Birth(self.facts, request, ends, self.rules, self.program))
        job = Job(request, ends[0], ends[1], worker, pids)
        self.jobs.update(dict.fromkeys(pids, job))

    def leave(self, birth: Birth) -> NoReturn:
        """In a process that was just made: be a template no more."""
        try:
            self.control.detach()
            self.jobs.clear()  # a cell can reach this object through its frames
            self.vacant.clear()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if self.nests is not None:
                self.become_worker(birth)
            close_others(birth.descriptors() | {self.lock})
            warden.guard(birth, self.pid, self.ids)
        except BaseException as e:
            traceback.print_exc()
            warden.say_exited(birth.channel, None, f"the worker could not be started: {e}")
        finally:
            os._exit(72)

    def become_worker(self, birth: Birth) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid():  # the parent is outside of this namespace, unless it died before the death signal was set
            os._exit(72)
        if self.nests is not None and birth.request["confine"]:
            namespaces.enter(self.nests.network, namespaces.NEWNET)
        if self.facts["mounts"]:
            namespaces.unshare(namespaces.NEWNS)
        birth.prepare_namespace()
        birth.become_worker()

    def reap(self) -> None:
        """Bury workers or wardens that ended: what they could not end, their folders, last of all their channels."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            job = self.jobs.pop(pid, None)
            if job is None:
                continue
            job.pids.discard(pid)
            if pid == job.worker or job.worker is None:
                job.status = status
            for other in job.pids:
                warden.signal_quietly(other, signal.SIGKILL)
            if not job.pids:
                self.bury(job)

    def bury(self, job: Job) -> None:
        status = job.status or 0
        if job.worker is None and os.WIFSIGNALED(status):
            self.end_strays()
        try:
            self.remove(job.request)
        except Exception:  # whatever a cell left, its neighbours need this process; the host reads this log
            traceback.print_exc()
        if job.worker is not None:
            warden.say_exited(job.channel, os.waitstatus_to_exitcode(status))
        elif os.WIFSIGNALED(status):
            warden.say_exited(job.channel, None, "its warden was killed")
        os.close(job.channel)
        os.close(job.out)

    def remove(self, request: Request) -> None:
        """Remove the folder of one worker, or keep it for the next one that the host gives the same name."""
        if request["size"] and _renew(request["folder"]):
            self.vacant.add(request["folder"])
        else:
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
        remove_tree(self.home, last="lock")


def _renew(folder: str) -> bool:
    """Whether a folder that a worker could change shows no trace of that; its times are set anew."""
    try:
        if os.listdir(folder) or os.listxattr(folder) or os.stat(folder).st_mode != stat.S_IFDIR | 0o700:
            return False
        os.utime(folder)
    except OSError:
        return False
    return True


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
    given: Options = json.loads(options)
    # The host's thread may have blocked some: without SIGCHLD no worker is buried, without SIGINT no cell interrupted.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        template = Template(given)
        template.run()
    except BaseException:
        # Of a host that is there it is the host that removes the folder, with the log in it.
        if os.getppid() != given["host"]:
            remove_tree(given["home"], last="lock")
        raise
