"""Arguments of a wrong type, and numbers that JSON has not: refused by name, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
from lm_backends import BACKENDS, FAMILIES, Backend
from lm_serving import KEY, ask

from asyncrlm import AsyncRLM
from asyncrlm.errors import ConfigurationError, LMError
from asyncrlm.lm.base import LMUsage
from asyncrlm.lm.clients import client_spec
from asyncrlm.testing import FakeReply

NAN, INF = float("nan"), float("inf")

WRONG: list[tuple[str, Any, str]] = [
    ("max_tokens", "5", "a whole number, not str"),
    ("max_completion_tokens", {}, "a whole number, not dict"),
    ("max_completion_tokens", 1.5, "a whole number, not 1.5"),
    ("max_tokens", True, "a whole number, not True"),
    ("temperature", "hot", "a number, not str"),
    ("top_p", [1], "a number, not list with int in it"),
    ("stop", 5, "a str or a list of them, not 5"),
    ("stop", ["a", 5], "a str or a list of them, not list with int in it"),
    ("stop_sequences", "END", "a list of str, not str"),
    ("user", 5, "a str, not 5"),
    ("reasoning_effort", ["low"], "a str, not list"),
    ("metadata", "x", "a dict, not str"),
    ("output_config", [], "a dict, not list"),
    ("response_format", "json", "a dict, not str"),
    ("extra_body", ["x"], "a dict, not list"),
    ("extra_headers", KEY, "a dict, not str"),
    ("extra_query", 5, "a dict, not 5"),
    ("timeout", "soon", "a positive number of seconds, not str"),
    ("timeout", NAN, "a positive number of seconds, not nan"),
    (5, 5, "a name in sampling_args must be a str, not int"),  # type: ignore[list-item]
]
ENDLESS: list[dict[str, Any]] = [
    {"temperature": NAN},
    {"top_p": -INF},
    {"extra_body": {"deep": [{"er": (1.0, INF)}]}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"maximum": INF}}}},
]


def given(backend: Backend) -> dict[str, Any]:
    url = {backend.url_name: "http://127.0.0.1:1", "model_name": "m", backend.key_name: KEY}
    return {**url, **backend.kwargs}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_sampling_args_of_a_wrong_type_are_refused_alike_by_all(backend: Backend) -> None:
    for name, value, said in WRONG:
        with pytest.raises(ConfigurationError, match=said) as caught:
            client_spec(backend.name, given(backend), {name: value})
        assert str(name) in str(caught.value) or name == 5
        assert KEY not in str(caught.value)
    for arguments in ENDLESS:
        with pytest.raises(ConfigurationError, match="JSON has no such number"):
            client_spec(backend.name, given(backend), arguments)
    with pytest.raises(ConfigurationError, match="stop in sampling_args must be"):
        AsyncRLM(backend.name, backend_kwargs=given(backend), sub_sampling_args={"stop": 5})


@pytest.mark.anyio
async def test_those_of_one_call_are_refused_before_anything_is_asked() -> None:
    rlm = AsyncRLM("vllm", backend_kwargs={"base_url": "http://127.0.0.1:1/v1", "model_name": "m"})
    for arguments, said in (({"max_tokens": "5"}, "a whole number"), ({"temperature": NAN}, "no such number")):
        with pytest.raises(ConfigurationError, match=said):
            await rlm.acompletion("CTX", sampling_args=arguments)


@pytest.mark.anyio
@pytest.mark.parametrize("backend", FAMILIES, ids=lambda backend: backend.name)
async def test_those_of_one_request_are_a_bad_request_that_is_not_sent(backend: Backend) -> None:
    async with backend.serving(lambda request: "ok") as (server, client):
        for name, value, said in WRONG:
            with pytest.raises(LMError, match=said) as caught:
                await client.acomplete(ask(sampling_args={name: value}))
            assert (caught.value.kind, caught.value.retryable) == ("bad_request", False)
        for arguments in ENDLESS:
            with pytest.raises(LMError, match=r"nan|inf") as caught:
                await client.acomplete(ask(sampling_args=arguments))
            assert (caught.value.kind, caught.value.retryable) == ("bad_request", False)
        assert not server.requests
        text = 'null and NaN in a text are nobody\'s business: {"a": null}'
        await client.acomplete(ask(text, sampling_args={"extra_body": {"nothing": None}}))
    assert (server.requests[0].text, server.requests[0].body["nothing"]) == (text, None)


@pytest.mark.parametrize(
    ("backend", "kwargs", "said"),
    [
        ("portkey/m", {"forward_headers": 5}, "forward_headers of portkey must be a list of names"),
        ("portkey/m", {"forward_headers": "x-mine"}, "forward_headers of portkey must be a list of names"),
        ("portkey/m", {"forward_headers": [5]}, "forward_headers of portkey must be a list of names"),
        ("portkey/m", {"config": [1]}, "config of portkey must be a str or a dict, not list"),
        ("portkey/m", {"metadata": {"a": NAN}}, "metadata of portkey can't be written as JSON"),
        ("portkey/m", {"metadata": {"a": object()}}, "metadata of portkey can't be written as JSON"),
        ("portkey/m", {"authorization": 5}, "authorization of portkey must be a str"),
        ("azure_openai/m", {"azure_endpoint": "http://h", "api_version": 2024}, "api_version must be a str .* not int"),
        ("azure_openai/m", {"azure_endpoint": "http://h", "azure_deployment": "a\nb"}, "azure_deployment must be"),
        ("gemini/m", {"api_version": "a\nb"}, "api_version must be a str of printable characters"),
        ("gemini/m", {"vertexai": "false"}, "vertexai must be True or False, not str"),
        ("gemini/m", {"project": 5}, "project must be a str"),
        ("openai/m", {"organization": 5}, "organization must be a str .* not int"),
        ("openai/m", {"project": "a\nb"}, "project must be a str of printable characters"),
        ("openai/m", {"timeout": "soon"}, "timeout must be a positive number of seconds, .* not str"),
        ("anthropic/m", {"timeout": (1,)}, "timeout must be a positive number of seconds, .* not tuple"),
    ],
)
def test_backend_kwargs_of_a_wrong_type_are_refused(backend: str, kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        client_spec(backend, {"api_key": KEY} | kwargs)


@pytest.mark.anyio
@pytest.mark.parametrize("backend", FAMILIES, ids=lambda backend: backend.name)
async def test_a_count_that_is_none_takes_no_other_with_it(backend: Backend) -> None:
    odd = {"cost": "abc", "total_tokens": [], "totalTokenCount": {}, "cache_creation": 5}
    odd |= {name: "many" for name in backend.usage if name.startswith(("cached", "cache_read"))}
    odd |= {name: True for name in backend.usage if name.endswith("details")}
    replies = [FakeReply("x", usage={**backend.usage, **odd}), FakeReply("x", usage={**backend.usage, "cost": True})]
    async with backend.serving(*replies) as (_, client):
        first, second = [(await client.acomplete(ask())).usage for _ in range(2)]
    assert first.output_tokens == 20
    assert first.input_tokens == (40 if backend.name == "anthropic" else 100)
    assert first.cost is None
    assert second == LMUsage(
        input_tokens=100,
        output_tokens=20,
        cached_tokens=60,
        cache_write_tokens=10 if backend.name == "anthropic" else None,
        reasoning_tokens=5,
    )
