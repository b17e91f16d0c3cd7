"""What only Gemini's client does."""

from __future__ import annotations

import json
from typing import Any

import anyio
import google.auth.exceptions
import pytest
from lm_backends import BACKENDS
from lm_serving import KEY, ask

from asyncrlm.errors import ConfigurationError, LMError
from asyncrlm.lm.base import LMRequest, LMUsage, Message
from asyncrlm.lm.clients import client_spec
from asyncrlm.testing import FakeGeminiServer, FakeReply

pytestmark = pytest.mark.anyio

BACKEND = next(backend for backend in BACKENDS if backend.name == "gemini")


async def test_a_request_is_what_the_api_wants() -> None:
    messages = (
        *(Message("system", "one"), Message("system", "two"), Message("user", "q"), Message("assistant", "a")),
        *(Message("assistant", ""), Message("user", "r")),
    )
    async with BACKEND.serving("a", "b") as (server, client):
        await client.acomplete(LMRequest(messages=messages))
        _ = [delta async for delta in client.astream(ask())]
    plain, stream = server.requests
    assert plain.path.endswith("/models/m:generateContent")
    assert stream.path.endswith("/models/m:streamGenerateContent?alt=sse")
    assert plain.body == {
        "systemInstruction": {"parts": [{"text": "one"}, {"text": "two"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "q"}]},
            {"role": "model", "parts": [{"text": "a"}]},
            {"role": "user", "parts": [{"text": "r"}]},
        ],
    }
    assert "google-genai-sdk" in plain.headers["x-goog-api-client"]


async def test_sampling_args_have_the_apis_names() -> None:
    sampling = {
        "max_completion_tokens": 64,
        "stop": "END",
        "temperature": 0.2,
        "top_p": 0.9,
        "seed": 7,
        "n": 1,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "safety_settings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        "extra_body": {"generationConfig": {"brandNew": 1}, "other": 2},
        "extra_headers": {"x-mine": "1"},
        "extra_query": {"q": "2"},
    }
    async with BACKEND.serving("a", "b", sampling_args=sampling) as (server, client):
        await client.acomplete(ask())
        await client.acomplete(ask(sampling_args={"stop": ["A"], "extra_body": None, "response_format": None}))
    body = dict(server.requests[0].body)
    config = body.pop("generationConfig")
    assert config.pop("thinkingConfig") in ({"thinking_level": "LOW"}, {"thinkingLevel": "LOW"})
    assert config == {
        "maxOutputTokens": 64,
        "stopSequences": ["END"],
        "temperature": 0.2,
        "topP": 0.9,
        "seed": 7,
        "candidateCount": 1,
        "responseMimeType": "application/json",
        "responseJsonSchema": {"type": "object"},
        "brandNew": 1,
    }
    assert body["safetySettings"] == sampling["safety_settings"]
    assert body["other"] == 2
    assert server.requests[0].headers["x-mine"] == "1"
    assert server.requests[0].path.endswith("?q=2")
    second = server.requests[1].body["generationConfig"]
    assert second["stopSequences"] == ["A"]
    assert not {"brandNew", "responseMimeType"} & second.keys()


async def test_what_the_sdk_does_not_know_is_refused_when_opening_and_in_a_call() -> None:
    async with BACKEND.server(["a"]) as server:
        with pytest.raises(ConfigurationError, match="frequenzy"):
            async with BACKEND.spec(server, {"frequenzy": 1}).open():
                pass
    async with BACKEND.serving("a") as (server, client):
        with pytest.raises(LMError, match="frequenzy") as caught:
            await client.acomplete(ask(sampling_args={"frequenzy": 1}))
    assert (caught.value.kind, server.requests) == ("bad_request", [])


def error(status: int, message: str, *details: dict[str, Any]) -> FakeReply:
    return FakeReply(status=status, error={"message": message, "details": list(details)})


QUOTA = "You exceeded your current quota, please check your plan and billing details."
RETRY = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "12.5s"}


@pytest.mark.parametrize(
    ("reply", "kind", "retryable", "retry_after"),
    [
        (error(429, QUOTA, RETRY), "rate_limit", True, 12.5),
        (error(429, QUOTA, {"violations": [{"quotaId": "GenerateRequestsPerDay"}]}, RETRY), "quota", False, None),
        (error(503, "overloaded", RETRY), "server", True, 12.5),
        (error(400, "API key not valid.", {"reason": "API_KEY_INVALID"}), "authentication", False, None),
        (FakeReply(status=500, body=b"[]"), "server", True, None),
        (FakeReply(status=500, body=b'{"error": {"details": [3, {"retryDelay": "soon"}]}}'), "server", True, None),
    ],
)
async def test_googles_errors_say_more(reply: FakeReply, kind: str, retryable: bool, retry_after: float | None) -> None:
    async with BACKEND.serving(reply) as (_, client):
        with pytest.raises(LMError) as caught:
            await client.acomplete(ask())
    found = caught.value
    assert (found.kind, found.retryable, found.retry_after) == (kind, retryable, retry_after)


