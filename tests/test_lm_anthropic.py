"""What only Anthropic's client does."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageCreateParams
from lm_backends import BACKENDS
from lm_serving import KEY, ask

from asyncrlm import AsyncRLM
from asyncrlm.errors import LMError
from asyncrlm.ledger import Price
from asyncrlm.lm.anthropic.client import DEFAULT_MAX_TOKENS, OLDER_SAMPLING, SAMPLING, SAMPLING_VERSION
from asyncrlm.lm.anthropic.spec import ANTHROPIC_KWARGS
from asyncrlm.lm.base import LMRequest, Message
from asyncrlm.lm.clients import client_spec
from asyncrlm.lm.pacing.fallback import cost_of
from asyncrlm.testing import FakeAnthropicServer, FakeReply

from .helpers import submit

pytestmark = pytest.mark.anyio

BACKEND = next(backend for backend in BACKENDS if backend.name == "anthropic")
MARK = {"type": "ephemeral"}


def history(turns: int) -> LMRequest:
    messages = [Message("system", "the rules"), Message("user", "question")]
    for turn in range(turns):
        messages += [Message("assistant", f"cell {turn}"), Message("user", f"output {turn}")]
    return LMRequest(messages=tuple(messages))


def prefixes(body: Any) -> list[str]:
    """What a request asks the provider to keep: all of it up to each mark."""
    blocks = [*body.get("system", []), *(block for turn in body["messages"] for block in turn["content"])]
    so_far, kept = "", list[str]()
    for block in blocks:
        so_far += block["text"] + "\n"
        if block.get("cache_control") == MARK:
            kept.append(so_far)
    return kept


async def test_what_one_turn_has_the_provider_keep_the_next_one_begins_with() -> None:
    async with BACKEND.serving(lambda request: "ok") as (server, client):
        for turns in range(5):
            await client.acomplete(history(turns))
    kept = [prefixes(request.body) for request in server.requests]
    for before, after in itertools.pairwise(kept):
        assert before[-1] in after
    assert all(len(marks) <= 4 for marks in kept)
    for request, marks in zip(server.requests, kept, strict=True):
        said = [block["text"] for turn in request.body["messages"] for block in turn["content"]]
        assert marks[-1] == "\n".join(["the rules", *said, ""])  # all of it comes again, not only the rules


async def test_a_single_question_is_not_kept_and_marks_can_be_left_out() -> None:
    async with BACKEND.serving("a", "b") as (server, client):
        await client.acomplete(ask())
        await client.acomplete(
            LMRequest(messages=history(1).messages, sampling_args={"cache_control": {"type": "ephemeral", "ttl": "1h"}})
        )
    async with BACKEND.serving("a", prompt_caching=False) as (other, client):
        await client.acomplete(history(1))
    assert [prefixes(request.body) for request in (*server.requests, *other.requests)] == [[], [], []]
    assert server.requests[1].body["cache_control"]["ttl"] == "1h"


async def test_system_texts_go_apart_in_order_and_empty_messages_are_left_out() -> None:
    messages = (
        *(Message("system", "one"), Message("developer", "two"), Message("user", "q"), Message("assistant", " ")),
        *(Message("system", "late"), Message("user", "r")),
    )
    async with BACKEND.serving("a") as (server, client):
        await client.acomplete(LMRequest(messages=messages))
    body = server.requests[0].body
    assert [block["text"] for block in body["system"]] == ["one", "two"]
    assert [(turn["role"], turn["content"][0]["text"]) for turn in body["messages"]] == [
        ("user", "q"),
        ("user", "late"),
        ("user", "r"),
    ]
    assert body["max_tokens"] == DEFAULT_MAX_TOKENS


async def test_sampling_args_have_anthropics_names() -> None:
    sampling = {
        "max_completion_tokens": 64,
        "stop": "END",
        "user": "u1",
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "thinking": {"type": "adaptive"},
        "extra_body": {"brand_new": 1},
        "extra_headers": {"anthropic-beta": "b1"},
    }
    async with BACKEND.serving("a", "b", sampling_args=sampling, max_tokens=1_000) as (server, client):
        await client.acomplete(ask(sampling_args={"top_k": 5}))
        await client.acomplete(ask(sampling_args={"max_completion_tokens": None, "stop": ["A", "B"]}))
    first, second = (dict(request.body) for request in server.requests)
    del first["messages"], second["messages"]
    assert first == {
        "model": "m",
        "max_tokens": 64,
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u1"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "thinking": {"type": "adaptive"},
        "brand_new": 1,
        "top_k": 5,
    }
    assert (second["max_tokens"], second["stop_sequences"]) == (1_000, ["A", "B"])
    assert [request.headers["anthropic-beta"] for request in server.requests] == ["b1", "b1"]
    # What the newer version of the API refuses is sent under the version that takes it.
    versions = [request.headers["anthropic-version"] for request in server.requests]
    assert versions[0] == SAMPLING_VERSION != versions[1]


async def test_what_anthropic_has_nothing_like_is_refused_in_a_call_too() -> None:
    async with BACKEND.serving("a") as (server, client):
        with pytest.raises(LMError, match="no 'seed'") as caught:
            await client.acomplete(ask(sampling_args={"seed": 1}))
    assert (caught.value.kind, server.requests) == ("bad_request", [])


async def test_a_refusal_in_the_middle_is_cut_off() -> None:
    async with BACKEND.serving(FakeReply("I was going to", finish_reason="refusal")) as (_, client):
        reply = await client.acomplete(ask())
    assert (reply.text, reply.finish_reason, reply.cut_off) == ("I was going to", "refusal", True)


async def test_keys_in_the_environment_go_to_anthropic_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    monkeypatch.setenv("ANTHROPIC_CUSTOM_HEADERS", "X-Secret: s3cret-value")
    async with FakeAnthropicServer(["a", "b", "c"]) as server:
        kwargs = {"base_url": server.base_url, "model_name": "m"}
        async with client_spec("anthropic", kwargs).open() as client:
            await client.acomplete(ask())
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.base_url)
        async with client_spec("anthropic/m").open() as client:
            await client.acomplete(ask())
        async with client_spec("anthropic", kwargs | {"auth_token": "token-of-mine"}).open() as client:
            await client.acomplete(ask())
    foreign, named, token = server.requests
    assert not {"authorization", "x-api-key", "x-secret"} & foreign.headers.keys()
    assert (named.headers["authorization"], named.headers["x-secret"]) == (f"Bearer {KEY}", "s3cret-value")
    assert token.headers["authorization"] == "Bearer token-of-mine"
    assert KEY not in str(token.headers)


async def test_a_key_may_be_an_async_callable_or_in_a_header() -> None:
    async def key() -> str:
        return "fresh-key"

    async with BACKEND.serving("a", api_key=key) as (server, client):
        await client.acomplete(ask())
    async with BACKEND.serving("a", api_key=None, default_headers={"x-api-key": "mine"}) as (other, client):
        await client.acomplete(ask())
    assert server.requests[0].headers["authorization"] == "Bearer fresh-key"
    assert other.requests[0].headers["x-api-key"] == "mine"
    assert "authorization" not in other.requests[0].headers


def test_the_sdk_takes_what_we_hand_on() -> None:
    known = set(inspect.signature(anthropic.AsyncAnthropic).parameters)
    assert set(ANTHROPIC_KWARGS) - {"max_tokens", "prompt_caching"} <= known
    names: set[str] = set()
    for shape in MessageCreateParams.__args__:  # type: ignore[attr-defined]
        names |= set(shape.__annotations__)
        for base in shape.__orig_bases__:
            names |= set(getattr(base, "__annotations__", {}))
    ours = SAMPLING - OLDER_SAMPLING - {"extra_body", "extra_headers", "extra_query", "timeout"}
    assert ours <= names
    # What it knows beyond that is the engine's to write, or of no use to it.
    assert names - ours == {"model", "messages", "system", "stream", "prefill"} & names


def test_what_goes_into_the_cache_costs_more_and_more_for_an_hour() -> None:
    def writes(**kwargs: Any) -> tuple[float | None, float | None]:
        spec = client_spec("anthropic/claude-sonnet-4-5", {"api_key": KEY} | kwargs)
        assert spec.price is not None
        return spec.price.cache_write, spec.price.cache_write_1h

    assert writes() == (1.25 * 3, 2 * 3)
    assert writes(price={"input": 3, "output": 15, "cache_write": 4}) == (4, None)
    assert writes(price={"input": 3, "output": 15, "cache_write_1h": 7}) == (None, 7)
    assert writes(price=(3, 15)) == (None, None)


async def test_a_run_pays_for_what_goes_into_the_cache() -> None:
    usage = {"input_tokens": 100, "cache_creation_input_tokens": 1_000, "output_tokens": 10}
    async with FakeAnthropicServer([FakeReply(submit("1"), usage=usage)]) as server:
        kwargs = {"base_url": server.base_url, "api_key": KEY}
        rlm = AsyncRLM("anthropic/claude-sonnet-4-5", backend_kwargs=kwargs, max_budget=1.0, limits="hard")
        result = await rlm.acompletion("CTX")
    assert result.usage_summary.total_cost == pytest.approx((100 * 3 + 1_000 * 3.75 + 10 * 15) / 1e6)


async def test_what_is_kept_for_an_hour_is_told_apart_and_costs_twice_the_input() -> None:
    usage = {
        "input_tokens": 10,
        "cache_creation_input_tokens": 90,
        "cache_creation": {"ephemeral_5m_input_tokens": 30, "ephemeral_1h_input_tokens": 60},
        "output_tokens": 0,
    }
    async with FakeAnthropicServer([FakeReply("x", usage=usage)] * 2) as server:
        spec = client_spec("anthropic/claude-sonnet-4-5", {"base_url": server.base_url, "api_key": KEY})
        async with spec.open() as client:
            replies = [await client.acomplete(ask()), *[delta.reply async for delta in client.astream(ask())]]
    assert spec.price == Price(3.0, 0.3, 15.0, cache_write=3.75, cache_write_1h=6.0)
    for reply in (replies[0], replies[-1]):
        assert reply is not None
        said = reply.usage
        assert (said.input_tokens, said.cache_write_tokens, said.cache_write_1h_tokens) == (100, 90, 60)
        assert cost_of(spec.price, said) == pytest.approx((10 * 3 + 30 * 3.75 + 60 * 6) / 1e6)
