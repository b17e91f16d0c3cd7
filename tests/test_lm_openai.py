"""The OpenAI-compatible client against a real HTTP server."""

from __future__ import annotations

import gzip
import logging
from typing import Any

import anyio
import httpx2
import pytest
from lm_serving import KEY, ask, serving, spec_for, timeless

from asyncrlm.errors import ConfigurationError, LMError
from asyncrlm.lm.base import LMReply, LMRequest, LMUsage, Message
from asyncrlm.lm.clients import client_spec
from asyncrlm.lm.pacing import reply_text
from asyncrlm.testing import FakeOpenAIServer, FakeReply

pytestmark = pytest.mark.anyio


async def test_a_request_is_what_the_api_wants_and_the_reply_is_taken_whole() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 6, "completion_tokens_details": {"reasoning_tokens": 2}}
    async with serving(FakeReply("hi", reasoning="hm", usage=usage)) as (server, client):
        request = LMRequest(messages=(Message("system", "be brief"), Message("user", "hällo")))
        reply = await client.acomplete(request)
    assert timeless(reply) == LMReply(
        text="hi",
        reasoning="hm",
        finish_reason="stop",
        usage=LMUsage(input_tokens=5, output_tokens=6, reasoning_tokens=2),
        model="m",
    )
    (seen,) = server.requests
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["authorization"] == f"Bearer {KEY}"
    assert seen.headers["content-type"] == "application/json"
    assert seen.body == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hällo"}],
    }


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_sampling_args_are_sent_under_the_names_given(name: str) -> None:
    async with serving("a", "b", sampling_args={name: 64, "temperature": 0.2, "top_p": None}) as (server, client):
        await client.acomplete(ask())
        await client.acomplete(ask(sampling_args={"temperature": None, "seed": 1}))
    first, second = (dict(request.body) for request in server.requests)
    for body in (first, second):
        del body["messages"]
    assert first == {"model": "m", name: 64, "temperature": 0.2}
    assert second == {"model": "m", name: 64, "seed": 1}


async def test_extra_body_headers_and_query_go_along() -> None:
    sampling = {"extra_body": {"top_k": 5}, "extra_headers": {"X-Trace": "t"}, "extra_query": {"v": "2"}}
    async with serving(
        "a", sampling_args=sampling, default_headers={"X-Mine": "1"}, default_query={"api-version": "9"}
    ) as (server, client):
        await client.acomplete(ask())
    (seen,) = server.requests
    assert seen.body["top_k"] == 5
    assert "extra_body" not in seen.body
    assert (seen.headers["x-trace"], seen.headers["x-mine"]) == ("t", "1")
    assert seen.path == "/v1/chat/completions?api-version=9&v=2"


@pytest.mark.parametrize(
    ("sampling", "cap", "expected"),
    [
        ({}, 50, {"max_tokens": 50}),
        ({"max_tokens": 10}, 50, {"max_tokens": 10}),
        ({"max_tokens": 100}, 50, {"max_tokens": 50}),
        ({"max_completion_tokens": 100}, 50, {"max_completion_tokens": 50}),
        ({"max_completion_tokens": 100, "max_tokens": 20}, 50, {"max_completion_tokens": 50, "max_tokens": 20}),
        ({"extra_body": {"max_tokens": 100}}, 50, {"max_tokens": 50}),
    ],
)
async def test_the_engines_cap_lowers_but_never_raises(sampling: dict[str, Any], cap: int, expected: Any) -> None:
    async with serving("a", sampling_args=sampling) as (server, client):
        await client.acomplete(ask(output_cap=cap))
    body = server.requests[0].body
    assert {name: value for name, value in body.items() if name.startswith("max_")} == expected


async def test_lone_surrogates_are_replaced_and_pairs_joined() -> None:
    async with serving("a", sampling_args={"stop": ["\udc00"], "n": 1}) as (server, client):
        await client.acomplete(ask("x\ud800y \ud83d\ude00"))
    assert server.requests[0].text == "x\ufffdy \U0001f600"
    assert server.requests[0].body["stop"] == ["\ufffd"]


async def test_what_is_no_json_is_a_bad_request_and_not_sent() -> None:
    async with serving("a") as (server, client):
        with pytest.raises(LMError, match="JSON") as caught:
            await client.acomplete(ask(sampling_args={"seed": object()}))
    assert (caught.value.kind, server.requests) == ("bad_request", [])


