"""Cases about what model servers send and want, each against a real HTTP server on loopback."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import anyio
import pytest

from asyncrlm import AsyncRLM, LMError
from asyncrlm.testing import FakeAnthropicServer, FakeOpenAIServer, FakeReply

from .cases import CASES, covers, scripted
from .cases.http import Asked, Serving, serving
from .cases.models import cell, submit

pytestmark = pytest.mark.anyio

both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
one = pytest.mark.parametrize("anyio_backend", ["asyncio"])


def client(server: Serving, **more: Any) -> dict[str, Any]:
    """`backend_kwargs` for the server; the key may be left out with `api_key=None`."""
    kwargs = {"model_name": "root-model", "base_url": server.url, "api_key": "key"} | more
    return {name: value for name, value in kwargs.items() if value is not None}


def script(id: str) -> Any:
    """A plan that replies the turns of a case, by turn."""
    turns = scripted(CASES[id])
    return lambda asked: FakeReply(turns[asked.turn - 1])


def _echo(asked: Asked) -> FakeReply:
    return FakeReply(scripted(CASES["C06"])[0] if asked.is_conversation else "ok")


@covers("C06")
def test_any_number_of_batches_loops_and_runs_with_one_instance() -> None:
    async def two_runs() -> None:
        async with serving(_echo) as server:
            rlm = AsyncRLM(backend_kwargs=client(server))
            with anyio.fail_after(10):
                for _ in range(2):
                    assert (await rlm.acompletion("CTX")).response == "|".join(["ok"] * 12)
            kept.append(rlm)

    kept: list[AsyncRLM] = []
    asyncio.run(two_runs())
    asyncio.run(two_runs())

    async def again(server: Serving, rlm: AsyncRLM) -> str:
        with anyio.fail_after(10):
            return (await rlm.acompletion("CTX")).response

    async def with_one_server() -> None:
        async with serving(_echo) as server:
            rlm = AsyncRLM(backend_kwargs=client(server))
            for _ in range(2):  # another event loop each, one instance
                answer = await anyio.to_thread.run_sync(lambda: asyncio.run(again(server, rlm)))
                assert answer == "|".join(["ok"] * 12)

    asyncio.run(with_one_server())


@one
@covers("C06")
async def test_a_thousand_subcalls_share_their_connections() -> None:
    def plan(asked: Asked) -> FakeReply:
        if asked.is_conversation:
            return FakeReply(
                cell("rs = llm_query_batched(list(map(str, range(1000))))\nanswer.update(content=rs, ready=True)")
            )
        return FakeReply(asked.newest)

    async with serving(plan) as server:
        with anyio.fail_after(20):
            result = await AsyncRLM(backend_kwargs=client(server)).acompletion("CTX")
    assert result.response == "[" + ", ".join(f'"{i}"' for i in range(1000)) + "]"
    assert result.usage_summary.total_calls == 1001


@both
@covers("U13")
async def test_a_server_that_does_not_say_what_it_used() -> None:
    async with serving(lambda _asked: FakeReply(scripted(CASES["U13"])[0], usage=None)) as server:
        with anyio.fail_after(10):
            result = await AsyncRLM(backend_kwargs=client(server)).acompletion("CTX")
    assert result.response == "ok"
    assert not result.usage_summary.complete
    assert result.usage_summary.total_calls == 1


@both
@covers("K01")
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_code_in_the_reasoning_is_not_run(field: str) -> None:
    wrong = submit("'WRONG'")

    def reply(content: str | None, finish_reason: str) -> FakeReply:
        message = {"role": "assistant", "content": content, field: wrong}
        choice = {"index": 0, "message": message, "finish_reason": finish_reason}
        return FakeReply(body=json.dumps({"id": "x", "object": "chat.completion", "choices": [choice]}).encode())

    replies = iter([reply(None, "length"), reply(scripted(CASES["K01"])[1], "stop")])
    async with serving(lambda _asked: next(replies)) as server:
        with anyio.fail_after(10):
            result = await AsyncRLM(backend_kwargs=client(server)).acompletion("CTX")
    assert result.response == "ok"
    assert len(server.asked) == 2
    assert "cut off because it reached its length limit" in server.asked[1].newest
    assert "empty" in server.asked[1].newest


@one
@covers("K02")
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("how", ["constructor", "call", "backend_kwargs"])
async def test_a_setting_is_sent_under_the_name_the_user_gave(name: str, how: str) -> None:
    async with serving(script("K02")) as server:
        settings = {name: 64, "temperature": 0.2}
        more = {"sampling_args": settings} if how == "backend_kwargs" else {}
        arguments: dict[str, Any] = {"sampling_args": settings} if how == "constructor" else {}
        override: dict[str, Any] = {"sampling_args": settings} if how == "call" else {}
        rlm = AsyncRLM(backend_kwargs=client(server, **more), **arguments)
        with anyio.fail_after(10):
            assert (await rlm.acompletion("CTX", **override)).response == "ok"
    sent = server.asked[0].body
    assert {k: v for k, v in sent.items() if k.startswith("max") or k == "temperature"} == settings


@both
@covers("K03")
async def test_a_server_of_ones_own_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with serving(script("K03")) as server:
        with anyio.fail_after(10):
            result = await AsyncRLM(backend_kwargs=client(server, api_key=None)).acompletion("CTX")
    assert result.response == "ok"


@one
@covers("K03")
@pytest.mark.parametrize("backend", ["openai", "vllm"])
async def test_the_key_of_one_host_is_not_sent_to_another(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-S3CRET")
    async with serving(script("K03")) as server:
        with anyio.fail_after(10):
            result = await AsyncRLM(backend=backend, backend_kwargs=client(server, api_key=None)).acompletion("CTX")
    assert result.response == "ok"
    assert not [value for value in server.asked[0].headers.values() if "S3CRET" in value]


@both
@covers("K05")
async def test_a_rate_limit_is_waited_for() -> None:
    came: list[float] = []

    def plan(_asked: Asked) -> FakeReply:
        came.append(time.monotonic())
        if len(came) <= 2:
            return FakeReply.fault(429, "slow down", retry_after=1)
        return FakeReply(scripted(CASES["K05"])[0])

    async with serving(plan) as server:
        with anyio.fail_after(10):
            result = await AsyncRLM(backend_kwargs=client(server)).acompletion("CTX")
    assert result.response == "ok"
    assert len(came) == 3
    assert min(came[1] - came[0], came[2] - came[1]) >= 0.99
    assert result.usage_summary.total_calls == 1


@both
@covers("K07")
@pytest.mark.parametrize(
    ("status", "kind"), [(401, "authentication"), (403, "permission"), (404, "not_found"), (400, "bad_request")]
)
async def test_what_will_not_get_better_is_raised_at_once(status: int, kind: str) -> None:
    async with serving(lambda _asked: FakeReply.fault(status, "no")) as server:
        with anyio.fail_after(5), pytest.raises(LMError) as raised:
            await AsyncRLM(backend_kwargs=client(server)).acompletion("CTX")
    assert len(server.asked) == 1
    assert (raised.value.kind, raised.value.status, raised.value.retryable) == (kind, status, False)


@both
@covers("K07")
async def test_a_wrong_key_of_a_sub_model_is_told_and_not_tried_for_ever() -> None:
    def plan(asked: Asked) -> FakeReply:
        if not asked.is_conversation:
            return FakeReply.fault(401, "no")
        if asked.turn == 1:
            return FakeReply(cell("for i in range(1000):\n    llm_query(f'q{i}')"))
        return FakeReply(submit("'told'"))

    async with serving(plan) as server:
        with anyio.fail_after(10):
            result = await AsyncRLM(backend_kwargs=client(server)).acompletion("CTX")
    assert result.response == "told"
    leaves = [asked for asked in server.asked if not asked.is_conversation]
    assert len(leaves) == 3
    assert "401" in server.asked[-1].newest or "authentication" in server.asked[-1].newest.lower()


@both
@covers("K06")
async def test_a_reply_of_anthropic_that_begins_with_thoughts() -> None:
    text = scripted(CASES["K06"])[0]
    replies = [FakeReply(None, reasoning=submit("'WRONG'")), FakeReply(text, reasoning="hm")]
    async with FakeAnthropicServer(replies) as server:
        kwargs = {"model_name": "claude", "base_url": server.base_url, "api_key": "key"}
        with anyio.fail_after(10):
            result = await AsyncRLM("anthropic", backend_kwargs=kwargs).acompletion("CTX")
    assert result.response == "ok"
    assert len(server.requests) == 2
    assert "empty" in server.requests[1].text


@both
@covers("K08")
async def test_a_deployment_on_azure_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_OPENAI_API_KEY", "AZURE_OPENAI_ENDPOINT", "AZURE_OPENAI_DEPLOYMENT", "OPENAI_API_VERSION"):
        monkeypatch.delenv(name, raising=False)
    async with FakeOpenAIServer(scripted(CASES["K08"])) as server:
        kwargs = {
            "azure_endpoint": server.url,
            "azure_deployment": "my-dep",
            "api_version": "2024-10-21",
            "api_key": "key",
        }
        rlm = AsyncRLM("azure_openai", backend_kwargs=kwargs, sampling_args={"temperature": 0.2})
        with anyio.fail_after(10):
            assert (await rlm.acompletion("CTX")).response == "ok"
    (seen,) = server.requests
    assert seen.path == "/openai/deployments/my-dep/chat/completions?api-version=2024-10-21"
    assert seen.body["temperature"] == 0.2
    assert seen.headers["api-key"] == "key"
