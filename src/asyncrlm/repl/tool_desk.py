"""Calls of host callables: asked for, counted, timed and run, in the calling task or in a thread."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
from msgspec import UNSET

from ..caught import is_async, is_ctrl_c, is_own, said
from .framing import packed
from .raised import innermost
from .sizes import is_large
from .tool_threads import ToolThreads, TooManyLeftError
from .tools import HostTools
from .worker import codec

TOOL_THREADS = 64
"""Plain tools of one run that run at the same time."""

ApproveTool = Callable[[str, list[Any], dict[str, Any]], Awaitable[str | None]]
"""Why this call, by name and arguments, is refused; None where it may be made."""


class ToolFailure(Exception):
    """A host callable raised, was refused, or returned what can't be sent. The text and `kind` are what the cell reads.

    `kind` is the name of an exception's class; `made_with`, where that is a builtin one, what makes an equal exception,
    as the codec encodes it.
    """

    def __init__(self, kind: str, message: str, made_with: list[Any] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.made_with = made_with


class ToolDesk:
    """What holds for the calls of tools in one run.

    Args:
        threads: Where plain functions run.
        counts: How often each was called so far; runs of one tree share them.
        timeout: Seconds one call may take where its tool says nothing else; None for no limit.
        approve: Asked before each call.
    """

    def __init__(
        self,
        threads: ToolThreads | None = None,
        *,
        counts: Counter[tuple[int, str]] | None = None,
        timeout: float | None = None,
        approve: ApproveTool | None = None,
    ) -> None:
        self._threads = threads or ToolThreads()
        self._counts: Counter[tuple[int, str]] = Counter() if counts is None else counts
        self._timeout = timeout
        self._approve = approve
        self._limiter = anyio.CapacityLimiter(TOOL_THREADS)

    async def admit(
        self,
        tools: HostTools,
        name: str,
        args: list[Any],
        kwargs: dict[str, Any],
        *,
        aside: anyio.CapacityLimiter | None = None,
    ) -> None:
        """Have a call approved and counted, before anything else is done for it.

        `aside`: for arguments that are large, of the threads to read them in.

        Raises:
            ToolFailure: if it may not be made.
        """
        if self._approve is not None:
            positional, named = await _read(name, args, kwargs, aside)
            reason = await self._approve(name, positional, named)
            if reason is not None:
                raise ToolFailure("PermissionError", f"{name} was refused" + (f": {reason}" if reason else ""))
        tool = tools.entry(name)
        counted = (id(tool), name)
        if tool.max_calls is not None and self._counts[counted] >= tool.max_calls:
            raise ToolFailure("RuntimeError", f"{name} may be called {tool.max_calls:,} times in all, and was")
        self._counts[counted] += 1

    async def call(
        self,
        tools: HostTools,
        name: str,
        args: list[Any],
        kwargs: dict[str, Any],
        *,
        aside: anyio.CapacityLimiter | None = None,
        threads: anyio.CapacityLimiter | None = None,
    ) -> Any:
        """Call a host callable with arguments as the codec encoded them; its result is encoded likewise.

        `aside` as for `admit`; `threads`: those to encode a large result in.

        Coroutine functions run in the calling task; plain ones in a thread, which a cancellation leaves behind.

        Raises:
            ToolFailure: if it raised, whatever it raised, took too long, or returned what can't be sent.
        """
        function, tool = tools.names[name], tools.entry(name)
        positional, named = await _read(name, args, kwargs, aside)
        run = partial(function, *positional, **named)
        limit = self._timeout if tool.timeout is UNSET else tool.timeout
        if is_async(function):
            outcome = await _timed(name, limit, _run_async(name, run, threads))
        else:
            outcome = await self._run_plain(name, limit, run)
            if isinstance(outcome, _Later):
                outcome = await _timed(name, limit, _run_async(name, partial(_awaited, outcome.awaitable), threads))
        if isinstance(outcome, ToolFailure):
            raise outcome
        return outcome

    async def _run_plain(self, name: str, limit: float | None, run: Callable[[], Any]) -> Any:
        async with self._limiter:
            try:
                thread = self._threads.run(name, partial(_run_plain, name, run))
                return await _timed(name, limit, thread, "; it can't be stopped, and goes on on the host")
            except TooManyLeftError as error:
                return ToolFailure("RuntimeError", f"{name} was not called: {error}")


async def _timed(name: str, limit: float | None, outcome: Awaitable[Any], more: str = "") -> Any:
    with anyio.move_on_after(math.inf if limit is None else limit):
        return await outcome
    return ToolFailure("TimeoutError", f"{name} took longer than {limit:g} s{more}")


async def _read(
    name: str, args: list[Any], kwargs: dict[str, Any], aside: anyio.CapacityLimiter | None
) -> tuple[list[Any], dict[str, Any]]:
    if aside is None:
        return _decoded(name, args, kwargs)
    return await anyio.to_thread.run_sync(_decoded, name, args, kwargs, abandon_on_cancel=True, limiter=aside)


def _decoded(name: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    try:
        return [codec.decode(value) for value in args], {key: codec.decode(value) for key, value in kwargs.items()}
    except ValueError as error:
        raise ToolFailure("ValueError", f"the arguments of {name} could not be read: {error}") from None


class _Later:
    """What a plain function returned to be awaited."""

    def __init__(self, awaitable: Any) -> None:
        self.awaitable = awaitable


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


async def _run_async(name: str, run: Callable[[], Awaitable[Any]], threads: anyio.CapacityLimiter | None) -> Any:
    try:
        result = await run()
    except BaseException as error:  # a SystemExit of a tool is the cell's, not the host's
        if not is_own(error):
            raise
        return _failure(error)
    if threads is None or not is_large(result):
        return _encode(name, result)
    return await anyio.to_thread.run_sync(_pack, name, result, abandon_on_cancel=True, limiter=threads)


def _run_plain(name: str, run: Callable[[], Any]) -> Any:
    # An exception is handed back as a value: what a thread raises nobody would see.
    try:
        result = run()
    except BaseException as error:  # noqa: BLE001 -- a SystemExit of a tool is the cell's, not the host's
        return _failure(error)
    return _Later(result) if inspect.isawaitable(result) else _pack(name, result)


def _failure(raised: BaseException) -> ToolFailure:
    error = innermost(raised)
    return ToolFailure(type(error).__name__, said(error), _made_with(error))


def _made_with(error: BaseException) -> list[Any] | None:
    """The arguments of a builtin exception, encoded; None where they can't be sent, or are long."""
    if type(error).__module__ != "builtins" or isinstance(error, BaseExceptionGroup):
        return None
    # The files that an OSError is about are not among its `args`.
    args: Any = error.__reduce__()[1] if isinstance(error, OSError) else error.args
    if is_large(args):
        return None
    try:
        return [codec.encode(each) for each in args]
    except BaseException as broken:  # as in `_encode`
        if is_ctrl_c(broken):
            raise
        return None


def _encode(name: str, result: Any) -> Any:
    try:
        return codec.encode(result)
    except BaseException as error:  # the caller's own objects take part in encoding and may raise anything
        if is_ctrl_c(error):
            raise
        text = f"the tool {name} returned a {type(result).__name__}, which can't be sent to a cell: {said(error)}"
        return ToolFailure("TypeError", text)


def _pack(name: str, result: Any) -> Any:
    """In a thread: what is large is made ready for its frame there, too, and given up there."""
    value = _encode(name, result)
    return packed(value) if is_large(value) else value
