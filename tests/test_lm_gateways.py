"""What only the clients of Azure and Portkey do."""

from __future__ import annotations

import inspect
from typing import Any

import openai
import pytest
from lm_backends import BACKENDS
from lm_serving import KEY, ask

from asyncrlm.errors import ConfigurationError, LMError
from asyncrlm.lm.clients import client_spec
from asyncrlm.lm.openai.azure import AZURE_KWARGS
from asyncrlm.lm.openai.portkey import PORTKEY_OPTIONS, gateway_headers
from asyncrlm.testing import FakeOpenAIServer, FakeReply

pytestmark = pytest.mark.anyio

AZURE = next(backend for backend in BACKENDS if backend.name == "azure_openai")
PORTKEY = next(backend for backend in BACKENDS if backend.name == "portkey")
VARIABLES = (
    *("AZURE_OPENAI_API_KEY", "AZURE_OPENAI_AD_TOKEN", "AZURE_OPENAI_ENDPOINT", "AZURE_OPENAI_DEPLOYMENT"),
    *("AZURE_OPENAI_API_VERSION", "OPENAI_API_VERSION", "OPENAI_API_KEY", "PORTKEY_API_KEY"),
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


# --- Azure ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "deployment", "version", "model"),
    [
        ({"azure_deployment": "dep"}, "dep", "2024-02-01", "dep"),
        ({"model_name": "gpt-5"}, "gpt-5", "2024-02-01", "gpt-5"),
        ({"model_name": "gpt-5", "azure_deployment": "a b/c"}, "a%20b%2Fc", "2024-02-01", "gpt-5"),
        ({"azure_deployment": "dep", "api_version": "2025-01-01"}, "dep", "2025-01-01", "dep"),
    ],
)
async def test_a_deployment_is_part_of_the_address(
    kwargs: dict[str, Any], deployment: str, version: str, model: str
) -> None:
    async with FakeOpenAIServer(["a"]) as server:
        spec = client_spec("azure_openai", {"azure_endpoint": server.url + "/", "api_key": KEY, **kwargs})
        async with spec.open() as client:
            await client.acomplete(ask())
    assert server.requests[0].path == f"/openai/deployments/{deployment}/chat/completions?api-version={version}"
    assert (spec.model, server.requests[0].body["model"]) == (model, model)


async def test_two_deployments_of_one_account_do_not_share_an_address() -> None:
    opened: dict[Any, Any] = {}
    async with FakeOpenAIServer(["a", "b"]) as server:
        from contextlib import AsyncExitStack

        async with AsyncExitStack() as stack:

            async def shared(key: Any, factory: Any) -> Any:
                if key not in opened:
                    opened[key] = await stack.enter_async_context(factory())
                return opened[key]

            for name in ("one", "two"):
                spec = client_spec(
                    "azure_openai", {"azure_endpoint": server.url, "api_key": KEY, "azure_deployment": name}
                )
                await (await spec.connect(shared)).acomplete(ask())
    assert ["/one/" in server.requests[0].path, "/two/" in server.requests[1].path] == [True, True]


async def test_everything_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeOpenAIServer(["a", "b"]) as server:
        monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", server.url)
        monkeypatch.setenv("AZURE_OPENAI_API_KEY", KEY)
        monkeypatch.setenv("AZURE_OPENAI_DEPLOYMENT", "dep")
        monkeypatch.setenv("AZURE_OPENAI_API_VERSION", "2025-02-02")
        async with client_spec("azure_openai").open() as client:
            await client.acomplete(ask())
        monkeypatch.setenv("AZURE_OPENAI_AD_TOKEN", "token-of-the-directory")
        async with client_spec("azure_openai").open() as client:
            await client.acomplete(ask())
    key, token = server.requests
    assert key.path == "/openai/deployments/dep/chat/completions?api-version=2025-02-02"
    assert key.headers["api-key"] == KEY
    assert token.headers["authorization"] == "Bearer token-of-the-directory"
    assert "api-key" not in token.headers


def test_a_key_in_the_environment_goes_to_its_own_resource_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", KEY)
    client_spec("azure_openai/d", {"azure_endpoint": "https://mine.openai.azure.com"})
    for foreign in ("https://azure.example", "http://mine.openai.azure.com", "https://openai.azure.com.evil.example"):
        with pytest.raises(ConfigurationError, match="not meant for") as caught:
            client_spec("azure_openai/d", {"azure_endpoint": foreign})
        assert KEY not in str(caught.value)
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", "https://other.openai.azure.com")
    with pytest.raises(ConfigurationError, match="not meant for"):
        client_spec("azure_openai/d", {"azure_endpoint": "https://mine.openai.azure.com"})


