"""Sandboxes booted ahead of the runs that need them."""

from __future__ import annotations

import asyncio  # noqa: TID251 - see `Pool`
from collections import deque
from typing import TYPE_CHECKING, Self

import anyio

from ..observe.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from .remote_sandbox import RemoteSandbox

AT_ONCE = 4
"""Sandboxes that are made at the same time when a pool is filled first."""
REFILLED_AT_ONCE = 2
"""Those that are made beside runs."""


class Pool:
    """As many sandboxes as runs begin at the same time, for one environment in one scope.

    Whoever needs it first waits until it is full; what is taken is made again in a task that outlives the run, and
    ends with the pool. A task group would have to be left by who entered it, which a pool is not: so, asyncio only.
    """

    def __init__(
        self,
        size: int,
        make: Callable[[], Awaitable[RemoteSandbox]],
        is_fresh: Callable[[RemoteSandbox], Awaitable[bool]],
    ) -> None:
        """`make` gives a sandbox that has booted; `is_fresh` tells whether one that waited is still good."""
        self._size = size
        self._make = make
        self._is_fresh = is_fresh
        self._spares: deque[RemoteSandbox] = deque()
        self._being_made = 0
        self._filling = anyio.Lock()
        self._refilling: asyncio.Task[None] | None = None
        self._ending = anyio.CancelScope()  # of that task
        self._filled = False
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        if self._refilling is not None:
            self._ending.cancel()
            await asyncio.wait({self._refilling})
        # Not shielded: whoever leaves it has a grace of its own, and each sandbox shields its end.
        async with anyio.create_task_group() as group:
            while self._spares:
                group.start_soon(_discard, self._spares.popleft())

    async def take(self) -> RemoteSandbox:
        """One that waits, or else a new one.

        Raises:
            SandboxLost: if none can be had.
        """
        await self.fill()
        while self._spares:
            sandbox, fresh = self._spares.popleft(), False
            try:
                fresh = await self._is_fresh(sandbox)
            finally:
                if not fresh:
                    await _discard(sandbox)
            if fresh:
                return sandbox
        return await self._make()

    async def fill(self) -> None:
        """Make all of them, once.

        Raises:
            SandboxLost: if one can't be had.
        """
        if self._filled:
            return
        async with self._filling:
            if not self._filled:
                if (error := await self._make_missing(AT_ONCE)) is not None:
                    raise error
                self._filled = True

    async def _make_missing(self, at_once: int) -> Exception | None:
        """Until none is missing, or one can't be made: then why."""
        errors: list[Exception] = []

        async def work() -> None:
            while not errors and self._wanted():
                try:
                    await self._add()
                except Exception as error:  # noqa: BLE001 -- given to the caller, and not in a group
                    errors.append(error)

        async with anyio.create_task_group() as group:
            for _ in range(min(at_once, self._size)):
                group.start_soon(work)
        return errors[0] if errors else None

    def refill(self) -> None:
        """Have those made that are missing, a few at a time: runs that begin together need the processors themselves.

        What goes wrong is logged.
        """
        if self._wanted() and (self._refilling is None or self._refilling.done()):
            self._refilling = asyncio.get_running_loop().create_task(self._refill())

    async def _refill(self) -> None:
        with anyio.CancelScope() as self._ending:
            if not self._closed and (error := await self._make_missing(REFILLED_AT_ONCE)) is not None:
                get_logger().warning("a sandbox could not be made ahead", error=str(error))

    def _wanted(self) -> bool:
        return not self._closed and len(self._spares) + self._being_made < self._size

    async def _add(self) -> None:
        self._being_made += 1
        try:
            sandbox = await self._make()
        finally:
            self._being_made -= 1
        if self._closed:
            await _discard(sandbox)
        else:
            self._spares.append(sandbox)


async def _discard(sandbox: RemoteSandbox) -> None:
    try:
        await sandbox.aclose()
    except Exception as error:  # noqa: BLE001 -- no run has anything to do with it
        get_logger().warning("a sandbox that was made ahead could not be destroyed", error=str(error))
