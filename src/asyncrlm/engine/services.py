"""What a run does for its cells: sub-calls to models, children, what is left of the limits."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from ..errors import LimitError, LMError
from ..events import SubcallFinished, SubcallStarted
from ..lm.base import LMReply, LMRequest
from ..lm.clients import ClientSpec
from ..repl.broker import describe_error
from ..repl.raised import innermost
from ..repl.session import SubCall
from .asking import Asking
from .shapes import Shape
from .tree import Stamp, Tree

PREVIEW = 80
"""Characters of a prompt that callbacks and events of a starting sub-call show, as in the reference."""


class RunServices:
    """Serves the calls of one run's cells. Each call is served in a task of its own."""

    def __init__(
        self,
        tree: Tree,
        depth: int,
        path: str,
        *,
        stamp: Stamp,
        start_child: Callable[[str | list[dict[str, Any]], ClientSpec, str, str, Shape | None], Awaitable[str]],
    ) -> None:
        self._tree = tree
        self._depth = depth
        self._path = path
        self._stamp = stamp
        self._start_child = start_child
        self._started = 0
        self._asking = Asking(tree.configuration.prompts, tree.checks)

    def limits(self) -> dict[str, Any]:
        """What is left: money in USD, tokens, sub-calls, seconds; None where there is no limit."""
        return self._tree.left()

    def width(self) -> int:
        """Requests of the tree that may be in flight."""
        return self._tree.gate.limit

    async def llm(self, call: SubCall) -> str:
        """One plain completion of a sub-model."""
        return await self._observed(call, lambda: self._tree.router.sub(self._depth + 1, call.model), self._ask)

    async def rlm(self, call: SubCall) -> str:
        """A child run, or a plain completion where the depth limit allows no child."""
        if self._depth + 1 >= self._tree.limits.max_depth:
            return await self.llm(call)
        return await self._observed(call, lambda: self._tree.router.root(call.model), self._child)

    async def _ask(self, call: SubCall, spec: ClientSpec, record: _Record) -> str:
        self._count()

        async def send(request: LMRequest, which: str) -> LMReply:
            record.reply = await self._tree.ask(
                spec,
                request,
                stamp=self._stamp,
                place=f"{self._path}{call.id}{which}",
                seconds=self._tree.limits.subcall_timeout,
            )
            return record.reply

        return await self._asking.reply(spec, call, send)

    async def _child(self, call: SubCall, spec: ClientSpec, record: _Record) -> str:
        shape = None if call.schema is None else await self._tree.checks.shape(call.schema)
        self._count()
        gate = self._tree.child_gate(self._depth + 1)
        await gate.acquire()
        try:
            record.child_run_id = uuid.uuid4().hex
            return await self._start_child(call.prompt, spec, f"{self._path}{call.id}/", record.child_run_id, shape)
        finally:
            gate.release()

    def _count(self) -> None:
        try:
            self._tree.ledger.count_subcall()
        except LimitError as error:
            self._tree.meet(error)
            raise

    async def _observed(self, call: SubCall, route: Callable[[], ClientSpec], serve: _Serve) -> str:
        """Serve a call between its two events and callbacks."""
        tree, callbacks = self._tree, self._tree.configuration.callbacks
        self._started += 1
        number, started = self._started, time.perf_counter()
        spec = _routed(route)
        model = spec.model if isinstance(spec, ClientSpec) else call.model or ""
        prompt = call.prompt if tree.watched or callbacks.on_subcall_start else ""
        text = prompt if isinstance(prompt, str) else "\n\n".join(str(m.get("content", "")) for m in prompt)
        if tree.watched:
            tree.emit(
                SubcallStarted(
                    **self._stamp(), subcall=number, kind=call.kind, model=model, prompt_preview=text[:PREVIEW]
                )
            )
        record = _Record()
        response, failure, cut_off = "", None, True
        try:
            await tree.callback(callbacks.on_subcall_start, self._depth + 1, model, text[:PREVIEW], stamp=self._stamp)
            if isinstance(spec, LMError):
                raise spec
            response = await serve(call, spec, record)
            cut_off = False
            return response
        except Exception as error:
            failure, cut_off = innermost(error), False
            raise
        finally:
            seconds = time.perf_counter() - started
            problem = "cancelled" if cut_off else describe_error(failure) if failure else None
            if tree.watched:
                reply = record.reply
                tree.emit(
                    SubcallFinished(
                        **self._stamp(),
                        subcall=number,
                        kind=call.kind,
                        model=model,
                        prompt=text,
                        response=response,
                        error=problem,
                        error_kind=failure.kind if isinstance(failure, LMError) else None,
                        child_run_id=record.child_run_id,
                        answered_by=reply.model if reply else None,
                        input_tokens=reply.usage.input_tokens if reply else None,
                        output_tokens=reply.usage.output_tokens if reply else None,
                        cached_tokens=reply.usage.cached_tokens if reply else None,
                        reasoning_tokens=reply.usage.reasoning_tokens if reply else None,
                        cost=reply.usage.cost if reply else None,
                        cached=reply.cached if reply else False,
                        waited=reply.waited if reply else 0.0,
                        retries=reply.retries if reply else 0,
                        seconds=seconds,
                    )
                )
            if not cut_off:
                await tree.callback(
                    callbacks.on_subcall_complete, self._depth + 1, model, seconds, problem, stamp=self._stamp
                )


class _Record(Struct):
    """What one sub-call has come to so far; a failed one too."""

    reply: LMReply | None = None
    child_run_id: str | None = None


_Serve = Callable[[SubCall, ClientSpec, _Record], Awaitable[str]]


def _routed(route: Callable[[], ClientSpec]) -> ClientSpec | LMError:
    try:
        return route()
    except LMError as error:
        return error
