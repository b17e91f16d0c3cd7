"""Sandboxes booted ahead of the runs that need them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Self

import anyio
import anyio.lowlevel

from ..errors import RLMError
from ..observe.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from .remote_sandbox import RemoteSandbox

AT_ONCE = 4
"""Sandboxes that are made at the same time when a pool is filled first."""
REFILLED_AT_ONCE = 2
"""Those that are made beside runs."""
REFILL_GRACE = 2.0
"""Seconds to make one in, beside a run; one that ends meanwhile waits, since half-made it would be lost."""


class Pool:
    """As many sandboxes as runs begin at the same time, for one environment in one scope.

    It holds no task: the first run waits until it is full, and each run that takes one makes another meanwhile.
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
        self._refilling = anyio.Semaphore(REFILLED_AT_ONCE, fast_acquire=True)
        self._filled = False
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        # Not shielded: whoever leaves it has a grace of its own, and each sandbox shields its end.
        async with anyio.create_task_group() as group:
            while self._spares:
                group.start_soon(self._spares.popleft().aclose)

    async def take(self) -> RemoteSandbox:
        """One that waits, or else a new one.

        Raises:
            SandboxLost: if none can be had.
        """
        if not self._filled:
            async with self._filling:
                if not self._filled:
                    await self._fill()
                    self._filled = True
        while self._spares:
            sandbox = self._spares.popleft()
            if await self._is_fresh(sandbox):
                return sandbox
            await sandbox.aclose()
        return await self._make()

    async def _fill(self) -> None:
        errors: list[Exception] = []

        async def work() -> None:
            while not errors and self._wanted():
                try:
                    await self._add()
                except Exception as error:  # noqa: BLE001 -- raised below, and not in a group
                    errors.append(error)

        async with anyio.create_task_group() as group:
            for _ in range(min(AT_ONCE, self._size)):
                group.start_soon(work)
        if errors:
            raise errors[0]

    async def refill(self) -> None:
        """Make what is missing, a few at a time: runs that begin together need the processors for themselves.

        What goes wrong is logged. Cancelled, it finishes the one that is being made and leaves the rest to others.
        """
        try:
            async with self._refilling:
                while self._wanted():
                    with anyio.move_on_after(REFILL_GRACE, shield=True):
                        await self._add()
                    await anyio.lowlevel.checkpoint()
        except RLMError as error:
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
            await sandbox.aclose()
        else:
            self._spares.append(sandbox)
