"""What an OpenAI-compatible server answers: a completion taken apart, or a failure classified."""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from msgspec import Raw, Struct

from ...errors import LMError, LMErrorKind
from ..base import LMReply, LMUsage

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")

NOTHING = Raw(b"null")

MOST_TOKENS = 10**12
MOST_COST = 1e6
"""Of one reply: a server that says more miscounts, and it is not known what it used."""


class RawMessage(Struct):
    """A message as servers send it, or a piece of one."""

    content: str | list[Any] | None = None
    refusal: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    content_blocks: list[Any] | None = None


class _Choice(Struct):
    message: RawMessage | None = None
    finish_reason: Any = None
    error: Any = None


class _Completion(Struct):
    choices: list[_Choice] | None = None
    usage: Raw = NOTHING
    model: Any = None
    error: Any = None


_decode_completion = msgspec.json.Decoder(_Completion).decode
_decode_usage = msgspec.json.Decoder(dict[str, Any] | None).decode


def whole_text(text: str) -> str:
    """`text` as valid Unicode: surrogate pairs joined, lone surrogates replaced. JSON and HTTP can't carry them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def parse_completion(body: bytes) -> LMReply:
    """The reply in the body of a successful response.

    Raises:
        LMError: of kind "bad_reply" if it is none, or of the kind of the error it reports.
    """
    try:
        completion = _decode_completion(body)
    except msgspec.DecodeError as error:
        completion = decode_leniently(body, _Completion, error)
    choice = completion.choices[0] if completion.choices else _Choice()
    message = choice.message
    if choice.error:  # what a gateway's provider broke off with, whatever text came before
        raise broken_off(choice.error, completion_usage(completion.usage))
    if completion.error and (message is None or not message.content):
        raise reported_error(completion.error)
    if message is None:
        raise empty_reply("choices", completion_usage(completion.usage))
    text, reasoning = message_parts(message)
    finish_reason = choice.finish_reason
    if not text.strip() and isinstance(message.refusal, str) and message.refusal:
        text, reasoning, finish_reason = "", message.refusal, "refusal"
    return LMReply(
        text=text,
        reasoning=reasoning,
        finish_reason=finish_reason_of(finish_reason),
        usage=completion_usage(completion.usage),
        model=completion.model if isinstance(completion.model, str) else None,
    )


def broken_off(reported: Any, usage: LMUsage) -> LMError:
    """The error that comes with a part of a reply, which has its price."""
    error = reported_error(reported)
    error.charged, error.usage = True, None if usage == LMUsage() else usage
    return error


def empty_reply(missing: str, usage: LMUsage) -> LMError:
    """The error for a successful response with nothing in it, which may have its price all the same."""
    return LMError(
        f"the server's reply has no {missing}",
        kind="bad_reply",
        retryable=True,
        charged=True,
        usage=None if usage == LMUsage() else usage,
    )


def decode_leniently(data: bytes, shape: type[T], error: msgspec.DecodeError, what: str = "reply") -> T:
    """What the standard library reads in `data` and msgspec refuses: NaN, lone surrogates, a byte order mark.

    Raises:
        LMError: of kind "bad_reply", if it is no JSON of that shape at all.
    """
    try:
        loaded = json.loads(data)
        usage = {"usage": Raw(msgspec.json.encode(loaded["usage"]))} if "usage" in loaded else {}
        return msgspec.convert(loaded | usage, shape)
    except (ValueError, TypeError, AttributeError, RecursionError):
        shown = whole_text(data[:80].decode("utf-8", "replace"))
        raise LMError(
            f"the server's {what} is no chat completion ({error}): {shown!r}",
            kind="bad_reply",
            retryable=True,
            charged=True,
        ) from error


_FINISH_REASONS = {
    "length": (
        *("length", "max_tokens", "max_output_tokens", "max_length", "model_length", "continuation"),
        *("model_context_window_exceeded", "context_length_exceeded"),
    ),
    "stop": ("stop", "end_turn", "stop_sequence", "eos", "eos_token", "complete", "completed"),
    "refusal": (
        *("refusal", "content_filter", "safety", "recitation", "language", "blocklist", "prohibited_content", "spii"),
        *("content-filter", "content_filtered", "guardrail_intervened", "sensitive"),
        *("model_armor", "escalation", "pup_limited_disabled", "image_safety", "image_prohibited_content"),
    ),
}
_FINISH_REASON = {word: reason for reason, words in _FINISH_REASONS.items() for word in words}


def finish_reason_of(said: Any) -> str | None:
    """Why a reply ends, in our words whatever the provider's; words that we have none for stay."""
    if not isinstance(said, str) or not said or said == "FINISH_REASON_UNSPECIFIED":
        return None
    return _FINISH_REASON.get(said.lower(), said)


def message_parts(message: RawMessage) -> tuple[str, str | None]:
    """The text of a message and the thoughts in it, wherever the server puts them."""
    reasoning = [part for part in (message.reasoning_content, message.reasoning) if isinstance(part, str) and part][:1]
    for block in message.content_blocks or []:
        match block:
            case {"thinking": str(text)} | {"delta": {"thinking": str(text)}} if text:
                reasoning.append(text)
            case _:
                continue
    if not isinstance(message.content, list):
        return whole_text(message.content or ""), "".join(reasoning) or None
    texts: list[str] = []
    for part in message.content:
        match part:
            case str():
                texts.append(part)
            case {"type": "text" | "output_text", "text": str(text)}:
                texts.append(text)
            case {"type": "thinking" | "reasoning", "thinking": str(text)} | {
                "type": "thinking" | "reasoning",
                "text": str(text),
            }:
                reasoning.append(text)
            case _:
                continue
    return whole_text("".join(texts)), "\n".join(reasoning) or None


