"""`RLM`: the same engine for blocking callers, through one portal thread that all instances share."""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import Context
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from .blocking import BlockingChat, BlockingEventStream, Start, completed
from .engine.completions import Completions
from .errors import ConfigurationError
from .rlm import AsyncRLM, completions_of
from .types import RLMChatCompletion

P = ParamSpec("P")
T = TypeVar("T")


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
    `with` block, or the end of the object. A forked process opens an engine of its own.
    """

    @_constructed_like(AsyncRLM.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._rlm = AsyncRLM(*args, **kwargs)
        self._begin()

    def _begin(self) -> None:
        self._completions = completions_of(self._rlm)
        self._open: _Open | None = None
        self._opening = threading.Lock()
        _process.every.add(self)

    def _begin_in_child(self) -> None:
        """In a forked process: nothing is open there, whatever is in the one it was forked from."""
        self._completions.forget()
        self._begin()

    def __repr__(self) -> str:
        return f"<RLM over {self._rlm!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self._rlm)

    def completion(
        self, prompt: Any, root_prompt: str | None = None, *, tags: dict[str, Any] | None = None, **overrides: Any
    ) -> RLMChatCompletion:
        """One run; see `AsyncRLM.acompletion`.

        Raises:
            CancellationError: on Ctrl-C, once everything the run had started is gone.
        """
        call = self._completions.prepare(overrides)
        return completed(self._start, call, lambda: self._completions.complete(call, prompt, root_prompt, tags))

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
        call = self._completions.prepare(overrides)
        stream = BlockingEventStream(self._start, self._completions, call, prompt, root_prompt, tags)
        try:
            yield stream
        finally:
            stream.close()

    def session(self) -> BlockingChat:
        """A conversation: `with rlm.session() as chat: chat.completion(…)` keeps one REPL."""
        return BlockingChat(self._completions, self._hold)

    def _start(self, function: Callable[[], Awaitable[T]]) -> _Task[T]:
        """Begin a coroutine function in the portal; under the lock, so that no `close` comes in between."""
        _process.portal.refuse_own_thread()
        with self._opening:
            return self._opened().start(function)

    def _hold(self, function: Callable[[], Awaitable[None]]) -> tuple[Start, _Task[None]]:
        """Begin what holds a session open, and say where its completions begin."""
        _process.portal.refuse_own_thread()
        with self._opening:
            opened = self._opened()
            task = opened.hold(function)

        def start(function: Callable[[], Awaitable[T]]) -> _Task[T]:
            _process.portal.refuse_own_thread()
            if self._open is not opened:  # which also keeps this object from being collected
                raise ConfigurationError("this session is closed, as its RLM was; open another one with rlm.session()")
            return opened.start(function)

        return start, task

    def _opened(self) -> _Open:
        opened = self._open
        if opened is None:
            opened = self._open = _Open(self._completions)
            opened.finalizer = weakref.finalize(self, opened.abandon)
            opened.finalizer.atexit = False  # `_close_all` does it then, where threads can't be started
        return opened

    def close(self) -> None:
        """End what the completions shared, once those under way have ended; the sessions, too.

        Closing twice is fine; the next completion opens it again, also one that begins meanwhile.
        """
        with self._opening:
            opened, self._open = self._open, None
            if (
                opened is not None and self._completions.configuration.persistent
            ):  # the next one can't be entered before this is left
                opened.close()
        if opened is not None:
            opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Task(Generic[T]):
    """A coroutine function under way in the portal."""

    def __init__(
        self, portal: BlockingPortal, function: Callable[[], Awaitable[T]], under_way: set[_Task[Any]] | None = None
    ) -> None:
        self._over = threading.Event()
        self._process = _process

        async def run() -> T:
            try:
                return await function()
            finally:
                self._over.set()
                if under_way is not None:
                    under_way.discard(self)

        self._future = portal.start_task_soon(run)
        if under_way is not None and not self._over.is_set():
            under_way.add(self)
            if self._over.is_set():
                under_way.discard(self)

    @property
    def is_foreign(self) -> bool:
        """Whether it is under way in the process that this one was forked from, and nowhere here."""
        return self._process is not _process

    def result(self) -> T:
        return self._future.result()

    def wait(self) -> None:
        self._over.wait()

    def stop(self) -> None:
        """Cancel it and wait for its end: a cancelled future says nothing about its task."""
        if self.is_foreign:
            return
        self._future.cancel()
        self.wait()


class _Portal:
    """The thread that all `RLM` share: the first lease starts it and the last ends it.

    Not anyio's own provider: in a forked process that one waits, while it is collected, for a thread that is not there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases = 0
        self._running: tuple[BlockingPortal, threading.Thread] | None = None

    def acquire(self) -> BlockingPortal:
        """Begin a lease.

        Raises:
            ConfigurationError: in the thread itself, which would wait for what it has to do.
        """
        self.refuse_own_thread()
        with self._lock:
            running = self._running = self._running or _portal_thread()
            self._leases += 1
            return running[0]

    def refuse_own_thread(self) -> None:
        running = self._running
        if running is not None and running[1] is threading.current_thread():
            raise ConfigurationError(
                "RLM can't be used in a callback, listener or model function of an RLM: make that a coroutine function "
                "and await AsyncRLM there"
            )

    def release(self) -> None:
        """End a lease; the last one waits for the thread's end."""
        with self._lock:
            self._leases -= 1
            if self._leases or self._running is None:
                return
            (portal, thread), self._running = self._running, None
        portal.call(portal.stop)
        thread.join()