async def test_a_local_server_needs_no_key_and_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_ORG_ID", "org-secret")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-secret")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Secret: s3cret\nAuthorization: Bearer custom")
    for backend in ("openai", "vllm"):
        async with FakeOpenAIServer(["ok"]) as server:
            spec = client_spec(backend, {"base_url": server.base_url + "/", "model_name": "m"})
            async with spec.open() as client:
                assert (await client.acomplete(ask())).text == "ok"
        seen = server.requests[0]
        assert "authorization" not in seen.headers
        assert not {name for name in seen.headers if name.startswith("openai-")}
        everything = repr(seen.headers) + repr(seen.body)
        assert KEY not in everything
        assert "s3cret" not in everything


async def test_what_the_environment_names_gets_what_is_meant_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeOpenAIServer(["ok", "ok"]) as server:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        async with client_spec("openai").open() as client:
            assert (await client.acomplete(ask())).text == "ok"
        monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        explicit = {"base_url": server.base_url, "organization": "org-2"}
        async with client_spec("openai", explicit).open() as client:
            await client.acomplete(ask())
    first, second = server.requests
    assert (first.headers["authorization"], first.headers["openai-organization"]) == (f"Bearer {KEY}", "org-1")
    assert "authorization" not in second.headers
    assert second.headers["openai-organization"] == "org-2"


async def test_a_key_may_be_an_async_callable() -> None:
    keys = iter(["first-key", " second-key\n", "bad key"])

    async def key() -> str:
        key = next(keys, None)
        if key is None:
            raise LookupError("no more keys")
        return key

    async with serving("a", "b", api_key=key) as (server, client):
        for _ in range(2):
            await client.acomplete(ask())
        for said in ("no HTTP header", "LookupError in the api_key function"):
            with pytest.raises(LMError, match=said) as caught:
                await client.acomplete(ask())
            assert (caught.value.kind, caught.value.retryable) == ("authentication", False)
    assert [seen.headers["authorization"] for seen in server.requests] == ["Bearer first-key", "Bearer second-key"]


# --- replies that are none, and failures ----------------------------------------------------------------------------


async def test_a_thought_without_text_is_an_empty_reply_and_its_code_is_not_the_text() -> None:
    cell = '```repl\nanswer["content"] = "WRONG"\n```'
    async with serving(
        FakeReply(None, reasoning=cell, finish_reason="length"),
        FakeReply([{"type": "thinking", "thinking": cell}, {"type": "text", "text": "right"}]),
        FakeReply([{"type": "thinking", "thinking": cell}]),
        FakeReply(None, refusal="never"),
    ) as (_, client):
        replies = [await client.acomplete(ask()) for _ in range(4)]
    assert [reply.text for reply in replies] == ["", "right", "", ""]
    assert replies[0].reasoning == cell
    for reply, kind in ((replies[0], "empty"), (replies[2], "empty"), (replies[3], "refusal")):
        with pytest.raises(LMError) as caught:
            reply_text(reply)
        assert caught.value.kind == kind


async def test_a_server_without_a_usage_block_is_fine() -> None:
    async with serving(FakeReply("ok", usage=None)) as (_, client):
        assert timeless(await client.acomplete(ask())) == LMReply(text="ok", finish_reason="stop", model="m")


@pytest.mark.parametrize(
    ("reply", "kind", "retryable", "charged"),
    [
        (FakeReply.fault(401, "bad key"), "authentication", False, False),
        (FakeReply.fault(429, retry_after=7), "rate_limit", True, False),
        (FakeReply.fault(500), "server", True, False),
        (FakeReply(status=400, error={"message": "x", "code": "context_length_exceeded"}), "too_long", False, False),
        (FakeReply(body=b'{"choices": [{"mess'), "bad_reply", True, True),
        (FakeReply(body=b'{"choices": []}'), "bad_reply", True, True),
        (FakeReply("x" * 1_000, cut="within"), "connection", True, True),
        (FakeReply("x", cut="before"), "connection", True, True),
        (FakeReply(status=202, body=b""), "bad_reply", False, False),
    ],
)
async def test_failures_are_typed(reply: FakeReply, kind: str, retryable: bool, charged: bool) -> None:
    async with serving(reply, "works again") as (server, client):
        with pytest.raises(LMError) as caught:
            await client.acomplete(ask())
        error = caught.value
        assert (error.kind, error.retryable, error.charged) == (kind, retryable, charged), error
        assert error.retry_after == (7.0 if kind == "rate_limit" else None)
        assert (await client.acomplete(ask())).text == "works again"
    assert len(server.requests) == 2


async def test_compressed_replies_are_read() -> None:
    body = gzip.compress(b'{"choices": [{"message": {"content": "small"}}]}')
    async with serving(FakeReply(body=body, headers={"content-encoding": "gzip"})) as (server, client):
        assert (await client.acomplete(ask())).text == "small"
    assert server.requests[0].headers["accept-encoding"] == "identity"


