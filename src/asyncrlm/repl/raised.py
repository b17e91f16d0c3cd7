"""What an exception is about, whatever it came wrapped in."""

from __future__ import annotations

from typing import cast


def innermost(error: BaseException) -> BaseException:
    """The one error inside groups of one, as task groups wrap what their tasks raise."""
    inner = error
    while isinstance(inner, BaseExceptionGroup):
        members = cast("tuple[BaseException, ...]", inner.exceptions)
        if len(members) != 1:
            return error
        inner = members[0]
    return inner
