"""`RLM`: the same engine for blocking callers, through one portal thread that all instances share."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Concatenate, Never, ParamSpec, Self, Unpack, overload

import anyio

from .blocking import BlockingChat, BlockingEventStream, BlockingStreaming, Start, completed
from .engine.completions import Completions
from .engine.overrides import Others, Overrides
from .errors import CancellationError, ConfigurationError
from .portal import Portal, Task, Tasks
from .rlm import AsyncRLM, completions_of
from .types import Parsed, RLMChatCompletion

P = ParamSpec("P")


def _constructed_like(
    constructor: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give a constructor the parameters of another one, for type checkers and `help`."""

    def decorate(function: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        function.__doc__ = "Takes the arguments of `AsyncRLM`, with the same meaning; see `help(AsyncRLM)`."
        function.__wrapped__ = constructor  # type: ignore[attr-defined] - what inspect.signature follows
        return function

    return decorate


_ELSEWHERE = {"acompletion": "rlm.completion(…)", "astream": "with rlm.stream(…) as events", "aclose": "rlm.close()"}
"""What the asynchronous face has → what there is here."""


class RLM:
    """`AsyncRLM` for blocking code: scripts, threads, notebooks with a running event loop.

    Takes the arguments of `AsyncRLM`. The engine, with workers started ahead (`pool_size`), stays open from the first
    completion until `close()`, the end of a `with` block, or the end of the object. A forked process opens an engine
    of its own.
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

    if not TYPE_CHECKING:  # for whoever takes it for an `AsyncRLM`; type checkers know better by themselves

        def __getattr__(self, name: str) -> Never:
            instead = _ELSEWHERE.get(name)
            more = "" if instead is None else f": use `{instead}`, or an AsyncRLM, which is awaited"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{more}")

        async def __aenter__(self) -> Never:
            raise TypeError("an RLM is entered with `with`, an AsyncRLM with `async with`")

        async def __aexit__(self, *_: object) -> None: ...

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self._rlm)

    @overload
    def completion(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        response_format: type[Parsed],
        tags: dict[str, Any] | None = None,
        **others: Unpack[Others],
    ) -> RLMChatCompletion[Parsed]: ...
    @overload
    def completion(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        tags: dict[str, Any] | None = None,
        **overrides: Unpack[Overrides],
    ) -> RLMChatCompletion: ...
    def completion(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        tags: dict[str, Any] | None = None,
        **overrides: Unpack[Overrides],
    ) -> RLMChatCompletion:
        """One run; see `AsyncRLM.acompletion`.

        Raises:
            CancellationError: on Ctrl-C, once everything the run had started is gone.
        """
        call = self._completions.prepare(overrides)
        return completed(self._start, call, lambda: self._completions.complete(call, prompt, root_prompt, tags))

    @overload
    def stream(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        response_format: type[Parsed],
        tags: dict[str, Any] | None = None,
        **others: Unpack[Others],
    ) -> BlockingStreaming[Parsed]: ...
    @overload
    def stream(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        tags: dict[str, Any] | None = None,
        **overrides: Unpack[Overrides],
    ) -> BlockingStreaming: ...
    def stream(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        tags: dict[str, Any] | None = None,
        **overrides: Unpack[Overrides],
    ) -> BlockingStreaming:
        """The same run as its events, in order: `with rlm.stream(…) as events: for event in events: …`.

        The run is cancelled, and all it started is gone, when the block is left before its end. After the last event
        `events.result` is set; a run that fails raises from the iteration.

        Raises:
            CancellationError: on Ctrl-C while waiting for an event, once everything the run had started is gone.
        """
        call = self._completions.prepare(overrides)
        return BlockingStreaming(
            lambda: BlockingEventStream(self._start, self._completions, call, prompt, root_prompt, tags)
        )

    def session(self) -> BlockingChat:
        """A conversation: `with rlm.session() as chat: chat.completion(…)` keeps one REPL."""
        return BlockingChat(self._completions, self._hold)

    def _start(self, task: Task[Any]) -> None:
        """Begin a run in the portal; under the lock, so that no `close` comes in between."""
        _process.portal.refuse_own_thread()
        with self._opening:
            self._opened().start(task)

    def _hold(self, task: Task[None]) -> Start:
        """Begin what holds a session open, and say where its completions begin."""
        _process.portal.refuse_own_thread()
        with self._opening:
            opened = self._opened()
            opened.hold(task)

        def start(task: Task[Any]) -> None:
            _process.portal.refuse_own_thread()
            if self._open is not opened:  # which also keeps this object from being collected
                raise ConfigurationError("this session is closed, as its RLM was; open another one with rlm.session()")
            opened.start(task)

        return start

    def _opened(self) -> _Open:
        opened = self._open
        if opened is not None and not opened.is_open:  # Ctrl-C came while it was opened or closed
            opened.leave()
            opened = None
        if opened is None:
            opened = self._open = _Open(self._completions)
            opened.finalizer = weakref.finalize(self, opened.leave)
            opened.finalizer.atexit = False  # `_close_all` does it then
            opened.enter()
        return opened

    def close(self) -> None:
        """End what the completions shared, once those under way have ended; the sessions, too.

        Closing twice is fine; the next completion opens it again, also one that begins meanwhile.

        Raises:
            KeyboardInterrupt: on Ctrl-C while it waits; then the completions under way are stopped, and all is closed.
        """
        _process.portal.refuse_own_thread()
        with self._opening:
            opened = self._open
            if opened is None:
                return
            opened.leave()
            self._open = None
            if opened.finalizer is not None:
                opened.finalizer.detach()
            if self._completions.configuration.persistent:  # the next one can't be entered before this is left
                opened.wait()
                return
        opened.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Open:
    """An engine that is open in the portal, with what runs on it. One task enters and leaves it."""

    finalizer: weakref.finalize[Any, Any] | None = None

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._process = _process
        self._runs = Tasks()
        self._sessions = Tasks()
        self._entered = threading.Event()
        self._leave: anyio.Event | None = None
        self._is_leaving = False
        self._holder = Task(self._hold)

    def enter(self) -> None:
        """Open it.

        Raises:
            Exception: what kept it from being opened.
        """
        try:
            self._process.portal.begin(self._holder)
            self._entered.wait()
            if self._leave is None:
                self._holder.wait()
                self._holder.result()
        except BaseException:
            self._is_leaving = True
            self._holder.stop()
            raise

    @property
    def is_open(self) -> bool:
        """Whether anything can be begun here."""
        return self._entered.is_set() and not self._is_leaving and not self._holder.is_over

    def start(self, task: Task[Any]) -> None:
        """Begin a run."""
        self._process.portal.begin(task, self._runs)

    def hold(self, task: Task[None]) -> None:
        """Begin what goes on until it is stopped."""
        self._process.portal.begin(task, self._sessions)

    def leave(self) -> None:
        """Let nothing begin any more, and have it closed; waits for nothing, takes no lock."""
        self._is_leaving = True
        self._holder.post(self._let_go)

    def wait(self) -> None:
        """Until it is closed. Ctrl-C stops what it is kept open for."""
        try:
            self._holder.wait()
        except BaseException:
            self._holder.post(self._runs.cancel)
            self._holder.wait()
            raise
        if self._holder.is_over:
            with suppress(CancellationError):  # Ctrl-C while it was being opened
                self._holder.result()

    def end(self) -> None:
        """Close it at the end of the process: only daemon threads are left to wait for what runs, and they end too."""
        self._holder.post(self._runs.drop)
        self.leave()
        self.wait()

    # ---- in the portal's thread ----

    def _let_go(self) -> None:
        self._runs.closed = self._sessions.closed = True
        if self._leave is not None:
            self._leave.set()

    async def _hold(self) -> None:
        self._process.open.add(self)
        try:
            async with self._completions:
                self._leave = anyio.Event()
                self._entered.set()
                await self._leave.wait()
                # Not before all that runs has ended: as long as a run keeps the engine open, whoever opens it again
                # must find the same event loop.
                await self._runs.over()
                self._sessions.cancel()
                await self._sessions.over()
        finally:
            self._process.open.discard(self)
            self._entered.set()


class _Process:
    """What the `RLM` of one process share."""

    def __init__(self) -> None:
        self.portal = Portal()
        self.open: set[_Open] = set()
        """What to close when the process ends."""
        self.every: weakref.WeakSet[RLM] = weakref.WeakSet()


_process = _Process()


@atexit.register
def _close_all() -> None:
    for opened in tuple(_process.open):
        opened.end()


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
