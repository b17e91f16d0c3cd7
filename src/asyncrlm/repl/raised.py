"""What an exception is about, whatever it came wrapped in."""

from __future__ import annotations

from typing import cast


def innermost(error: BaseException) -> BaseException:
    """What is inside groups of one, as task groups wrap what their tasks raise."""
    while isinstance(error, BaseExceptionGroup):
        members = cast("tuple[BaseException, ...]", error.exceptions)
        if len(members) != 1:
            break
        error = members[0]
    return cast("BaseException", error)
