"""What a tree's usage says of calls whose cost nobody knows, and of fallbacks that were paid for nothing."""

from __future__ import annotations

import pickle
from typing import Any

import anyio
import pytest

from asyncrlm import AsyncRLM, LMError, LMReply, LMUsage, TokenLimitExceededError
from asyncrlm.events import ModelReplied, SubcallFinished, UsageSettled
from asyncrlm.testing import ScriptedLM

from .helpers import cell, scripted, submit

pytestmark = pytest.mark.anyio

USAGE = LMUsage(input_tokens=1_000, output_tokens=1_000)
PRICE = {"price": (1, 2)}


def sub(**settings: Any) -> ScriptedLM:
    return ScriptedLM(lambda _: "fine", usage=USAGE, model="sub", needs_price=True, **settings)


@pytest.mark.parametrize(
    ("root_price", "sub_price", "total", "complete"),
    [({}, {}, None, True), (PRICE, {}, 0.003, False), ({}, PRICE, 0.003, False), (PRICE, PRICE, 0.006, True)],
)
async def test_a_cost_that_leaves_calls_out_is_not_complete(
    root_price: Any, sub_price: Any, total: float | None, complete: bool
) -> None:
    root = scripted(submit("llm_query('x')"), usage=USAGE, needs_price=True)
    rlm = AsyncRLM(root, backend_kwargs=root_price, other_backends=[sub()], other_backend_kwargs=[sub_price])
    with anyio.fail_after(20):
        usage = (await rlm.acompletion("CTX")).usage_summary
    assert (usage.total_cost, usage.complete) == (total, complete)
    assert usage.to_dict()["complete"] is complete


def lost(model: str) -> ScriptedLM:
    """A model whose replies get lost once they are paid for."""
    return ScriptedLM(lambda _: LMError("cut", kind="timeout", charged=True), model=model)


def refusing(model: str) -> ScriptedLM:
    return ScriptedLM(lambda _: LMError("no", kind="bad_request"), model=model)


async def test_fallbacks_that_may_have_been_paid_for_are_booked() -> None:
    works = ScriptedLM([cell("print(llm_query('x'))"), "fine", submit("'ok'")], model="works")
    rlm = AsyncRLM([lost("first"), lost("second"), works])
    with anyio.fail_after(20):
        async with rlm.astream("CTX") as events:
            seen = [event async for event in events]
    assert events.result is not None
    usage = events.result.usage_summary
    assert (usage.total_calls, usage.complete) == (7, False)  # twice failed, they are left alone for a while
    estimated = [event.estimated for event in seen if isinstance(event, UsageSettled)]
    assert estimated == [True, True, False, True, True, False, False]
    replies = [event for event in seen if isinstance(event, (ModelReplied, SubcallFinished))]
    assert [(event.model, event.answered_by) for event in replies] == [("first", "works")] * 3
    assert events.result.metadata is not None
    first = events.result.metadata["iterations"][0]
    assert first["answered_by"] == "works"
    assert first["code_blocks"][0]["result"]["rlm_calls"][0]["answered_by"] == "works"


@pytest.mark.parametrize(("last", "charges"), [(lost, 3), (refusing, 2)])
async def test_when_all_fail_each_that_may_have_been_paid_for_is_booked(last: Any, charges: int) -> None:
    rlm = AsyncRLM([lost("first"), lost("second"), last("third")], max_depth=0)
    with anyio.fail_after(20), pytest.raises(LMError) as caught:
        await rlm.acompletion("CTX")
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.charged is (last is lost)
    assert error.usage_summary.total_calls == charges


async def test_a_reply_that_says_nothing_of_its_use_is_booked_by_its_text() -> None:
    async def model(messages: list[dict[str, str]]) -> str:
        if len(messages) == 1:  # a sub-call
            return "yes"
        return submit('sum(r == "yes" for r in llm_query_batched(["?"] * 40))')

    with anyio.fail_after(20):
        completion = await AsyncRLM(model, max_tokens=20_000).acompletion("CTX")
    assert completion.response == "40"
    assert completion.usage_summary.total_output_tokens < 1_000
    assert not completion.usage_summary.complete


async def test_a_hard_limit_has_room_for_every_fallback() -> None:
    clients = [lost("first"), lost("second"), ScriptedLM(["fine"] * 9, model="works")]
    rlm = AsyncRLM(clients, max_depth=0, limits="hard", max_tokens=6_000)
    with anyio.fail_after(20):
        usage = (await rlm.acompletion("x" * 1_000)).usage_summary
        assert usage.total_calls == 3
        assert usage.total_input_tokens + usage.total_output_tokens <= 6_000
        with pytest.raises(TokenLimitExceededError) as caught:
            await rlm.acompletion("x" * 2_000)  # fits twice, but not three times
    used = caught.value.usage_summary
    assert used.total_calls == 2
    assert used.total_input_tokens + used.total_output_tokens <= 6_000


@pytest.mark.parametrize(
    ("cell_code", "sampling"),
    [("llm_query([{'role': 'x' * 3_000, 'content': 'hi'}])", {}), ("llm_query('hi')", {"tools": ["x" * 3_000]})],
)
async def test_a_hard_limit_counts_all_that_a_model_reads(cell_code: str, sampling: dict[str, Any]) -> None:
    sub = lost("sub")
    root = scripted(cell(f"print({cell_code})"), submit("'done'"))
    rlm = AsyncRLM(root, other_backends=[sub], sub_sampling_args=sampling, limits="hard", max_tokens=40_000)
    used: list[int] = []
    with anyio.fail_after(20):
        async with rlm.astream("CTX") as events:
            async for event in events:
                if isinstance(event, UsageSettled) and event.model == "sub":
                    used.append(event.input_tokens)
    assert used[0] >= 3_000


async def test_a_reply_of_a_model_alone_is_booked_once() -> None:
    root = ScriptedLM([LMReply(text="plain", usage=USAGE)])
    with anyio.fail_after(20):
        usage = (await AsyncRLM(root, max_depth=0).acompletion("CTX")).usage_summary
    assert (usage.total_calls, usage.total_input_tokens) == (1, 1_000)


async def test_a_sub_call_tells_of_cached_input_and_of_thoughts() -> None:
    usage = LMUsage(input_tokens=9, output_tokens=8, cached_tokens=7, reasoning_tokens=6)
    rlm = AsyncRLM(scripted(submit("llm_query('x')")), other_backends=[ScriptedLM([LMReply(text="y", usage=usage)])])
    with anyio.fail_after(20):
        async with rlm.astream("CTX") as events:
            (told,) = [event async for event in events if isinstance(event, SubcallFinished)]
    assert (told.input_tokens, told.cached_tokens, told.output_tokens, told.reasoning_tokens) == (9, 7, 8, 6)
