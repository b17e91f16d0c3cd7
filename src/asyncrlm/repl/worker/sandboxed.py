"""A worker in a sandbox that somebody else made: confined as far as the kernel there gives it, and what that was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from . import birth, confine, homes, main, syscalls
from .kept import CHUNK

if TYPE_CHECKING:
    from typing import NoReturn, TypedDict

    class Options(TypedDict):
        """What a keeper is told by the host; see `environments/remote_boot.py`."""

        folder: str  # of this keeper; made by it, gone with it
        work: str | None  # where cells run; None: a folder inside `folder`
        mode: str  # "auto", or the one wanted: see `choose_mode`
        confine: bool
        network: bool  # sockets may be made, where `confine`
        read: list[str]
        write: list[str]
        limits: dict[str, int]
        env: dict[str, str]
        inherit: bool  # cells see the sandbox's environment variables as well
        keep: int  # bytes of head and of tail of each output stream of a cell
        binary: bool
        padding: int
        resumed: bool  # the stream may break and be there anew: see `resumed.py`
        packages: list[str]  # more folders for sys.path
        shell: bool  # cells run in IPython's shell
        kernel: list[str]  # the command of a Jupyter kernel, in which they do instead; see `kernel.py`


FAREWELL = 10.0
"""Seconds for a host that is there to read what is left."""
_F_SETPIPE_SZ = 1031
_NAMES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services", "/etc/protocols")
"""What looking up a host name reads."""


def choose_mode(options: Options) -> str:
    """How this process will end what it started: see `warden.sweep`; "group" where there is no /proc."""
    if options["mode"] != "auto":
        return options["mode"]
    if os.getpid() == 1:
        return "pidns"
    if options["confine"] and confine.LANDLOCK_ABI >= 6:  # not else: `sudo` works in no domain
        try:
            confine.restrict(scope=confine.SCOPE_SIGNAL)  # the domain that kill(-1) will empty
        except OSError:
            pass
        else:
            return "scope"
    return "walk" if confine.LINUX and os.path.exists("/proc/self/stat") else "group"


_OUTLIVING = {"pidns": "pid namespace", "scope": "Landlock signal scope"}


class Lodging:
    """All that the worker is made from; made before the fork."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.mode = choose_mode(options)
        folder = options["folder"]
        homes.sweep_homes(os.path.dirname(folder))  # a sandbox may be used again, and a killed keeper removes nothing
        os.makedirs(folder, 0o700)
        self.lock = -1
        with contextlib.suppress(OSError):  # there are file systems without locks
            self.lock = homes.lock_home(folder)
        self.files = os.path.join(folder, "files")
        self.work = options["work"] or os.path.join(folder, "work")
        os.makedirs(self.files, 0o700)
        os.makedirs(self.work, 0o700, exist_ok=True)
        self.landlock = confine.LANDLOCK_ABI if options["confine"] else 0
        self.rules = confine.open_rules(options["packages"]) if self.landlock else []

    def become_worker(self, channel: int, out: int, err: int) -> NoReturn:
        """In the process just forked: serve the keeper, confined; never returns."""
        try:
            os.setsid()
            if confine.LINUX:
                confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
                confine.prctl(confine.PR_SET_DUMPABLE, 1)
                with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
                    f.write("1000")  # out of memory, it is not the keeper that is killed
            birth.take_descriptors(out, err, {channel, *(rule for rule, _ in self.rules)})
            os.nice(birth.NICE)
            os.chdir(self.work)
            self._set_environment()
            limits = self._limit()
            in_force = self._confine() if self.options["confine"] else {}
            for rule, _ in self.rules:
                os.close(rule)
            if limits and "seccomp" in str(in_force.get("kernel")):
                in_force["memory"] = limits
            in_force["outliving"] = _OUTLIVING.get(self.mode)
            if self.options["kernel"]:
                from . import kernel  # noqa: PLC0415 - others start without what it needs

                kernel.become(self.options["kernel"], channel, in_force, self.options["network"])
            main.serve(channel, in_force)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)

    def _set_environment(self) -> None:
        kept = dict(os.environ) if self.options["inherit"] else {}
        path = os.environ.get("PATH") or "/usr/local/bin:/usr/bin:/bin"
        own = {"PATH": path, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
        folders = dict.fromkeys(("HOME", "TMPDIR", "PWD"), self.work)
        birth.set_environment({**own, **kept, **folders, **self.options["env"]})

    def _limit(self) -> str | None:
        for name, value in self.options["limits"].items():
            with contextlib.suppress(OSError, ValueError):  # some systems refuse some of them
                confine.limit({name: value})
        return "RLIMIT_DATA" if confine.LINUX and "DATA" in self.options["limits"] else None

    def _confine(self) -> dict[str, Any]:
        """Take what can be had, and say which row of the report holds by what."""
        landlock = seccomp = None
        network = self.options["network"]
        if confine.LINUX:
            with contextlib.suppress(OSError):
                confine.drop_capabilities()
        if self.landlock:
            with contextlib.suppress(OSError):
                confine.landlock(self._landlock_rules(), network)
                landlock = f"Landlock ABI {self.landlock}"
        read_only = bool(os.statvfs("/").f_flag & os.ST_RDONLY)
        if syscalls.SECCOMP:
            with contextlib.suppress(OSError):
                later = bool(self.options["kernel"])  # it makes sockets and threads before it is a worker
                syscalls.seccomp(syscalls.filter_program(not read_only, network or later, later))
                seccomp = "seccomp"
        both = f"{landlock}, seccomp" if landlock and seccomp else None
        own = "pid namespace" if self.mode == "pidns" else landlock if self.landlock >= 6 else None
        return {
            "read_outside": landlock,
            "write_outside": both,
            "network": None if network else seccomp,
            "other_processes": f"{own}, seccomp" if own and seccomp else None,
            "kernel": seccomp,
            "environment": None if self.options["inherit"] else f"clean environment, {landlock}" if landlock else None,
        }

    def _landlock_rules(self) -> list[confine.Rule]:
        options = self.options
        own_proc = self.mode == "pidns"
        return [
            *self.rules,
            *((path, confine.READ) for path in (*options["read"], *(_NAMES if options["network"] else ()))),
            *((path, confine.WORK) for path in options["write"]),
            ("/proc" if own_proc else "/proc/self", confine.READ),
            *((("/dev/shm", confine.WORK),) if own_proc else ()),
            (self.files, confine.TAKE),
            (self.work, confine.WORK),
        ]


def extend_path(packages: list[str]) -> None:
    """Let cells import what lies in these folders too."""
    sys.path += [path for path in packages if path not in sys.path]


def take_wire(size: int) -> tuple[int, int]:
    """Standard input and output become the wire, with a pipe of this size, which nothing that is started inherits."""
    inp, out = (os.dup(fd) for fd in (0, 1))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    if confine.LINUX:
        with contextlib.suppress(OSError):  # it is no pipe, or others of this user have had their share of memory
            fcntl.fcntl(inp, _F_SETPIPE_SZ, size)
    return inp, out


def farewell(out: int, data: bytearray) -> None:
    """Write the last of it, as long as somebody reads."""
    end = time.monotonic() + FAREWELL
    poll = select.poll()
    poll.register(out, select.POLLOUT)
    with contextlib.suppress(OSError):
        while data and (left := end - time.monotonic()) > 0:
            poll.poll(left * 1000)
            with contextlib.suppress(BlockingIOError):
                del data[: os.write(out, memoryview(data)[:CHUNK])]
