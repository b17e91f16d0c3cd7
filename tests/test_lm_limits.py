"""Limits by the minute: those of the caller, and those that a server tells of or shows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from lm_serving import spec_for

from asyncrlm import ConfigurationError, LMError, Pacer, TokenLimitExceededError
from asyncrlm.ledger import Ledger
from asyncrlm.lm.base import LMReply, LMRequest, LMUsage, Message
from asyncrlm.lm.pacing.limits import rate_hints
from asyncrlm.testing import FakeOpenAIServer, FakeReply, ScriptedLM
from asyncrlm.types import RateHints

from .pacing_support import Limited, LimitedLM, all_at_once, on_a_jumping_clock, send

pytestmark = pytest.mark.anyio

# --- limits of the caller's -------------------------------------------------------------------------------------------


def test_requests_and_tokens_a_minute_are_never_exceeded() -> None:
    sent: list[tuple[float, int]] = []

    async def answer(request: LMRequest) -> LMReply:
        tokens = int(request.messages[0].content)
        sent.append((anyio.current_time(), tokens))
        await anyio.sleep(0.1)
        return LMReply(text="", usage=LMUsage(input_tokens=tokens - 10, output_tokens=10))

    async def main() -> None:
        requests = Pacer(requests_per_minute=30)
        await all_at_once(100, lambda number: send(requests, ScriptedLM(answer), "20"))
        assert _most_in_a_minute([(time, 1) for time, _ in sent]) == 30
        assert sent[-1][0] - sent[0][0] < 190
        sent.clear()
        tokens = Pacer(tokens_per_minute=2_000)
        await all_at_once(40, lambda number: send(tokens, ScriptedLM(answer), "200"))
        assert 1_400 <= _most_in_a_minute(sent) <= 2_000

    on_a_jumping_clock(main)


def _most_in_a_minute(sent: list[tuple[float, int]]) -> int:
    return max(sum(amount for time, amount in sent if start <= time < start + 60) for start, _ in sent)


def test_a_request_larger_than_the_limit_goes_alone() -> None:
    async def main() -> None:
        pacer = Pacer(tokens_per_minute=100)
        began = anyio.current_time()
        for _ in range(2):
            await send(pacer, ScriptedLM([LMReply(text="", usage=LMUsage(input_tokens=900, output_tokens=1))]))
        assert 60 <= anyio.current_time() - began < 65

    on_a_jumping_clock(main)


def test_what_was_not_sent_counts_for_nothing() -> None:
    async def main() -> None:
        pacer, ledger = Pacer(requests_per_minute=1), Ledger(max_tokens=0)
        with pytest.raises(TokenLimitExceededError):
            await send(pacer, ScriptedLM([]), ledger=ledger)
        began = anyio.current_time()
        await send(pacer, ScriptedLM(["x"]))
        assert anyio.current_time() == began

    on_a_jumping_clock(main)


@pytest.mark.parametrize("name", ["max_concurrent", "requests_per_minute", "tokens_per_minute"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
def test_a_limit_is_a_positive_number(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        Pacer(**{name: value})


def test_no_more_in_flight_than_there_are_files_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1_024, 4_096))
    assert Pacer().width == 256
    assert Pacer(max_concurrent=500).width == 500
    monkeypatch.setattr("resource.getrlimit", lambda _: (10**6, 10**6))
    assert Pacer().width == 2_000


# --- what the server says ---------------------------------------------------------------------------------------------


async def test_it_narrows_when_refused_and_widens_with_success() -> None:
    pacer, busy = Pacer(max_concurrent=64), True

    async def answer(request: LMRequest) -> str:
        await anyio.lowlevel.checkpoint()
        if busy and lm.in_flight > 8:
            raise LMError("429", kind="rate_limit", retryable=True, retry_after=None)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        return ""

    lm = ScriptedLM(answer)
    await all_at_once(100, lambda number: send(pacer, lm))
    assert pacer.width <= 16
    busy = False
    await all_at_once(1_000, lambda number: send(pacer, lm))
    assert pacer.width == 64


@pytest.mark.parametrize("kind", ["server", "timeout", "connection"])
async def test_only_a_rate_limit_narrows(kind: Any) -> None:
    pacer = Pacer(max_concurrent=64)
    failure = LMError("fault", kind=kind, retryable=True, retry_after=0.0)
    await send(pacer, ScriptedLM([failure, failure, "x"]))
    assert pacer.width == 64


def test_a_refusal_holds_back_all_of_the_account() -> None:
    async def main() -> None:
        refusal = LMError("429", kind="rate_limit", retryable=True, retry_after=40.0)
        pacer, began = Pacer(), anyio.current_time()
        lm = ScriptedLM([refusal, "a", "b"])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, pacer, lm)
            await anyio.sleep(1)
            reply = await send(pacer, lm)
            assert 40 <= anyio.current_time() - began < 46
            assert 39 <= reply.waited < 45

    on_a_jumping_clock(main)


def test_what_the_headers_say_is_left_is_not_exceeded() -> None:
    async def main() -> None:
        lm = LimitedLM(Limited(at_once=1_000, quota=10, period=60.0), tells=True)
        pacer = Pacer()
        for _ in range(25):
            await send(pacer, lm)
        # The first refusal tells that this server refills all at once.
        assert lm.limited.wasted <= 2

    on_a_jumping_clock(main)


async def test_the_client_reads_the_headers() -> None:
    said = {"x-ratelimit-remaining-requests": "7", "x-ratelimit-reset-requests": "6m0s"}
    refusal = FakeReply(status=429, error="no", headers={"x-ratelimit-remaining-tokens": "0"})
    async with FakeOpenAIServer([FakeReply("x", headers=said), refusal]) as server, spec_for(server).open() as client:
        request = LMRequest(messages=(Message("user", "u"),))
        assert (await client.acomplete(request)).rate == RateHints(requests_left=7, requests_reset=360.0)
        with pytest.raises(LMError) as caught:
            await client.acomplete(request)
        assert caught.value.rate == RateHints(tokens_left=0)


@pytest.mark.parametrize(
    ("headers", "hints"),
    [
        ({}, None),
        ({"x-ratelimit-remaining-requests": "many"}, None),
        ({"x-ratelimit-remaining-requests": "-1"}, None),
        (
            {
                "x-ratelimit-limit-requests": "60",
                "x-ratelimit-remaining-requests": "59",
                "x-ratelimit-reset-requests": "1s",
                "x-ratelimit-limit-tokens": "150000",
                "x-ratelimit-remaining-tokens": "149984",
                "x-ratelimit-reset-tokens": "2m59.56s",
            },
            RateHints(
                requests_left=59,
                request_limit=60,
                requests_reset=1.0,
                tokens_left=149_984,
                token_limit=150_000,
                tokens_reset=179.56,
            ),
        ),
        (
            {
                "anthropic-ratelimit-requests-remaining": "3",
                "anthropic-ratelimit-requests-limit": "50",
                "anthropic-ratelimit-requests-reset": "2026-12-01T00:00:30Z",
                "anthropic-ratelimit-tokens-remaining": "1000",
            },
            RateHints(requests_left=3, request_limit=50, requests_reset=30.0, tokens_left=1_000),
        ),
        (
            {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1796083210000"},
            RateHints(requests_left=0, requests_reset=10.0),
        ),
        (
            {"ratelimit-remaining": "5", "ratelimit-limit": "9", "ratelimit-reset": "12"},
            RateHints(requests_left=5, request_limit=9, requests_reset=12.0),
        ),
        (
            {"x-ratelimit-remaining-requests": "5", "x-ratelimit-reset-requests": "120ms"},
            RateHints(requests_left=5, requests_reset=0.12),
        ),
        (
            {"x-ratelimit-remaining-requests": "5", "x-ratelimit-reset-requests": "soon"},
            RateHints(requests_left=5),
        ),
    ],
)
def test_headers(headers: dict[str, str], hints: RateHints | None) -> None:
    found = rate_hints(headers, datetime(2026, 12, 1, tzinfo=UTC))
    assert found == (None if hints is None else hints)
