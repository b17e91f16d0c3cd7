"""The loop: ask the root model, run its cells, show it what they printed, until an answer is ready."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.to_thread

from ..caught import described
from ..errors import ErrorThresholdExceededError, LimitError, LMError
from ..lm.base import LMReply
from ..lm.clients import ClientSpec
from ..lm.pacing import reply_text
from ..mcp.connections import with_servers
from ..repl.context import ContextInfo, describe
from ..repl.gather import check_given, gathered
from ..repl.raised import innermost
from ..repl.resources import DepthScope, waited_for
from ..repl.session import CellOutcome, Session
from ..repl.tool_desk import ToolDesk
from ..repl.tools import HostTools
from ..repl.web import Web
from ..types import UsageSummary
from . import prompts as words
from .approval import Approval
from .closing import Closing, RunResult
from .conversation import FIRST_HISTORY, Conversation
from .plain import plain_text, strip_thinking
from .services import RunServices
from .settings import MAX_EMPTY_REPLIES
from .shapes import Shape
from .telling import Telling
from .tree import Tree
from .turns import Turns
from .typed import Answers


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
        run_id: str | None = None,
        parent_id: str | None = None,
        tags: dict[str, Any] | None = None,
        path: str = "",
        shape: Shape | None = None,
        lazy: bool = False,
        web: Web | None = None,
        conversation: Conversation | None = None,
    ) -> None:
        self.tree = tree
        self.path = path  # the calls that led here: the same in a replay
        self.depth = depth
        self.run_id = run_id or tree.run_id
        self._tags = tags
        self.parent_id = parent_id
        self._prompt = prompt
        self._lazy = lazy
        self._web = web or Web()
        self._root_prompt = root_prompt
        self._root = root
        self._configuration = tree.configuration
        self._tools = self._configuration.tools if tools is None else tools
        self._started = time.perf_counter()
        self._empty_replies = 0
        self._failed_turns = 0
        self._session: Session | None = None
        self._conversation = conversation
        self._telling = Telling(tree, self.stamp)
        hook = self._configuration.approve
        self._approval = None
        if hook is not None:
            self._approval = Approval(hook, run_id=self.run_id, depth=depth, on_failure=self._telling.listener_failed)
        self._turns = Turns(tree, root, self._telling, path=path, approval=self._approval)
        self._history = self._turns.history
        self._answers = Answers(shape, self._configuration.prompts, tree.checks)
        self._closing = Closing(tree, self._turns, self._answers, depth=depth, root_prompt=root_prompt)
        self._result: RunResult | None = None

    # ---- what the tree and the services ask of a run ----

    @property
    def partial_answer(self) -> str | None:
        """The best text so far."""
        return self._closing.partial_answer(self._session)

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

    async def run_child(
        self, prompt: str | list[dict[str, Any]], root: ClientSpec, path: str, run_id: str, shape: Shape | None = None
    ) -> str:
        """Run the child of one `rlm_query`. Returns its response."""
        child = Run(
            self.tree,
            prompt=prompt,
            root=root,
            tools=self._configuration.sub_tools,
            depth=self.depth + 1,
            run_id=run_id,
            parent_id=self.run_id,
            path=path,
            shape=shape,
        )
        return (await child.execute()).response

    # ---- from start to end ----

    async def execute(self) -> RunResult:
        """Run to the end.

        Raises:
            LimitError: when a limit is met and no answer is ready.
            LMError: when the root model can't be asked.
            SandboxLost: when there is no place to run cells.
        """
        context = await self._described()
        self._telling.run_started(self._root.model, context, self._root_prompt, self._tags)
        outcome: dict[str, Any] = {"stop_reason": "cancelled"}
        try:
            if self.depth >= self.tree.limits.max_depth:
                result = await self._plain()
            else:
                scope = DepthScope(self.tree.scope)
                with waited_for():
                    result = await self._with_session(context, scope)
            outcome = {"stop_reason": result.stop_reason, "response": result.response, "error": result.error}
            return result
        except Exception as raised:
            error = innermost(raised)
            outcome = {"stop_reason": "error", "error": described(error)}
            raise
        except anyio.get_cancelled_exc_class():
            if anyio.current_time() >= self.tree.deadline:
                self.tree.time_is_up()
            if (limit := self.tree.limit) is not None:
                outcome["error"] = described(limit)
            raise
        finally:
            self._telling.run_finished(seconds=self.seconds, **outcome)

    async def _described(self) -> ContextInfo:
        """What the model is told of the prompt. Folders and large values take long to walk: not on the event loop."""
        prompt, tree = self._prompt, self.tree
        check_given(prompt)
        if isinstance(prompt, str | bytes) and not self._lazy:
            return describe(prompt)
        threads = tree.scope.threads
        with anyio.CancelScope(deadline=tree.deadline):
            self._prompt = await gathered(
                prompt, lazy=self._lazy, web=self._web, threads=threads, tell=self._telling.context_came
            )
            return await anyio.to_thread.run_sync(describe, self._prompt, abandon_on_cancel=True, limiter=threads)
        raise tree.time_is_up()

    async def _plain(self) -> RunResult:
        """No depth for a REPL: the prompt goes to the model as it is."""
        with anyio.CancelScope(deadline=self.tree.deadline):
            self._history.user(await plain_text(self._prompt, self._root_prompt, self.tree.scope.threads))
            self._history.user(self._answers.asked_in_text)
            text = strip_thinking(reply_text(await self._turns.ask()))
            if self._answers.shape is not None:
                return await self._plain_answer(text)
            error = None if text.strip() else f"model {self._root.model!r} gave an empty reply"
            return RunResult(response=text, stop_reason="text", error=error)
        raise self.tree.time_is_up()

    async def _plain_answer(self, text: str) -> RunResult:
        """An answer of the shape that was asked for, mended once if it is not."""
        answers = self._answers
        fit = await answers.read(text)
        if fit is None:
            self._history.assistant(text)
            self._history.user(answers.refusal_in_text)
            fit = await answers.read(strip_thinking(reply_text(await self._turns.ask())))
        if fit is None:
            raise answers.failure(f"model {self._root.model!r} was asked twice")
        return RunResult(response=fit.text, parsed=fit.value, stop_reason="text")

    async def _with_session(self, context: ContextInfo, scope: DepthScope) -> RunResult:
        tree, conversation = self.tree, self._conversation
        await self._join_servers()
        self._open_history(context)
        services = RunServices(tree, self.depth, self.path, stamp=self.stamp, start_child=self.run_child)
        settings: dict[str, Any] = {
            "tools": self._tools,
            "desk": ToolDesk(
                tree.scope.tool_threads,
                counts=tree.tool_counts,
                timeout=tree.limits.tool_timeout,
                approve=None if self._approval is None else self._approval.tool,
            ),
            "raise_errors": tree.limits.on_subcall_error == "raise",
            "show_values": tree.show_values,
            "on_tool": self._telling.tool_called,
            "on_sandbox": self._telling.sandbox_opened,
            "on_upload": self._telling.context_went,
        }
        if conversation is None:
            async with Session(self._configuration.environment, scope, services, **settings) as session:
                self._turns.meanwhile(lambda: session.load("context_0", self._prompt), hear_out=False)
                return await self._to_the_end(session)
        session = conversation.session

        async def begin() -> None:
            serve = functools.partial(session.serve, services, **settings)
            said, load = await conversation.begin(self._prompt, serve)
            self._history.user(said)
            # Cut off, it would take the worker with it, and all that earlier completions have there.
            self._turns.meanwhile(load, hear_out=True)

        try:
            return await self._to_the_end(session, begin)
        finally:
            conversation.end(self._turns.transcript())

    async def _join_servers(self) -> None:
        """The tools of servers are beside those of the root, and so with children that have these."""
        tree, configuration = self.tree, self._configuration
        if self._tools is not configuration.tools or not configuration.servers:
            return
        with anyio.CancelScope(deadline=tree.deadline) as scope:
            self._tools = await with_servers(self._tools, configuration.servers, tree.scope)
        if scope.cancelled_caught:
            raise tree.time_is_up()

    async def _to_the_end(self, session: Session, begin: Callable[[], Awaitable[None]] | None = None) -> RunResult:
        limit: LimitError | None = None
        with anyio.CancelScope(deadline=self._closing.loop_deadline()) as scope:
            if begin is not None:
                await begin()
            self._session = session
            name = FIRST_HISTORY if self._conversation is None else self._conversation.history_name
            self._turns.compacts(session, name)
            try:
                await self._loop(session)
            except LimitError as error:
                limit = error
        if self._result is None:
            if scope.cancelled_caught:
                limit = self.tree.time_is_up()
            self._result = await self._closing.end(session, limit)
        return self._result

    def _open_history(self, context: ContextInfo) -> None:
        configuration, tree = self._configuration, self.tree
        sub = tree.router.sub(self.depth + 1)
        system = words.system_prompt(
            configuration.prompts,
            custom=configuration.custom_system_prompt,
            orchestrator=configuration.orchestrator,
            has_children=self.depth + 1 < tree.limits.max_depth,
            tools=self._tools.describe(configuration.prompts.untrusted),
            sub_models=[(spec.model, spec.window) for spec in dict.fromkeys((sub, *tree.router.specs[1:]))],
            environment=configuration.environment.name,
        )
        self._history.system(system)
        self._history.user(
            words.context_message(
                configuration.prompts,
                kind=context.kind,
                type_name=context.type,
                size=context.size,
                items=context.count,
                first=context.names,
                root_prompt=self._root_prompt,
            )
        )
        self._history.user(self._answers.asked)
        if configuration.user_prologue:
            self._history.user(configuration.user_prologue)

    # ---- turns ----

    async def _loop(self, session: Session) -> None:
        """Turn after turn, until there is an answer or none are left."""
        limits = self.tree.limits
        for _ in range(limits.max_iterations):
            await self._one_turn(session)
            if self._result is not None:
                return
            if self.tree.limit is not None:
                raise self.tree.limit
            if limits.max_errors is not None and self._failed_turns >= limits.max_errors:
                raise ErrorThresholdExceededError(self._failed_turns, limits.max_errors, self._turns.last_error)

    async def _one_turn(self, session: Session) -> None:
        tree, callbacks = self.tree, self._configuration.callbacks
        turn = self._turns.begin()
        await tree.callback(callbacks.on_iteration_start, self.depth, turn, stamp=self.stamp)
        reply = await self._reply(session, turn)
        if reply.text.strip():
            self._empty_replies = 0
            self._history.assistant(reply.text)
            await self._run_cells(session, reply)
        else:
            self._reply_was_empty(reply)
        seconds = self._turns.end()
        await tree.callback(callbacks.on_iteration_complete, self.depth, turn, seconds, stamp=self.stamp)

    async def _reply(self, session: Session, turn: int) -> LMReply:
        """The reply of a turn, the history compacted first where it must be."""
        compaction = self._turns.compaction
        if compaction is not None and compaction.is_due:
            await compaction.compact(session)
        try:
            return await self._ask(turn)
        except LMError as error:
            if error.kind != "too_long" or compaction is None or not compaction.can_help:
                raise
        await compaction.compact(session)
        return await self._ask(turn)

    async def _ask(self, turn: int) -> LMReply:
        most = self.tree.limits.max_iterations
        self._history.user(words.turn_message(self._configuration.prompts, turn=turn, max_turns=most))
        self._closing.hold_back()
        return await self._turns.ask()

    def _reply_was_empty(self, reply: LMReply) -> None:
        self._empty_replies += 1
        if self._empty_replies >= MAX_EMPTY_REPLIES:
            raise LMError(
                f"model {self._root.model!r} gave {self._empty_replies} empty replies in a row "
                f"(finish reason: {reply.finish_reason or 'unknown'})",
                kind="empty",
            )
        self._history.assistant(reply.text)
        self._history.user(words.empty_message(self._configuration.prompts, reply.ending))

    async def _run_cells(self, session: Session, reply: LMReply) -> None:
        """Run the cells of one reply and tell the model what came of them, or keep its answer."""
        parsed = await self._turns.parsed(reply)
        prompts = self._configuration.prompts
        outcomes: list[CellOutcome] = []
        failed = False
        for code in parsed.cells:
            outcome = await self._turns.run_cell(session, code)
            outcomes.append(outcome)
            failed = failed or outcome.error is not None or outcome.lost is not None
            if await self._accept(outcome):
                return
            if outcome.lost is not None or self._answers.newly_refused:
                break
        if outcomes:
            self._failed_turns = self._failed_turns + 1 if failed else 0
        skipped = len(parsed.cells) - len(outcomes)
        self._history.user(
            words.cells_message(
                prompts,
                outcomes,
                problem=words.problem_message(prompts, parsed, reply.ending),
                skipped=skipped,
                unclosed=parsed.unclosed,
            )
        )
        if any(outcome.answer is not None and outcome.answer.empty for outcome in outcomes):
            self._history.user(words.empty_answer_message(prompts))
        elif outcomes and outcomes[-1].answer is not None:
            self._history.user(self._answers.refusal)

    async def _accept(self, outcome: CellOutcome) -> bool:
        answer = outcome.answer
        if answer is None or answer.empty:
            return False
        fit = await self._answers.read(answer.content)
        if fit is None:
            return False
        self._result = RunResult(response=fit.text, parsed=fit.value, stop_reason="answer")
        return True
