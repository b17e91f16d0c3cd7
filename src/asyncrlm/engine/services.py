"""What a run does for its cells: sub-calls to models, children, what is left of the limits."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from ..errors import LimitError, LMError, RLMError
from ..events import SubcallFinished, SubcallStarted
from ..lm.base import LMReply, LMRequest, Message
from ..lm.clients import ClientSpec
from ..lm.pacing import reply_text
from ..repl.session import SubCall
from .plain import strip_thinking
from .tree import Tree

PREVIEW = 80
"""Characters of a prompt that callbacks and events of a starting sub-call show, as in the reference."""


class RunServices:
    """Serves the calls of one run's cells. Each call is served in a task of its own."""

    def __init__(
        self,
        tree: Tree,
        depth: int,
        run_id: str,
        path: str,
        *,
        stamp: Callable[[], dict[str, Any]],
        start_child: Callable[[str | list[dict[str, Any]], ClientSpec, str], Awaitable[tuple[str, str]]],
    ) -> None:
        self._tree = tree
        self._depth = depth
        self._run_id = run_id
        self._path = path
        self._stamp = stamp
        self._start_child = start_child
        self._started = 0

    def limits(self) -> dict[str, Any]:
        """What is left: money in USD, tokens, sub-calls, seconds; None where there is no limit."""
        return self._tree.left()

    async def llm(self, call: SubCall) -> str:
        """One plain completion of a sub-model."""
        spec = self._tree.router.sub(self._depth + 1, call.model)
        return await self._observed(call, spec, lambda: self._ask(call, spec))

    async def rlm(self, call: SubCall) -> str:
        """A child run, or a plain completion where the depth limit allows no child."""
        if self._depth + 1 >= self._tree.limits.max_depth:
            return await self.llm(call)
        spec = self._tree.router.root(call.model)
        return await self._observed(call, spec, lambda: self._child(call, spec))

    async def _ask(self, call: SubCall, spec: ClientSpec) -> tuple[str, LMReply | None, str | None]:
        _refuse_schema(call)
        self._count()
        request = LMRequest(messages=prompt_messages(call.prompt), sampling_args={})
        seconds = self._tree.limits.subcall_timeout
        reply: LMReply | None = None
        with anyio.move_on_after(seconds):
            reply = await self._tree.ask(spec, request, run_id=self._run_id, place=f"{self._path}{call.id}")
        if reply is None:
            raise LMError(f"no reply within {seconds:g} s (subcall_timeout)", kind="timeout", retryable=True)
        text = strip_thinking(reply_text(reply))
        if not text.strip():
            raise LMError(f"model {spec.model!r} gave thoughts and no text", kind="empty", retryable=True)
        return text, reply, None

    async def _child(self, call: SubCall, spec: ClientSpec) -> tuple[str, LMReply | None, str | None]:
        _refuse_schema(call)
        gate = self._tree.child_gate(self._depth + 1)
        await gate.acquire()
        try:
            response, child_id = await self._start_child(call.prompt, spec, f"{self._path}{call.id}/")
        finally:
            gate.release()
        return response, None, child_id

    def _count(self) -> None:
        try:
            self._tree.ledger.count_subcall()
        except LimitError as error:
            self._tree.meet(error)
            raise

    async def _observed(
        self, call: SubCall, spec: ClientSpec, serve: Callable[[], Awaitable[tuple[str, LMReply | None, str | None]]]
    ) -> str:
        """Serve a call between its two events and callbacks."""
        tree, callbacks = self._tree, self._tree.configuration.callbacks
        self._started += 1
        number, started = self._started, time.perf_counter()
        prompt = call.prompt if tree.watched or callbacks.on_subcall_start else ""
        text = prompt if isinstance(prompt, str) else "\n\n".join(str(m.get("content", "")) for m in prompt)
        if tree.watched:
            tree.emit(
                SubcallStarted(
                    **self._stamp(), subcall=number, kind=call.kind, model=spec.model, prompt_preview=text[:PREVIEW]
                )
            )
        await tree.callback(callbacks.on_subcall_start, self._depth + 1, spec.model, text[:PREVIEW])
        response, reply, child_id, failure = "", None, None, None
        cut_off = True
        try:
            response, reply, child_id = await serve()
            cut_off = False
            return response
        except RLMError as error:
            failure, cut_off = error, False
            raise
        finally:
            seconds = time.perf_counter() - started
            if tree.watched:
                usage = reply.usage if reply else None
                tree.emit(
                    SubcallFinished(
                        **self._stamp(),
                        subcall=number,
                        kind=call.kind,
                        model=spec.model,
                        prompt=text,
                        response=response,
                        error="cancelled" if cut_off else str(failure) if failure else None,
                        error_kind=failure.kind if isinstance(failure, LMError) else None,
                        child_run_id=child_id,
                        input_tokens=usage.input_tokens if usage else None,
                        output_tokens=usage.output_tokens if usage else None,
                        cost=usage.cost if usage else None,
                        cached=reply.cached if reply else False,
                        waited=reply.waited if reply else 0.0,
                        seconds=seconds,
                    )
                )
            if callbacks.on_subcall_complete is not None and not cut_off:
                error = str(failure) if failure else None
                await tree.callback(callbacks.on_subcall_complete, self._depth + 1, spec.model, seconds, error)


def prompt_messages(prompt: str | list[dict[str, Any]]) -> tuple[Message, ...]:
    """The messages that a sub-call's prompt stands for: a text is one message of the user."""
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    return tuple(Message(str(m.get("role", "user")), str(m.get("content", ""))) for m in prompt)


def _refuse_schema(call: SubCall) -> None:
    if call.schema is not None:
        raise LMError("schema= is not supported yet; ask for JSON in the prompt and parse it", kind="bad_request")
