"""Asking the caller before a cell is run or a tool called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..caught import is_own
from ..repl.approval import ApprovalRequest
from ..repl.messages import CellError
from ..repl.outcome import CellOutcome


class Approval:
    """What one run asks the caller's `approve` hook.

    A hook that raises, or returns something else than it may, has approved nothing: what it was asked about is refused.

    Args:
        hook: The caller's: returns None or True, or else a reason (or False) to refuse.
        run_id: Of the run.
        depth: Of the run.
        on_failure: Told when the hook raised.
    """

    def __init__(
        self,
        hook: Callable[[ApprovalRequest], Any],
        *,
        run_id: str = "",
        depth: int = 0,
        on_failure: Callable[[Any, BaseException], None] = lambda _hook, _error: None,
    ) -> None:
        self._hook = hook
        self._run_id = run_id
        self._depth = depth
        self._on_failure = on_failure

    async def refused(self, code: str) -> CellOutcome | None:
        """What comes of a cell that may not be run; None if it may."""
        reason = await self._ask(ApprovalRequest(kind="cell", run_id=self._run_id, depth=self._depth, code=code))
        if reason is None:
            return None
        text = "this cell was refused and not run" + (f": {reason}" if reason else "")
        return CellOutcome(error=CellError(type="PermissionError", message=text, traceback=f"PermissionError: {text}"))

    async def tool(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> str | None:
        """Why a tool may not be called; None if it may."""
        return await self._ask(
            ApprovalRequest(kind="tool", run_id=self._run_id, depth=self._depth, name=name, args=args, kwargs=kwargs)
        )

    async def _ask(self, request: ApprovalRequest) -> str | None:
        try:
            verdict = self._hook(request)
            if inspect.isawaitable(verdict):
                verdict = await verdict
            if verdict is None or verdict is True:
                return None
            if verdict is False:
                return ""
            if isinstance(verdict, str):
                return verdict.strip()
            raise TypeError(f"approve returned a {type(verdict).__name__}, not None, a bool or a str")
        except BaseException as error:  # the caller's code; what it did not approve is refused
            if not is_own(error):
                raise
            self._on_failure(self._hook, error)
            return f"approval failed ({type(error).__name__})"
