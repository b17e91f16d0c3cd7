"""What a caller sees of the tasks that its calls run in: nothing."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncGenerator
from contextvars import ContextVar

import anyio
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, LMError, Repl
from asyncrlm.events import CellFinished, ListenerFailed

from .cases.runs import nothing_left
from .helpers import cell, scripted, submit

pytestmark = pytest.mark.anyio

one = pytest.mark.parametrize("anyio_backend", ["asyncio"])
REQUEST: ContextVar[str] = ContextVar("REQUEST", default="none")


async def test_the_callers_context_variables_reach_all_that_is_called() -> None:
    seen: dict[str, str] = {}

    def look(name: str) -> str:
        seen[name] = REQUEST.get()
        return name

    async def root(messages: list[dict[str, str]]) -> str:
        look("model")
        return cell("tool('tool')\nllm_query('x')") + submit("'done'")

    async def sub(messages: list[dict[str, str]]) -> str:
        return look("sub-call")

    rlm = AsyncRLM(
        root,
        other_backends=[sub],
        custom_tools={"tool": look},
        on_iteration_start=lambda *_: look("callback"),
        on_iteration_complete=lambda *_: look("callback"),
    )
    everywhere = {"model", "tool", "sub-call", "callback"}
    for request in ("first", "second"):
        REQUEST.set(request)
        await rlm.acompletion("CTX")
        assert seen == dict.fromkeys(everywhere, request)
    async with Repl(custom_tools={"tool": look}) as repl:
        await repl.execute("tool('tool')")
    assert seen["tool"] == "second"


async def test_what_one_callback_sets_the_next_one_finds() -> None:
    began: ContextVar[int] = ContextVar("began")
    found: list[int] = []
    rlm = AsyncRLM(
        scripted(cell("x = 1"), submit("'done'")),
        on_iteration_start=lambda _depth, turn: began.set(turn),
        on_iteration_complete=lambda *_: found.append(began.get()),
    )
    await rlm.acompletion("CTX")
    assert found == [1, 2]


async def test_an_error_comes_with_its_traceback_and_its_cause() -> None:
    class Broken(Exception):
        pass

    async def model_that_breaks(messages: list[dict[str, str]]) -> str:
        raise LMError("broken", kind="other") from Broken("the cause")

    with pytest.raises(LMError) as caught:
        await AsyncRLM(model_that_breaks).acompletion("CTX")
    assert isinstance(caught.value.__cause__, Broken)
    text = "".join(traceback.format_exception(caught.value))
    assert "in model_that_breaks" in text
    assert "in test_an_error_comes_with_its_traceback_and_its_cause" in text


@one
async def test_a_timeout_of_asyncio_is_one() -> None:
    async def never(messages: list[dict[str, str]]) -> str:
        return await anyio.sleep_forever()

    with nothing_left():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await AsyncRLM(never).acompletion("CTX")
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        assert (await AsyncRLM(scripted(submit("'on'"))).acompletion("CTX")).response == "on"


@one
async def test_a_task_group_of_asyncio_waits_for_the_cleaning_up() -> None:
    asked = asyncio.Event()

    async def never(messages: list[dict[str, str]]) -> str:
        asked.set()
        return await anyio.sleep_forever()

    async def fails() -> None:
        await asked.wait()
        raise ValueError("a neighbour")

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(AsyncRLM(never).acompletion("CTX"))
            group.create_task(fails())

    with nothing_left():
        with pytest.raises(ExceptionGroup) as caught:
            await both()
        assert [str(error) for error in caught.value.exceptions] == ["a neighbour"]


async def test_a_model_that_cancels_itself_ends_its_run_alone() -> None:
    async def gives_up(messages: list[dict[str, str]]) -> str:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anyio.lowlevel.checkpoint()
        return submit("'done'")

    assert (await AsyncRLM(gives_up).acompletion("CTX")).response == "done"


async def test_what_ends_a_program_is_in_an_iterator_its_failure() -> None:
    async def context() -> AsyncGenerator[str]:
        yield "CTX"
        raise SystemExit(3)

    with nothing_left(), pytest.raises(ConfigurationError, match="iterator given as prompt raised SystemExit: 3"):
        await AsyncRLM(scripted()).acompletion(context())


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [SystemExit("out"), GeneratorExit("out"), Stop("out")], ids=repr)
async def test_what_ends_a_program_is_in_a_callback_an_event_and_in_a_call_its_failure(error: BaseException) -> None:
    def plain(*_: object) -> bool:
        raise error

    async def later(*_: object) -> str:
        raise error

    code = "for call in (tool, lambda: llm_query('x')):\n    try: print(call())\n    except Exception as e: print(e)"
    failed: list[str] = []
    rlm = AsyncRLM(
        scripted(cell(code), submit("'done'")),
        other_backends=[later],
        custom_tools={"tool": later},
        on_iteration_start=plain,
        on_iteration_complete=later,
    )
    async with rlm.astream("CTX") as events:
        async for event in events:
            if isinstance(event, CellFinished) and event.turn == 1:
                kind = type(error).__name__
                assert all(f"{kind}: out" in line or f"raised {kind}" in line for line in event.stdout.splitlines())
                assert len(event.stdout.splitlines()) == 2
            if isinstance(event, ListenerFailed):
                failed.append(event.error)
    assert events.result is not None
    assert events.result.response == "done"
    assert failed == [f"{type(error).__name__}: out"] * 4
