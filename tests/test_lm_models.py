"""The models behind a name: callables, clients of the caller's own, fallbacks, routing, what they cost."""

from __future__ import annotations

import functools
from typing import Any

import anyio
import pytest

from asyncrlm.errors import ConfigurationError, LMError
from asyncrlm.ledger import Price
from asyncrlm.lm import catalog
from asyncrlm.lm.base import LMClient, LMReply, LMRequest, LMUsage, Message
from asyncrlm.lm.callable import CallableClient
from asyncrlm.lm.clients import client_spec
from asyncrlm.lm.http.endpoints import PRESETS
from asyncrlm.lm.routing import Router
from asyncrlm.testing import ScriptedLM

pytestmark = pytest.mark.anyio

REQUEST = LMRequest(messages=(Message("system", "s"), Message("user", "u")))


async def echo(messages: list[dict[str, str]]) -> str:
    return messages[-1]["content"]


# --- callables, objects, fallbacks ------------------------------------------------------------------------------------


class Asker:
    async def __call__(self, messages: list[dict[str, str]]) -> str:
        return f"asked {len(messages)}"


@pytest.mark.parametrize(
    ("function", "text", "model"),
    [
        (echo, "u", "echo"),
        (Asker(), "asked 2", "Asker"),
        (functools.partial(echo), "u", "partial"),
    ],
)
async def test_a_callable_is_asked_with_plain_messages(function: Any, text: str, model: str) -> None:
    spec = client_spec(function)
    assert (spec.model, spec.needs_price, spec.price) == (model, True, None)
    async with spec.open() as client:
        assert await client.acomplete(REQUEST) == LMReply(text=text)
    assert repr(client) == f"<CallableClient {model}>"


async def test_a_callable_may_be_named_and_say_what_it_used() -> None:
    reply = LMReply(text="x", usage=LMUsage(input_tokens=1))

    async def model(messages: list[dict[str, str]]) -> LMReply:
        return reply

    spec = client_spec(model, {"model_name": "mine", "price": (1, 2), "context_window": 100})
    assert (spec.model, spec.window, spec.price) == ("mine", 100, Price(input=1, output=2))
    async with spec.open() as client:
        assert await client.acomplete(REQUEST) is reply


@pytest.mark.parametrize("error", [ValueError("bug"), LMError("busy", kind="rate_limit", retryable=True)])
async def test_what_a_callable_raises_is_an_lm_error_with_its_cause(error: Exception) -> None:
    async def model(messages: list[dict[str, str]]) -> str:
        raise error

    with pytest.raises(LMError) as caught:
        await CallableClient(model).acomplete(REQUEST)
    if isinstance(error, LMError):
        assert caught.value is error
    else:
        assert (caught.value.kind, caught.value.retryable, caught.value.__cause__) == ("other", False, error)
        assert "ValueError: bug" in str(caught.value)


async def test_a_callable_that_returns_something_else_is_told() -> None:
    async def model(messages: list[dict[str, str]]) -> Any:
        return 5

    with pytest.raises(LMError, match="returned int") as caught:
        await CallableClient(model).acomplete(REQUEST)
    assert caught.value.kind == "bad_reply"


async def test_a_cancelled_callable_is_cancelled() -> None:
    async def model(messages: list[dict[str, str]]) -> str:
        await anyio.sleep(60)
        return ""

    with anyio.move_on_after(0.01) as scope:
        await CallableClient(model).acomplete(REQUEST)
    assert scope.cancelled_caught


async def test_a_client_object_is_used_as_it_is_and_not_closed() -> None:
    closed: list[bool] = []

    class Mine(ScriptedLM):
        async def aclose(self) -> None:
            closed.append(True)

    lm = Mine(["a", "b"], model="mine", needs_price=True)
    spec = client_spec(lm)
    assert (spec.model, spec.needs_price, spec.price) == ("mine", True, None)
    async with spec.open() as client:
        assert client is lm
    with_args = client_spec(lm, {"sampling_args": {"a": 1, "b": 1}}, {"b": 2})
    async with with_args.open() as client:
        await client.acomplete(LMRequest(messages=REQUEST.messages, sampling_args={"c": 3}, output_cap=4))
        assert (client.model, client.account, client.needs_price) == (lm.model, lm.account, True)
    assert (lm.calls[0].sampling_args, lm.calls[0].output_cap) == ({"a": 1, "b": 2, "c": 3}, 4)
    assert closed == []


# --- routing ----------------------------------------------------------------------------------------------------------


def named(*names: str) -> list[Any]:
    return [client_spec(ScriptedLM([], model=name)) for name in names]


@pytest.mark.parametrize(
    ("names", "subs"),
    [
        (["r"], ["r", "r", "r"]),
        (["r", "a"], ["a", "a", "a"]),
        (["r", "a", "b"], ["a", "b", "b"]),
    ],
)
def test_models_by_depth(names: list[str], subs: list[str]) -> None:
    root, *others = named(*names)
    router = Router(root, others)
    assert router.root() is root
    assert [router.sub(depth).model for depth in (1, 2, 3)] == subs
    assert router.sub(0) is router.sub(1)
    assert router.names == tuple(names)


