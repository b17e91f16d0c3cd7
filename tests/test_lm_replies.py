"""What servers answer, taken apart: replies of every shape, and errors classified."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from asyncrlm.errors import LMError
from asyncrlm.lm.base import LMReply, LMUsage
from asyncrlm.lm.http.replies import classify, error_of_status, parse_completion, retry_after, whole_text
from asyncrlm.lm.openai.stream import CompletionStream
from asyncrlm.lm.pacing import reply_text


def body(message: dict[str, Any] | None = None, finish_reason: Any = "stop", **more: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **(message or {})}, "finish_reason": finish_reason}
    return json.dumps({"object": "chat.completion", "choices": [choice], **more}).encode()


@pytest.mark.parametrize(
    ("message", "text", "reasoning"),
    [
        ({"content": "plain"}, "plain", None),
        ({"content": None}, "", None),
        ({}, "", None),
        ({"content": "", "reasoning_content": "hm"}, "", "hm"),
        ({"content": "a", "reasoning": "why"}, "a", "why"),
        ({"content": "a", "reasoning_content": "", "reasoning": "why"}, "a", "why"),
        ({"content": "a", "reasoning": {"odd": 1}}, "a", None),
        ({"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]}, "a", "hm"),
        ({"content": [{"type": "reasoning", "text": "hm"}]}, "", "hm"),
        ({"content": ["a", {"type": "output_text", "text": "b"}, {"type": "image"}, 5, None]}, "ab", None),
        ({"content": "a", "refusal": "no"}, "a", None),
        ({"content": None, "tool_calls": [{"id": "x"}]}, "", None),
    ],
)
def test_text_and_reasoning(message: dict[str, Any], text: str, reasoning: str | None) -> None:
    reply = parse_completion(body(message))
    assert (reply.text, reply.reasoning) == (text, reasoning)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, LMUsage()),
        ({}, LMUsage()),
        ({"prompt_tokens": 3, "completion_tokens": 2}, LMUsage(input_tokens=3, output_tokens=2)),
        ({"prompt_tokens": 3.0, "completion_tokens": "2"}, LMUsage(input_tokens=3, output_tokens=2)),
        ({"prompt_tokens": -1, "completion_tokens": 0}, LMUsage(output_tokens=0)),
        (
            {
                "prompt_tokens": 9,
                "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 5},
                "cost": 0.25,
            },
            LMUsage(input_tokens=9, cached_tokens=4, reasoning_tokens=5, cost=0.25),
        ),
        ({"prompt_tokens_details": None, "cost": 0}, LMUsage(cost=0.0)),
        ({"prompt_tokens": 1, "cost": -1.0}, LMUsage(input_tokens=1)),
        ({"prompt_tokens": [1]}, LMUsage()),
        ("none of it", LMUsage()),
    ],
)
def test_usage_is_what_the_server_said_and_no_more(usage: Any, expected: LMUsage) -> None:
    assert parse_completion(body({"content": "a"}, usage=usage)).usage == expected


def test_a_reply_without_a_usage_block_has_unknown_usage() -> None:
    assert parse_completion(body({"content": "ok"})) == LMReply(text="ok", finish_reason="stop", usage=LMUsage())


def test_finish_reason_and_model_are_kept_if_they_are_text() -> None:
    reply = parse_completion(body({"content": "a"}, "length", model="m-1"))
    assert (reply.finish_reason, reply.model) == ("length", "m-1")
    reply = parse_completion(body({"content": "a"}, 5, model=None))
    assert (reply.finish_reason, reply.model) == (None, None)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b"oops",
        b'{"choices": []}',
        b'{"choices": null}',
        b'{"choices": [{}]}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": "x"}',
        b'{"choices": [{"message": {"content": 5}}]}',
        b'{"choices": [{"message": {"content": "a"}}',
        b"<html>\xff</html>",
        b"[" * 100_000,
    ],
)
def test_what_is_no_completion_is_a_bad_reply_that_may_have_cost(raw: bytes) -> None:
    with pytest.raises(LMError) as caught:
        parse_completion(raw)
    error = caught.value
    assert (error.kind, error.retryable, error.charged) == ("bad_reply", True, True)
    assert len(str(error)) < 600


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'{"choices": [{"message": {"content": "a"}, "logprobs": NaN}], "usage": {"prompt_tokens": 4}}', "a"),
        (b'{"choices": [{"message": {"content": "a\\ud800b"}}], "usage": {"prompt_tokens": 4}}', "a\ufffdb"),
        (b'\xef\xbb\xbf{"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": 4}}', "a"),
    ],
)
def test_sloppy_json_is_read_all_the_same(raw: bytes, text: str) -> None:
    reply = parse_completion(raw)
    assert (reply.text, reply.usage) == (text, LMUsage(input_tokens=4))


def test_whole_text_joins_pairs_and_replaces_lone_surrogates() -> None:
    assert whole_text("as it is \U0001f600") == "as it is \U0001f600"
    assert whole_text("\ud83d\ude00 \udc00") == "\U0001f600 \ufffd"


@pytest.mark.parametrize(
    ("message", "finish_reason", "kind", "said"),
    [
        ({"content": None, "reasoning_content": "hm"}, "length", "empty", "output limit while still thinking"),
        ({"content": " \n"}, "length", "empty", "output limit"),
        ({"content": [{"type": "thinking", "thinking": "hm"}]}, "stop", "empty", "thoughts but no text"),
        ({"content": ""}, None, "empty", "not given"),
        ({"content": None, "refusal": "I will not"}, "stop", "refusal", "I will not"),
    ],
)
def test_a_reply_without_text_is_a_typed_error(
    message: dict[str, Any], finish_reason: Any, kind: str, said: str
) -> None:
    with pytest.raises(LMError, match=said) as caught:
        reply_text(parse_completion(body(message, finish_reason)))
    assert (caught.value.kind, caught.value.retryable) == (kind, False)


def test_a_reply_with_text_is_its_text() -> None:
    assert reply_text(parse_completion(body({"content": " a "}))) == " a "


# What servers say when a prompt is too long for them: OpenAI, vLLM, llama.cpp, OpenRouter, Anthropic's endpoint, TGI.
TOO_LONG: list[tuple[int, dict[str, Any]]] = [
    (400, {"error": {"message": "This model's maximum context length is 128000 tokens.", "code": "x"}}),
    (400, {"error": {"message": "sorry", "code": "context_length_exceeded", "type": "invalid_request_error"}}),
    (400, {"object": "error", "message": "The decoder prompt (length 9) is longer than the maximum model length of 8"}),
    (400, {"error": {"code": 400, "message": "the request exceeds the available context size. try increasing it"}}),
    (400, {"error": {"code": 400, "message": "x", "type": "exceed_context_size_error"}}),
    (400, {"error": {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8 maximum"}}),
    (422, {"error": "Input validation error: `inputs` must have less than 8 tokens: reduce the length"}),
    (413, {"detail": "whatever"}),
]


@pytest.mark.parametrize(("status", "said"), TOO_LONG)
def test_too_long_is_recognised(status: int, said: dict[str, Any]) -> None:
    error = error_of_status(status, {}, json.dumps(said).encode())
    assert (error.kind, error.retryable, error.status) == ("too_long", False, status)


@pytest.mark.parametrize(
    ("status", "said", "kind", "retryable"),
    [
        (400, {"error": {"message": "temperature must be in [0, 2]"}}, "bad_request", False),
        (401, {"error": {"message": "no"}}, "authentication", False),
        (402, {"error": {"message": "pay"}}, "quota", False),
        (403, {"error": {"message": "region"}}, "permission", False),
        (404, {"error": {"message": "no such model", "code": "model_not_found"}}, "not_found", False),
        (405, {}, "bad_request", False),
        (408, {}, "timeout", True),
        (409, {}, "server", True),
        (422, {"detail": [{"loc": ["body"], "msg": "field required"}]}, "bad_request", False),
        (429, {"error": {"message": "Rate limit reached", "code": "rate_limit_exceeded"}}, "rate_limit", True),
        (429, {"error": {"message": "x", "code": "insufficient_quota"}}, "quota", False),
        (429, {"error": {"message": "You exceeded your current quota"}}, "quota", False),
        (500, {}, "server", True),
        (503, {}, "server", True),
        (529, {}, "server", True),
    ],
)
def test_statuses_are_classified(status: int, said: dict[str, Any], kind: str, retryable: bool) -> None:
    error = error_of_status(status, {}, json.dumps(said).encode())
    assert (error.kind, error.retryable, error.status, error.charged) == (kind, retryable, status, False)
    assert str(error).startswith(f"HTTP {status}")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"error": {"message": "a\\n b"}}', "HTTP 500: a b"),
        (b'{"error": "short"}', "HTTP 500: short"),
        (b'{"detail": "gone"}', "HTTP 500: gone"),
        (b'{"message": {"message": "deep"}}', "HTTP 500: deep"),
        (b"plain text", "HTTP 500: plain text"),
        (b"", "HTTP 500"),
        (b"[1]", "HTTP 500: [1]"),
        (b'{"odd": 1}', 'HTTP 500: {"odd": 1}'),
        (b"x" * 9_999, "HTTP 500: " + "x" * 500 + " ..."),
        (b"[" * 100_000, "HTTP 500: " + "[" * 500 + " ..."),
    ],
)
def test_the_message_is_found_and_bounded(raw: bytes, message: str) -> None:
    assert str(error_of_status(500, {}, raw)) == message


@pytest.mark.parametrize(
    ("status", "verdict", "retryable"),
    [(500, "false", False), (429, "false", False), (409, "true", True), (401, "true", False), (500, "maybe", True)],
)
def test_the_servers_verdict_on_retrying_counts(status: int, verdict: str, retryable: bool) -> None:
    assert error_of_status(status, {"x-should-retry": verdict}, b"").retryable is retryable


@pytest.mark.parametrize(
    ("raw", "kind", "status"),
    [
        (b'{"error": {"code": 429, "message": "upstream is busy"}}', "rate_limit", 429),
        (b'{"error": {"code": 502, "message": "bad gateway"}, "choices": []}', "server", 502),
        (b'{"error": {"message": "something"}}', "server", None),
        (b'{"error": "flat"}', "server", None),
        (b'{"choices": [{"message": {"content": ""}}], "error": {"code": 401, "message": "x"}}', "authentication", 401),
    ],
)
def test_an_error_in_a_successful_response_is_an_error(raw: bytes, kind: str, status: int | None) -> None:
    with pytest.raises(LMError) as caught:
        parse_completion(raw)
    assert (caught.value.kind, caught.value.status) == (kind, status)


NOW = datetime(2026, 12, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "Tue, 01 Dec 2026 12:00:30 GMT"}, 30.0),
        ({"retry-after": "Tue, 01 Dec 2026 12:00:30 -0000"}, 30.0),
        ({"retry-after": "Tue, 01 Dec 2026 11:00:00 GMT"}, 0.0),
        ({"retry-after": "later"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": ""}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers, NOW) == seconds


def test_retry_after_goes_with_what_may_be_retried_only() -> None:
    assert error_of_status(429, {"retry-after": "3"}, b"").retry_after == 3.0
    assert error_of_status(503, {"retry-after": "3"}, b"").retry_after == 3.0
    assert error_of_status(401, {"retry-after": "3"}, b"").retry_after is None
    assert classify(500, "").status == 500


@pytest.mark.parametrize(
    ("said", "ending"),
    [
        *((word, "whole") for word in (None, "stop", "end_turn", "STOP", "stop_sequence", "tool_calls", "tool_use")),
        *((word, "cut") for word in ("length", "max_tokens", "MAX_TOKENS", "model_length", "max_output_tokens")),
        ("model_context_window_exceeded", "cut"),
        *((word, "refused") for word in ("content_filter", "refusal", "SAFETY", "RECITATION", "sensitive")),
        *((word, "broken") for word in ("error", "abort", "insufficient_system_resource", "network_error", "OTHER")),
        *((word, "broken") for word in ("pause_turn", "MALFORMED_RESPONSE", "MALFORMED_FUNCTION_CALL")),
        ("a word of tomorrow", "unknown"),
    ],
)
def test_how_a_reply_ends(said: str | None, ending: str) -> None:
    reply = parse_completion(body({"content": "text"}, said))
    assert (reply.ending, reply.cut_off) == (ending, ending != "whole")


def test_an_error_beside_a_part_of_a_reply_is_one_that_cost_something() -> None:
    choice = {"message": {"content": "half"}, "finish_reason": "error", "error": {"code": 502, "message": "gone"}}
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    with pytest.raises(LMError, match="HTTP 502: gone") as caught:
        parse_completion(json.dumps({"choices": [choice], "usage": usage}).encode())
    assert (caught.value.retryable, caught.value.charged) == (True, True)
    assert caught.value.usage == LMUsage(input_tokens=5, output_tokens=2)
    stream = CompletionStream()
    stream.feed(json.dumps({"choices": [{"delta": {"content": "half"}}]}).encode())
    with pytest.raises(LMError, match="HTTP 502: gone") as streamed:
        stream.feed(json.dumps({"choices": [choice | {"delta": {}}]}).encode())
    assert (streamed.value.retryable, streamed.value.charged) == (True, True)
