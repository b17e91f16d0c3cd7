"""What the caller's own code raises, whatever it is, is that code's failure, never the program's or a cancellation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, LMClient, LMError, LMReply, LMRequest, RLMLogger
from asyncrlm.events import CellFinished, ListenerFailed
from asyncrlm.lm.base import LMUsage
from asyncrlm.testing import ScriptedLM

from .helpers import cell, scripted, submit, told

pytestmark = pytest.mark.anyio

asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"])


class Unsayable(Exception):
    def __str__(self) -> str:
        raise SystemExit(9)


async def of_a_cancelled_future() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def of_an_unsayable() -> None:
    raise Unsayable


async def of_a_group() -> None:
    raise BaseExceptionGroup("both", [asyncio.CancelledError(), KeyboardInterrupt()])


ODD = [
    pytest.param("asyncio", of_a_cancelled_future, "CancelledError", id="cancelled-future"),
    pytest.param("asyncio", of_a_group, "BaseExceptionGroup", id="group"),
    pytest.param("asyncio", of_an_unsayable, "Unsayable", id="unsayable"),
    pytest.param("trio", of_an_unsayable, "Unsayable", id="unsayable-trio"),
]
odd = pytest.mark.parametrize(("anyio_backend", "raises", "kind"), ODD)


@odd
async def test_of_functions_beside_the_root(raises: Callable[[], Any], kind: str) -> None:
    async def function(*_: object) -> Any:
        await raises()

    code = "for call in (tool, lambda: llm_query('x')):\n    try: print(call())\n    except Exception as e: print(e)"
    root = scripted(cell(code), submit("'done'"))
    failed: list[str] = []
    printed = ""
    rlm = AsyncRLM(
        root,
        other_backends=[function],
        custom_tools={"tool": function},
        on_iteration_start=function,
        on_subcall_start=function,
        on_subcall_complete=function,
        on_iteration_complete=function,
    )
    with anyio.fail_after(10):
        async with rlm.astream("CTX") as events:
            async for event in events:
                if isinstance(event, ListenerFailed):
                    failed.append(event.error)
                if isinstance(event, CellFinished):
                    printed += event.stdout
    assert events.result is not None
    assert events.result.response == "done"
    assert [error.partition(":")[0] for error in failed] == [kind] * 6
    assert len(printed.splitlines()) == 2
    assert all(kind in line for line in printed.splitlines())


@odd
async def test_of_a_hook_that_was_to_approve(raises: Callable[[], Any], kind: str) -> None:
    async def approve(request: object) -> None:
        if not model.calls[1:]:
            await raises()

    model = scripted(cell("print('ran')"), submit("'done'"))
    with anyio.fail_after(10):
        assert (await AsyncRLM(model, approve=approve).acompletion("CTX")).response == "done"
    assert f"approval failed ({kind})" in told(model, 2)


@odd
async def test_of_a_root_model(raises: Callable[[], Any], kind: str) -> None:
    async def model(messages: object) -> Any:
        await raises()

    with anyio.fail_after(10), pytest.raises(LMError, match=f"model raised {kind}") as caught:
        await AsyncRLM(model).acompletion("CTX")
    assert caught.value.run_id


@asyncio_only
async def test_a_task_that_is_cancelled_by_itself_asks_nothing_more() -> None:
    others: list[asyncio.Task[Any]] = []

    async def model(messages: list[Any]) -> str:
        if len(messages) < 3:
            return cell("pass")
        others.extend(asyncio.all_tasks() - before)
        for task in others:
            task.cancel()
        await anyio.sleep_forever()
        return ""

    second = scripted(submit("'done'"))
    before = asyncio.all_tasks()
    call = asyncio.create_task(AsyncRLM([model, second]).acompletion("CTX"))
    with anyio.fail_after(10), pytest.raises(asyncio.CancelledError):
        await call
    assert len(others) > 1
    assert not second.calls


# --- clients of one's own ---------------------------------------------------------------------------------------------


class Mine(LMClient):
    model = "mine"

    def __init__(self, replies: Callable[[LMRequest], Any]) -> None:
        self.replies = replies

    async def acomplete(self, request: LMRequest) -> LMReply:
        return self.replies(request)


def resets(request: LMRequest) -> LMReply:
    raise ConnectionResetError("the peer is gone")


OWN = [
    pytest.param(resets, "mine raised ConnectionResetError: the peer is gone", "other", id="raises"),
    pytest.param(lambda _: "text", "mine returned str, not an LMReply", "bad_reply", id="str"),
    pytest.param(lambda _: LMReply(text=None), "whose text is NoneType, not str", "bad_reply", id="no-text"),  # type: ignore[arg-type]
    pytest.param(lambda _: LMReply(text="x", usage=None), "whose usage is NoneType", "bad_reply", id="no-usage"),  # type: ignore[arg-type]
    pytest.param(
        lambda _: LMReply(text="x", usage=LMUsage(input_tokens="5")),  # type: ignore[arg-type]
        "whose usage.input_tokens is str, not Real",
        "bad_reply",
        id="count",
    ),
    pytest.param(lambda _: LMReply(text="x", finish_reason=3), "whose finish_reason is int", "bad_reply", id="reason"),  # type: ignore[arg-type]
]


@asyncio_only
@pytest.mark.parametrize(("replies", "said", "kind"), OWN)
async def test_a_client_that_fails_in_a_way_of_its_own(replies: Any, said: str, kind: str) -> None:
    with anyio.fail_after(10):
        with pytest.raises(LMError, match=said) as caught:
            await AsyncRLM(Mine(replies)).acompletion("CTX")
        assert (caught.value.kind, caught.value.retryable) == (kind, False)
        assert caught.value.run_id
        assert caught.value.usage_summary is not None
        root = scripted(submit("llm_query('x')"))
        completion = await AsyncRLM(root, other_backends=[Mine(replies)]).acompletion("CTX")
        assert completion.response.startswith("Error: mine ")
        assert said in completion.response


@asyncio_only
async def test_an_exception_of_a_script() -> None:
    with anyio.fail_after(10), pytest.raises(LMError, match="scripted raised ValueError: no"):
        await AsyncRLM(ScriptedLM([ValueError("no")])).acompletion("CTX")


@pytest.mark.parametrize("name", [None, "", 5])
def test_a_client_without_a_name(name: Any) -> None:
    client = Mine(resets)
    client.model = name
    with pytest.raises(ConfigurationError, match="give Mine a `model`"):
        AsyncRLM(client)


# --- what else is the caller's ----------------------------------------------------------------------------------------


@asyncio_only
async def test_of_a_function_that_compacts() -> None:
    async def compact(messages: object, ask: object) -> str:
        raise KeyError("gone")

    async def none(messages: object, ask: object) -> Any:
        return None

    for function, said in ((compact, "compaction raised KeyError: 'gone'"), (none, "compaction returned NoneType")):
        rlm = AsyncRLM(
            scripted(cell("print('x' * 9_000)"), cell("print('x' * 9_000)"), submit("'done'")),
            compaction=function,
            backend_kwargs={"context_window": 3_000},
        )
        with anyio.fail_after(10), pytest.raises(LMError, match=said):
            await rlm.acompletion("CTX")


class Picky(msgspec.Struct):
    number: int

    def __post_init__(self) -> None:
        if self.number < 5:
            raise KeyError("too small")


@asyncio_only
async def test_of_a_class_that_an_answer_must_be_of() -> None:
    root = scripted(submit("{'number': 1}"), submit("{'number': 7}"))
    with anyio.fail_after(10):
        assert (await AsyncRLM(root).acompletion("CTX", response_format=Picky)).parsed == Picky(7)
    assert "too small" in told(root, 2)


@asyncio_only
async def test_of_a_tag_that_has_no_text(tmp_path: Path) -> None:
    class Untold:
        def __repr__(self) -> str:
            raise SystemExit(9)

    rlm = AsyncRLM(scripted(submit("'done'")), logger=RLMLogger(log_dir=tmp_path))
    with anyio.fail_after(10):
        assert (await rlm.acompletion("CTX", tags={"who": Untold()})).response == "done"
    (log,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[-1]["type"] == "RunFinished"
    assert "SystemExit" in next(line["tags"]["who"] for line in lines if line.get("type") == "RunStarted")
