"""What every request to a model goes through, whoever sends it: a run, its sub-calls, a `Repl` without a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ..errors import LMError
from ..lm.base import LMReply, LMRequest, Message
from ..lm.clients import ClientSpec
from ..lm.pacing import reply_text
from ..repl.broker import SubCall
from .plain import strip_thinking

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


def refuse_schema(call: SubCall) -> None:
    """Sub-calls with `schema=` come with a later release.

    Raises:
        LMError: if it has one.
    """
    if call.schema is not None:
        raise LMError("schema= is not supported yet; ask for JSON in the prompt and parse it", kind="bad_request")


def prompt_messages(prompt: str | list[dict[str, Any]]) -> tuple[Message, ...]:
    """The messages that a sub-call's prompt stands for: a text is one message of the user."""
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    return tuple(Message(str(m.get("role", "user")), str(m.get("content", ""))) for m in prompt)


async def subcall_reply(spec: ClientSpec, call: SubCall, send: Callable[[LMRequest], Awaitable[LMReply]]) -> str:
    """What a sub-model says to a call, without its thoughts; `send` sends the request.

    Raises:
        LMError: if there is no such text in time.
    """
    reply = await send(LMRequest(messages=prompt_messages(call.prompt)))
    text = strip_thinking(reply_text(reply))
    if not text.strip():
        raise LMError(f"model {spec.model!r} gave thoughts and no text", kind="empty", retryable=True)
    return text