def test_models_by_name_and_unknown_ones() -> None:
    root, *others = named("big", "small", "small/er", "big")
    router = Router(root, others)
    assert router.sub(1, "small") is others[0]
    assert router.sub(1, "small/er") is others[1]
    assert router.sub(2, "ScriptedLM/small") is others[0]
    assert router.sub(1, "big") is others[2]
    assert router.root("big") is root
    assert router.root("small") is others[0]
    assert router.names == ("big", "small", "small/er")
    assert repr(router) == "<Router big, small, small/er>"
    for unknown in ("tiny", "", "Small", "smal"):
        with pytest.raises(LMError, match="known: big, small, small/er"):
            router.root(unknown)
        with pytest.raises(LMError, match="known: big, small, small/er") as caught:
            router.sub(1, unknown)
        assert (caught.value.kind, caught.value.retryable) == ("unknown_model", False)


def test_a_router_from_the_constructors_arguments() -> None:
    one, two, three = (ScriptedLM([], model=name) for name in ("one", "two", "three"))
    assert Router.of(one).names == ("one",)
    assert Router.of(one, other_backends=[two, three]).names == ("one", "two", "three")
    alone = Router.of(one, sampling_args={"a": 1}, sub_sampling_args={"b": 2})
    assert len(alone.specs) == 2
    assert alone.sub(1).model == "one"
    assert Router.of("openai/m", {"api_key": "k"}, ["openai/n"], [{"api_key": "k"}]).names == ("m", "n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"other_backend_kwargs": [{}]}, "no other_backends"),
        ({"other_backends": "openai"}, "must be a list"),
        ({"other_backends": [echo], "other_backend_kwargs": [{}, {}]}, "list of 1 dicts"),
        ({"other_backends": [echo], "other_backend_kwargs": {"price": 1}}, "list of 1 dicts"),
    ],
)
def test_a_router_says_what_is_wrong(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Router.of(echo, **arguments)


# --- the catalogue ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "entry"),
    [
        ("gpt-5", "gpt-5"),
        ("GPT-5", "gpt-5"),
        ("gpt-5-2025-08-07", "gpt-5"),
        ("gpt-5-latest", "gpt-5"),
        ("openai/gpt-5-mini", "gpt-5-mini"),
        ("gpt-5-mini-2025-08-07", "gpt-5-mini"),
        ("gpt-5-pro", "gpt-5-pro"),
        ("gpt-5.4-nano", "gpt-5.4-nano"),
        ("claude-opus-4-5-20251101", "claude-opus-4-5"),
        ("anthropic/claude-opus-4.5", "claude-opus-4-5"),
        ("gemini-2.5-flash-002", "gemini-2.5-flash"),
        ("gpt-5-ultra", None),
        ("gpt-5-32", None),
        ("gpt-5.9", None),
        ("gpt-5-", None),
        ("my-gpt-5", None),
        ("gpt-50", None),
        ("gpt", None),
        ("someone/gpt-5", None),
        ("openai/gpt-5:free", None),
        ("gpt-5-mini-latest-2025", None),
        ("claude-opus-4", None),
        ("", None),
        ("/", None),
    ],
)
def test_names_are_compared_by_segments(model: str, entry: str | None) -> None:
    found = catalog.find(model)
    assert (found.name if found else None) == entry
    assert (catalog.window(model) is None) == (catalog.price(model) is None) == (entry is None)


def test_the_default_model_is_in_the_catalogue() -> None:
    model = PRESETS["openai"].default_model
    assert model is not None
    assert catalog.price(model) is not None


def test_no_two_lines_of_the_catalogue_share_a_name() -> None:
    table: Any = catalog._TABLE  # pyright: ignore[reportPrivateUsage]
    assert len({entry.name.replace(".", "-") for entry in table}) == len(table)
    assert all(entry.cached is None or 0 <= entry.cached <= entry.input for entry in table)
    assert all(entry.window > 0 for entry in table)


def test_a_client_is_what_the_base_class_says() -> None:
    class Least(LMClient):
        model = "least"

        async def acomplete(self, request: LMRequest) -> LMReply:
            return LMReply(text="")

    assert (client_spec(Least()).needs_price, Least().account) == (True, "Least:least")


async def test_the_offline_model_is_a_backend_like_any_other() -> None:
    spec = client_spec("offline")
    assert (spec.model, spec.backend, spec.needs_price, spec.price) == ("offline", "offline", False, Price(0.0))
    async with spec.open() as client:
        assert (await client.acomplete(REQUEST)).text
    with pytest.raises(ConfigurationError, match="known"):
        client_spec("offline", {"api_key": "k"})
