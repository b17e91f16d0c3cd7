"""One error ends a run or none: a group of one never leaves a public door."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

import anyio

from ..repl.raised import innermost

T = TypeVar("T")


class one_error:  # noqa: N801 - used as a function
    """Raise the only member of an exception group in the group's place, with its own cause and context."""

    # No generator: the frames of one would hold the group, and so the error whose traceback holds them.

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, group: BaseException | None, traceback: TracebackType | None
    ) -> None:
        error = None if group is None else innermost(group)
        if error is None or error is group:
            return
        context = error.__context__
        try:
            raise error
        finally:
            error.__context__ = context
            del error, group, context, traceback


async def beside(work: Callable[[], Awaitable[None]], ask: Callable[[], Awaitable[T]], *, hear_out: bool) -> T:
    """What `ask` gives, once `work`, which goes on meanwhile, is done too. If `work` fails, `ask` is cancelled.

    Args:
        work, ask: The two.
        hear_out: Whether `work` goes on to its end where `ask` fails; else it is cancelled.

    Raises:
        Exception: what the first of them raised that failed.
    """
    errors: list[Exception] = []
    replies: list[T] = []

    async def working() -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 -- raised below, by itself and not in a group
            errors.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(working)
        try:
            replies.append(await ask())
        except Exception as error:  # noqa: BLE001 -- as above
            errors.append(error)
            if not hear_out:
                group.cancel_scope.cancel()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # whose tracebacks hold this frame
    return replies[0]