def _portal_thread() -> tuple[BlockingPortal, threading.Thread]:
    ready: Future[BlockingPortal] = Future()

    async def serve() -> None:
        async with BlockingPortal() as portal:
            ready.set_result(portal)
            await portal.sleep_until_stopped()

    def run() -> None:
        try:
            Context().run(anyio.run, serve)
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=run, name="asyncrlm-portal", daemon=True)
    thread.start()
    return ready.result(), thread


class _Open:
    """A lease of the portal thread, and in it an open engine."""

    finalizer: weakref.finalize[Any, Any] | None = None

    def __init__(self, completions: Completions) -> None:
        self._closing = threading.Lock()
        self._starting = threading.Lock()
        self._closed = False
        self._under_way: set[_Task[Any]] = set()
        self._sessions: set[_Task[Any]] = set()
        self._process = _process
        self._portal = _process.portal.acquire()
        entered: Future[anyio.Event] = Future()

        async def hold() -> None:
            # One task enters and leaves: what `persistent` keeps belongs to it.
            try:
                async with completions:
                    leave = anyio.Event()
                    entered.set_result(leave)
                    await leave.wait()
            except BaseException as error:
                if not entered.done():
                    entered.set_exception(error)
                raise

        self._holder = _Task(self._portal, hold)
        try:
            self._leave = entered.result()
        except BaseException:
            try:
                self._holder.stop()
            finally:
                _process.portal.release()
            raise
        _process.open.add(self)

    def start(self, function: Callable[[], Awaitable[T]]) -> _Task[T]:
        with self._starting:
            if self._closed:
                raise ConfigurationError("this RLM is being closed")
            return _Task(self._portal, function, self._under_way)

    def hold(self, function: Callable[[], Awaitable[None]]) -> _Task[None]:
        """Begin what goes on until it is stopped."""
        with self._starting:
            return _Task(self._portal, function, self._sessions)

    def close(self) -> None:
        """Once all that runs has ended, close the sessions and the engine, and leave the portal.

        Not before: as long as a run holds the engine open, whoever opens it again must find the same event loop.
        """
        if self._process is not _process:
            return
        with self._closing:
            if self._closed:
                return
            with self._starting:
                self._closed = True
            self._process.open.discard(self)
            if self.finalizer is not None:
                self.finalizer.detach()
            try:
                for task in tuple(self._under_way):
                    task.wait()
                for session in tuple(self._sessions):
                    session.stop()
                self._portal.call(self._leave.set)
                self._holder.result()
            finally:
                self._process.portal.release()

    def abandon(self) -> None:
        """Close it for an `RLM` that nobody has any more.

        The garbage is collected in any thread, at any line: the portal's own, which would wait for itself, or one that
        holds the portal's lock. So nothing is waited for here, and no lock taken, not even those that `threading` takes
        to start a thread.
        """
        _thread.start_new_thread(self.close, ())


class _Process:
    """What the `RLM` of one process share."""

    def __init__(self) -> None:
        self.portal = _Portal()
        self.open: set[_Open] = set()
        """What to close when the process ends."""
        self.every: weakref.WeakSet[RLM] = weakref.WeakSet()


_process = _Process()


@atexit.register
def _close_all() -> None:
    for opened in tuple(_process.open):
        opened.close()


def _after_fork() -> None:
    """No thread but the forking one is there any more: what waits for another, or for a lock it held, waits for ever.

    What was open stays so in the process it belongs to, and is used no more in this one.
    """
    global _process
    left, _process = _process, _Process()
    for rlm in tuple(left.every):
        rlm._begin_in_child()  # pyright: ignore[reportPrivateUsage]


if hasattr(os, "register_at_fork"):  # there is no fork on Windows
    os.register_at_fork(after_in_child=_after_fork)


def _unpickled(cls: type[RLM], configured: AsyncRLM) -> RLM:
    rlm = cls.__new__(cls)
    rlm._rlm = configured  # pyright: ignore[reportPrivateUsage]
    rlm._begin()  # pyright: ignore[reportPrivateUsage]
    return rlm
