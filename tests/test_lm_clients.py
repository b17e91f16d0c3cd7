"""Naming a client: what is checked, and which key goes where."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from asyncrlm.errors import ConfigurationError
from asyncrlm.ledger import Price
from asyncrlm.lm.clients import BACKENDS, client_spec
from asyncrlm.lm.http.endpoints import PRESETS, key_from_environment, origin_of
from asyncrlm.testing import ScriptedLM

VARIABLES = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENROUTER_API_KEY", "AI_GATEWAY_API_KEY", "PRIME_API_KEY")
OF_OTHERS = (
    *("PORTKEY_API_KEY", "AZURE_OPENAI_API_KEY", "AZURE_OPENAI_AD_TOKEN", "AZURE_OPENAI_ENDPOINT"),
    *("AZURE_OPENAI_DEPLOYMENT", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL"),
    *("GEMINI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_GEMINI_BASE_URL", "GOOGLE_GENAI_USE_VERTEXAI"),
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *OF_OTHERS):
        monkeypatch.delenv(name, raising=False)


async def echo(messages: list[dict[str, str]]) -> str:
    return messages[-1]["content"]


# --- what is refused, and how it says what is right -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "kwargs", "said"),
    [
        ("openai", None, r"needs an API key.*OPENAI_API_KEY.*vllm.*offline"),
        ("openrouter", {"model_name": "m"}, "OPENROUTER_API_KEY"),
        ("vercel", {"model_name": "m"}, "AI_GATEWAY_API_KEY"),
        ("prime", {"model_name": "m"}, "PRIME_API_KEY"),
        ("openai", {"api_key": "  "}, "needs an API key"),
        ("vllm", {"model_name": "m"}, "base_url"),
        ("vllm", {"base_url": "http://h/v1"}, "model_name"),
        ("openrouter", {"api_key": "k"}, "model_name"),
        ("opena", None, "did you mean 'openai'.*known: openai, vllm"),
        ("gpt", None, "known: openai"),
        ("anthropic", {"api_key": "k"}, "anthropic/claude"),
        ("anthropic/c", {"api_key": "k", "auth_token": "t"}, "not both"),
        ("anthropic/c", {"api_key": "k", "max_tokens": 0}, "positive number of tokens"),
        ("anthropic/c", {"api_key": "k", "prompt_caching": "yes"}, "True or False"),
        ("anthropic/c", {"api_key": 5}, "async callable"),
        ("anthropic/c", {"api_key": "k", "sampling_args": {"seed": 1}}, "anthropic has no 'seed'"),
        ("anthropic/c", {"api_key": "k", "sampling_args": {"response_format": {"type": "x"}}}, "json_schema"),
        ("gemini", {"api_key": "k", "model_name": 5}, "must be a str"),
        ("gemini", {"api_key": "k", "credentials": object()}, "vertexai=True"),
        ("gemini", {"api_key": "k", "sampling_args": {"system_instruction": "x"}}, "written for each request"),
        ("gemini", {"api_key": "k", "sampling_args": {"response_format": {"type": "x"}}}, "json_schema"),
        ("gemini", {"vertexai": True, "base_url": "http://h:1"}, "credentials= or api_key="),
        ("azure_openai", {"azure_endpoint": "https://h"}, "azure_deployment"),
        ("azure_openai/d", {"api_key": "k"}, "needs azure_endpoint"),
        ("azure_openai/d", {"azure_endpoint": "https://h", "base_url": "https://h"}, "exclude each other"),
        ("azure_openai/d", {"azure_endpoint": "https://h", "api_key": "k", "azure_ad_token": "t"}, "not two"),
        ("azure_openai/d", {"azure_endpoint": "https://h", "azure_ad_token_provider": "t"}, "must be a function"),
        ("azure_openai/d", {"azure_endpoint": "https://h"}, "AZURE_OPENAI_API_KEY"),
        ("azure_openai/m", {"api_key": "k", "azure_endpoint": "https://h", "default_query": [1]}, "must be a dict"),
        ("anthropic/m", {"api_key": "k", "default_query": ["s3cret"]}, "default_query must be a dict"),
        ("gemini/m", {"api_key": "k", "default_query": ["s3cret"]}, "default_query must be a dict"),
        ("openai/m", {"api_key": "k", "default_query": ["s3cret"]}, "default_query must be a dict"),
        ("portkey/m", {"api_key": 5}, "must be a str"),
        ("portkey/m", None, "PORTKEY_API_KEY"),
        ("portkey/m", {"api_key": "k", "default_headers": []}, "must be a dict"),
        ("openai", {"api_kei": "k"}, "did you mean 'api_key'.*known: .*base_url"),
        ("openai", {"api_key": "k", "provider": object()}, "provider is not supported yet"),
        ("openai", {"api_key": "k", "max_retries": -1}, "max_retries"),
        ("openai", {"api_key": "k", "timeout": 0}, "timeout"),
        ("openai", {"api_key": "k", "timeout": float("nan")}, "timeout"),
        ("openai", {"api_key": 5}, "api_key must be"),
        ("openai", {"api_key": "two words"}, "no HTTP header"),
        ("openai", {"api_key": "schlüssel"}, "no HTTP header"),
        ("openai", {"api_key": "k", "context_window": 0}, "context_window"),
        ("openai", {"api_key": "k", "price": 5}, "price must be"),
        ("openai", {"api_key": "k", "price": (1, -1)}, "price must be"),
        ("openai", {"api_key": "k", "price": {"input": 1}}, "price must be"),
        ("openai", {"api_key": "k", "price": {"input": 1, "output": 1, "out": 1}}, "price must be"),
        ("openai", {"api_key": "k", "price": {"input": 1, "output": float("inf")}}, "price must be"),
        ("openai", {"api_key": "k", "sampling_args": {"model": "x"}}, "model_name"),
        ("openai", {"api_key": "k", "sampling_args": {"stream": True}}, "asks for a stream"),
        ("openai", {"api_key": "k", "sampling_args": [1]}, "must be a dict"),
        ("openai", {"api_key": "k", "sampling_args": {"timeout": "soon"}}, "timeout in sampling_args"),
        ("openai", {"api_key": "k", "default_headers": ["x"]}, "default_headers must be a dict"),
        ("openai", {"api_key": "k", "base_url": "http://x/v1", "data_residency": "eu"}, "data_residency"),
        ("openai/gpt-5", {"api_key": "k", "model_name": "gpt-4"}, "two models"),
        ("openai", [{}], "list of backends"),
        (5, None, "backend must be"),
        ([], None, "at least one"),
        ([["openai"]], None, "another list"),
        (["openai", "vllm"], {"api_key": "k"}, "a list too"),
        (["openai", "vllm"], [{}], "2 backends but 1"),
        (lambda messages: "x", None, "not async"),
        (echo, {"base_url": "x"}, "known: cache_key, context_window, price"),
        (ScriptedLM([]), {"model_name": "x"}, "known: cache_key, context_window, price"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_right(backend: Any, kwargs: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        client_spec(backend, kwargs)
    assert "sk-" not in str(caught.value)


def test_sampling_args_can_not_reach_a_callable() -> None:
    with pytest.raises(ConfigurationError, match="only the messages"):
        client_spec(echo, None, {"temperature": 0})


@pytest.mark.parametrize("backend", ["openai", "openai/gpt-5", *[f"{name}/m" for name in PRESETS]])
def test_every_preset_can_be_named(backend: str) -> None:
    kwargs = {"api_key": "k"} | ({"base_url": "http://h:1/v1"} if backend.startswith("vllm") else {})
    spec = client_spec(backend, kwargs)
    assert spec.backend == backend.partition("/")[0]
    assert spec.model == (backend.partition("/")[2] or PRESETS["openai"].default_model)
    assert spec.needs_price is not PRESETS[spec.backend].free
    assert repr(spec) == f"<ClientSpec {spec.backend}: {spec.model}>"
    assert set(BACKENDS) >= set(PRESETS)


@pytest.mark.parametrize("name", ["ollama", "lmstudio", "llamacpp"])
def test_a_model_on_this_machine_costs_nothing_and_gets_no_key(name: str) -> None:
    spec = client_spec(f"{name}/m")
    assert (spec.price, spec.needs_price) == (Price(0.0), False)
    assert client_spec(f"{name}/m", {"price": (1, 2)}).price == Price(input=1, output=2)
    assert client_spec(f"{name}/m", {"base_url": "http://gpu.example:1/v1"}).needs_price


@pytest.mark.parametrize(
    ("backend", "base_url", "listed"),
    [
        ("vllm", "http://127.0.0.1:1/v1", False),
        ("vllm", "http://gpu.example:1/v1", False),
        ("ollama", "http://gpu.example:1/v1", False),
        ("openai", "http://localhost:1/v1", True),
        ("openai", "https://proxy.example/v1", True),
        ("openrouter", "https://openrouter.ai/api/v1", True),
    ],
)
def test_a_server_of_ones_own_has_no_vendors_list_price(backend: str, base_url: str, listed: bool) -> None:
    kwargs = {"base_url": base_url, "api_key": "k"}
    spec = client_spec(f"{backend}/deepseek-v4-pro", kwargs)
    assert (spec.price is not None, spec.needs_price, spec.window) == (listed, True, 1_000_000)
    assert client_spec(f"{backend}/deepseek-v4-pro", {**kwargs, "price": (1, 2)}).price == Price(input=1, output=2)


@pytest.mark.parametrize(("backend", "extra"), [("anthropic/m", "anthropic"), ("gemini/m", "gemini")])
def test_an_sdk_that_is_not_there_says_how_to_get_it(backend: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, {"anthropic": "anthropic", "gemini": "google.genai"}[extra], None)
    with pytest.raises(ConfigurationError, match=rf'pip install "asyncrlm\[{extra}\]"'):
        client_spec(backend, {"api_key": "k"})


def test_retries_price_and_window_are_taken() -> None:
    spec = client_spec("openai/gpt-5", {"api_key": "k"})
    assert (spec.price, spec.window, spec.attempts) == (Price(1.25, 0.125, 10.0), 272_000, 6)
    given = {"api_key": "k", "max_retries": 0, "price": {"input": 1, "output": 2, "cached": 0.5}, "context_window": 9}
    spec = client_spec("openai/gpt-5", given)
    assert (spec.price, spec.window, spec.attempts) == (Price(input=1, cached=0.5, output=2), 9, 1)
    assert client_spec("openai/x", {"api_key": "k", "price": (1, 2)}).price == Price(input=1, output=2)
    assert client_spec("openai/x", {"api_key": "k", "price": Price(3.0)}).price == Price(3.0)
    assert client_spec("openai/x", {"api_key": "k"}).price is None
    assert given == {
        "api_key": "k",
        "max_retries": 0,
        "price": {"input": 1, "output": 2, "cached": 0.5},
        "context_window": 9,
    }


# --- which key goes where ---------------------------------------------------------------------------------------------


def test_a_preset_takes_its_own_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        if name != "OPENAI_BASE_URL":
            monkeypatch.setenv(name, f"{name}-value")
    for preset in PRESETS.values():
        if preset.base_url is not None and preset.key_variable is not None:
            assert key_from_environment(origin_of(preset.base_url)) == f"{preset.key_variable}-value"


@pytest.mark.parametrize(
    "base_url",
    [
        "https://api.openai.com.evil.example/v1",
        "https://evil.example/api.openai.com/v1",
        "https://api-openai.com/v1",
        "https://xapi.openai.com/v1",
        "https://api.openai.com.:443/v1",
        "https://api.openai.com:8443/v1",
        "http://api.openai.com/v1",
        "https://127.0.0.1/v1",
        "https://openai.com/v1",
    ],
)
def test_the_key_in_the_environment_goes_to_no_other_host(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        if name != "OPENAI_BASE_URL":
            monkeypatch.setenv(name, "the-key")
    assert key_from_environment(origin_of(base_url)) is None


@pytest.mark.parametrize(
    "base_url",
    [
        "https://api.openai.com/v1/",
        "https://API.OpenAI.com/v1",
        "HTTPS://api.openai.com:443/v1",
        "https://eu.api.openai.com/v1",
    ],
)
def test_other_spellings_of_the_right_host_get_it(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", " the-key\n")
    assert key_from_environment(origin_of(base_url)) == "the-key"


@pytest.mark.parametrize(
    "base_url",
    [
        "https://user:s3cret@api.openai.com/v1",
        "https://api.openai.com@evil.example/v1",
        "https://evil.example\\@api.openai.com/v1",
        "https://api.openai.com/v1?x=1",
        "https://api.openai.com/v1#x",
        "https://api.openai.com /v1",
        "https://api.openai.com\t/v1",
        "https://\u0430pi.openai.com/v1",
        "ftp://api.openai.com/v1",
        "api.openai.com/v1",
        "https:///v1",
        "https://[::1/v1",
        "https://h:port/v1",
        "",
    ],
)
def test_urls_that_can_be_read_in_two_ways_are_refused(base_url: str) -> None:
    with pytest.raises(ConfigurationError, match="base_url must") as caught:
        client_spec("openai", {"api_key": "k", "base_url": base_url})
    assert "s3cret" not in str(caught.value)


def test_a_preset_sent_elsewhere_leaves_its_key_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "router-key-0123")
    monkeypatch.setenv("OPENAI_API_KEY", "openai-key-0123")
    elsewhere = client_spec("openrouter/m", {"base_url": "http://127.0.0.1:1/v1"})
    unnamed = client_spec("vllm/m", {"base_url": "http://127.0.0.1:1/v1"})
    assert elsewhere.key == unnamed.key
    by_url = client_spec("openai/m", {"base_url": "https://openrouter.ai/api/v1"})
    by_name = client_spec("openrouter/m")
    assert by_url.key == by_name.key


def test_a_header_may_stand_for_the_key() -> None:
    client_spec("openai", {"default_headers": {"Authorization": "Bearer x"}})


def test_keys_and_hosts_tell_specs_apart_without_showing() -> None:
    keys = {
        client_spec("openai/m", {"api_key": "secret-one"}).key,
        client_spec("openai/m", {"api_key": "secret-two"}).key,
        client_spec("openai/n", {"api_key": "secret-one"}).key,
        client_spec("openai/m", {"api_key": "secret-one"}, {"temperature": 1}).key,
        client_spec("openai/m", {"api_key": "secret-one", "base_url": "http://h/v1"}).key,
    }
    assert len(keys) == 5
    assert "secret" not in repr(keys)
    assert client_spec("openai/m", {"api_key": "secret-one"}).key in keys
