"""The loop: ask the root model, run its cells, show it what they printed, until an answer is ready."""

from __future__ import annotations

import time
import uuid
from typing import Any

import anyio
import anyio.to_thread
from msgspec import Struct

from ..errors import ErrorThresholdExceededError, LimitError, LMError, TimeoutExceededError
from ..lm.base import LMReply
from ..lm.clients import ClientSpec
from ..lm.pacing import reply_text
from ..repl.context import ContextInfo, check_prompt_type, describe
from ..repl.scope import DepthScope
from ..repl.session import CellOutcome, Session
from ..repl.tools import HostTools
from ..types import StopReason, UsageSummary
from . import prompts as words
from .history import History
from .parsing import looks_like_code, parse_reply
from .plain import plain_text, strip_thinking, without_code
from .services import RunServices
from .settings import CLOSING_GROWTH, CLOSING_SECONDS, CLOSING_SHARE, CLOSING_TOKENS, MAX_EMPTY_REPLIES
from .telling import Telling
from .tree import Tree

EMPTY_REPLY = "(no reply)"
"""Stands for an empty assistant message, which some servers refuse."""


class RunResult(Struct, frozen=True, kw_only=True):
    """How one run ended well."""

    response: str
    stop_reason: StopReason


class Run:
    """One completion. Owns its worker, its history and its place in the tree."""

    def __init__(
        self,
        tree: Tree,
        *,
        prompt: Any,
        root: ClientSpec,
        root_prompt: str | None = None,
        tools: HostTools | None = None,
        depth: int = 0,
        parent_id: str | None = None,
        tags: dict[str, Any] | None = None,
        path: str = "",
    ) -> None:
        self.tree = tree
        self.path = path  # the calls that led here: the same in a replay
        self.depth, self._tags = depth, tags
        self.run_id = uuid.uuid4().hex if depth else tree.run_id
        self.parent_id = parent_id
        self._prompt = prompt
        self._root_prompt = root_prompt
        self._root = root
        self._configuration = tree.configuration
        self._tools = self._configuration.tools if tools is None else tools
        self._history = History()
        self._started = time.perf_counter()
        self._cells = self._turn = 0
        self._empty_replies = self._failed_turns = 0
        self._last_text = ""
        self._last_error: str | None = None
        self._session: Session | None = None
        self._telling = Telling(tree, self.stamp)
        self._result: RunResult | None = None

    # ---- what the tree and the services ask of a run ----

    @property
    def partial_answer(self) -> str | None:
        """The best text so far: the answer as it stands, else the last reply."""
        answer = self._session.answer if self._session is not None else None
        if answer is not None and not answer.empty:
            return answer.content
        return self._last_text or None

    def usage(self) -> UsageSummary:
        """Of the whole tree."""
        return self.tree.ledger.usage()

    @property
    def seconds(self) -> float:
        """Since the run was made."""
        return time.perf_counter() - self._started

    def stamp(self) -> dict[str, Any]:
        """The fields that every event of this run has."""
        return {"run_id": self.run_id, "parent_id": self.parent_id, "depth": self.depth, "time": time.time()}

    async def run_child(self, prompt: str | list[dict[str, Any]], root: ClientSpec, path: str) -> tuple[str, str]:
        """Run the child of one `rlm_query`. Returns its response and its run id."""
        child = Run(
            self.tree,
            prompt=prompt,
            root=root,
            tools=self._configuration.sub_tools,
            depth=self.depth + 1,
            parent_id=self.run_id,
            path=path,
        )
        return (await child.execute()).response, child.run_id

    # ---- from start to end ----

    async def execute(self) -> RunResult:
        """Run to the end.

        Raises:
            LimitError: when a limit is met and no answer is ready.
            LMError: when the root model can't be asked.
            SandboxLost: when there is no place to run cells.
        """
        context = await _described(self._prompt)
        self._telling.run_started(self._root.model, context, self._root_prompt, self._tags)
        outcome: dict[str, Any] = {"stop_reason": "cancelled"}
        try:
            result = await (self._plain() if self.depth >= self.tree.limits.max_depth else self._with_session(context))
            outcome = {"stop_reason": result.stop_reason, "response": result.response}
            return result
        except Exception as error:
            outcome = {"stop_reason": "error", "error": f"{type(error).__name__}: {error}"}
            raise
        finally:
            self._telling.run_finished(seconds=self.seconds, **outcome)

    async def _plain(self) -> RunResult:
        """No depth for a REPL: the prompt goes to the model as it is."""
        self._history.user(await plain_text(self._prompt, self._root_prompt))
        with anyio.CancelScope(deadline=self.tree.deadline) as scope:
            text = strip_thinking(reply_text(await self._ask()))
            return RunResult(response=text, stop_reason="text")
        if scope.cancelled_caught:
            self.tree.meet(self._timed_out())
        raise self._timed_out()

    async def _with_session(self, context: ContextInfo) -> RunResult:
        configuration, tree = self._configuration, self.tree
        self._open_history(context)
        session = Session(
            configuration.environment,
            DepthScope(tree.scope, self.depth),
            RunServices(tree, self.depth, self.run_id, self.path, stamp=self.stamp, start_child=self.run_child),
            tools=self._tools,
            raise_errors=tree.limits.on_subcall_error == "raise",
            show_values=tree.show_values,
            on_tool=self._telling.tool_called,
            on_sandbox=self._telling.sandbox_opened,
        )
        async with session:
            self._session = session
            with anyio.CancelScope(deadline=self._loop_deadline()) as scope:
                await session.load("context_0", self._prompt)
                try:
                    await self._loop(session)
                except LimitError as error:
                    if self._result is None:
                        await self._close_out(session, error)
            if self._result is None and scope.cancelled_caught:
                await self._out_of_time(session)
        if self._result is None:
            raise RuntimeError("a run ended without a result or an error")
        return self._result

    def _open_history(self, context: ContextInfo) -> None:
        configuration, tree = self._configuration, self.tree
        sub = tree.router.sub(self.depth + 1)
        system = words.system_prompt(
            configuration.prompts,
            custom=configuration.custom_system_prompt,
            orchestrator=configuration.orchestrator,
            has_children=self.depth + 1 < tree.limits.max_depth,
            tools=self._tools.describe(),
            sub_models=[(spec.model, spec.window) for spec in dict.fromkeys((sub, *tree.router.specs[1:]))],
            environment=configuration.environment.name,
        )
        self._history.system(system)
        self._history.user(
            words.context_message(
                configuration.prompts,
                kind=context.kind,
                size=context.size,
                items=context.count,
                root_prompt=self._root_prompt,
            )
        )
        if configuration.user_prologue:
            self._history.user(configuration.user_prologue)

    # ---- turns ----

    async def _loop(self, session: Session) -> None:
        limits = self.tree.limits
        for turn in range(1, limits.max_iterations + 1):
            await self._one_turn(session, turn)
            if self._result is not None:
                return
            if self.tree.limit is not None:
                raise self.tree.limit
            if limits.max_errors is not None and self._failed_turns >= limits.max_errors:
                raise ErrorThresholdExceededError(self._failed_turns, limits.max_errors, self._last_error)
        await self._last_turn(session, "max_iterations", f"all {limits.max_iterations} turns are used up")

    async def _one_turn(self, session: Session, turn: int) -> None:
        tree, callbacks = self.tree, self._configuration.callbacks
        started = time.perf_counter()
        self._turn = turn
        self._telling.turn_started(turn)
        await tree.callback(callbacks.on_iteration_start, self.depth, turn)
        self._history.user(
            words.turn_message(self._configuration.prompts, turn=turn, max_turns=tree.limits.max_iterations)
        )
        self._hold_back()
        reply = await self._ask()
        if reply.text.strip():
            self._empty_replies = 0
            self._history.assistant(reply.text)
            await self._run_cells(session, reply)
        else:
            self._reply_was_empty(reply)
        seconds = time.perf_counter() - started
        self._telling.turn_finished(turn, seconds)
        await tree.callback(callbacks.on_iteration_complete, self.depth, turn, seconds)

    def _reply_was_empty(self, reply: LMReply) -> None:
        self._empty_replies += 1
        if self._empty_replies >= MAX_EMPTY_REPLIES:
            raise LMError(
                f"model {self._root.model!r} gave {self._empty_replies} empty replies in a row "
                f"(finish reason: {reply.finish_reason or 'unknown'})",
                kind="empty",
            )
        self._history.assistant(EMPTY_REPLY)
        self._history.user(self._configuration.prompts.empty_reply)

    async def _run_cells(self, session: Session, reply: LMReply) -> None:
        """Run the cells of one reply and tell the model what came of them, or keep its answer."""
        parsed = parse_reply(reply.text)
        problem = parsed.problem
        if reply.finish_reason == "length":
            cut_off = self._configuration.prompts.cut_off
            problem = f"{cut_off} {problem}" if problem else cut_off
        outcomes: list[CellOutcome] = []
        failed = False
        for code in parsed.cells:
            outcome = await self._run_cell(session, code)
            outcomes.append(outcome)
            failed = failed or outcome.error is not None or outcome.lost is not None
            if self._accept(outcome):
                return
            if outcome.lost is not None:
                break
        if outcomes:
            self._failed_turns = self._failed_turns + 1 if failed else 0
        skipped = len(parsed.cells) - len(outcomes)
        prompts = self._configuration.prompts
        self._history.user(
            words.cells_message(
                prompts,
                outcomes,
                problem=problem,
                skipped=skipped,
                skipped_because="the worker was lost",
                unclosed=parsed.unclosed,
            )
        )
        if any(outcome.answer is not None for outcome in outcomes):
            self._history.user(words.empty_answer_message(prompts))

    async def _run_cell(self, session: Session, code: str) -> CellOutcome:
        self._cells += 1
        self._telling.cell_started(self._turn, self._cells, code)
        outcome = await session.execute(code)
        error = None
        if outcome.error is not None:
            error = self._last_error = outcome.error.traceback or f"{outcome.error.type}: {outcome.error.message}"
        self._telling.cell_finished(self._turn, self._cells, outcome, error)
        return outcome

    def _accept(self, outcome: CellOutcome) -> bool:
        answer = outcome.answer
        if answer is None or answer.empty:
            return False
        self._result = RunResult(response=answer.content, stop_reason="answer")
        return True

    # ---- ending without an answer ----

    async def _close_out(self, session: Session, error: LimitError) -> None:
        """A limit was met: the last turn, where the caller wants one, else the error."""
        if self.tree.limits.on_limit != "answer" or self.depth:
            raise error
        await self._last_turn(session, "limit", str(error), closing=True, otherwise=error)

    async def _out_of_time(self, session: Session) -> None:
        """The deadline cut the loop. An answer that was ready by then counts."""
        answer = session.answer
        if answer is not None and not answer.empty:
            self._result = RunResult(response=answer.content, stop_reason="answer")
            return
        error = self._timed_out()
        self.tree.meet(error)
        with anyio.CancelScope(deadline=self.tree.deadline) as scope:
            await self._close_out(session, error)
        if self._result is None and scope.cancelled_caught:
            answer = session.answer
            if answer is None or answer.empty:
                raise error
            self._result = RunResult(response=answer.content, stop_reason="answer")

    async def _last_turn(
        self,
        session: Session,
        stop_reason: StopReason,
        why: str,
        *,
        closing: bool = False,
        otherwise: LimitError | None = None,
    ) -> None:
        """Ask once more, for an answer from what there is. Code in that reply is run for its answer, never returned."""
        started = time.perf_counter()
        self._turn += 1
        self._telling.turn_started(self._turn)
        self._history.user(
            words.closing_message(self._configuration.prompts, reason=why, root_prompt=self._root_prompt)
        )
        try:
            reply = await self._ask(closing=closing)
        except LimitError as error:
            raise otherwise or error from None
        self._result = await self._last_answer(session, reply, stop_reason)
        self._telling.turn_finished(self._turn, time.perf_counter() - started)

    async def _last_answer(self, session: Session, reply: LMReply, stop_reason: StopReason) -> RunResult:
        for code in parse_reply(reply.text).cells:
            outcome = await self._run_cell(session, code)
            if outcome.answer is not None and not outcome.answer.empty:
                return RunResult(response=outcome.answer.content, stop_reason=stop_reason)
            if outcome.lost is not None:
                break
        text = without_code(reply.text)
        if not text or looks_like_code(text):
            answer = session.answer
            text = answer.content if answer is not None and not answer.empty else ""
        return RunResult(response=text, stop_reason=stop_reason)

    def _loop_deadline(self) -> float:
        """When the loop must end: the tree's deadline, less what the last turn of `on_limit="answer"` may need."""
        timeout = self.tree.limits.max_timeout
        if self.depth or timeout is None:
            return float("inf")
        if self.tree.limits.on_limit != "answer":
            return self.tree.deadline
        return self.tree.deadline - min(CLOSING_SECONDS, CLOSING_SHARE * timeout)

    def _timed_out(self) -> TimeoutExceededError:
        elapsed = anyio.current_time() - self.tree.started
        return TimeoutExceededError(elapsed, self.tree.limits.max_timeout or elapsed)

    def _hold_back(self) -> None:
        """Keep room for the last turn: the history as it is now, and an answer."""
        limits = self.tree.limits
        if self.depth or limits.on_limit != "answer" or (limits.max_budget is None and limits.max_tokens is None):
            return
        self.tree.hold_back(self._root, self._history.request(), CLOSING_TOKENS, growth=CLOSING_GROWTH)

    # ---- asking the root model ----

    async def _ask(self, *, closing: bool = False) -> LMReply:
        tree, history = self.tree, self._history
        request = history.request(sampling_args=tree.sampling_args, output_cap=CLOSING_TOKENS if closing else None)
        started = time.perf_counter()
        reply = await tree.ask(
            self._root, request, run_id=self.run_id, closing=closing, place=f"{self.path}{self._turn}t"
        )
        if reply.text.strip():
            self._last_text = reply.text
        if tree.watched:
            seconds = time.perf_counter() - started
            self._telling.model_replied(self._turn, self._root.model, history.news(), reply, seconds)
        return reply


async def _described(prompt: Any) -> ContextInfo:
    """What the model is told of the prompt. A large dict or list takes long to walk, so not on the event loop."""
    check_prompt_type(prompt)
    if isinstance(prompt, str | bytes):
        return describe(prompt)
    return await anyio.to_thread.run_sync(describe, prompt)
