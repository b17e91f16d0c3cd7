"""`RLM`: the same engine for blocking callers, through one portal thread that all instances share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Self

from anyio.from_thread import BlockingPortal, BlockingPortalProvider

from .errors import CancellationError
from .rlm import AsyncRLM
from .types import RLMChatCompletion

P = ParamSpec("P")

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
        with self._opening:
            opened = self._open
            if opened is None:
                opened = self._open = _Open(self._engine)
                opened.finalizer = weakref.finalize(self, opened.close)
        return opened.complete(prompt, root_prompt, tags, overrides)

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


class _Open:
    """A lease of the portal thread, and in it an open engine."""

    finalizer: weakref.finalize[Any, Any] | None = None

    def __init__(self, engine: AsyncRLM) -> None:
        self._engine = engine
        self._portal: BlockingPortal = _portals.__enter__()
        self._closed = False
        self._portal.call(engine.__aenter__)

    def complete(
        self, prompt: Any, root_prompt: str | None, tags: dict[str, Any] | None, overrides: dict[str, Any]
    ) -> RLMChatCompletion:
        call = self._engine.prepare(overrides)
        over = threading.Event()

        async def run() -> RLMChatCompletion:
            try:
                return await self._engine.complete(call, prompt, root_prompt, tags)
            finally:
                over.set()

        future = self._portal.start_task_soon(run)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            over.wait()
            error = CancellationError("interrupted by the keyboard; everything the run had started is gone")
            call.account(error)
            raise error from None

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.finalizer is not None:
            self.finalizer.detach()
        try:
            self._portal.call(self._engine.aclose)
        finally:
            _portals.__exit__(None, None, None)


def _unpickled(cls: type[RLM], engine: AsyncRLM) -> RLM:
    rlm = cls.__new__(cls)
    rlm.__dict__.update(_engine=engine, _open=None, _opening=threading.Lock())
    return rlm
