"""A history that nears the window of its model is summarised; all of it stays in the REPL."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import anyio
import pytest

from asyncrlm import RLM, AsyncRLM, LMError, TokenLimitExceededError
from asyncrlm.events import Event, HistoryCompacted
from asyncrlm.lm.base import LMReply, LMRequest, LMUsage
from asyncrlm.testing import ScriptedLM

from .helpers import cell, submit

pytestmark = pytest.mark.anyio

WINDOW = 6_000
BIG = cell("print('x' * 9_000)")
WANTED = "Before it goes on, write down"


def is_summary(request: LMRequest) -> bool:
    return WANTED in request.messages[-1].content


def model(*turns: Any) -> ScriptedLM:
    """Replies with `turns` in order, and with a numbered summary where it is asked for one."""
    left, summaries = list(turns), iter(range(1, 100))

    def reply(request: LMRequest) -> Any:
        return f"SUMMARY {next(summaries)}" if is_summary(request) else left.pop(0)

    return ScriptedLM(reply)


def compacting(lm: ScriptedLM, **settings: Any) -> AsyncRLM:
    return AsyncRLM(lm, backend_kwargs={"context_window": WINDOW}, compaction=True, **settings)


LOOK = cell(
    "roles = [m['role'] for m in history]\n"
    "answer['content'] = [found, len([m for m in history if 'xxxx' in m['content']]), history is history_0,\n"
    "    all(a != b for a, b in zip(roles, roles[1:])), roles[-1]]\nanswer['ready'] = True"
)


async def test_the_prologue_stays_and_the_repl_has_all_of_it() -> None:
    lm = model(cell("found = 42"), BIG, BIG, cell("pass"), LOOK)
    events: list[Event] = []
    with anyio.fail_after(10):
        async with compacting(lm, user_prologue="PROLOGUE").astream("CTX", "QUESTION") as stream:
            async for event in stream:
                events.append(event)
    assert stream.result is not None
    assert stream.result.response == '[42, 2, true, true, "user"]'
    (compacted,) = [event for event in events if isinstance(event, HistoryCompacted)]
    assert compacted.tokens_before > 0.85 * WINDOW > compacted.tokens_after
    assert compacted.summary == "SUMMARY 1"
    asked = [call.messages for call in lm.calls]
    (at,) = [i for i, messages in enumerate(asked) if WANTED in messages[-1].content]
    assert asked[at][1].content == asked[0][1].content
    after = asked[at + 1]
    assert [m.role for m in after] == ["system", "user", "assistant", "user"]
    assert after[:2] == asked[0]
    assert "PROLOGUE" in after[1].content
    assert "QUESTION" in after[1].content
    assert after[2].content == "SUMMARY 1"
    assert "`history`" in after[3].content
    assert "Turn 4" in after[3].content
    for messages in asked:
        assert all(a.role != b.role for a, b in itertools.pairwise(messages))


@pytest.mark.parametrize("compaction", [True, False])
async def test_there_is_a_history_before_there_is_a_summary(compaction: bool) -> None:
    look = (
        "try: found = [len(history), history is history_0, 'QUESTION' in history[1]['content']]\n"
        "except NameError: found = 'none'\nanswer.update(content=found, ready=True)"
    )
    lm = ScriptedLM([cell(look), cell(look)])
    settings: dict[str, Any] = {"backend_kwargs": {"context_window": WINDOW}, "compaction": compaction}
    expected = "[2, true, true]" if compaction else "none"
    with anyio.fail_after(10):
        assert (await AsyncRLM(lm, **settings).acompletion("CTX", "QUESTION")).response == expected
        async with AsyncRLM(ScriptedLM([cell(look), cell(look)]), **settings).session() as chat:
            assert (await chat.acompletion("CTX", "QUESTION")).response == expected
            assert (await chat.acompletion("CTX", "other")).response == "[3, true, true]"


async def test_it_is_done_as_often_as_it_must_be() -> None:
    lm = model(cell("found = 1"), *[BIG] * 6, LOOK)
    with anyio.fail_after(10):
        completion = await compacting(lm).acompletion("CTX")
    assert completion.response == '[1, 6, true, true, "user"]'
    assert sum(is_summary(call) for call in lm.calls) == 3
    assert "summary number 3." in lm.calls[-1].messages[-1].content


async def test_what_the_provider_counts_is_believed() -> None:
    def reply(request: LMRequest) -> LMReply:
        text = "SUMMARY" if is_summary(request) else cell("pass") if len(lm.calls) < 3 else submit("'done'")
        return LMReply(text=text, usage=LMUsage(input_tokens=WINDOW, output_tokens=1))

    lm = ScriptedLM(reply)
    with anyio.fail_after(10):
        assert (await compacting(lm).acompletion("CTX")).response == "done"
    assert [is_summary(call) for call in lm.calls] == [False, True, False, True, False][: len(lm.calls)]


async def test_a_prompt_that_the_provider_finds_too_long_is_compacted() -> None:
    said: list[str] = []

    def reply(request: LMRequest) -> str:
        said.append("summary" if is_summary(request) else "turn")
        if said == ["turn", "turn"]:
            raise LMError("too long", kind="too_long")
        return {1: cell("y = 5"), 3: "SUMMARY", 4: submit("y")}[len(said)]

    with anyio.fail_after(10):
        assert (await compacting(ScriptedLM(reply)).acompletion("CTX")).response == "5"
    assert said == ["turn", "turn", "summary", "turn"]


async def test_a_first_prompt_that_is_too_long_stays_an_error() -> None:
    lm = ScriptedLM([LMError("too long", kind="too_long")])
    with anyio.fail_after(10), pytest.raises(LMError, match="too long"):
        await compacting(lm).acompletion("CTX")


async def test_a_history_too_long_to_be_summarised_is_cut_for_it() -> None:
    sizes: list[int] = []

    def reply(request: LMRequest) -> str:
        if is_summary(request) or "summarise" in request.messages[-1].content:
            sizes.append(request.input_bytes())
            if len(sizes) == 1:
                raise LMError("too long", kind="too_long")
            return "SUMMARY"
        return BIG if len(lm.calls) < 3 else submit("'ok'")

    lm = ScriptedLM(reply)
    with anyio.fail_after(10):
        assert (await compacting(lm).acompletion("CTX")).response == "ok"
    assert sizes[1] < sizes[0]


async def test_children_do_it_too() -> None:
    def reply(request: LMRequest) -> str:
        if is_summary(request):
            return "SUMMARY"
        if "ROOT" in request.messages[1].content:
            return submit("rlm_query('part')")
        turns = sum(m.role == "assistant" for m in request.messages)
        if request.messages[2:] and request.messages[2].content == "SUMMARY":
            return submit("len(history)")
        return BIG if turns < 9 else submit("'never'")

    with anyio.fail_after(10):
        completion = await compacting(ScriptedLM(reply), max_depth=2).acompletion("CTX", "ROOT")
    assert int(completion.response) >= 4


async def test_the_summary_is_under_the_limits_of_the_run() -> None:
    def reply(request: LMRequest) -> LMReply:
        text = "SUMMARY" if is_summary(request) else BIG
        return LMReply(text=text, usage=LMUsage(input_tokens=request.input_bytes() // 3, output_tokens=100))

    lm = ScriptedLM(reply)
    with anyio.fail_after(10), pytest.raises(TokenLimitExceededError) as caught:
        await compacting(lm, max_tokens=20_000).acompletion("CTX")
    assert any(is_summary(call) for call in lm.calls)
    assert caught.value.usage_summary is not None


@pytest.mark.parametrize("kind", ["function", "partial", "object"])
async def test_a_compactor_of_ones_own(kind: str) -> None:
    async def last_two(messages: list[dict[str, str]], ask: Any) -> str:
        asked = await ask([{"role": "user", "content": "name the colour"}])
        return f"{len(messages)} messages, {asked}"

    def reply(request: LMRequest) -> str:
        if request.messages[-1].content == "name the colour":
            return "blue"
        return BIG if len(lm.calls) < 3 else submit("'ok'")

    lm = ScriptedLM(reply)

    class Compactor:
        async def __call__(self, messages: list[dict[str, str]], ask: Any) -> str:
            return await last_two(messages, ask)

    compaction = {"function": last_two, "partial": functools.partial(Compactor()), "object": Compactor()}[kind]
    rlm = AsyncRLM(lm, backend_kwargs={"context_window": WINDOW}, compaction=compaction)
    with anyio.fail_after(10):
        assert (await rlm.acompletion("CTX")).response == "ok"
    assert lm.calls[-1].messages[2].content == "6 messages, blue"


async def test_the_next_completion_of_a_conversation_finds_all_of_it() -> None:
    look = submit("[len([m for m in history_0 if 'xxxx' in m['content']]), 'SUMMARY' in str(history_0)]")
    lm = model(BIG, BIG, cell("pass"), submit("'one'"), look)
    with anyio.fail_after(10):
        async with compacting(lm).session() as chat:
            assert (await chat.acompletion("CTX")).response == "one"
            assert (await chat.acompletion("CTX")).response == "[2, true]"


def test_the_blocking_face_does_it_too() -> None:
    with RLM(model(BIG, BIG, submit("'ok'")), backend_kwargs={"context_window": WINDOW}, compaction=True) as rlm:
        assert rlm.completion("CTX").response == "ok"