async def test_a_redirect_is_not_followed_with_a_key() -> None:
    async with FakeOpenAIServer(["leaked"]) as other:
        target = other.base_url + "/chat/completions?token=t0ken"
        async with serving(FakeReply(status=307, headers={"location": target}, body=b"")) as (_, client):
            with pytest.raises(LMError, match="redirects to http") as caught:
                await client.acomplete(ask())
    assert (caught.value.kind, caught.value.retryable) == ("not_found", False)
    assert "t0ken" not in str(caught.value)
    assert other.requests == []


async def test_nobody_there_is_a_connection_error_that_cost_nothing() -> None:
    async with FakeOpenAIServer([]) as gone:
        spec, url = spec_for(gone), gone.base_url
    async with spec.open() as client:
        with pytest.raises(LMError) as caught:
            await client.acomplete(ask())
    error = caught.value
    why = f"no connection to {url}: connection refused; is the server running, and is base_url right? (model 'm')"
    assert str(error) == why
    assert (error.kind, error.retryable, error.charged) == ("connection", True, False)


async def test_no_tls_where_it_is_expected_is_a_connection_error_that_cost_nothing() -> None:
    async with FakeOpenAIServer([]) as server:
        spec = spec_for(server, base_url=server.base_url.replace("http:", "https:"))
        async with spec.open() as client:
            with pytest.raises(LMError) as caught:
                await client.acomplete(ask())
    assert (caught.value.kind, caught.value.charged) == ("connection", False)


@pytest.mark.parametrize("timeout", [0.05, httpx2.Timeout(0.05)])
async def test_a_reply_that_is_too_late_is_a_timeout_that_may_have_cost(timeout: Any) -> None:
    async with serving(FakeReply("late", latency=60), "in time", timeout=timeout) as (server, client):
        with anyio.fail_after(10), pytest.raises(LMError, match="in time") as caught:
            await client.acomplete(ask())
        error = caught.value
        assert (error.kind, error.retryable, error.charged) == ("timeout", True, True)
        assert (await client.acomplete(ask(sampling_args={"timeout": 10}))).text == "in time"
        with anyio.fail_after(10):
            while server.aborted != 1:
                await anyio.sleep(0.005)


async def test_no_limit_at_all_is_possible() -> None:
    async with serving("a", timeout=None) as (_, client):
        assert (await client.acomplete(ask())).text == "a"


async def test_a_connection_that_the_server_closed_meanwhile_is_not_a_surprise() -> None:
    async with serving(*[FakeReply(str(i), headers={"connection": "close"}) for i in range(20)]) as (server, client):
        texts = [(await client.acomplete(ask())).text for _ in range(20)]
    assert texts == [str(i) for i in range(20)]
    assert server.connections == 20


# --- secrets ----------------------------------------------------------------------------------------------------------


async def test_no_secret_shows_up_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret, version = "header-s3cret-value", "query-s3cret-value"
    echo = FakeReply.fault(401, f"Incorrect API key {KEY} / {secret} / {version}")
    async with serving(echo, default_headers={"X-Api-Key": secret}, default_query={"sig": version}) as (server, client):
        spec = spec_for(server, default_headers={"X-Api-Key": secret}, default_query={"sig": version})
        with pytest.raises(LMError, match="Incorrect API key") as caught:
            await client.acomplete(ask())
        shown = [repr(spec), repr(client), client.account, repr(spec.key), str(caught.value), repr(caught.value)]
    for text in shown:
        assert KEY not in text
        assert secret not in text
        assert version not in text
    assert "[redacted]" in str(caught.value)
    assert KEY not in caplog.text
    assert secret not in caplog.text


@pytest.mark.parametrize("headers", [{"x-a": "one\r\nx-b: two"}, {"x\n": "a"}, {"bäd": "a"}, {"x": 5}, {5: "x"}])
async def test_headers_that_no_request_can_carry_are_refused(headers: dict[Any, Any]) -> None:
    async with serving("a") as (server, client):
        with pytest.raises(LMError, match="header") as caught:
            await client.acomplete(ask(sampling_args={"extra_headers": headers}))
        with pytest.raises(ConfigurationError, match="default_headers"):
            spec_for(server, default_headers=headers)
    assert (caught.value.kind, server.requests) == ("bad_request", [])


async def test_a_header_of_none_is_left_out() -> None:
    async with serving("a", default_headers={"x-a": "1", "x-b": "2"}) as (server, client):
        await client.acomplete(ask(sampling_args={"extra_headers": {"X-A": None}}))
    assert "x-a" not in server.requests[0].headers
    assert server.requests[0].headers["x-b"] == "2"
