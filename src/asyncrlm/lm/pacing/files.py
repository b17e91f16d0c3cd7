"""How many files all connections of an event loop may have open: the process's limit is one for all accounts."""

from __future__ import annotations

import math
from collections import deque
from time import monotonic

import anyio
from anyio.lowlevel import RunVar

from .gate import Gate
from .limits import open_files_share

MOST = 100_000
"""Requests of one event loop in flight at most, where the process may have any number of files."""


class Files:
    """What the pools of one event loop have open. A request takes one file, a connection that is kept another."""

    __slots__ = ("gate", "kept", "pools")

    def __init__(self, most: int) -> None:
        self.gate = Gate(most)
        self.kept = 0
        """Connections that pools keep open between requests, at most: some may have ended by themselves."""
        self.pools: set[PoolFiles] = set()

    @property
    def crowded(self) -> bool:
        return self.kept + self.gate.in_flight > self.gate.limit


_FILES: RunVar[Files] = RunVar("the files that connections of this event loop may have open")


def _shared() -> Files:
    files = _FILES.get(None)
    if files is None:
        _FILES.set(files := Files(open_files_share(MOST)))
    return files


class PoolFiles:
    """The part of it that one pool of connections has. Belongs to one event loop."""

    __slots__ = ("_idle", "_kept", "_shared")

    def __init__(self, idle: float = math.inf) -> None:
        """`idle`: seconds after which the pool has closed a connection without a request by itself."""
        self._shared = _shared()
        self._idle = idle
        self._kept: deque[float] = deque()
        """When each connection was last used; the oldest, which is the next that a pool uses, first."""
        self._shared.pools.add(self)

    async def acquire(self) -> float:
        """Wait until one more request may have a file. Returns for how many seconds that was."""
        shared, waited = self._shared, 0.0
        if not shared.gate.acquire_nowait():
            began = anyio.current_time()
            await shared.gate.acquire()
            waited = anyio.current_time() - began
        if self._kept:
            self._kept.popleft()
            shared.kept -= 1
        return waited

    @property
    def crowded(self) -> bool:
        """Whether a connection had better be closed after its request, since others need its file."""
        if self._shared.crowded:
            for pool in self._shared.pools:
                pool.forget()
        return self._shared.crowded

    def forget(self) -> None:
        """Count no more what the pool has closed by itself."""
        latest = monotonic() - self._idle
        while self._kept and self._kept[0] < latest:
            self._kept.popleft()
            self._shared.kept -= 1

    def release(self, *, keeps: bool) -> None:
        """The request is done, and its connection kept or closed."""
        if keeps:
            self._kept.append(monotonic())
            self._shared.kept += 1
        self._shared.gate.release()

    def close(self) -> None:
        """The pool keeps nothing any more."""
        self._shared.kept -= len(self._kept)
        self._kept.clear()
        self._shared.pools.discard(self)