async def test_a_reply_blocked_in_the_middle_is_cut_off_and_counts_of_zero_are_counts() -> None:
    body = {
        "candidates": [{"content": {"parts": [{"text": "I was"}]}, "finishReason": "SAFETY"}],
        "usageMetadata": {"promptTokenCount": 4, "totalTokenCount": 4},
    }
    empty = {"candidates": [{"finishReason": "RECITATION", "finishMessage": "too alike"}]}
    async with BACKEND.serving(*(FakeReply(body=json.dumps(b).encode()) for b in (body, empty))) as (_, client):
        cut, nothing = await client.acomplete(ask()), await client.acomplete(ask())
    assert (cut.text, cut.finish_reason, cut.cut_off) == ("I was", "refusal", True)
    assert cut.usage == LMUsage(input_tokens=4, output_tokens=0)
    assert (nothing.text, nothing.finish_reason, nothing.reasoning) == ("", "refusal", "too alike")


async def test_keys_in_the_environment_go_to_google_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOOGLE_API_KEY", "GOOGLE_GEMINI_BASE_URL", "GOOGLE_GENAI_USE_VERTEXAI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GEMINI_API_KEY", KEY)
    async with FakeGeminiServer(["a", "b", "c"]) as server:
        async with client_spec("gemini", {"base_url": server.base_url, "model_name": "m"}).open() as client:
            await client.acomplete(ask())
        monkeypatch.setenv("GOOGLE_GEMINI_BASE_URL", server.base_url)
        async with client_spec("gemini/m").open() as client:
            await client.acomplete(ask())
        headers = {"x-goog-api-key": "mine"}
        async with client_spec("gemini/m", {"default_headers": headers}).open() as client:
            await client.acomplete(ask())
    foreign, named, own = server.requests
    assert not {"authorization", "x-goog-api-key"} & foreign.headers.keys()
    assert named.headers["x-goog-api-key"] == KEY
    assert own.headers["x-goog-api-key"] == "mine"
    monkeypatch.delenv("GEMINI_API_KEY")
    monkeypatch.delenv("GOOGLE_GEMINI_BASE_URL")
    with pytest.raises(ConfigurationError, match="GEMINI_API_KEY"):
        client_spec("gemini")


class Credentials:
    """What google-auth gives: a token that runs out, and a blocking way to get another."""

    def __init__(self) -> None:
        self.token: str | None = None
        self.valid = False
        self.refreshed = 0
        self.error: Exception | None = None

    def refresh(self, request: object) -> None:
        if self.error is not None:
            raise self.error
        self.refreshed += 1
        self.token, self.valid = f"token-{self.refreshed}", True


async def test_vertex_signs_with_tokens_that_are_renewed_once_for_all() -> None:
    credentials = Credentials()
    async with FakeGeminiServer(lambda request: "ok") as server:
        kwargs = {"vertexai": True, "project": "p1", "location": "eu-1", "credentials": credentials}
        spec = client_spec("gemini/m", {**kwargs, "base_url": server.base_url})
        async with spec.open() as client:
            async with anyio.create_task_group() as tasks:
                for _ in range(10):
                    tasks.start_soon(client.acomplete, ask())
            credentials.valid = False
            _ = [delta async for delta in client.astream(ask())]
            credentials.valid, credentials.error = False, google.auth.exceptions.RefreshError("s3cret", retryable=True)
            with pytest.raises(LMError, match="RefreshError") as caught:
                await client.acomplete(ask())
    assert (caught.value.kind, caught.value.retryable) == ("authentication", True)
    assert "s3cret" not in str(caught.value)
    assert credentials.refreshed == 2
    assert [request.headers["authorization"] for request in server.requests] == [
        *["Bearer token-1"] * 10,
        "Bearer token-2",
    ]
    path = "/projects/p1/locations/eu-1/publishers/google/models/m:generateContent"
    assert server.requests[0].path.endswith(path)
    assert "x-goog-api-key" not in server.requests[0].headers


async def test_vertex_without_credentials_says_how_to_get_some(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(scopes: list[str]) -> tuple[object, str]:
        raise google.auth.exceptions.DefaultCredentialsError("nothing found")

    monkeypatch.setattr(google.auth, "default", none)
    with pytest.raises(ConfigurationError, match="application-default login"):
        async with client_spec("gemini/m", {"vertexai": True, "project": "p"}).open():
            pass
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT", raising=False)
    with pytest.raises(ConfigurationError, match="needs project="):
        async with client_spec("gemini/m", {"vertexai": True, "credentials": Credentials()}).open():
            pass
