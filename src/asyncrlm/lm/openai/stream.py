"""A chat completion put together from the pieces of a stream."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct

from ...errors import LMError
from ..base import LMDelta, LMReply
from ..http.replies import (
    NOTHING,
    RawMessage,
    broken_off,
    completion_usage,
    decode_leniently,
    empty_reply,
    finish_reason_of,
    message_parts,
    reported_error,
)


class _Choice(Struct):
    index: Any = 0
    delta: RawMessage | None = None
    finish_reason: Any = None
    error: Any = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    usage: Raw = NOTHING
    model: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class CompletionStream:
    """Takes the events of a streamed chat completion."""

    def __init__(self) -> None:
        self.done = False
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._finish_reason: str | None = None
        self._usage: Raw = NOTHING
        self._model: str | None = None
        self._begun = False

    def feed(self, data: bytes) -> LMDelta | None:
        if data.strip() == b"[DONE]":
            self.done = True
            return None
        try:
            chunk = _decode(data)
        except msgspec.DecodeError as error:
            chunk = decode_leniently(data, _Chunk, error, "event")
        if chunk.error:
            error = reported_error(chunk.error)
            error.charged = True
            raise error
        if isinstance(chunk.model, str) and chunk.model:
            self._model = chunk.model
        if bytes(chunk.usage) != b"null":
            # A copy: what was decoded without one would hold the whole event.
            self._usage = chunk.usage.copy()
        choice = next((choice for choice in chunk.choices or [] if choice.index in (0, None)), None)
        if choice is None:
            return None
        if choice.error:
            raise broken_off(choice.error, completion_usage(self._usage))
        self._begun = True
        self._finish_reason = finish_reason_of(choice.finish_reason) or self._finish_reason
        return self._delta(choice.delta) if choice.delta is not None else None

    def _delta(self, piece: RawMessage) -> LMDelta | None:
        if isinstance(piece.refusal, str):
            self._refusal.append(piece.refusal)
        text, reasoning = message_parts(piece)
        if text:
            self._texts.append(text)
        if reasoning:
            self._reasoning.append(reasoning)
        return LMDelta(text=text, reasoning=reasoning or "") if text or reasoning else None

    def reply(self) -> LMReply:
        if not self.done and self._finish_reason is None:
            raise cut_stream()
        if not self._begun:
            raise empty_reply("choices", completion_usage(self._usage))
        text, reasoning = "".join(self._texts), "".join(self._reasoning) or None
        refusal, finish_reason = "".join(self._refusal), self._finish_reason
        if not text.strip() and refusal:
            reasoning, finish_reason = refusal, "refusal"
        return LMReply(
            text=text,
            reasoning=reasoning,
            finish_reason=finish_reason,
            usage=completion_usage(self._usage),
            model=self._model,
        )


def cut_stream() -> LMError:
    """The error for a stream that ended before its reply did."""
    return LMError("the stream ended before the reply did", kind="connection", retryable=True, charged=True)
