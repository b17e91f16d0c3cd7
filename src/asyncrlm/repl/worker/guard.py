"""When the main thread may be interrupted, and how the worker process ends."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

get_ident = threading.get_ident

before_exit: list[Callable[[], object]] = []
"""Called before the process ends by `leave`, which skips everything that Python does at exit."""


def leave(status: int) -> NoReturn:
    """End the process now: no cell's thread or `atexit` function may hold it up."""
    for hook in before_exit:
        hook()
    os._exit(status)


def open_gate(gate: threading.Lock) -> None:
    """Let the thread that sleeps on `gate` go on; a gate that is open already stays so."""
    try:
        gate.release()
    except RuntimeError:
        return


class Guard:
    """Keeps KeyboardInterrupt out of the main thread while it changes what threads share.

    Inside `with guard`, SIGINT is only noted; it is raised on leaving the outermost one. Python runs signal handlers
    in the main thread only, so for any other thread a guard does nothing. Without it an interrupt loses a frame that
    was just received, or leaves a lock taken.
    """

    def __init__(self, stop: Callable[[], None], kick: Callable[[], None]) -> None:
        self.thread = get_ident()
        """The main thread."""
        self.depth = 1
        """Above 0, SIGINT is only noted. Main thread only. It is 0 only while the code of a cell runs."""
        self.armed = False
        """A cell runs. Otherwise SIGINT came late and means nothing. Main thread only."""
        self.pending = False
        """SIGINT was noted and not raised yet. Set by the handler, cleared by the main thread."""
        self.stopped = False
        """The running cell was interrupted: its threads get no new sub-calls. Set by the handler."""
        self.child = False
        """This is a process forked by a cell. Never unset."""
        self.gate: threading.Lock | None = None
        """What the main thread sleeps on, or is about to."""
        self._stop = stop
        self._kick = kick

    def __enter__(self) -> None:
        if get_ident() == self.thread:
            self.depth += 1

    def __exit__(self, *_: object) -> None:
        if get_ident() == self.thread:
            self.depth -= 1
            if self.pending and not self.depth:
                self.pending = False
                self._stop()
                raise KeyboardInterrupt from None  # not "during handling of" whatever ended the guarded block

    def on_signal(self, *_: Any) -> None:
        """The handler of SIGINT."""
        if self.child:
            raise KeyboardInterrupt
        if not self.armed:
            return
        self.stopped = True
        if not self.depth:
            self._stop()
            raise KeyboardInterrupt
        self.pending = True
        # The main thread may be asleep in `Wire.wait`, where nothing is raised: wake it, whichever way it sleeps.
        self._kick()
        gate = self.gate
        if gate is not None:
            open_gate(gate)
