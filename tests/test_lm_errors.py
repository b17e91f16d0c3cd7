"""What the error of a model's server says to the caller: which model, where, how often, and what to do next."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from asyncrlm import RLM, AsyncRLM, LMError
from asyncrlm.testing import FakeAnthropicServer, FakeOpenAIServer, FakeReply

from .helpers import cell, scripted, told

pytestmark = pytest.mark.anyio

KEY = "sk-SECRET0123456789"


async def failed(server: Any, backend: str = "openai", /, **kwargs: Any) -> LMError:
    settings = {"base_url": server.base_url, "model_name": "m", "max_retries": 1} | kwargs
    with pytest.raises(LMError) as caught:
        await AsyncRLM(backend, backend_kwargs=settings).acompletion("CTX", "WHAT?")
    return caught.value


@pytest.mark.parametrize("status", [400, 429])
async def test_it_names_the_model_the_server_and_how_often_it_was_tried(status: int) -> None:
    reply = FakeReply.fault(status, "no good", retry_after=0)
    async with FakeOpenAIServer(lambda request: reply) as server:
        error, where = await failed(server), server.base_url
    tried = ", tried 2 times" if status == 429 else ""
    assert str(error) == f"HTTP {status}: no good (model 'm' at {where}{tried})"
    assert error.message == f"HTTP {status}: no good"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.model, again.attempts) == (str(error), "m", len(server.requests))


async def test_a_cell_reads_what_went_wrong_and_no_address() -> None:
    root = scripted(cell("print(llm_query('x'))"), "done")
    async with FakeOpenAIServer(lambda request: FakeReply.fault(400, "no good")) as server:
        sub = {"base_url": server.base_url, "model_name": "m"}
        rlm = AsyncRLM(root, other_backends=["vllm"], other_backend_kwargs=[sub], max_iterations=1)
        await rlm.acompletion("CTX")
    assert "Error: HTTP 400: no good" in told(root, 2)
    assert "127.0.0.1" not in told(root, 2)


async def test_of_several_models_each_has_its_address() -> None:
    async with FakeOpenAIServer(lambda request: FakeReply.fault(404, "no good")) as server:
        kwargs = [{"base_url": server.base_url, "model_name": name} for name in ("a", "b")]
        with pytest.raises(LMError) as caught:
            await AsyncRLM(["vllm", "vllm"], backend_kwargs=kwargs).acompletion("CTX")
        each = "; ".join(f"{name} at {server.base_url}: HTTP 404: no good" for name in ("a", "b"))
    assert str(caught.value) == f"all models failed: {each}"


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(
    ("backend", "kind", "variable"),
    [
        ("openai", FakeOpenAIServer, "OPENAI_API_KEY"),
        ("vllm", FakeOpenAIServer, "OPENAI_API_KEY"),
        ("anthropic", FakeAnthropicServer, "ANTHROPIC_AUTH_TOKEN"),
    ],
)
async def test_a_key_that_is_withheld_is_told_of(
    monkeypatch: pytest.MonkeyPatch, backend: str, kind: Any, variable: str, status: int
) -> None:
    if backend == "anthropic":
        pytest.importorskip("anthropic")
        monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    why = f"; {variable} is not sent to 127.0.0.1"
    async with kind(lambda request: FakeReply.fault(status, "no key")) as server:
        monkeypatch.setenv(variable, KEY)
        error = await failed(server, backend)
        assert why in str(error)
        assert 'backend_kwargs={"api_key": …}' in str(error)
        assert KEY not in str(error)
        assert why not in str(await failed(server, backend, api_key="another-key"))
        monkeypatch.delenv(variable)
        assert why not in str(await failed(server, backend))


async def test_a_path_that_was_left_out_is_asked_for() -> None:
    async with FakeOpenAIServer(["hello"]) as server:
        error = await failed(server, "vllm", base_url=server.base_url.removesuffix("/v1"))
        assert "under /v1" in str(error)
        assert "under /v1" not in str(await failed(server, "vllm", base_url=server.base_url + "/v2"))


def test_where_nobody_listens_two_attempts_are_enough() -> None:
    with FakeOpenAIServer.serve_in_thread([]) as gone:
        url = gone.base_url
    kwargs = {"base_url": url, "model_name": "m"}
    with RLM("vllm", backend_kwargs=kwargs, max_depth=0) as rlm, pytest.raises(LMError) as caught:
        rlm.completion("CTX")
    assert str(caught.value).startswith(f"no connection to {url}: connection refused; is the server running")
    assert str(caught.value).endswith("(model 'm', tried 2 times)")
