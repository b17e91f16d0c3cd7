"""What every request to a model goes through, whoever sends it: a run, its sub-calls, a `Repl` without a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from ..errors import LMError
from ..lm.base import LMReply, LMRequest, Message
from ..lm.clients import ClientSpec
from ..lm.pacing import reply_text
from ..repl.broker import SubCall
from . import prompts as words
from .checks import Checks
from .fitting import TooManySteps
from .plain import strip_thinking
from .prompts import Prompts
from .shapes import Misfit, Shape

_STRUCTURED = frozenset({"openai", "azure_openai", "anthropic", "gemini", "openrouter", "vllm"})
"""Backends whose servers take a JSON schema as the form of a reply, most of their models at least."""

BYTES_PER_TOKEN = 4
"""English text in today's tokenisers: what a prompt's size is estimated with when it is held against a window. Low on
purpose: only what is surely too long is refused before it is sent."""


def fitting_bytes(spec: ClientSpec, request: LMRequest) -> int:
    """The size of a request, if it can fit the window of its model.

    Raises:
        LMError: of kind "too_long", naming the window and the prompt's size.
    """
    size = request.input_bytes()
    if spec.window is not None and size // BYTES_PER_TOKEN > spec.window:
        raise LMError(
            f"the prompt is too long for model {spec.model!r}: about {size // BYTES_PER_TOKEN:,} tokens "
            f"({size:,} bytes), its window is {spec.window:,} tokens; ask about smaller pieces",
            kind="too_long",
        )
    return size


def prompt_messages(prompt: str | list[dict[str, Any]]) -> tuple[Message, ...]:
    """The messages that a sub-call's prompt stands for: a text is one message of the user."""
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    return tuple(Message(str(m["role"]), m["content"]) for m in prompt)


Send: TypeAlias = Callable[[LMRequest, str], Awaitable[LMReply]]
"""Sends a request of a sub-call; the text tells the requests of one call apart."""


class Asking:
    """What the sub-calls of one run's cells ask, and what they take for an answer."""

    def __init__(self, prompts: Prompts, checks: Checks) -> None:
        self._prompts = prompts
        self._checks = checks
        self._unstructured: set[ClientSpec] = set()  # whose server has refused structured output

    async def reply(self, spec: ClientSpec, call: SubCall, send: Send) -> str:
        """What a sub-model says to a call, without its thoughts; with a schema, JSON that fits it.

        Raises:
            LMError: if there is no such text in time; of kind "schema", if the model does not keep to it when told.
        """
        messages = prompt_messages(call.prompt)
        if call.schema is None:
            reply = await send(LMRequest(messages=messages), "")
            return _text(spec, reply) + words.sign(self._prompts, reply.ending)
        shape = await self._checks.shape(call.schema)
        stated = words.shape_message(self._prompts, shape.stated, in_cell=False)
        messages = (*messages, Message("user", stated))
        if messages[-2].role == "user":
            messages = (*messages[:-2], Message("user", f"{messages[-2].content}\n\n{stated}"))
        misfits: list[Misfit] = []
        for which in ("", "again"):
            text = _text(spec, await self._structured(spec, messages, shape, send, which))
            try:
                return (await self._checks.read(shape, words.clean(text))).text
            except TooManySteps as error:
                raise LMError(f"no reply can be held against schema=: {error}", kind="bad_request") from error
            except Misfit as misfit:
                misfits.append(misfit)
                told = words.misfit_message(self._prompts, str(misfit), in_cell=False)
                messages = (*messages, Message("assistant", text), Message("user", told))
        told = f"model {spec.model!r} was asked twice, and no reply fits schema=: {misfits[-1]}"
        raise LMError(told, kind="schema", retryable=True) from misfits[-1]

    async def _structured(
        self, spec: ClientSpec, messages: tuple[Message, ...], shape: Shape, send: Send, which: str
    ) -> LMReply:
        """Ask through the provider's structured output, where it has one and takes this schema."""
        can = spec.backend in _STRUCTURED and shape.schema.get("type") == "object" and spec not in self._unstructured
        if can:
            form = {"type": "json_schema", "json_schema": {"name": "reply", "schema": shape.schema}}
            try:
                return await send(LMRequest(messages=messages, sampling_args={"response_format": form}), which)
            except LMError as error:
                if error.kind != "bad_request":
                    raise
            self._unstructured.add(spec)
        return await send(LMRequest(messages=messages), f"{which}plain" if can else which)


def _text(spec: ClientSpec, reply: LMReply) -> str:
    text = strip_thinking(reply_text(reply))
    if not text.strip():
        raise LMError(f"model {spec.model!r} gave thoughts and no text", kind="empty", retryable=True)
    return text
