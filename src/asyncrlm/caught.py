"""What the caller's own functions raise, told apart from what is raised into them."""

from __future__ import annotations

import threading

import anyio

from .backend import on_trio


def is_own(error: BaseException) -> bool:
    """Whether a function that was called in this task has raised it, also if it ends programs where nobody catches it.

    Else its task is cancelled, or Ctrl-C was pressed.
    """
    if isinstance(error, Exception):
        return True
    cancelled = anyio.get_cancelled_exc_class()
    if isinstance(error, BaseExceptionGroup):
        return error.split(cancelled)[0] is None  # pyright: ignore[reportUnknownMemberType]
    return not isinstance(error, cancelled) and not is_ctrl_c(error)


def is_ctrl_c(error: BaseException) -> bool:
    """Whether it may be the user's: trio raises that in whatever task of the main thread it meets, asyncio in none."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread() and on_trio()
