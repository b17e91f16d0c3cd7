"""What one run tells its listeners. Nothing is made of it where nobody listens."""

from __future__ import annotations

from typing import Any

from ..events import (
    CellFinished,
    CellStarted,
    ContextProgress,
    HistoryCompacted,
    ModelReplied,
    RunFinished,
    RunStarted,
    SandboxDied,
    SandboxOpened,
    ToolCalled,
    TurnFinished,
    TurnStarted,
)
from ..lm.base import LMReply
from ..repl.arguments import brief
from ..repl.context import ContextInfo
from ..repl.sandbox import Report
from ..repl.session import CellOutcome, ToolRecord
from .tree import Stamp, Tree


class Telling:
    """The events of one run, each by the method of its name."""

    def __init__(self, tree: Tree, stamp: Stamp) -> None:
        self._tree = tree
        self.stamp = stamp
        self._environment = tree.configuration.environment.name

    def run_started(
        self, model: str, context: ContextInfo, root_prompt: str | None, tags: dict[str, Any] | None
    ) -> None:
        tree = self._tree
        if not tree.watched:
            return
        tree.emit(
            RunStarted(
                **self.stamp(),
                root_model=model,
                sub_models=list(tree.router.names[1:]),
                environment=self._environment,
                max_depth=tree.limits.max_depth,
                max_iterations=tree.limits.max_iterations,
                limits={name: getattr(tree.limits, name) for name in tree.limits.__struct_fields__},
                prompt_type=context.kind,
                prompt_size=context.size,
                root_prompt=root_prompt,
                tags=tags,
            )
        )

    def context_came(self, name: str, received: int, total: int | None) -> None:
        if self._tree.watched:
            self._tree.emit(ContextProgress(**self.stamp(), name=name, received=received, total=total))

    def context_went(self, name: str, sent: int, total: int | None) -> None:
        if self._tree.watched:
            self._tree.emit(ContextProgress(**self.stamp(), name=name, received=sent, total=total, to="sandbox"))

    def run_finished(
        self, *, seconds: float, stop_reason: str, response: str | None = None, error: str | None = None
    ) -> None:
        tree = self._tree
        if not tree.watched:
            return
        tree.emit(
            RunFinished(
                **self.stamp(),
                stop_reason=stop_reason,
                response=response,
                error=error,
                usage_summary=tree.ledger.usage(),
                seconds=seconds,
            )
        )

    def turn_started(self, turn: int) -> None:
        if self._tree.watched:
            most = self._tree.limits.max_iterations
            self._tree.emit(TurnStarted(**self.stamp(), turn=turn, max_turns=most))

    def turn_finished(self, turn: int, seconds: float) -> None:
        if self._tree.watched:
            self._tree.emit(TurnFinished(**self.stamp(), turn=turn, seconds=seconds))

    def model_replied(self, turn: int, model: str, news: list[dict[str, str]], reply: LMReply, seconds: float) -> None:
        self._tree.emit(
            ModelReplied(
                **self.stamp(),
                turn=turn,
                model=model,
                prompt=news,
                text=reply.text,
                reasoning=reply.reasoning,
                finish_reason=reply.finish_reason,
                answered_by=reply.model,
                input_tokens=reply.usage.input_tokens,
                output_tokens=reply.usage.output_tokens,
                cached=reply.cached,
                waited=reply.waited,
                retries=reply.retries,
                seconds=seconds,
            )
        )

    def history_compacted(self, turn: int, before: int, after: int, summary: str, seconds: float) -> None:
        if not self._tree.watched:
            return
        self._tree.emit(
            HistoryCompacted(
                **self.stamp(),
                turn=turn,
                tokens_before=before,
                tokens_after=after,
                summary=summary,
                seconds=seconds,
            )
        )

    def cell_started(self, turn: int, cell: int, code: str) -> None:
        if self._tree.watched:
            self._tree.emit(CellStarted(**self.stamp(), turn=turn, cell=cell, code=code))

    def cell_finished(self, turn: int, cell: int, outcome: CellOutcome, error: str | None) -> None:
        tree = self._tree
        if not tree.watched:
            return
        if outcome.lost_before is not None:
            tree.emit(SandboxDied(**self.stamp(), reason=outcome.lost_before))
        tree.emit(
            CellFinished(
                **self.stamp(),
                turn=turn,
                cell=cell,
                stdout=outcome.stdout,
                stderr=outcome.stderr,
                error=error,
                variables=outcome.values or outcome.variables,
                subcalls=outcome.subcalls,
                failed_subcalls=sum(outcome.failures.values()),
                seconds=outcome.seconds,
            )
        )
        if outcome.lost is not None:
            tree.emit(SandboxDied(**self.stamp(), reason=outcome.lost))

    def sandbox_opened(self, report: Report, seconds: float) -> None:
        if self._tree.watched:
            self._tree.emit(
                SandboxOpened(
                    **self.stamp(), environment=report.environment, in_force=report.isolation, seconds=seconds
                )
            )

    def listener_failed(self, listener: Any, error: BaseException) -> None:
        self._tree.callback_failed(listener, error, self.stamp)

    def tool_called(self, record: ToolRecord) -> None:
        if self._tree.watched:
            args, kwargs = brief(record.args, record.kwargs)
            self._tree.emit(
                ToolCalled(
                    **self.stamp(),
                    name=record.name,
                    args=args,
                    kwargs=kwargs,
                    error=record.error,
                    result_bytes=record.result_bytes,
                    seconds=record.seconds,
                )
            )
