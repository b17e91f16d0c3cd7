"""What stands between a caller's task and ours: however that task is cancelled, what we began ends in order.

`Task.cancel()`, which is what `asyncio.timeout`, web servers and Ctrl-C in `asyncio.run` do, goes through the shields
of anyio's scopes, and a second one breaks off the cleaning up that the first one began. So on asyncio the work is done
in a task of its own, which nobody else can cancel; the caller's task waits for it in a task group, which makes of each
such cancellation one of a scope. trio has scopes only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Generic, TypeVar, cast

import anyio
import anyio.abc

from ..backend import on_trio

T = TypeVar("T")


class Outcome(Generic[T]):
    """What came of a coroutine function that another task runs."""

    __slots__ = ("error", "value")

    def __init__(self) -> None:
        self.value: T | None = None
        self.error: BaseException | None = None

    async def of(self, body: Callable[[], Awaitable[T]]) -> None:
        """Run it. Whatever it raises is kept: SystemExit and its like would end the event loop, not the caller."""
        try:
            self.value = await body()
        except anyio.get_cancelled_exc_class() as cancelled:
            self.error = cancelled
            raise
        except BaseException as error:  # noqa: BLE001 - raised in the caller's task
            self.error = error

    def result(self) -> T:
        """The value, or the error raised once more, with its own traceback, cause and context."""
        error = self.error
        if error is None:
            return cast("T", self.value)
        context = error.__context__
        try:
            raise error
        finally:
            if context is not None:  # else it is what the caller is handling, as of any call
                error.__context__ = context
            self.error = None
            del error, context  # the traceback holds this frame


async def behind_door(body: Callable[[], Awaitable[T]]) -> T:
    """The result of a coroutine function; a cancelled caller waits until all of it is cleaned up."""
    if on_trio():
        return await body()
    outcome = Outcome[T]()
    async with anyio.create_task_group() as group:
        group.start_soon(outcome.of, body)
    return outcome.result()


class BehindDoor(Generic[T]):
    """An async context manager that is entered and left behind the door; by one task, once.

    What fails while the block runs does not concern the manager: it is left without an error, or cancelled.
    """

    def __init__(self, manager: AbstractAsyncContextManager[T]) -> None:
        self._manager = manager
        self._entered = anyio.Event()
        self._leave = anyio.Event()
        self._group: anyio.abc.TaskGroup | None = None
        self._outcome = Outcome[None]()
        self._value: T | None = None

    async def __aenter__(self) -> T:
        if on_trio():
            return await self._manager.__aenter__()
        group = anyio.create_task_group()
        await group.__aenter__()
        group.start_soon(self._outcome.of, self._hold)
        try:
            await self._entered.wait()
        except BaseException as error:
            await group.__aexit__(type(error), error, error.__traceback__)
            raise
        if self._outcome.error is not None:
            await group.__aexit__(None, None, None)
            self._outcome.result()
        self._group = group
        return cast("T", self._value)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        group, self._group = self._group, None
        if group is None:
            return await self._manager.__aexit__(kind, error, traceback)
        self._leave.set()
        await group.__aexit__(None, None, None)
        self._outcome.result()
        return None

    async def _hold(self) -> None:
        try:
            async with self._manager as self._value:
                self._entered.set()
                await self._leave.wait()
        finally:
            self._entered.set()
