"""One error ends a run or none: a group of one never leaves a public door."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import cast


@contextmanager
def one_error() -> Generator[None]:
    """Raise the only member of an exception group in the group's place, with its own cause and context."""
    try:
        yield
    except BaseExceptionGroup as group:
        error = _only(group)
        if error is group:
            raise
        raise error from error.__cause__


def _only(error: BaseException) -> BaseException:
    members = cast("tuple[BaseException, ...]", getattr(error, "exceptions", ()))
    return _only(members[0]) if isinstance(error, BaseExceptionGroup) and len(members) == 1 else error  # pyright: ignore[reportUnknownVariableType]
