"""Children, routing, limits and usage over a whole tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asyncrlm import (
    AsyncRLM,
    BudgetExceededError,
    ConfigurationError,
    ErrorThresholdExceededError,
    LMError,
    LMReply,
    LMRequest,
    LMUsage,
    SubcallLimitExceededError,
    TimeoutExceededError,
    TokenLimitExceededError,
)
from asyncrlm.events import ListenerFailed, RequestWaiting, RunFinished
from asyncrlm.testing import ScriptedLM

from .helpers import cell, echo, scripted, submit, told

pytestmark = pytest.mark.anyio


def by_context(root: str, child: str) -> ScriptedLM:
    """One model that plays root and child: the root is the one that was asked a question."""

    def reply(request: object) -> str:
        return root if "QUESTION" in request.messages[1].content else child  # type: ignore[attr-defined]

    return ScriptedLM(reply)


async def test_children_have_a_repl_and_grandchildren_are_plain() -> None:
    model = by_context(submit("rlm_query('go')"), submit("'child:' + context + ':' + rlm_query('leaf')"))
    rlm = AsyncRLM(
        model, other_backends=[ScriptedLM(lambda request: "plain " + request.messages[-1].content)], max_depth=2
    )
    with anyio.fail_after(30):
        completion = await rlm.acompletion("CTX", "QUESTION")
    assert completion.response == "child:go:plain leaf"
    assert completion.usage_summary.total_calls == 3


async def test_many_children_at_once_never_deadlock(no_leaks: None) -> None:
    model = by_context(
        submit("'|'.join(rlm_query_batched([str(i) for i in range(12)]))"),
        submit("context + ''.join(llm_query_batched(['a', 'b']))"),
    )
    rlm = AsyncRLM(model, other_backends=[echo("")], max_depth=2, max_concurrent_subcalls=3, max_concurrent_requests=2)
    with anyio.fail_after(60):
        completion = await rlm.acompletion("CTX", "QUESTION")
    assert completion.response == "|".join(f"{i}ab" for i in range(12))


async def test_a_child_never_waits_for_the_place_its_parent_has() -> None:
    model = by_context(submit("rlm_query('go')"), submit("context if context == 'leaf' else rlm_query('leaf') + '!'"))
    rlm = AsyncRLM(model, max_depth=3, max_concurrent_subcalls=1)
    with anyio.fail_after(10):
        assert (await rlm.acompletion("CTX", "QUESTION")).response == "leaf!"


def priced(cost: float, *replies: str) -> ScriptedLM:
    usage = LMUsage(input_tokens=10, output_tokens=10, cost=cost)
    return ScriptedLM([LMReply(text=text, usage=usage) for text in replies])


async def test_budget_counts_the_whole_tree() -> None:
    def reply(request: object) -> LMReply:
        return LMReply(text=cell("rlm_query('x')"), usage=LMUsage(input_tokens=1, output_tokens=1, cost=1.0))

    price = {"input": 0.0, "output": 0.0}
    rlm = AsyncRLM(ScriptedLM(reply), backend_kwargs={"price": price}, max_depth=2, max_budget=5.0)
    with anyio.fail_after(60), pytest.raises(BudgetExceededError) as caught:
        await rlm.acompletion("CTX")
    assert 5.0 <= caught.value.spent <= 7.0
    assert caught.value.budget == 5.0


async def test_budget_with_an_unknown_price_fails_at_the_start() -> None:
    with pytest.raises(ConfigurationError, match="price"):
        AsyncRLM("openai", backend_kwargs={"model_name": "nobody-knows", "api_key": "k"}, max_budget=1.0)


def test_a_budget_names_the_models_of_a_list_whose_price_is_not_known() -> None:
    models = ["openai/gpt-5-mini", "openai/nobody-knows", ScriptedLM([]), "openai/nor-this"]
    kwargs = [{"api_key": "k"}, {"api_key": "k"}, {}, {"api_key": "k"}]
    with pytest.raises(ConfigurationError) as caught:
        AsyncRLM(
            models, backend_kwargs=kwargs, other_backends=[models[1]], other_backend_kwargs=kwargs[1:2], max_budget=1
        )
    assert str(caught.value).startswith("max_budget needs a price for 'nobody-knows', 'nor-this': ")


async def test_budget_with_a_callable_needs_its_price() -> None:
    with pytest.raises(ConfigurationError, match="price"):
        AsyncRLM(silent, max_budget=1.0)
    AsyncRLM(silent, backend_kwargs={"price": {"input": 1.0, "output": 2.0}}, max_budget=1.0)


async def silent(messages: list[dict[str, str]]) -> str:
    return ""


async def test_ready_answer_wins_over_a_limit_crossed_in_its_turn() -> None:
    rlm = AsyncRLM(scripted(submit("str([llm_query('a'), llm_query('b')])")), other_backends=[echo()], max_subcalls=1)
    completion = await rlm.acompletion("CTX")
    assert "sub-call limit" in completion.response


async def test_children_count_as_sub_calls() -> None:
    child = ScriptedLM(lambda request: submit("context"), model="child")
    root = scripted(cell("rlm_query('a', model='child')\nprint(rlm_query('b', model='child'))"), submit("'never'"))
    rlm = AsyncRLM(root, other_backends=[child], max_depth=2, max_subcalls=1)
    with pytest.raises(SubcallLimitExceededError):
        await rlm.acompletion("CTX")
    assert len(child.calls) == 1


SPIN = "while True: llm_query('x')"
DEAF = "while True:\n    try: llm_query('x')\n    except BaseException: pass"


@pytest.mark.parametrize(
    ("code", "anyio_backend"),
    [(SPIN, "asyncio"), pytest.param(DEAF, "trio", marks=pytest.mark.soak)],
    ids=["spin", "deaf"],
)
async def test_a_cell_that_goes_on_to_ask_after_a_limit_is_ended(code: str) -> None:
    sub, asked = echo(), 0

    def count(*_: object) -> None:
        nonlocal asked
        asked += 1

    root = scripted(cell(code), "enough")
    rlm = AsyncRLM(root, other_backends=[sub], max_subcalls=5, on_limit="answer", on_subcall_complete=count)
    with anyio.fail_after(10):
        completion = await rlm.acompletion("CTX")
    assert (completion.response, completion.stop_reason) == ("enough", "limit")
    assert "the cell went on to ask after a limit was met: it was refused 5,000 times" in told(root, 2)
    assert (len(sub.calls), asked) == (5, pytest.approx(5_005, abs=20))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_a_cell_had_asked_before_it_heard_of_a_limit_does_not_end_it() -> None:
    many = cell(
        "import asyncio\n"
        "one = await asyncio.gather(*[allm_query(str(n)) for n in range(2_000)])\n"
        "two = llm_query_batched(['x'] * 6_000)\n"
        "answer.update(content=len(one + two), ready=True)"
    )
    rlm = AsyncRLM(scripted(many), other_backends=[echo()], max_subcalls=5)
    with anyio.fail_after(10):
        assert (await rlm.acompletion("CTX")).response == "8000"


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(1000)", "llm_query('hang')"])
async def test_the_deadline_cuts_through_anything(code: str, no_leaks: None) -> None:
    async def sub(messages: list[dict[str, str]]) -> str:
        await anyio.sleep_forever()
        return ""

    rlm = AsyncRLM(scripted(cell(code), submit("'late'")), other_backends=[sub], max_timeout=0.7)
    with anyio.fail_after(15), pytest.raises(TimeoutExceededError) as caught:
        await rlm.acompletion("CTX")
    assert caught.value.timeout == 0.7


async def test_on_limit_answer_gets_one_last_turn() -> None:
    root = scripted(cell("llm_query('a')\nllm_query('b')\nprint('seen')"), "the answer from what there is")
    rlm = AsyncRLM(root, other_backends=[echo()], max_subcalls=1, on_limit="answer")
    completion = await rlm.acompletion("CTX")
    assert (completion.response, completion.stop_reason) == ("the answer from what there is", "limit")
    assert "sub-call limit" in told(root, 2)
    assert "seen" in told(root, 2)


async def test_on_limit_answer_keeps_time_for_its_last_turn() -> None:
    root = scripted(cell("while True: pass"), "what I know")
    rlm = AsyncRLM(root, max_timeout=2.0, on_limit="answer")
    with anyio.fail_after(15):
        completion = await rlm.acompletion("CTX")
    assert (completion.response, completion.stop_reason) == ("what I know", "limit")


async def test_token_limit_is_over_the_whole_tree() -> None:
    usage = LMUsage(input_tokens=400, output_tokens=100)
    root = ScriptedLM(lambda request: LMReply(text=cell("llm_query('x')"), usage=usage))
    sub = ScriptedLM(lambda request: LMReply(text="ok", usage=usage))
    with anyio.fail_after(30), pytest.raises(TokenLimitExceededError) as caught:
        await AsyncRLM(root, other_backends=[sub], max_tokens=20_000).acompletion("CTX")
    assert caught.value.tokens_used <= 21_000


async def test_errors_in_a_row_end_a_run_and_warnings_do_not() -> None:
    with pytest.raises(ErrorThresholdExceededError) as caught:
        await AsyncRLM(scripted(cell("1/0"), cell("1/0")), max_errors=2).acompletion("CTX")
    assert "ZeroDivisionError" in (caught.value.last_error or "")
    warn = cell("import sys; print('w', file=sys.stderr)")
    completion = await AsyncRLM(scripted(warn, warn, submit("'ok'")), max_errors=2).acompletion("CTX")
    assert completion.response == "ok"


async def test_sub_models_are_chosen_by_depth_and_by_name() -> None:
    model = by_context(
        submit("rlm_query('go') + llm_query('0')"), submit("llm_query('1') + llm_query('2', model='first')")
    )
    first = ScriptedLM(lambda request: "F" + request.messages[-1].content, model="first")
    second = ScriptedLM(lambda request: "S" + request.messages[-1].content, model="second")
    rlm = AsyncRLM(model, other_backends=[first, second], max_depth=2)
    with anyio.fail_after(30):
        completion = await rlm.acompletion("CTX", "QUESTION")
    assert completion.response == "S1F2F0"


async def test_callbacks_hear_everything_and_may_fail() -> None:
    heard: list[tuple[object, ...]] = []

    async def on_iteration_complete(depth: int, turn: int, seconds: float) -> None:
        heard.append(("done", depth, turn))

    def on_subcall_complete(depth: int, model: str, seconds: float, error: str | None) -> None:
        raise RuntimeError("a callback's own fault")

    rlm = AsyncRLM(
        scripted(cell("llm_query('hello')"), submit("'ok'")),
        other_backends=[echo(model="sub")],
        on_subcall_start=lambda *args: heard.append(("sub", *args)),
        on_subcall_complete=on_subcall_complete,
        on_iteration_start=lambda *args: heard.append(("start", *args)),
        on_iteration_complete=on_iteration_complete,
    )
    assert (await rlm.acompletion("CTX")).response == "ok"
    assert heard == [("start", 0, 1), ("sub", 1, "sub", "hello"), ("done", 0, 1), ("start", 0, 2), ("done", 0, 2)]


async def test_what_goes_wrong_in_a_child_is_told_of_the_child() -> None:
    busy = iter([True])

    def model(request: LMRequest) -> str:
        if "QUESTION" in request.messages[1].content:
            return submit("rlm_query('go')")
        if next(busy, False):
            raise LMError("busy", kind="server", retryable=True, retry_after=0.01)
        return submit("'child'")

    failed: set[str] = set()

    def once(name: str) -> Callable[..., None]:
        def failing(first: Any, *_: Any) -> None:
            if getattr(first, "depth", first) == 1 and name not in failed:
                failed.add(name)
                raise ValueError(name)

        return failing

    names = ("approve", "on_iteration_start", "on_iteration_complete", "on_subcall_start", "on_subcall_complete")
    rlm = AsyncRLM(ScriptedLM(model), max_depth=2, **{name: once(name) for name in names})
    places: dict[str, tuple[str | None, int]] = {}
    with anyio.fail_after(30):
        async with rlm.astream("CTX", "QUESTION") as stream:
            async for event in stream:
                if isinstance(event, ListenerFailed):
                    places[event.error.removeprefix("ValueError: ")] = event.parent_id, event.depth
                elif isinstance(event, RequestWaiting):
                    places["waiting"] = event.parent_id, event.depth
    root, child = (None, 0), (stream.result.run_id, 1)
    # A sub-call is the run's whose cell makes it.
    assert places.pop("on_subcall_start") == places.pop("on_subcall_complete") == root
    assert places == dict.fromkeys(("approve", "on_iteration_start", "on_iteration_complete", "waiting"), child)


@pytest.mark.parametrize("events", range(0, 24, 2))
async def test_cancelled_after_any_event_nothing_is_left(events: int, no_leaks: None) -> None:
    model = by_context(cell("print(llm_query_batched(['a', 'b']))\nrlm_query('go')"), submit("llm_query('c')"))
    sub = echo()
    seen = 0
    async with AsyncRLM(model, other_backends=[sub], max_depth=2, max_iterations=3) as rlm:
        with anyio.fail_after(20):
            async with rlm.astream("CTX", "QUESTION") as stream:
                async for _ in stream:
                    seen += 1
                    if seen > events:
                        break
        asked = len(model.calls) + len(sub.calls)
        await anyio.lowlevel.checkpoint()
        assert len(model.calls) + len(sub.calls) == asked


async def test_a_child_that_a_limit_cut_off_says_which() -> None:
    async def never(messages: list[dict[str, str]]) -> str:
        await anyio.sleep_forever()
        return ""

    rlm = AsyncRLM(scripted(cell("rlm_query('x', model='never')")), other_backends=[never], max_depth=2, max_timeout=2)
    seen: list[RunFinished] = []

    async def listen() -> None:
        async with rlm.astream("CTX") as events:
            async for event in events:
                if isinstance(event, RunFinished):
                    seen.append(event)

    with anyio.fail_after(15), pytest.raises(TimeoutExceededError):
        await listen()
    (child,) = [event for event in seen if event.depth == 1]
    assert child.stop_reason == "cancelled"
    assert child.error is not None
    assert "TimeoutExceededError" in child.error