def completion_usage(raw: Raw) -> LMUsage:
    """What the usage block of a completion says."""
    try:
        usage = _decode_usage(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return LMUsage()
    if not usage:
        return LMUsage()
    counts = {
        "input_tokens": count_in(usage, "prompt_tokens"),
        "output_tokens": count_in(usage, "completion_tokens"),
        "cached_tokens": count_in(usage, "prompt_tokens_details", "cached_tokens"),
        "reasoning_tokens": count_in(usage, "completion_tokens_details", "reasoning_tokens"),
    }
    cost = _number(usage.get("cost"))
    return LMUsage(**counted(counts), cost=cost if cost is not None and 0 <= cost <= MOST_COST else None)


def count_in(usage: Any, *path: str) -> int | None:
    """The count under these names. A server that counts in strings or in floats still says what it used; what is no
    count at all is as if it was not there, and takes nothing else with it."""
    for name in path:
        usage = cast("dict[str, Any]", usage).get(name) if isinstance(usage, dict) else None
    number = _number(usage)
    return int(number) if number is not None and number.is_integer() else None


def _number(said: Any) -> float | None:
    if isinstance(said, bool) or not isinstance(said, int | float | str):
        return None
    try:
        number = float(said)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def counted(counts: dict[str, int | None]) -> dict[str, int]:
    """The counts that a provider really gave."""
    return {name: count for name, count in counts.items() if count is not None and 0 <= count <= MOST_TOKENS}


# --- failures -----------------------------------------------------------------------------------------------------

_TOO_LONG = re.compile(
    r"context.?length|context.?window|context.?size|maximum.context|maximum.(model|input|prompt).length|"
    r"(prompt|input|request).{0,20} too.(long|large)|too.many.(input.)?tokens|reduce.the.length|"
    r"exceeds.the.(maximum|model)",
    re.IGNORECASE,
)
_QUOTA = re.compile(
    r"insufficient_quota|billing_hard_limit|exceeded your current quota|credit balance|insufficient credits?"
)

_KINDS: dict[int, LMErrorKind] = {
    401: "authentication",
    402: "quota",
    403: "permission",
    404: "not_found",
    408: "timeout",
    429: "rate_limit",
}


def error_of_status(status: int, headers: Mapping[str, str], body: bytes) -> LMError:
    """What a response that is no success says: its kind, whether to try again, and when."""
    message, code = _message_of(body)
    error = classify(status, message, code)
    verdict = headers.get("x-should-retry")
    if verdict in ("true", "false") and error.kind in ("server", "rate_limit", "timeout"):
        error.retryable = verdict == "true"
    if error.retryable:
        error.retry_after = retry_after(headers)
    return error


def classify(status: int, message: str, code: str = "") -> LMError:
    """The error for an HTTP status and what the server said with it."""
    kind: LMErrorKind = _KINDS.get(status, "server" if status >= 500 or status == 409 else "bad_request")
    if status in (400, 413, 422) and (status == 413 or _TOO_LONG.search(f"{code} {message}")):
        kind = "too_long"
    elif status == 400 and "content_filter" in f"{code} {message}":
        kind = "refusal"
    elif status in (400, 402, 403, 429) and _QUOTA.search(f"{code} {message}"):
        kind = "quota"
    return LMError(
        f"HTTP {status}: {message}" if message else f"HTTP {status}",
        kind=kind,
        status=status,
        retryable=kind in ("server", "rate_limit", "timeout"),
    )


def _message_of(body: bytes) -> tuple[str, str]:
    """The message, and the code and type, in the body of an error response, however the server shapes it."""
    try:
        loaded = json.loads(body)
    except (ValueError, RecursionError):
        loaded = body.decode("utf-8", "replace")
    return message_in(loaded)


def message_in(loaded: Any) -> tuple[str, str]:
    """The message, and the code and type, in what a server gives as an error."""
    code = ""
    for _ in range(4):
        if not isinstance(loaded, dict):
            break
        fields = cast("dict[str, Any]", loaded)
        named = [str(fields[name]) for name in ("code", "type") if fields.get(name)]
        code = " ".join(named) or code
        loaded = next((fields[name] for name in ("error", "message", "detail") if fields.get(name)), fields)
        if loaded is fields:
            break
    text = loaded if isinstance(loaded, str) else json.dumps(loaded, default=str)
    text = whole_text(" ".join(text.split()))
    return (text if len(text) <= 500 else text[:500] + " ..."), code


def reported_error(reported: Any) -> LMError:
    """The error that a response of status 200 carries instead of a completion."""
    message, code = message_in({"error": reported})
    number = code.partition(" ")[0]
    if len(number) == 3 and number.isdecimal() and number >= "400":
        return classify(int(number), message, code)
    return LMError(f"the server reports: {message}", kind="server", retryable=True)


def retry_after(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Seconds that the server asks to wait: `retry-after-ms`, or `retry-after` as seconds or as an HTTP date."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        said = headers.get(name)
        if said is None:
            continue
        try:
            seconds = float(said) * unit
        except ValueError:
            seconds = _seconds_until(said, now or datetime.now(UTC))
        if seconds is not None and math.isfinite(seconds) and seconds >= 0:
            return seconds
    return None


def _seconds_until(date: str, now: datetime) -> float | None:
    try:
        moment = parsedate_to_datetime(date)
    except (ValueError, TypeError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - now).total_seconds())
