"""How a run ends whose loop gave no answer: one last turn where there may be one, else the error of its limit."""

from __future__ import annotations

import anyio
from msgspec import Struct

from ..errors import LimitError
from ..lm.base import LMReply
from ..repl.session import Session
from ..types import StopReason
from . import prompts as words
from .parsing import looks_like_code, parse_reply
from .plain import without_code
from .settings import CLOSING_GROWTH, CLOSING_SECONDS, CLOSING_SHARE, CLOSING_TOKENS
from .tree import Tree
from .turns import Turns


class RunResult(Struct, frozen=True, kw_only=True):
    """How one run ended well."""

    response: str
    stop_reason: StopReason


class Closing:
    """The end of one run, and what is kept for it while the loop goes on."""

    def __init__(self, tree: Tree, turns: Turns, *, depth: int, root_prompt: str | None) -> None:
        self._tree = tree
        self._turns = turns
        self._is_root = not depth
        self._root_prompt = root_prompt
        self._answers_limits = self._is_root and tree.limits.on_limit == "answer"

    # ---- while the loop goes on ----

    def loop_deadline(self) -> float:
        """When the loop must end: the tree's deadline, less what the last turn of `on_limit="answer"` may need."""
        timeout = self._tree.limits.max_timeout
        if not self._answers_limits or timeout is None:
            return self._deadline()
        return self._tree.deadline - min(CLOSING_SECONDS, CLOSING_SHARE * timeout)

    def hold_back(self) -> None:
        """Keep room for the last turn: the history as it is now, and an answer."""
        limits = self._tree.limits
        if not self._answers_limits or (limits.max_budget is None and limits.max_tokens is None):
            return
        turns = self._turns
        self._tree.hold_back(turns.root, turns.history.request(), CLOSING_TOKENS, growth=CLOSING_GROWTH)

    # ---- the end ----

    async def end(self, session: Session, limit: LimitError | None) -> RunResult:
        """What comes of a run whose loop ended without an answer: for `limit`, or because all turns are used up.

        Raises:
            LimitError: if it is to be raised, or nothing else is left to give.
        """
        answer = session.answer
        if answer is not None and not answer.empty:
            return RunResult(response=answer.content, stop_reason="answer")
        if limit is not None and not self._answers_limits:
            raise limit
        with anyio.CancelScope(deadline=self._deadline()):
            return await self._last_turn(session, limit)
        limit = limit or self._tree.time_is_up()
        answer = session.answer
        if answer is None or answer.empty:
            raise limit
        return RunResult(response=answer.content, stop_reason="answer")

    async def _last_turn(self, session: Session, limit: LimitError | None) -> RunResult:
        """Ask once more, for an answer from what there is. Code in that reply is run for its answer, never returned."""
        turns, prompts = self._turns, self._tree.configuration.prompts
        why = f"all {self._tree.limits.max_iterations} turns are used up" if limit is None else str(limit)
        turns.begin()
        turns.history.user(words.closing_message(prompts, reason=why, root_prompt=self._root_prompt))
        try:
            reply = await turns.ask(closing=limit is not None)
        except LimitError as error:
            raise limit or error from None
        result = await self._last_answer(session, reply, "max_iterations" if limit is None else "limit")
        turns.end()
        return result

    async def _last_answer(self, session: Session, reply: LMReply, stop_reason: StopReason) -> RunResult:
        for code in parse_reply(reply.text).cells:
            outcome = await self._turns.run_cell(session, code)
            if outcome.answer is not None and not outcome.answer.empty:
                return RunResult(response=outcome.answer.content, stop_reason=stop_reason)
            if outcome.lost is not None:
                break
        text = without_code(reply.text)
        if not text or looks_like_code(text):
            answer = session.answer
            text = answer.content if answer is not None and not answer.empty else ""
        return RunResult(response=text, stop_reason=stop_reason)

    def _deadline(self) -> float:
        """A child has none of its own: what cuts its root cuts it too."""
        return self._tree.deadline if self._is_root else float("inf")