async def test_tokens_come_from_functions_of_the_callers() -> None:
    async def fresh() -> str:
        return "async-token"

    async with FakeOpenAIServer(["a", "b", "c"]) as server:
        base = {"azure_endpoint": server.url, "azure_deployment": "d"}
        for given in (
            {"azure_ad_token_provider": fresh},
            {"azure_ad_token_provider": lambda: "plain-token"},
            {"api_key": fresh},
        ):
            async with client_spec("azure_openai", base | given).open() as client:
                await client.acomplete(ask())
        for provider in (lambda: "", lambda: 1 / 0):
            async with client_spec("azure_openai", base | {"azure_ad_token_provider": provider}).open() as client:
                with pytest.raises(LMError, match="azure_ad_token_provider") as caught:
                    await client.acomplete(ask())
            assert caught.value.kind == "authentication"
    signed = [(seen.headers.get("authorization"), seen.headers.get("api-key")) for seen in server.requests]
    assert signed == [("Bearer async-token", None), ("Bearer plain-token", None), (None, "async-token")]


@pytest.mark.parametrize(
    ("version", "says", "cap"),
    [("2024-02-01", False, "max_tokens"), ("2024-10-21", True, "max_tokens"), ("2025-01-01", True, None)],
)
async def test_old_versions_are_not_asked_for_what_they_refuse(version: str, says: bool, cap: str | None) -> None:
    async with AZURE.serving("a", api_version=version) as (server, client):
        _ = [delta async for delta in client.astream(ask(output_cap=5))]
    body = server.requests[0].body
    assert ("stream_options" in body) is says
    assert body[cap or "max_completion_tokens"] == 5


async def test_a_filtered_prompt_is_a_refusal() -> None:
    error = {"code": "content_filter", "message": "The response was filtered", "status": 400}
    async with AZURE.serving(FakeReply(status=400, error=error)) as (_, client):
        with pytest.raises(LMError) as caught:
            await client.acomplete(ask())
    assert (caught.value.kind, caught.value.retryable) == ("refusal", False)


def test_the_sdk_takes_what_we_hand_on() -> None:
    assert set(AZURE_KWARGS) <= set(inspect.signature(openai.AsyncAzureOpenAI).parameters)


# --- Portkey ----------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "virtual_key": "virtual-key-of-mine",
    "config": {"retry": {"attempts": 2}},
    "provider": "@openai-prod",
    "trace_id": "t1",
    "metadata": {"_user": "u"},
    "cache_force_refresh": True,
    "strict_open_ai_compliance": False,
    "forward_headers": ["aws_region"],
    "aws_region": "eu-1",
    "debug": None,
}


async def test_options_are_headers_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-for-openai-only")
    async with PORTKEY.serving("a", authorization="provider-key", default_headers={"x-mine": "1"}, **OPTIONS) as (
        server,
        client,
    ):
        await client.acomplete(ask())
    headers = server.requests[0].headers
    assert {name: value for name, value in headers.items() if name.startswith("x-portkey")} == {
        "x-portkey-api-key": KEY,
        "x-portkey-virtual-key": "virtual-key-of-mine",
        "x-portkey-config": '{"retry": {"attempts": 2}}',
        "x-portkey-provider": "@openai-prod",
        "x-portkey-trace-id": "t1",
        "x-portkey-metadata": '{"_user": "u"}',
        "x-portkey-cache-force-refresh": "true",
        "x-portkey-strict-open-ai-compliance": "false",
        "x-portkey-forward-headers": "aws_region",
    }
    assert (headers["aws-region"], headers["x-mine"]) == ("eu-1", "1")
    assert headers["authorization"] == "Bearer provider-key"
    assert "key-for-openai-only" not in str(headers)


async def test_without_a_providers_key_none_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key-for-openai-only")
    monkeypatch.setenv("PORTKEY_API_KEY", KEY)
    async with PORTKEY.serving("a", api_key=None, virtual_key="v") as (server, client):
        await client.acomplete(ask())
    assert not {"authorization", "x-portkey-api-key"} & server.requests[0].headers.keys()
    client_spec("portkey/m")  # at home the key in the environment is the right one


async def test_thoughts_in_portkeys_content_blocks_are_thoughts() -> None:
    whole = (
        b'{"choices": [{"message": {"content": "hi", "content_blocks": '
        b'[{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "hi"}]}, "finish_reason": "stop"}]}'
    )
    pieces = (
        b'data: {"choices": [{"delta": {"content_blocks": [{"index": 0, "delta": {"thinking": "hm"}}]}}]}\n\n'
        b'data: {"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    )
    stream = FakeReply(body=pieces, headers={"content-type": "text/event-stream"})
    async with PORTKEY.serving(FakeReply(body=whole), stream) as (_, client):
        replies = [await client.acomplete(ask()), [delta async for delta in client.astream(ask())][-1].reply]
    assert [(reply and reply.text, reply and reply.reasoning) for reply in replies] == [("hi", "hm")] * 2


def test_headers_are_those_of_portkeys_own_sdk() -> None:
    portkey_ai = pytest.importorskip("portkey_ai")
    given = {name: value for name, value in OPTIONS.items() if value is not None} | {"api_key": KEY}
    assert gateway_headers(given) == portkey_ai.createHeaders(**given)
    known = set(inspect.signature(portkey_ai.AsyncPortkey.__init__).parameters)
    assert set(PORTKEY_OPTIONS) <= known
