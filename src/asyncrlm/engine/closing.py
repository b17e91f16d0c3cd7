"""How a run ends whose loop gave no answer: one last turn where there may be one, else the error of its limit."""

from __future__ import annotations

from typing import Any

import anyio
from msgspec import Struct

from ..errors import LimitError, LMError, SandboxLost, last_line
from ..lm.base import LMReply
from ..repl.session import Session
from ..types import StopReason
from . import prompts as words
from .parsing import looks_like_code, parse_reply
from .plain import strip_thinking, without_code
from .settings import CLOSING_GROWTH, CLOSING_MESSAGE, CLOSING_SECONDS, CLOSING_SHARE, CLOSING_TOKENS
from .tree import Tree
from .turns import Turns
from .typed import Answers


class RunResult(Struct, frozen=True, kw_only=True):
    """How one run ended well."""

    response: str
    stop_reason: StopReason
    error: str | None = None
    """Why the response is no answer; None where it is one."""
    limit: str | None = None
    """The limit that ended the loop, if one did."""
    parsed: Any = None
    """The answer as its caller asked for it, checked."""


class Closing:
    """The end of one run, and what is kept for it while the loop goes on."""

    def __init__(self, tree: Tree, turns: Turns, answers: Answers, *, depth: int, root_prompt: str | None) -> None:
        self._tree = tree
        self._turns = turns
        self._answers = answers
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
        request = turns.history.request(sampling_args=self._tree.sampling_args)
        self._tree.hold_back(turns.root, request, CLOSING_TOKENS, growth=CLOSING_GROWTH)

    # ---- the end ----

    async def end(self, session: Session, limit: LimitError | None) -> RunResult:
        """What comes of a run whose loop ended without an answer: for `limit`, or because all turns are used up.

        Raises:
            LimitError: if it is to be raised, or there is nothing to give in its place.
            LMError: if all turns are used up, and the last one failed; of a child, also if it gave nothing. Of kind
                "schema", if no answer fits what was asked for.
        """
        reached = None if limit is None else str(limit)
        if (answer := _submitted(session)) and (fit := await self._answers.read(answer)) is not None:
            return RunResult(response=fit.text, parsed=fit.value, stop_reason="answer", limit=reached)
        if limit is not None and not self._answers_limits:
            raise limit
        stop_reason: StopReason = "max_iterations" if limit is None else "limit"
        with anyio.CancelScope(deadline=self._deadline()):
            text = await self._last_turn(session, limit)
            if self._answers.shape is not None:
                return await self._fitting(text, _draft(session), stop_reason, limit)
            error = None if text else self._no_answer()
            return RunResult(response=text, stop_reason=stop_reason, error=error, limit=reached)
        limit = limit or self._tree.time_is_up()
        text = self._best_text(session) if self._answers_limits else _submitted(session)
        if not text:
            raise limit
        if self._answers.shape is not None:
            with anyio.CancelScope(shield=True):  # it is there; only its check is left
                return await self._fitting(text, _draft(session), stop_reason, limit)
        return RunResult(response=text, stop_reason=stop_reason, limit=str(limit))

    async def _fitting(self, text: str, draft: str, stop_reason: StopReason, limit: LimitError | None) -> RunResult:
        """The result of a last turn that must be of a shape: its `text`, or else the `draft` of an answer.

        Raises:
            LMError: of kind "schema", if it is not.
        """
        fit = await self._answers.read(text) if text else None
        if fit is None and draft:
            problem = self._answers.problem
            fit = await self._answers.read(draft)
            self._answers.problem = problem or self._answers.problem
        if fit is None:
            raise self._answers.failure(
                f"{words.turns_used(most=self._tree.limits.max_iterations)}, then the last one"
                if limit is None
                else str(limit)
            ) from limit
        reached = None if limit is None else str(limit)
        return RunResult(response=fit.text, parsed=fit.value, stop_reason=stop_reason, limit=reached)

    async def _last_turn(self, session: Session, limit: LimitError | None) -> str:
        """Ask once more, for an answer from what there is.

        "" where the root run has used up its turns and says nothing, which is an error of its result; for the cell that
        started a child, which reads a text and no result, it is raised.
        """
        turns = self._turns
        prompts, shape = self._tree.configuration.prompts, self._answers.shape
        most = self._tree.limits.max_iterations
        why = words.turns_used(most=most) if limit is None else str(limit)
        told = words.turns_used(prompts, most=most) if limit is None else str(limit)
        turns.begin()
        schema = "" if shape is None else shape.stated
        turns.history.user(words.closing_message(prompts, reason=told, root_prompt=self._root_prompt, schema=schema))
        model = turns.root.model
        silence = LMError(f"model {model!r} gave no answer in its last turn: {why}", kind="empty")
        failure: Exception = silence
        try:
            reply = await self._ask(closing=limit is not None)
            turns.final = reply.text
        except (LimitError, LMError) as error:
            if not self._answers_limits:
                raise
            text, failure = "", error
        else:
            try:
                text = await self._answer_in(session, reply)
            except SandboxLost as error:
                if not self._answers_limits:
                    raise
                text, failure = _prose(reply.text), error
        text = text or self._best_text(session)
        if not text and limit is not None:
            raise limit from failure
        if not text and not (self._is_root and failure is silence):
            raise failure
        turns.end()
        return text

    async def _ask(self, *, closing: bool) -> LMReply:
        """The last reply. A request that is refused as too much is made once more, its last message shorter."""
        turns = self._turns
        try:
            return await turns.ask(closing=closing)
        except LimitError:
            shorter = turns.history.shorten(CLOSING_MESSAGE)
            if not shorter and (closing or not self._answers_limits):
                raise
            closing = self._answers_limits
        except LMError as error:
            if error.kind != "too_long" or not turns.history.shorten(CLOSING_MESSAGE):
                raise
        return await turns.ask(closing=closing)

    async def _answer_in(self, session: Session, reply: LMReply) -> str:
        """The answer that a last reply gives; "" if none. Its code is run for its answer, never returned."""
        refused = ""
        for code in (await self._turns.parsed(reply)).cells:
            outcome = await self._turns.run_cell(session, code)
            answer = outcome.answer
            if answer is not None and not answer.empty:
                if await self._answers.read(answer.content) is not None:
                    return answer.content
                refused = answer.content
            if outcome.lost is not None:
                break
        if self._answers.shape is None:
            return _prose(reply.text)
        return refused or strip_thinking(reply.text)

    def partial_answer(self, session: Session | None) -> str | None:
        """The best of a run that ends in an error: its answer as it stands, or a last reply that ran no code."""
        if session is not None and (text := _submitted(session) or _draft(session)):
            return text
        reply = self._turns.last_text
        return None if parse_reply(reply).cells else _prose(reply) or None

    def _no_answer(self) -> str:
        most, error = self._tree.limits.max_iterations, last_line(self._turns.last_error)
        why = self._turns.cut_off or (f"last error: {error}" if error else "")
        return f"no answer after {most:,} turn{'s' * (most != 1)} and a last one" + (f"; {why}" if why else "")

    def _best_text(self, session: Session) -> str:
        """The best there is besides a last reply; "" if nothing."""
        return _submitted(session) or _draft(session) or _prose(self._turns.history.last_reply)

    def _deadline(self) -> float:
        """A child has none of its own: what cuts its root cuts it too."""
        return self._tree.deadline if self._is_root else float("inf")


def _submitted(session: Session) -> str:
    """The answer that is ready now; "" if none is."""
    answer = session.answer
    return "" if answer is None or answer.empty else answer.content


def _draft(session: Session) -> str:
    """What stands in the answer that was never said to be ready; "" if nothing does."""
    return session.draft if session.draft.strip() else ""


def _prose(reply: str) -> str:
    """What a reply says to people; "" if it is code and nothing else."""
    text = without_code(reply)
    return "" if looks_like_code(text) else text
