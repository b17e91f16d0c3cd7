"""From a process that was just forked to a worker: its descriptors, its folder, its limits, its confinement."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from typing import TYPE_CHECKING

from . import confine, forking, main, namespaces, syscalls
from .title import entitle

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
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
        ipython: str  # its version, where cells run in its shell

    class Request(TypedDict):
        """What a worker is started with: the host's JSON, and the folder that `Template.start` adds."""

        token: str
        confine: bool
        read: list[str]
        work: str  # the host's may be null: a folder of the worker's own
        size: int | None
        limits: dict[str, int]
        pid_max: int | None
        env: dict[str, str]
        in_force: dict[str, str | None]
        folder: str  # where the host puts files, and the working folder if that needs one on disk


NICE = 5
"""How much lower than the host's, or a keeper's, the priority of cells is: hundreds that start at once would else take
turns with its event loop, which all of them wait for."""


class Birth:
    """All that a worker is made from: what was asked for, what this machine has, and what the template opened."""

    def __init__(
        self,
        facts: Facts,
        request: Request,
        ends: tuple[int, int, int],
        rules: Sequence[tuple[int, int]],
        program: bytes,
    ) -> None:
        self.facts = facts
        self.request = request
        self.channel, self.out, self.err = ends
        self.rules = rules
        """Descriptors of what every worker may use, with the rights on each."""
        self.program = program
        """The filter of system calls."""

    def descriptors(self) -> set[int]:
        return {self.channel, self.out, self.err, *(fd for fd, _ in self.rules)}

    def prepare_namespace(self) -> None:
        """In new namespaces, as their administrator: mounts, and how many processes there may be."""
        facts, request = self.facts, self.request
        if request["confine"] and facts["mounts"]:
            sized = (request["work"], request["size"]) if request["size"] else None
            folders = [request["folder"]] if sized else [request["folder"], request["work"]]
            namespaces.mounts(facts["mounts"], folders, sized)
        if facts["pid_max"] and request["pid_max"]:
            with open("/proc/sys/kernel/pid_max", "w") as f:
                f.write(str(request["pid_max"]))

    def become_worker(self) -> NoReturn:
        """Serve the host, confined; never returns."""
        try:
            os.setsid()
            entitle("asyncrlm-worker", self.request["folder"])
            # First of all, so that the host can end this process whatever it does later.
            pidfd = os.pidfd_open(os.getpid())
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, self.channel)
            socket.send_fds(channel, [b"\n"], [pidfd])
            channel.detach()
            os.close(pidfd)
            take_descriptors(self.out, self.err, {self.channel, *(rule for rule, _ in self.rules)})
            os.chdir(self.request["work"])
            set_environment(self.request["env"])
            confine.limit(self.request["limits"])
            if self.request["confine"]:
                self._confine()
            for rule, _ in self.rules:
                os.close(rule)
            forking.register()
            main.serve(self.channel, self.request["in_force"])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)

    def _confine(self) -> None:
        facts, request = self.facts, self.request
        confine.drop_capabilities()
        if facts["landlock"]:
            own_proc = "proc" in facts["mounts"]
            rules: list[confine.Rule] = [
                *self.rules,
                *((p, confine.READ) for p in request["read"]),
                ("/proc" if own_proc else "/proc/self", confine.READ),
                (request["folder"], confine.TAKE),
                (request["work"], confine.WORK),
            ]
            if own_proc:
                rules.append(("/dev/shm", confine.WORK))
            confine.landlock(rules)
        if self.program:
            syscalls.seccomp(self.program)


def take_descriptors(out: int, err: int, keep: Iterable[int]) -> None:
    """Descriptors 0 to 2 as a program expects them, those of `keep` above, everything else closed."""
    null = os.open(os.devnull, os.O_RDWR)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)  # the worker opens its own streams on them; until then its parent's do
    close_others(keep)


def set_environment(wanted: Mapping[str, str]) -> None:
    """Have these environment variables and no others."""
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
    if sys.version_info < (3, 10):  # noqa: UP036 - of a sandbox's Python; it tries every number, up to a billion
        for name in os.listdir("/dev/fd"):
            if int(name) > last:
                with contextlib.suppress(OSError):
                    os.close(int(name))
    else:
        os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))
