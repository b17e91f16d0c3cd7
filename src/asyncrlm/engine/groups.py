"""One error ends a run or none: a group of one never leaves a public door."""

from __future__ import annotations

from types import TracebackType

from ..repl.raised import innermost


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
