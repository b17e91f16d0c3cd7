"""What outlives a run: the resources an `AsyncRLM`'s calls share, entered by the first and left by the last."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.lowlevel import EventLoopToken, current_token

from ..caught import described
from ..errors import ConfigurationError
from ..observe.log import get_logger
from ..repl.resources import ResourceScope


class EngineScope:
    """Clients, the worker template and pools of one `AsyncRLM`, on one event loop.

    Invariant: `_resources` is open exactly while `_leases` is positive; entering the `AsyncRLM` is a lease too.
    """

    def __init__(self) -> None:
        self._resources: ResourceScope | None = None
        self._leases = 0
        self._loop: EventLoopToken | None = None
        self._closing: anyio.Event | None = None

    @asynccontextmanager
    async def lease(self) -> AsyncGenerator[ResourceScope]:
        """The open resources, for as long as the block runs. What fails while they are closed is logged.

        Raises:
            ConfigurationError: on another event loop than the one they were opened on.
        """
        resources = await self.acquire()
        try:
            await resources.turnstile.enter()
            yield resources
        finally:
            try:
                await self.release()
            except Exception as error:  # noqa: BLE001 - it must not take the place of what the block came to
                get_logger().warning("closing failed", error=described(error))

    async def acquire(self, *, long_lived: bool = False) -> ResourceScope:
        """Begin a lease; `release` ends it."""
        while self._closing is not None and self._loop == current_token():
            await self._closing.wait()
        if self._resources is not None and self._loop != current_token():
            raise ConfigurationError(
                "this AsyncRLM is open on another event loop; close it there first (`await rlm.aclose()`), or make one "
                "AsyncRLM per event loop"
            )
        if self._resources is None:
            self._resources = ResourceScope()
            self._loop = current_token()
        self._leases += 1
        if long_lived:
            self._resources.long_lived = True
        return self._resources

    async def release(self) -> None:
        """End a lease; the last one closes the resources, also if cancelled meanwhile.

        Raises:
            Exception: what went wrong while closing; all is closed all the same.
        """
        self._leases -= 1
        if self._leases or self._resources is None:
            return
        resources, self._resources = self._resources, None
        closing = self._closing = anyio.Event()
        try:
            await resources.aclose()
        finally:
            self._closing = None
            closing.set()

    @property
    def is_open(self) -> bool:
        return self._resources is not None
