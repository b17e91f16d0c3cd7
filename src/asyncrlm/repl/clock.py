"""How long a cell has run by itself, and how long it may."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Literal

import anyio

Verdict = Literal["time", "cpu", "refused"]

FINEST = 0.01
"""Seconds between two looks at the worker's CPU time, at least."""
HEAD_START = 0.05
"""Seconds, or a tenth of the limit, before the first look, from which CPU time counts: most cells are over by then, and
looking costs more than all else the host does for an empty one."""
CORES = os.cpu_count() or 1


class CellClock:
    """Counts a cell's own time, which stands still while a call of it is in flight, and its CPU time, which does not.

    The timer is set for the earliest moment at which a limit could be met and looks again then. Time can only stand
    still after that, so pausing and resuming, once per call, seldom has to touch the timer.
    """

    def __init__(self, limit: float | None, cpu_seconds: Callable[[], float | None]) -> None:
        self._limit = math.inf if limit is None else limit
        self._cpu_seconds = cpu_seconds
        self._cpu_base: float | None = None  # the worker's CPU time at the first look
        self._own = 0.0  # seconds counted until the last pause
        self._since: float | None = time.monotonic()  # when it last began to run; None while paused
        self._due = math.inf  # when the timer wakes, by time.monotonic
        self._scope: anyio.CancelScope | None = None
        self._verdict: Verdict | None = None

    @property
    def own(self) -> float:
        """Seconds the cell has run by itself."""
        return self._own if self._since is None else self._own + time.monotonic() - self._since

    def pause(self) -> None:
        """The first call is in flight."""
        if self._since is not None:
            self._own += time.monotonic() - self._since
            self._since = None

    def resume(self) -> None:
        """No call is in flight any more."""
        now = self._since = time.monotonic()
        due = now + self._limit - self._own
        if due < self._due and self._scope is not None:
            self._due = due
            self._scope.deadline = anyio.current_time() + due - now

    def end(self, verdict: Verdict) -> None:
        """The cell is to end for another reason than its time."""
        self._verdict = verdict
        if self._scope is not None:
            self._scope.cancel()

    async def wait(self, done: anyio.Event) -> Verdict | None:
        """Until `done` is set (None), a limit is met ("time" of its own, or "cpu" whatever is in flight), or `end`."""
        until_look = min(HEAD_START, self._limit / 10)
        while not done.is_set():
            if self._verdict is not None:
                return self._verdict
            left = self._limit - self.own if self._since is not None else math.inf
            if left <= 0:
                return "time"
            left = min(left, until_look)
            self._due = time.monotonic() + left
            with anyio.CancelScope(deadline=anyio.current_time() + left) as self._scope:
                await done.wait()
                return None
            until_look = self._until_cpu_limit()
            if until_look <= 0:
                return "cpu"
        return None

    def _until_cpu_limit(self) -> float:
        """Seconds until the CPU limit can be met at the earliest; 0 if it is."""
        cpu = None if self._limit == math.inf else self._cpu_seconds()
        if cpu is None:
            return math.inf
        if self._cpu_base is None:
            self._cpu_base = cpu
        left = self._limit - (cpu - self._cpu_base)
        return max(left / CORES, FINEST) if left > 0 else 0.0
