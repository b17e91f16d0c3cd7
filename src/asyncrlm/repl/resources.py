"""What outlives a run: resources entered once, on first use, and left together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Hashable
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import anyio

from ..errors import RLMError
from .tool_threads import ToolThreads

if TYPE_CHECKING:
    from .sandbox import Scope

T = TypeVar("T")

CLOSE_GRACE = 10.0
"""Seconds each resource has to close, whatever is cancelled meanwhile."""
THREADS = 40
"""Blocking calls of ours at a time, for each scope. What the caller's own code blocks on never counts among them."""


class _Entry:
    """One resource. `done` is set once it is entered or has failed; nobody but its first asker writes the rest."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.manager: AbstractAsyncContextManager[Any] | None = None  # set once entered
        self.value: Any = None
        self.error: Exception | None = None


class ResourceScope:
    """The concrete `Scope`: context managers by key, entered by the first who asks, left in reverse order.

    Args:
        long_lived: Whether it outlives single runs, so that it pays to keep spare workers.
        grace: Seconds each resource has to close.
    """

    def __init__(self, *, long_lived: bool = False, grace: float = CLOSE_GRACE) -> None:
        self.long_lived = long_lived
        self.threads = anyio.CapacityLimiter(THREADS)
        """For blocking calls of ours: anyio's own limiter is the application's, whose threads may wait for us."""
        self.tool_threads = ToolThreads()
        """Of tools that are plain functions, some of which may never end."""
        self._grace = grace
        self._entries: dict[Hashable, _Entry] = {}
        self._order: list[_Entry] = []  # as they were entered
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def shared(self, key: Hashable, factory: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """The value of the context manager entered under `key`.

        Those who ask while it is being entered wait and share what comes of it, an error too; if the one who enters
        it is cancelled, the next of them enters it. After an error the next who asks tries anew.

        Raises:
            anyio.ClosedResourceError: if the scope is closed.
        """
        while True:
            if self._closed:
                raise anyio.ClosedResourceError
            entry = self._entries.get(key)
            if entry is None:
                return await self._enter(key, factory)
            await entry.done.wait()
            if entry.error is not None:
                if isinstance(entry.error, RLMError):
                    raise copy.copy(entry.error) from entry.error  # each run writes its own account into it
                raise entry.error  # others' may not be ones that can be copied
            if entry.manager is not None:
                return cast("T", entry.value)

    async def _enter(self, key: Hashable, factory: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        entry = self._entries[key] = _Entry()
        try:
            manager = factory()
            value = await manager.__aenter__()
        except BaseException as error:
            self._entries.pop(key, None)  # `aclose` may have forgotten it meanwhile
            if isinstance(error, Exception):
                entry.error = error
            raise
        else:
            entry.manager, entry.value = manager, value
            self._order.append(entry)
        finally:
            entry.done.set()
        if self._closed:  # closed meanwhile: `aclose` could not know of it
            await self._leave(entry)
            raise anyio.ClosedResourceError
        return value

    async def aclose(self) -> None:
        """Leave everything, newest first, each shielded from cancellation and within the grace; twice is fine.

        Raises:
            Exception: what went wrong while closing, once all is closed; a group if several did.
        """
        self._closed = True
        self._entries.clear()
        errors: list[Exception] = []
        while self._order:
            try:
                await self._leave(self._order[-1])
            except Exception as error:  # noqa: BLE001 -- raised below; the others must be closed first
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise ExceptionGroup("several resources could not be closed", errors)

    async def _leave(self, entry: _Entry) -> None:
        if entry not in self._order:
            return
        self._order.remove(entry)
        if entry.manager is not None:
            with anyio.move_on_after(self._grace, shield=True):
                await entry.manager.__aexit__(None, None, None)


_above: ContextVar[int] = ContextVar("asyncrlm_above", default=0)


@contextmanager
def waited_for() -> Generator[None]:
    """A run, while it lasts: what its cells call has one run more above it, a tool that asks another model included."""
    token = _above.set(_above.get() + 1)
    try:
        yield
    finally:
        _above.reset(token)


class DepthScope:
    """A scope as a run here sees it: `depth` is how many runs wait for it, be they its parents or callers of a tool."""

    def __init__(self, scope: ResourceScope) -> None:
        self.shared = scope.shared
        self.long_lived = scope.long_lived
        self.threads = scope.threads
        self.depth = _above.get()


def threads_of(scope: Scope) -> anyio.CapacityLimiter:
    """The limiter of blocking calls that goes with `scope`; a new one where a caller's scope has none."""
    limiter = getattr(scope, "threads", None)
    return anyio.CapacityLimiter(THREADS) if limiter is None else limiter
