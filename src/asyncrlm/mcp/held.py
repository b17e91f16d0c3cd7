"""An async context manager held open by a task of its own, so that any task may begin and end it."""

from __future__ import annotations

import asyncio  # noqa: TID251 - a task outside of any task group: what it holds outlives the run that began it
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from typing import Any, Generic, TypeVar, cast

import anyio

from ..backend import on_trio
from ..repl.raised import innermost

T = TypeVar("T")

LEAVE_GRACE = 3.0
"""Seconds to be left in before it is cancelled."""


class Held(Generic[T]):
    """A context manager that may hold task groups and cancel scopes open: one task enters and leaves it.

    That task belongs to the event loop, not to who began it; `aclose` ends it, and so does the end of the loop.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._make = make
        self._settled = anyio.Event()  # entered, or failed
        self._leave = anyio.Event()
        self._ended = anyio.Event()
        self._scope = anyio.CancelScope()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._task: object = None  # asyncio keeps a weak reference only

    async def start(self) -> T:
        """Enter it and return its value. Cancelled meanwhile, everything is undone first.

        Raises:
            Exception: what entering raised.
        """
        self._task = _spawn(self._live)
        try:
            await self._settled.wait()
        except BaseException:
            self._scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._ended.wait()
            raise
        if self._error is not None:
            raise self._error
        return self.value

    @property
    def value(self) -> T:
        """Of the context manager; once `start` has returned."""
        return cast("T", self._value)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def aclose(self) -> None:
        """Leave it, gently at first, and wait until it is left, also if cancelled meanwhile."""
        self._leave.set()
        try:
            with anyio.move_on_after(LEAVE_GRACE):
                await self._ended.wait()
        finally:
            self._scope.cancel()
            with anyio.CancelScope(shield=True):
                await self._ended.wait()

    async def _live(self) -> None:
        try:
            with self._scope:
                async with self._make() as self._value:
                    self._settled.set()
                    await self._leave.wait()
            if not self._settled.is_set():
                self._error = RuntimeError("it was cancelled before it was ready")
        except Exception as error:  # noqa: BLE001 - raised to whoever starts it; later, its users meet the end
            self._error = innermost(error)
        finally:
            self._ended.set()
            self._settled.set()


def _spawn(function: Callable[[], Coroutine[Any, Any, None]]) -> object:
    if on_trio():
        trio: Any = sys.modules["trio"]
        return trio.lowlevel.spawn_system_task(function, context=Context())
    return asyncio.get_running_loop().create_task(function(), context=Context())
