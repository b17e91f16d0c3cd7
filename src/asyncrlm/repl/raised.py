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


def said(error: BaseException) -> str:
    """The text of an exception, whose `str()` may raise anything."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as broken:  # noqa: BLE001 -- an exception without a text is still one to report
        return f"(its text can't be had: {type(broken).__name__})"
