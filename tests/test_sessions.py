"""Conversations: completions that keep one REPL between them."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from asyncrlm import RLM, AsyncRLM, ConfigurationError, TimeoutExceededError
from asyncrlm.lm.base import LMRequest
from asyncrlm.testing import ScriptedLM

from .helpers import cell

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]

CAP = 30.0


def says(expression: str, before: str = "") -> str:
    return cell(f"{before}\nanswer['content'], answer['ready'] = {expression}, True")


def rlm(*replies: Any, **settings: Any) -> AsyncRLM:
    return AsyncRLM(ScriptedLM(replies), **settings)


async def test_the_repl_is_kept() -> None:
    model = ScriptedLM(
        [says("'first'", "x = 41"), says("(x + 1, context, context_0, context_1)"), says("len(history_1)")]
    )
    async with AsyncRLM(model).session() as chat:
        assert (await chat.acompletion("one", "Q1")).response == "first"
        assert (await chat.acompletion("two", "Q2")).response == '[42, "two", "one", "two"]'
        assert int((await chat.acompletion("three", "Q3")).response) >= 3
    told = [call.messages[-1].content for call in model.calls]
    assert "conversation" not in told[0]
    assert "This is completion 2 of a conversation" in "\n".join(m.content for m in model.calls[1].messages)
    assert "Q1" not in "\n".join(m.content for m in model.calls[1].messages)


async def test_histories_are_whole() -> None:
    look = says("[history_0[-1]['role'], 'Q1' in str(history_0), history is history_1, 'Q2' in str(history)]")
    async with rlm(says("'a'"), says("1"), look).session() as chat:
        for number in (1, 2):
            await chat.acompletion("text", f"Q{number}")
        assert (await chat.acompletion("text", "Q3")).response == '["assistant", true, true, true]'


@pytest.mark.parametrize("how", ["error", "limit", "cancelled", "killed"])
async def test_a_completion_that_fails_leaves_the_session_usable(how: str) -> None:
    endless = cell("y = 2\nimport time\nwhile True: time.sleep(0.01)")
    second = {"error": "", "limit": cell("y = 2"), "cancelled": endless, "killed": cell("import os; os._exit(3)")}[how]
    third = says("'x' in globals() and (x, context, context_0)")
    model = ScriptedLM(
        [says("'ok'", "x = [1]")]
        + {"error": [], "limit": [second], "cancelled": [second], "killed": [second, says("'after'")]}[how]
        + ([ValueError("no")] if how in ("error", "limit") else [])
        + [third]
    )
    async with AsyncRLM(model).session() as chat:
        await chat.acompletion("one")
        with anyio.fail_after(CAP):
            if how == "cancelled":
                with anyio.move_on_after(1.0) as scope:
                    await chat.acompletion("two")
                assert scope.cancelled_caught
            elif how == "killed":
                assert (await chat.acompletion("two")).response == "after"
            else:
                with pytest.raises(Exception, match="no"):
                    await chat.acompletion("two")
            response = (await chat.acompletion("three")).response
    assert response == ("false" if how == "killed" else '[[1], "three", "one"]')
    if how == "killed":
        assert "was lost" in "\n".join(m.content for m in model.calls[-1].messages)


async def test_a_deadline_of_one_completion_is_its_own() -> None:
    model = ScriptedLM([cell("import time; time.sleep(60)"), says("context")])
    async with AsyncRLM(model).session() as chat:
        with pytest.raises(TimeoutExceededError), anyio.fail_after(CAP):
            await chat.acompletion("one", max_timeout=0.5)
        assert (await chat.acompletion("two")).response == "two"


async def test_completions_queue_and_sessions_run_side_by_side() -> None:
    running = most = 0
    both = anyio.Event()

    async def model(messages: list[dict[str, str]]) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 2:
            both.set()
        if most < 2 and "wait" in messages[1]["content"]:
            await both.wait()
        await anyio.lowlevel.checkpoint()
        running -= 1
        return says("context")

    got: list[str] = []

    async def ask(chat: Any, prompt: str, question: str = "") -> None:
        got.append((await chat.acompletion(prompt, question or None)).response)

    with anyio.fail_after(CAP):
        async with AsyncRLM(model) as engine:
            async with engine.session() as chat, anyio.create_task_group() as group:
                for number in range(4):
                    group.start_soon(ask, chat, str(number))
            assert sorted(got) == ["0", "1", "2", "3"]
            assert most == 1
            async with engine.session() as one, engine.session() as two, anyio.create_task_group() as group:
                group.start_soon(ask, one, "a", "wait")
                group.start_soon(ask, two, "b", "wait")
            assert most == 2


async def test_a_session_is_used_while_it_is_open() -> None:
    engine = rlm(says("'a'"))
    chat = engine.session()
    with pytest.raises(ConfigurationError, match="not open yet: use `async with"):
        await chat.acompletion("x")
    async with chat:
        await chat.acompletion("x")
        with pytest.raises(ConfigurationError, match="entered once"):
            await chat.__aenter__()
    with pytest.raises(ConfigurationError, match="closed; open another"):
        await chat.acompletion("x")
    await chat.aclose()


async def test_closed_under_a_completion() -> None:
    begun = anyio.Event()

    async def model(messages: list[dict[str, str]]) -> str:
        begun.set()
        await anyio.sleep_forever()
        return ""

    async def ask(chat: Any) -> None:
        with pytest.raises(ConfigurationError, match="was closed before the completion ended"):
            await chat.acompletion("x")

    with anyio.fail_after(CAP):
        async with AsyncRLM(model).session() as chat, anyio.create_task_group() as group:
            group.start_soon(ask, chat)
            group.start_soon(ask, chat)
            await begun.wait()
            await chat.aclose()


async def test_persistent_is_one_session_of_the_block() -> None:
    engine = rlm(says("'a'", "x = 1"), says("x + len(context)"), persistent=True)
    with pytest.raises(ConfigurationError, match="use `async with AsyncRLM"):
        await engine.acompletion("one")
    async with engine:
        await engine.acompletion("one")
        assert (await engine.acompletion("two")).response == "4"


async def test_tools_and_limits_of_one_completion() -> None:
    use = says("str(tool(1))")
    gone = says("'tool' in globals()")
    async with rlm(use, use, gone).session() as chat:
        first = await chat.acompletion("x", custom_tools={"tool": lambda n: n + 1})
        second = await chat.acompletion("x", custom_tools={"tool": lambda n: n + 2})
        third = await chat.acompletion("x")
    assert [first.response, second.response, third.response] == ["2", "3", "false"]


async def test_a_stream_of_a_session() -> None:
    async with rlm(says("'a'", "x = 1"), says("x")).session() as chat:
        await chat.acompletion("x")
        async with chat.astream("y") as events:
            kinds = [type(event).__name__ async for event in events]
        assert events.result is not None
        assert events.result.response == "1"
    assert "CellFinished" in kinds


async def test_children_know_nothing_of_it() -> None:
    def reply(request: LMRequest) -> str:
        text = "\n".join(message.content for message in request.messages)
        if "child" in text:
            return says("'x' in globals()")
        return says("rlm_query('child: look')") if "two" in text else says("'a'", "x = 1")

    async with AsyncRLM(ScriptedLM(reply), max_depth=2).session() as chat:
        await chat.acompletion("x", "one")
        assert (await chat.acompletion("y", "two")).response in ("False", "false")


def test_blocking() -> None:
    with RLM(ScriptedLM([says("'a'", "x = 1"), says("x"), says("x + 1")])) as engine, engine.session() as chat:
        assert chat.completion("one").response == "a"
        assert chat.completion("two").response == "1"
        with chat.stream("three") as events:
            list(events)
        assert events.result is not None
        assert events.result.response == "2"
    with pytest.raises(ConfigurationError):
        chat.completion("four")


def test_blocking_from_threads() -> None:
    got: list[str] = []

    def ask(chat: Any) -> None:
        got.append(chat.completion("x").response)

    code = says("len(seen)", "seen = globals().get('seen', []) + [1]")
    with RLM(ScriptedLM(lambda _: code)) as engine, engine.session() as chat:
        threads = [threading.Thread(target=ask, args=(chat,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(CAP)
    assert sorted(got) == ["1", "2", "3"]


def test_blocking_persistent() -> None:
    with RLM(ScriptedLM([says("'a'", "x = 1"), says("x")]), persistent=True) as engine:
        engine.completion("one")
        assert engine.completion("two").response == "1"
