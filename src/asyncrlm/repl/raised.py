"""What an exception is about, whatever it came wrapped in."""

from __future__ import annotations

from typing import cast

from ..caught import is_ctrl_c


def innermost(error: BaseException) -> BaseException:
    """What is inside groups of one, as task groups wrap what their tasks raise."""
    while isinstance(error, BaseExceptionGroup):
        members = cast("tuple[BaseException, ...]", error.exceptions)
        if len(members) != 1:
            break
        error = members[0]
    return cast("BaseException", error)


def said(error: BaseException) -> str:
    """The text of an exception, whose `str()` may raise anything."""
    try:
        return str(error)
    except BaseException as broken:  # an exception without a text is still one to report
        if is_ctrl_c(broken):
            raise
        return f"(its text can't be had: {type(broken).__name__})"
