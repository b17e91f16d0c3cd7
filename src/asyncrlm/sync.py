"""`RLM`: the same engine for blocking callers, through one portal thread that all instances share."""

from __future__ import annotations

import _thread
import atexit
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from anyio.from_thread import BlockingPortal, BlockingPortalProvider

from .engine.call import Call
from .errors import CancellationError
from .events import Event
from .rlm import AsyncRLM
from .types import RLMChatCompletion

P = ParamSpec("P")
T = TypeVar("T")

_portals = BlockingPortalProvider()
"""Starts the thread with the first lease and ends it with the last."""


def _constructed_like(
    constructor: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the parameters of another one, for type checkers and `help`."""

    def decorate(function: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        function.__doc__ = constructor.__doc__
        function.__wrapped__ = constructor  # type: ignore[attr-defined] - what inspect.signature follows
        return function

    return decorate


class RLM:
    """`AsyncRLM` for blocking code: scripts, threads, notebooks with a running event loop.

    Takes the arguments of `AsyncRLM`. The engine stays open from the first completion until `close()`, the end of a
    `with` block, or the end of the object.
    """

    @_constructed_like(AsyncRLM.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._engine = AsyncRLM(*args, **kwargs)
        self._open: _Open | None = None
        self._opening = threading.Lock()

    def __repr__(self) -> str:
        return f"<RLM over {self._engine!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self._engine)

    def completion(
        self, prompt: Any, root_prompt: str | None = None, *, tags: dict[str, Any] | None = None, **overrides: Any
    ) -> RLMChatCompletion:
        """One run; see `AsyncRLM.acompletion`.

        Raises:
            CancellationError: on Ctrl-C, once everything the run had started is gone.
        """
        return self._opened().complete(prompt, root_prompt, tags, overrides)

    @contextmanager
    def stream(
        self, prompt: Any, root_prompt: str | None = None, *, tags: dict[str, Any] | None = None, **overrides: Any
    ) -> Generator[BlockingEventStream]:
        """The same run as its events, in order: `with rlm.stream(…) as events: for event in events: …`.

        The run is cancelled, and all it started is gone, when the block is left before its end. After the last event
        `events.result` is set; a run that fails raises from the iteration.

        Raises:
            CancellationError: on Ctrl-C while waiting for an event, once everything the run had started is gone.
        """
        stream = self._opened().stream(prompt, root_prompt, tags, overrides)
        try:
            yield stream
        finally:
            stream.close()

    def _opened(self) -> _Open:
        with self._opening:
            opened = self._open
            if opened is None:
                opened = self._open = _Open(self._engine)
                opened.finalizer = weakref.finalize(self, opened.abandon)
                opened.finalizer.atexit = False  # `_close_all` does it then, where threads can't be started
            return opened

    def close(self) -> None:
        """End what the completions shared. Closing twice is fine; the next completion opens it again."""
        with self._opening:
            opened, self._open = self._open, None
        if opened is not None:
            opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class BlockingEventStream:
    """The events of one run, for one thread. `result` is set once the last of them was taken."""

    def __init__(self, portal: BlockingPortal, engine: AsyncRLM, call: Call, *asked: Any) -> None:
        self.result: RLMChatCompletion | None = None
        self._call = call
        self._ended = False
        # Events cross the threads one way, without a round trip each.
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

        async def run() -> RLMChatCompletion | None:
            try:
                async with engine.stream_of(call, *asked) as events:
                    async for event in events:
                        self._events.put(event)
                    return events.result
            finally:
                self._events.put(None)

        self._task = _Task(portal, run)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        try:
            event = self._events.get()
            if event is not None:
                return event
            self._ended = True
            self.result = self._task.result()
        except KeyboardInterrupt:
            self.close()
            raise _interrupted(self._call) from None
        raise StopIteration

    def close(self) -> None:
        """Cancel the run unless it has ended, and wait until everything it had started is gone."""
        self._ended = True
        self._task.stop()


class _Task(Generic[T]):
    """A coroutine function under way in the portal."""

    def __init__(self, portal: BlockingPortal, function: Callable[[], Awaitable[T]]) -> None:
        self._over = threading.Event()

        async def run() -> T:
            try:
                return await function()
            finally:
                self._over.set()

        self._future = portal.start_task_soon(run)

    def result(self) -> T:
        return self._future.result()

    def stop(self) -> None:
        """Cancel it and wait for its end: a cancelled future says nothing about its task."""
        self._future.cancel()
        self._over.wait()


def _interrupted(call: Call) -> CancellationError:
    error = CancellationError("interrupted by the keyboard; everything the run had started is gone")
    call.account(error)
    return error


class _Open:
    """A lease of the portal thread, and in it an open engine."""

    finalizer: weakref.finalize[Any, Any] | None = None

    def __init__(self, engine: AsyncRLM) -> None:
        self._engine = engine
        self._closing = threading.Lock()
        self._closed = False
        self._portal: BlockingPortal = _portals.__enter__()
        entering = _Task(self._portal, engine.__aenter__)
        try:
            entering.result()
        except BaseException:
            try:
                entering.stop()
                self._portal.call(engine.aclose)
            finally:
                _portals.__exit__(None, None, None)
            raise
        _all_open.add(self)

    def complete(
        self, prompt: Any, root_prompt: str | None, tags: dict[str, Any] | None, overrides: dict[str, Any]
    ) -> RLMChatCompletion:
        call = self._engine.prepare(overrides)
        task = _Task(self._portal, lambda: self._engine.complete(call, prompt, root_prompt, tags))
        try:
            return task.result()
        except KeyboardInterrupt:
            task.stop()
            raise _interrupted(call) from None

    def stream(
        self, prompt: Any, root_prompt: str | None, tags: dict[str, Any] | None, overrides: dict[str, Any]
    ) -> BlockingEventStream:
        call = self._engine.prepare(overrides)
        return BlockingEventStream(self._portal, self._engine, call, prompt, root_prompt, tags)

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
            _all_open.discard(self)
            if self.finalizer is not None:
                self.finalizer.detach()
            try:
                self._portal.call(self._engine.aclose)
            finally:
                _portals.__exit__(None, None, None)

    def abandon(self) -> None:
        """Close it for an `RLM` that nobody has any more.

        The garbage is collected in any thread, at any line: the portal's own, which would wait for itself, or one that
        holds the portals' lock. So nothing is waited for here, and no lock taken, not even those that `threading` takes
        to start a thread.
        """
        _thread.start_new_thread(self.close, ())


_all_open: set[_Open] = set()
"""What to close when the process ends."""


@atexit.register
def _close_all() -> None:
    for opened in tuple(_all_open):
        opened.close()


def _unpickled(cls: type[RLM], engine: AsyncRLM) -> RLM:
    rlm = cls.__new__(cls)
    rlm.__dict__.update(_engine=engine, _open=None, _opening=threading.Lock())
    return rlm
