"""How many requests of one tree may be in flight."""

from __future__ import annotations

from collections import OrderedDict

import anyio


class Gate:
    """At most `limit` holders at once, first come, first served.

    A free permit is had without giving way to other tasks. A permit handed to a task that is cancelled at that very
    moment goes on to the next one. (Not `anyio.Semaphore`: who is cancelled there looks through all that wait.)
    """

    __slots__ = ("_free", "_waiting", "limit")

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a gate needs room for at least one, not {limit}")
        self.limit = limit
        self._free = limit
        # Invariant: nobody waits while a permit is free. An event leaves the queue before it is set.
        self._waiting: OrderedDict[anyio.Event, None] = OrderedDict()

    @property
    def in_flight(self) -> int:
        """Permits held now."""
        return self.limit - self._free

    @property
    def waiting(self) -> int:
        """Tasks waiting for a permit."""
        return len(self._waiting)

    def acquire_nowait(self) -> bool:
        """Take a permit if one is free."""
        if self._free:
            self._free -= 1
            return True
        return False

    async def acquire(self) -> None:
        """Take a permit, waiting for one if none is free."""
        if self.acquire_nowait():
            return
        granted = anyio.Event()
        self._waiting[granted] = None
        try:
            await granted.wait()
        except BaseException:
            if granted.is_set():
                self.release()
            else:
                del self._waiting[granted]
            raise

    def release(self) -> None:
        """Give a permit back: to whoever has waited longest, if anyone."""
        if self._waiting:
            granted, _ = self._waiting.popitem(last=False)
            granted.set()
        else:
            self._free += 1

    def __repr__(self) -> str:
        return f"<Gate {self.in_flight}/{self.limit} in flight, {self.waiting} waiting>"
