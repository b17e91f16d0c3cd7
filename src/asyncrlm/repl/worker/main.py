"""The worker process: takes frames from the host and runs cells until the host is gone."""

from __future__ import annotations

import functools
import os
import signal
import sys
from typing import Any, NoReturn

from . import loading, report
from .answer import Submission
from .bounds import CREDIT, MAX_CALLS, PROTOCOL_VERSION
from .calls import Calls
from .cells import Cells, Namespace
from .guard import before_exit, leave
from .lazily import when_imported
from .loops import Loops
from .stdio import Stdio
from .surface import HostObject, Surface
from .wire import Wire

__all__ = ["before_exit", "serve"]


class Worker:
    """Puts the parts together and dispatches control frames.

    Making one touches no descriptor, so a template has one ready that each process it forks goes on with.
    """

    def __init__(self) -> None:
        self.stdio = Stdio()
        self.wire = Wire()
        self.calls = Calls(self.wire)
        self.surface = Surface(self.calls)
        self.submission = Submission(self.wire.post)
        self.namespace = Namespace(self.submission)
        self.loops = Loops()
        self.cells = Cells(self.wire, self.namespace, self.stdio, self.loops)
        self.cells.arm = self._arm
        for name, function in self.surface.queries().items():
            self.namespace.reserve(name, function)
        self.namespace.reserve("SHOW_VARS", self.namespace.show_vars)
        self.namespace.reserve("SHOW_LIMITS", self.surface.limits)
        self.python = sys.version.split()[0]
        # The others start processes that can't reach `__main__`.
        when_imported("multiprocessing", lambda module: module.set_start_method("fork", force=True))

    def serve(self, channel_fd: int, in_force: dict[str, Any]) -> NoReturn:
        """Serve the host at the other end of `channel_fd` until it is gone."""
        os.set_inheritable(channel_fd, False)
        self.cells.confined = is_confined(in_force)
        self.stdio.attach()
        self.wire.attach(channel_fd)
        self._arm()
        self.loops.install()
        os.register_at_fork(before=self.stdio.flush, after_in_child=self.wire.cut)
        self.namespace.restore()
        self.wire.send({"t": "ready", "version": PROTOCOL_VERSION, "python": self.python, "in_force": in_force})
        while True:
            frame = self.wire.next_frame()
            kind = frame["t"]
            if kind == "execute":
                self.wire.send(self.cells.run(frame["cell"], frame["code"]), closes=True)
            elif kind == "load":
                self.wire.send(self._load(frame))
            elif kind == "init":
                self._init(frame)

    def _arm(self) -> None:
        handler = self.wire.guard.on_signal
        if signal.getsignal(signal.SIGINT) != handler:
            signal.signal(signal.SIGINT, handler)

    def _init(self, frame: dict[str, Any]) -> None:
        if frame.get("version", PROTOCOL_VERSION) != PROTOCOL_VERSION:
            print(f"the host speaks version {frame['version']} of the protocol, this worker {PROTOCOL_VERSION}")
            leave(64)
        self.wire.credit = frame.get("credit", CREDIT)
        self.wire.most_calls = frame.get("calls", MAX_CALLS)
        self.surface.raise_errors = frame.get("raise_errors", False)
        self.cells.show_values = frame.get("show_values", False)
        for name in frame.get("drop", ()):
            self.namespace.release(name)
        functions: dict[str, dict[str, Any]] = {}
        awaitable = frozenset(frame.get("awaitable", ()))
        for name, doc in frame.get("tools", {}).items():
            owner, _, function = name.partition(".")
            functions.setdefault(owner, {})[function] = self.surface.tool(name, doc, awaitable=name in awaitable)
        for name, of_it in functions.items():
            self.namespace.reserve(name, of_it.get("") or HostObject(name, of_it))

    def _load(self, frame: dict[str, Any]) -> dict[str, Any]:
        try:
            self._bind(frame)
        except MemoryError:
            error = "too large for the memory_limit of the environment"
        except BaseException as failure:
            described = report.describe_error(failure, interrupted=False, confined=self.cells.confined)
            error = f"{described['type']}: {described['message']}"
            if frame.get("form") == "code":
                error = described["traceback"]
        else:
            return {"t": "loaded", "id": frame["id"]}
        return {"t": "loaded", "id": frame["id"], "error": error}

    def _bind(self, frame: dict[str, Any]) -> None:
        name = frame["name"]
        if frame.get("form") == "code":
            self.cells.execute(loading.load(frame, self.wire.descriptors, self.surface), f"<cell {name}>")
            self.stdio.flush()
            self.stdio.restore()
            self.namespace.restore()
            if name not in self.namespace.names:
                raise NameError(f"the code does not bind {name!r}")
            value = self.namespace.names[name]
        else:
            value = loading.load(frame, self.wire.descriptors, self.surface)
        if name == "answer":
            self.submission.reset(value)
            self.namespace.restore()
        else:
            self.namespace.reserve(name, value)
            self._alias(name, frame.get("also"), value)

    def _alias(self, name: str, also: str | None, value: Any) -> None:
        """`context` is `context_0` and `history` is `history_0`, or what the host says, without being there twice."""
        if also is not None:
            self.namespace.reserve(also, value)
            return
        other = name[:-2] if name.endswith("_0") else f"{name}_0"
        if {name, other} & {"context", "history"} and other not in self.namespace.reserved:
            self.namespace.reserve(other, value)


@functools.cache
def prepare() -> Worker:
    """The worker that this process, or each one it forks, will be."""
    return Worker()


def is_confined(in_force: dict[str, Any]) -> bool:
    """Whether anything is denied to cells. That nothing outlives them is no denial."""
    return any(held for row, held in in_force.items() if row != "outliving")


def serve(channel_fd: int, in_force: dict[str, Any]) -> NoReturn:
    """Serve the host at the other end of `channel_fd` until it is gone. Never returns.

    Descriptors 0 to 2, the working folder, the environment and confinement are set up before; `in_force` says what of
    it holds, and is reported to the host.
    """
    try:
        prepare().serve(channel_fd, in_force)
    except BaseException as error:
        sys.stderr.write(f"the worker failed: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        leave(70)
