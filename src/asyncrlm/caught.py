"""The caller's own functions: whether they are async; what they raise, told apart from what is raised into them, and
what can be said of it."""

from __future__ import annotations

import functools
import inspect
import math
import threading
from typing import Any, cast

import anyio

from .backend import is_cancelled_alone, on_trio


def is_async(function: Any) -> bool:
    """Whether a call of it makes a coroutine: it is an `async def`, has one as `__call__`, or is a partial of such."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[Any]", function).func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def is_own(error: BaseException) -> bool:
    """Whether a function that was called in this task has raised it, also if it ends programs where nobody catches it.

    Else its task is cancelled, or Ctrl-C was pressed.
    """
    if isinstance(error, Exception):
        return True
    cancelled = anyio.get_cancelled_exc_class()
    if isinstance(error, BaseExceptionGroup):
        cancels = error.split(cancelled)[0] is not None  # pyright: ignore[reportUnknownMemberType]
        return not cancels or not _is_cancelled()
    return not _is_cancelled() if isinstance(error, cancelled) else not is_ctrl_c(error)


def _is_cancelled() -> bool:
    """Whether this task is to end. On asyncio its error does not say so: awaiting a cancelled future raises it, too."""
    return anyio.current_effective_deadline() == -math.inf or (not on_trio() and is_cancelled_alone())


def is_ctrl_c(error: BaseException) -> bool:
    """Whether it may be the user's: trio raises that in whatever task of the main thread it meets, asyncio in none."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread() and on_trio()


def said(error: BaseException) -> str:
    """The text of an exception, whose `str()` may raise anything."""
    try:
        return str(error)
    except BaseException as broken:  # an exception without a text is still one to report
        if is_ctrl_c(broken):
            raise
        return f"(its text can't be had: {type(broken).__name__})"


def described(error: BaseException) -> str:
    """The class of an exception and its text."""
    return f"{type(error).__name__}: {said(error)}"
