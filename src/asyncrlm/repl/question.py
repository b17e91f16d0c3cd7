"""What a cell asks a model: a text, or messages."""

from __future__ import annotations

from typing import Any, cast

from ..errors import LMError
from .messages import Call
from .reading import holds_more
from .worker import codec

MOST_OF_A_SCHEMA = 20_000
"""Values of `schema=`, as it comes: some stand for others."""


def asked_for(call: Call) -> tuple[str | list[dict[str, Any]], Any]:
    """Prompt and schema of a call."""
    if holds_more(call.schema, MOST_OF_A_SCHEMA):  # found out before it is made anew
        raise LMError(f"schema= is too large: it has more than {MOST_OF_A_SCHEMA:,} values", kind="bad_request")
    prompt = _checked(codec.decode(call.prompt))
    if call.kind == "llm" and not isinstance(prompt, str):
        prompt = [{**message, "content": _text(message["content"], number)} for number, message in enumerate(prompt)]
    return prompt, None if call.schema is None else codec.decode(call.schema)


def _checked(prompt: Any) -> str | list[dict[str, Any]]:
    """The prompt of a sub-call, if it is one.

    Raises:
        LMError: if it is neither a text nor a list of messages.
    """
    if isinstance(prompt, str):
        return prompt
    messages = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    if messages and all(
        isinstance(m, dict) and {"role", "content"} <= cast("dict[Any, Any]", m).keys() for m in messages
    ):
        return messages
    text = 'a prompt must be a str or a list of {"role": ..., "content": ...} messages'
    raise LMError(text, kind="bad_request")


def _text(content: Any, number: int) -> str:
    """The content of a message as a text: its parts may be lists of texts, as in the vendors' own form."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        what = type(content).__name__
        raise LMError(f"the content of message {number} must be text, not {what}", kind="bad_request")
    return "".join([_part(part, number) for part in cast("list[Any]", content)])


def _part(part: Any, number: int) -> str:
    kind = type(part).__name__
    if isinstance(part, dict):
        fields = cast("dict[Any, Any]", part)
        part, kind = fields.get("text"), str(fields.get("type", kind))[:40]
    if not isinstance(part, str):
        raise LMError(f"the content of message {number} has a part that is no text ({kind})", kind="bad_request")
    return part
