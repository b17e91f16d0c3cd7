"""What a run costs and how long its prompts may be: the provider's word, the caller's, the table's, or nobody's."""

from __future__ import annotations

import re
from typing import Any

import pytest

from asyncrlm import AsyncRLM, ConfigurationError, LMError, RLMChatCompletion
from asyncrlm.events import SubcallFinished
from asyncrlm.lm import catalog
from asyncrlm.testing import FakeOpenAIServer, FakeReply

from .helpers import cell, submit

pytestmark = pytest.mark.anyio

USED = {"prompt_tokens": 1_000, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 400}}
ASK = submit("llm_query('x')")


async def run(
    usage: dict[str, Any] | None, model: str = "nobody-knows", **kwargs: Any
) -> tuple[RLMChatCompletion, float | None]:
    """One run of a root reply and a sub-call that both used this, and the cost that the sub-call's event tells."""
    limits = {name: kwargs.pop(name) for name in ("max_budget", "limits") if name in kwargs}
    async with FakeOpenAIServer([FakeReply(ASK, usage=usage), FakeReply("sub", usage=usage)]) as server:
        own = {"base_url": server.base_url, "model_name": model, "api_key": "k"} | kwargs
        rlm = AsyncRLM("openai", backend_kwargs=own, **limits)
        async with rlm.astream("CTX") as events:
            costs = [event.cost async for event in events if isinstance(event, SubcallFinished)]
    assert events.result is not None
    return events.result, costs[0]


async def test_what_the_provider_says_wins() -> None:
    result, told = await run(USED | {"cost": 0.25}, "gpt-5-mini", price=(100, 100))
    assert (result.usage_summary.total_cost, told) == (0.5, 0.25)
    free, told = await run(USED | {"cost": 0}, price=(100, 100))
    assert (free.usage_summary.total_cost, told) == (0.0, 0.0)


async def test_else_the_callers_price_then_the_table() -> None:
    result, told = await run(USED, "gpt-5-mini", price={"input": 10, "cached": 1, "output": 20})
    assert told == pytest.approx((600 * 10 + 400 * 1 + 100 * 20) / 1e6)
    assert result.usage_summary.total_cost == pytest.approx(2 * told)
    entry = catalog.find("gpt-5-mini")
    assert entry is not None
    assert entry.cached is not None
    result, told = await run(USED, "gpt-5-mini")
    assert told == pytest.approx((600 * entry.input + 400 * entry.cached + 100 * entry.output) / 1e6)
    assert result.usage_summary.total_cost == pytest.approx(2 * told)


async def test_what_is_unknown_stays_unknown() -> None:
    result, told = await run(USED)
    assert (result.usage_summary.total_cost, told) == (None, None)
    result, told = await run(None, price=(1, 1))  # a price, but no usage: what was reserved counts
    assert told is None
    assert result.usage_summary.total_cost
    assert not result.usage_summary.complete


async def test_a_budget_needs_every_price_before_anything_is_sent() -> None:
    known = {"model_name": "gpt-5", "api_key": "k"}
    unknown = {"model_name": "nobody-knows", "api_key": "k"}
    for arguments in (
        {"backend_kwargs": unknown},
        {"backend_kwargs": known, "other_backends": ["openai"], "other_backend_kwargs": [unknown]},
    ):
        with pytest.raises(ConfigurationError, match=r"price for 'nobody-knows'.*backend_kwargs"):
            AsyncRLM("openai", max_budget=1.0, **arguments)
        rlm = AsyncRLM("openai", **arguments)
        with pytest.raises(ConfigurationError, match="price for 'nobody-knows'"):
            await rlm.acompletion("CTX", max_budget=1.0)
    AsyncRLM("openai", backend_kwargs=known, max_budget=1.0)
    with pytest.raises(ConfigurationError, match="price for 'nobody-knows'"):
        AsyncRLM(["openai/gpt-5", "openai/nobody-knows"], backend_kwargs=[{"api_key": "k"}] * 2, max_budget=1.0)
    result, _ = await run(USED, price=(1, 1), max_budget=1.0)
    assert result.stop_reason == "answer"


async def test_the_window_is_the_callers_then_the_tables_and_unknown_is_no_limit() -> None:
    async def ask(model: str, size: int, **kwargs: Any) -> str:
        code = [cell(f"r = llm_query('x' * {size})"), submit("str(r)")]
        replies = iter([*code])

        def answer(request: Any) -> str:
            return "fits" if request.text.startswith("xx") else next(replies)

        async with FakeOpenAIServer(answer) as server:
            own = {"base_url": server.base_url, "model_name": model, "api_key": "k"} | kwargs
            return (await AsyncRLM("openai", backend_kwargs=own).acompletion("CTX")).response

    assert await ask("nobody-knows", 600_000) == "fits"
    assert "its window is 128,000 tokens" in await ask("gpt-4o", 600_000)
    assert await ask("gpt-4o", 600_000, context_window=1_000_000) == "fits"
    assert "its window is 50,000 tokens" in await ask("nobody-knows", 300_000, context_window=50_000)
    with pytest.raises(LMError, match="too long"):
        await ask("gpt-4o", 10, context_window=10)
    for wrong in (0, -1, 1.5, "8k"):
        with pytest.raises(ConfigurationError, match="context_window must be a positive number"):
            AsyncRLM("openai/gpt-5", backend_kwargs={"api_key": "k", "context_window": wrong})


def test_the_table_is_dated_plain_data() -> None:
    assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", catalog.AS_OF)
    table: Any = catalog._TABLE  # pyright: ignore[reportPrivateUsage]
    assert all(type(value) in (str, int, float, type(None)) for entry in table for value in entry)
