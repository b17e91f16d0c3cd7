"""What Anthropic's Messages API answers: a message taken apart, or put together from a stream."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from msgspec import Struct

from ...errors import LMError
from ..base import LMDelta, LMReply, LMUsage
from ..http.replies import (
    classify,
    count_in,
    counted,
    decode_leniently,
    empty_reply,
    finish_reason_of,
    message_in,
    whole_text,
)
from ..openai.stream import cut_stream


class _Block(Struct):
    type: Any = None
    text: Any = None
    thinking: Any = None


class _StopDetails(Struct):
    category: Any = None
    explanation: Any = None


class _Message(Struct):
    content: list[_Block] | None = None
    stop_reason: Any = None
    stop_details: _StopDetails | None = None
    usage: Any = None
    model: Any = None
    error: Any = None


class _Delta(Struct):
    type: Any = None
    text: Any = None
    thinking: Any = None
    stop_reason: Any = None
    stop_details: _StopDetails | None = None


class _Event(Struct):
    type: str = ""
    message: _Message | None = None
    content_block: _Block | None = None
    delta: _Delta | None = None
    usage: Any = None
    error: Any = None


_decode_message = msgspec.json.Decoder(_Message).decode
_decode_event = msgspec.json.Decoder(_Event).decode


def parse_message(body: bytes) -> LMReply:
    """The reply in the body of a successful response.

    Raises:
        LMError: of kind "bad_reply" if it is none, or of the kind of the error it reports.
    """
    try:
        message = _decode_message(body)
    except msgspec.DecodeError as error:
        message = decode_leniently(body, _Message, error)
    if message.error:
        raise _reported(message.error)
    if message.content is None:
        raise empty_reply("content", _usage(message.usage))
    texts = [block.text for block in message.content if block.type == "text" and isinstance(block.text, str)]
    thoughts = [b.thinking for b in message.content if b.type == "thinking" and isinstance(b.thinking, str)]
    return _reply(
        "".join(texts), "\n".join(thoughts), message.stop_reason, message.stop_details, message.usage, message.model
    )


def _reply(text: str, thoughts: str, stop: Any, details: _StopDetails | None, usage: Any, model: Any) -> LMReply:
    finish_reason = finish_reason_of(stop)
    if finish_reason == "refusal" and not text.strip():
        said = [part for part in (details and details.explanation, details and details.category) if part]
        text, thoughts = "", str(said[0]) if said else thoughts
    return LMReply(
        text=whole_text(text),
        reasoning=whole_text(thoughts) or None,
        finish_reason=finish_reason,
        usage=_usage(usage),
        model=model if isinstance(model, str) else None,
    )


def _usage(raw: Any) -> LMUsage:
    entered = count_in(raw, "input_tokens")
    read, written = count_in(raw, "cache_read_input_tokens"), count_in(raw, "cache_creation_input_tokens")
    counts = {
        # What came from the cache or went there is not among Anthropic's own input tokens.
        "input_tokens": None if entered is None else entered + (read or 0) + (written or 0),
        "output_tokens": count_in(raw, "output_tokens"),
        "cached_tokens": read,
        "cache_write_tokens": written,
        "cache_write_1h_tokens": count_in(raw, "cache_creation", "ephemeral_1h_input_tokens"),
        "reasoning_tokens": count_in(raw, "output_tokens_details", "thinking_tokens"),
    }
    return LMUsage(**counted(counts))


class MessageStream:
    """Takes the events of a streamed message."""

    def __init__(self) -> None:
        self.done = False
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._stop: Any = None
        self._details: _StopDetails | None = None
        self._usage: dict[str, Any] = {}
        self._model: Any = None
        self._begun = False

    def feed(self, data: bytes) -> LMDelta | None:
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            event = decode_leniently(data, _Event, error, "event")
        match event.type:
            case "error":
                error = _reported(event.error)
                error.charged = self._begun
                raise error
            case "message_start" if event.message is not None:
                self._begun = True
                self._model = event.message.model
                self._count(event.message.usage)
            case "content_block_start" if event.content_block is not None:
                return self._piece(event.content_block.text, event.content_block.thinking, new=True)
            case "content_block_delta" if event.delta is not None:
                return self._piece(event.delta.text, event.delta.thinking)
            case "message_delta":
                self._count(event.usage)
                if event.delta is not None:
                    self._stop = event.delta.stop_reason or self._stop
                    self._details = event.delta.stop_details or self._details
            case "message_stop":
                self.done = True
            case _:
                pass
        return None

    def _count(self, usage: Any) -> None:
        # What comes later is the total so far, not a part to add.
        if isinstance(usage, dict):
            given = cast("dict[str, Any]", usage)
            self._usage |= {name: count for name, count in given.items() if count is not None}

    def _piece(self, text: Any, thinking: Any, *, new: bool = False) -> LMDelta | None:
        text = text if isinstance(text, str) else ""
        thinking_block = isinstance(thinking, str)
        thinking = thinking if isinstance(thinking, str) else ""
        if new and thinking_block and self._thoughts:
            thinking = "\n" + thinking
        if text:
            self._texts.append(text)
        if thinking:
            self._thoughts.append(thinking)
        return LMDelta(text=text, reasoning=thinking) if text or thinking else None

    def reply(self) -> LMReply:
        if not self.done:
            raise cut_stream()
        if not self._begun:
            raise empty_reply("content", _usage(self._usage or None))
        usage = self._usage or None
        return _reply("".join(self._texts), "".join(self._thoughts), self._stop, self._details, usage, self._model)


# --- failures -----------------------------------------------------------------------------------------------------

_STATUS = {
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "invalid_request_error": 400,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}


def _reported(reported: Any) -> LMError:
    """The error that comes in a stream, where the status was 200 already."""
    message, code = message_in({"error": reported})
    status = next((_STATUS[word] for word in code.split() if word in _STATUS), None)
    if status is not None:
        return classify(status, message, code)
    return LMError(f"the server reports: {message}", kind="server", retryable=True)
