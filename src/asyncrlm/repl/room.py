"""Bytes of results on their way to a worker, bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio

IN_FLIGHT = 64 * 1024 * 1024
"""Bytes of tools' results that are made or under way to one worker; beyond it calls wait to begin."""
UNKNOWN = 1024 * 1024
"""Bytes expected of a tool that has not returned yet."""
DECAY = 0.8
"""How much of the largest result so far is still expected after a smaller one."""


class Room:
    """Lets a call begin where its result will fit beside those that are being made and those not sent yet.

    How large a result will be is not known before it is there: each call is expected to take what the largest result
    of its tool took so far. One call may always be under way, however large.

    Args:
        unsent: Bytes of replies that wait to be sent to the worker.
        limit: Bytes in all.
    """

    def __init__(self, unsent: Callable[[], int], limit: int = IN_FLIGHT) -> None:
        self._unsent = unsent
        self._limit = limit
        self._expected = 0  # the sum over the calls under way
        self._largest: dict[str, int] = {}
        self._queue: deque[anyio.Event] = deque()  # in the order they came; the first looks again when woken

    @asynccontextmanager
    async def place(self, name: str) -> AsyncGenerator[None]:
        """One call of the tool `name`, from when there is room for it until the block ends."""
        size = self._largest.get(name, UNKNOWN)
        if self._queue or not self._fits(size):
            await self._wait(size)
        self._expected += size
        try:
            yield
        finally:
            self._expected -= size
            self.look()

    def learn(self, name: str, size: int) -> None:
        """A result of the tool `name` took `size` bytes. One that was large is forgotten after a while."""
        self._largest[name] = max(size, int(self._largest.get(name, 0) * DECAY))

    def look(self) -> None:
        """There may be more room now."""
        if self._queue:
            self._queue[0].set()

    def _fits(self, size: int) -> bool:
        taken = self._expected + self._unsent()
        return not taken or taken + size <= self._limit

    async def _wait(self, size: int) -> None:
        turn = anyio.Event()
        self._queue.append(turn)
        try:
            while self._queue[0] is not turn or not self._fits(size):
                await turn.wait()
                if not self._fits(size):
                    self._queue[self._queue.index(turn)] = turn = anyio.Event()
        finally:
            self._queue.remove(turn)
            self.look()
