"""What the Gemini API answers: candidates taken apart, or put together from a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import Struct

from ...errors import LMError
from ..base import LMDelta, LMReply, LMUsage
from ..http.replies import (
    count_in,
    counted,
    decode_leniently,
    empty_reply,
    error_of_status,
    finish_reason_of,
    reported_error,
    whole_text,
)
from ..openai.stream import cut_stream


class _Part(Struct):
    text: Any = None
    thought: Any = None


class _Content(Struct):
    parts: list[_Part] | None = None


class _Candidate(Struct, rename="camel"):
    content: _Content | None = None
    index: Any = 0
    finish_reason: Any = None
    finish_message: Any = None


class _Feedback(Struct, rename="camel"):
    block_reason: Any = None
    block_reason_message: Any = None


class _Response(Struct, rename="camel"):
    candidates: list[_Candidate] | None = None
    prompt_feedback: _Feedback | None = None
    usage_metadata: Any = None
    model_version: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Response).decode


def parse_response(body: bytes) -> LMReply:
    """The reply in the body of a successful response.

    Raises:
        LMError: of kind "bad_reply" if it is none, or of the kind of the error it reports.
    """
    whole = ResponseStream()
    whole.feed(body)
    return whole.reply(cut=False)


class ResponseStream:
    """Takes the events of a streamed response, each a part of it in the shape of a whole one."""

    def __init__(self) -> None:
        self.done = False  # the stream has no word for it: it ends with the connection
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._finish: str | None = None
        self._why: str | None = None
        self._usage: Any = None
        self._model: str | None = None
        self._begun = False

    def feed(self, data: bytes) -> LMDelta | None:
        try:
            response = _decode(data)
        except msgspec.DecodeError as error:
            response = decode_leniently(data, _Response, error)
        if response.error:
            error = reported_error(response.error)
            error.charged = self._begun
            raise error
        self._usage = response.usage_metadata or self._usage
        if isinstance(response.model_version, str):
            self._model = response.model_version
        feedback = response.prompt_feedback
        if feedback is not None and feedback.block_reason:
            self._begun, self._finish = True, "refusal"
            self._why = str(feedback.block_reason_message or f"the prompt was blocked: {feedback.block_reason}")
        candidate = next((c for c in response.candidates or [] if c.index in (0, None)), None)
        return self._piece(candidate) if candidate is not None else None

    def _piece(self, candidate: _Candidate) -> LMDelta | None:
        self._begun = True
        self._finish = finish_reason_of(candidate.finish_reason) or self._finish
        if candidate.finish_reason and candidate.finish_message:
            self._why = str(candidate.finish_message)
        parts = [part for part in (candidate.content and candidate.content.parts) or [] if isinstance(part.text, str)]
        text = whole_text("".join(part.text for part in parts if not part.thought))
        thoughts = whole_text("".join(part.text for part in parts if part.thought))
        if text:
            self._texts.append(text)
        if thoughts:
            self._thoughts.append(thoughts)
        return LMDelta(text=text, reasoning=thoughts) if text or thoughts else None

    def reply(self, *, cut: bool = True) -> LMReply:
        if not self._begun:
            raise empty_reply("candidates", _usage(self._usage))
        if cut and self._finish is None:
            raise cut_stream()
        text, thoughts = "".join(self._texts), "".join(self._thoughts)
        if self._finish == "refusal" and not text.strip():
            text, thoughts = "", self._why or thoughts
        return LMReply(
            text=text,
            reasoning=thoughts or None,
            finish_reason=self._finish,
            usage=_usage(self._usage),
            model=self._model,
        )


def _usage(raw: Any) -> LMUsage:
    entered, thoughts = count_in(raw, "promptTokenCount"), count_in(raw, "thoughtsTokenCount")
    counts = {
        "input_tokens": None if entered is None else entered + (count_in(raw, "toolUsePromptTokenCount") or 0),
        # A count of zero is left out, and thoughts are counted apart.
        "output_tokens": None if entered is None else (count_in(raw, "candidatesTokenCount") or 0) + (thoughts or 0),
        "cached_tokens": count_in(raw, "cachedContentTokenCount"),
        "reasoning_tokens": thoughts,
    }
    return LMUsage(**counted(counts))


def failure(status: int, headers: Mapping[str, str], body: bytes) -> LMError:
    """What a response that is no success says; how long to wait stands in its body."""
    error = error_of_status(status, headers, body)
    details = _details(body)
    reasons = {str(detail.get("reason")) for detail in details}
    if reasons & {"API_KEY_INVALID", "API_KEY_EXPIRED"}:
        error.kind = "authentication"
    if status == 429:
        # The message is the same for the limits of a minute and for a plan that is used up.
        daily = any("PerDay" in str(detail.get("violations", "")) for detail in details)
        error.kind, error.retryable = ("quota", False) if daily else ("rate_limit", True)
    if error.retryable and error.retry_after is None:
        delays = (_seconds(detail.get("retryDelay")) for detail in details)
        error.retry_after = next((delay for delay in delays if delay is not None), None)
    return error


def _details(body: bytes) -> list[dict[str, Any]]:
    try:
        loaded: Any = json.loads(body)
        details = (cast("list[Any]", loaded)[0] if isinstance(loaded, list) else loaded)["error"]["details"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []
    return (
        [detail for detail in cast("list[Any]", details) if isinstance(detail, dict)]
        if isinstance(details, list)
        else []
    )


def _seconds(said: Any) -> float | None:
    """Of a duration such as "12.5s"."""
    try:
        seconds = float(str(said).removesuffix("s"))
    except ValueError:
        return None
    return seconds if 0 <= seconds < 86_400 else None
