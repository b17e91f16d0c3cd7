"""Every call gets exactly one reply, whatever becomes of it."""

from __future__ import annotations

import contextlib
import re
from typing import Any, cast

import anyio
import pytest
from repl_fakes import FakeSandbox, FunctionServices, Worker, fake_session

from asyncrlm.errors import BudgetExceededError, LMError, LMErrorKind, SandboxLost
from asyncrlm.repl import broker as broker_module
from asyncrlm.repl.broker import Broker
from asyncrlm.repl.channel import Channel
from asyncrlm.repl.clock import CellClock
from asyncrlm.repl.link import Link
from asyncrlm.repl.messages import Execute
from asyncrlm.repl.session import SubCall
from asyncrlm.repl.tool_desk import ToolDesk
from asyncrlm.repl.tools import HostTools

pytestmark = pytest.mark.anyio

# ---- one reply to each call ------------------------------------------------------------------------------------------


async def replies_to(
    calls: list[dict[str, Any]],
    *,
    services: FunctionServices | None = None,
    tools: dict[str, Any] | None = None,
    cancel: tuple[int, ...] = (),
    expect: int | None = None,
    **options: Any,
) -> tuple[dict[int, dict[str, Any]], Any]:
    """Runs one cell that makes `calls`, cancels some, takes as many replies as are due, and ends."""
    replies: dict[int, dict[str, Any]] = {}

    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, _ = await worker.cell()
        for number, call in enumerate(calls):
            await worker.send(t="call", **{"id": number, **call})
        for number in cancel:
            await worker.send(t="cancel", id=number)
        for _ in range(len(calls) if expect is None else expect):
            frame = await worker.take()
            assert frame.pop("t") == "reply"
            assert frame["id"] not in replies
            replies[frame.pop("id")] = frame
        await worker.done(cell)
        while True:
            frame = await worker.take()
            assert frame["t"] == "dropped"
            dropped = [number for first, last in frame["ids"] for number in range(first, last + 1)]
            assert not replies.keys() & set(dropped)
            replies.update({number: {"dropped": True} for number in dropped})

    outcome = None
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, opened = fake_session(group, script, services=services, tools=HostTools(tools), **options)
            async with session:
                outcome = await session.execute("")
                while len(replies) < len([call for call in calls if call.get("kind") != "none"]):
                    await anyio.lowlevel.checkpoint()
            assert opened[0].killed.is_set()
            group.cancel_scope.cancel()
    return replies, outcome


def raising(*errors: Exception) -> FunctionServices:
    left = list(errors)

    async def answer(call: SubCall) -> str:
        raise left.pop(0)

    return FunctionServices(answer)


@pytest.mark.parametrize(
    ("kind", "error", "reply"),
    [
        (
            "llm",
            LMError("slow down", kind="rate_limit", retryable=True),
            {"error": "slow down", "kind": "rate_limit", "retryable": True},
        ),
        ("rlm", BudgetExceededError(1.0, 0.5, "no money"), {"error": "no money", "kind": "limit"}),
        ("rlm", SandboxLost("gone"), {"error": "gone", "kind": "child"}),
        ("rlm", ValueError("oops"), {"error": "ValueError: oops", "kind": "child"}),
        ("llm", ValueError(), {"error": "ValueError", "kind": "other"}),
        (
            "rlm",
            ExceptionGroup("g", [ExceptionGroup("h", [LMError("in a group", kind="quota")])]),
            {"error": "in a group", "kind": "quota"},
        ),
    ],
)
async def test_errors_of_services_become_replies(kind: str, error: Exception, reply: dict[str, Any]) -> None:
    replies, outcome = await replies_to([{"kind": kind, "prompt": "p"}], services=raising(error))
    assert replies == {0: reply}
    assert outcome.failures == {reply["kind"]: 1}
    assert "Traceback" not in replies[0]["error"]


async def test_third_permanent_failure_of_a_kind_raises_in_the_cell() -> None:
    kinds: list[LMErrorKind] = [
        "authentication", "permission", "authentication", "server", "server", "server", "authentication"
    ]  # fmt: skip

    async def answer(call: SubCall) -> str:
        raise LMError("no", kind=cast("LMErrorKind", call.prompt))

    calls = [{"kind": "llm", "prompt": kind} for kind in kinds]
    replies, outcome = await replies_to(calls, services=FunctionServices(answer))
    assert [reply["kind"] for reply in replies.values() if reply.get("raises")] == ["authentication"]
    assert [reply for reply in replies.values() if reply["kind"] == "authentication"][-1]["raises"]
    assert outcome.failures == {"authentication": 3, "permission": 1, "server": 3}


async def test_cancelled_calls_stop_and_are_answered_once() -> None:
    stopped: list[Any] = []

    async def answer(call: SubCall) -> str:
        try:
            await anyio.sleep_forever()
        finally:
            stopped.append(call.prompt)
        return ""

    replies, _ = await replies_to(
        [{"kind": "llm", "prompt": "a"}, {"kind": "rlm", "prompt": "b"}, {"kind": "llm", "prompt": "c"}],
        services=FunctionServices(answer),
        cancel=(0, 1, 1),
        expect=2,
    )
    cancelled = {"error": "cancelled", "kind": "cancelled"}
    assert replies == {0: cancelled, 1: cancelled, 2: {"dropped": True}}  # the third by the end of the cell
    # A call that is cancelled before its task has begun never reaches the services.
    assert set(stopped) <= {"a", "b", "c"}


async def test_more_calls_than_tasks_all_get_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "MOST_TASKS", 7)
    calls = [{"kind": "llm", "prompt": str(number)} for number in range(50)]
    go = anyio.Event()

    async def answer(call: SubCall) -> str:
        await go.wait()
        return f"re: {call.prompt}"

    async def release() -> None:
        await anyio.wait_all_tasks_blocked()
        go.set()

    async with anyio.create_task_group() as group:
        group.start_soon(release)
        replies, outcome = await replies_to(calls, services=FunctionServices(answer), cancel=(48,))
    assert replies.pop(48) == {"error": "cancelled", "kind": "cancelled"}  # it had not begun
    assert [replies[number]["value"] for number in sorted(replies)] == [f"re: {n}" for n in range(50) if n != 48]
    assert outcome.subcalls == 49


async def test_the_end_of_a_cell_drops_calls_without_a_frame_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "MOST_TASKS", 2)
    calls = [{"kind": "llm", "prompt": "hang"} for _ in range(5)]

    async def answer(call: SubCall) -> str:
        await anyio.sleep_forever()
        return ""

    services = FunctionServices(answer)
    replies, outcome = await replies_to(calls, services=services, expect=0)
    assert list(replies.values()) == [{"dropped": True}] * 5
    assert outcome.failures == {}
    assert len(services.calls) <= 2  # the end of the cell begins none that waited


async def test_without_task_handles_calls_can_be_cancelled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an anyio that has none yet."""
    monkeypatch.setattr(broker_module, "getattr", lambda *_: None, raising=False)

    async def answer(call: SubCall) -> str:
        if call.prompt == "hang":
            await anyio.sleep_forever()
        return "ok"

    calls = [{"kind": "llm", "prompt": "hang"}, {"kind": "llm", "prompt": "x"}]
    replies, _ = await replies_to(calls, services=FunctionServices(answer), cancel=(0,))
    assert replies == {0: {"error": "cancelled", "kind": "cancelled"}, 1: {"value": "ok"}}


@pytest.mark.parametrize(
    "prompt", [5, {"a": 1}, [], [{"role": "user"}], {"$": "tuple", "v": []}, {"$": "lies", "v": 0}]
)
async def test_what_is_no_prompt_fails_its_call(prompt: Any) -> None:
    services = FunctionServices()
    replies, _ = await replies_to([{"kind": "llm", "prompt": prompt}], services=services)
    assert replies[0]["error"]
    assert not services.calls


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "the content of message 1 must be text, not NoneType"),
        ({"a": 1}, "must be text, not dict"),
        ([{"type": "image_url", "image_url": {}}], r"a part that is no text \(image_url\)"),
        (["a", 5], r"a part that is no text \(int\)"),
    ],
)
async def test_a_message_whose_content_is_no_text_is_named(content: Any, error: str) -> None:
    services = FunctionServices()
    prompt = [{"role": "system", "content": ""}, {"role": "user", "content": content}]
    replies, _ = await replies_to([{"kind": "llm", "prompt": prompt}], services=services)
    assert replies[0]["kind"] == "bad_request"
    assert re.search(error, replies[0]["error"])
    assert not services.calls


async def test_a_model_named_by_a_long_text_is_none() -> None:
    services = FunctionServices()
    replies, _ = await replies_to([{"kind": "llm", "prompt": "m", "model": "text " * 5_000}], services=services)
    assert "this one has 25,000 characters" in replies[0]["error"]
    assert (replies[0]["kind"], services.calls) == ("bad_request", [])


async def test_a_schema_of_many_values_is_not_read() -> None:
    services = FunctionServices()
    calls = [{"kind": "rlm", "prompt": "m", "schema": {"enum": [[0] * 10] * 2_000}}]
    replies, _ = await replies_to(calls, services=services)
    assert "schema= is too large" in replies[0]["error"]
    assert (replies[0]["kind"], services.calls) == ("bad_request", [])


async def test_texts_in_the_parts_of_a_message_are_one_text() -> None:
    services = FunctionServices()
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    await replies_to([{"kind": "llm", "prompt": [{"role": "user", "content": parts}]}], services=services)
    assert services.calls[0].prompt == [{"role": "user", "content": "abc"}]


async def test_what_waits_for_one_model_keeps_nobody_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "MOST_TASKS", 3)
    go = anyio.Event()

    async def answer(call: SubCall) -> str:
        if call.model == "slow":
            await go.wait()
        else:
            go.set()
        return ""

    calls = [{"kind": "llm", "prompt": "x", "model": model} for model in (*["slow"] * 9, "quick")]
    replies, _ = await replies_to(calls, services=FunctionServices(answer))
    assert len(replies) == 10


async def test_an_exception_without_a_text_is_an_error_reply() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise SystemExit

    replies, _ = await replies_to([{"kind": "llm", "prompt": "p"}], services=raising(Mute()))
    assert "its text can't be had: SystemExit" in replies[0]["error"]


async def test_prompts_and_answers_may_hold_any_text() -> None:
    async def answer(call: SubCall) -> str:
        assert isinstance(call.prompt, list)
        return call.prompt[0]["content"] + "\ud800\x00é😀"

    message = {"role": "user", "content": {"$": "str", "v": "7aCA"}}  # a lone surrogate
    replies, _ = await replies_to([{"kind": "llm", "prompt": [message]}], services=FunctionServices(answer))
    from asyncrlm.repl.worker import codec

    assert codec.decode(replies[0]["value"]) == "\ud800\ud800\x00é😀"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio's Cancelled can't be made by hand
async def test_a_call_whose_task_is_torn_down_is_answered() -> None:
    """asyncio's own cancellation, raised by code that awaits a cancelled future, is no answer and no error."""

    async def answer(call: SubCall) -> str:
        raise anyio.get_cancelled_exc_class()

    replies, outcome = await replies_to([{"kind": "llm", "prompt": "a"}] * 2, services=FunctionServices(answer))
    cancelled = {"error": "cancelled", "kind": "cancelled"}
    assert replies == {0: cancelled, 1: cancelled}
    assert outcome.lost is None


async def test_limits_that_fail_are_an_error_reply() -> None:
    class Broken(FunctionServices):
        def limits(self) -> dict[str, Any]:
            raise ZeroDivisionError("x")

    replies, _ = await replies_to([{"kind": "limits"}], services=Broken())
    assert replies == {0: {"error": "ZeroDivisionError: x", "kind": "other"}}


# ---- sending ---------------------------------------------------------------------------------------------------------


async def test_a_reply_longer_than_a_frame_is_an_error_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channel.__init__, "__kwdefaults__", {"credit": 1 << 20, "max_frame": 2000})

    async def answer(call: SubCall) -> str:
        return "x" * int(str(call.prompt))

    calls = [{"kind": "llm", "prompt": "5000"}, {"kind": "llm", "prompt": "5"}]
    replies, _ = await replies_to(calls, services=FunctionServices(answer))
    assert replies[0]["kind"] == "too_long"
    assert "at most 2,000" in replies[0]["error"]
    assert replies[1] == {"value": "xxxxx"}


async def _begin_cell(link: Link, sandbox: FakeSandbox, group: anyio.abc.TaskGroup) -> None:
    """Greet the worker, and begin a cell whose calls are served."""
    group.start_soon(link.run)
    await sandbox.outward.send(b'{"t":"ready","version":1,"python":"3"}\n')
    await link.ready.wait()
    broker = Broker(
        group,
        link.channel,
        FunctionServices(),
        HostTools(),
        CellClock(None, sandbox.cpu_seconds),
        desk=ToolDesk(),
        room=link.room,
        threads=anyio.CapacityLimiter(1),
    )
    link.begin_cell(1, "", broker)


@pytest.mark.parametrize("direct", [True, False])
async def test_a_worker_that_takes_no_replies_runs_out_of_credit(direct: bool) -> None:
    call = b'{"t":"call","id":%d,"kind":"limits"}\n'
    sandbox = FakeSandbox(capacity=500, direct=direct)
    link = Link(sandbox)
    link.channel = Channel(sandbox, link, credit=2_000)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            await _begin_cell(link, sandbox, group)
            for number in range(200):  # each is answered at once, and its answer read
                await sandbox.outward.send(call % number)
                while f'"id":{number},'.encode() not in sandbox.inward.data:
                    await anyio.lowlevel.checkpoint()
                await sandbox.inward.receive()
            assert link.failure is None
            with contextlib.suppress(anyio.BrokenResourceError):
                for number in range(1000, 1200):
                    await sandbox.outward.send(call % number)
            await link.ended.wait()
    assert "beyond its credit" in str(link.failure)


class TellsLate(FakeSandbox):
    """Its `send` returns only after the worker had the bytes, and sent what it then could."""

    def __init__(self) -> None:
        super().__init__(direct=False)
        self.may_return = anyio.Event()

    async def send(self, data: bytes) -> None:
        await super().send(data)
        if b'"reply"' in data:
            await self.may_return.wait()


async def test_credit_is_back_before_the_worker_can_know_it() -> None:
    sandbox = TellsLate()
    link = Link(sandbox)
    second = b'{"t":"call","id":1,"kind":"limits"}\n'
    link.channel = Channel(sandbox, link, credit=len(second))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            await _begin_cell(link, sandbox, group)
            await sandbox.outward.send(second.replace(b"1", b"0"))
            await sandbox.inward.receive()
            while b'"reply"' not in await sandbox.inward.receive():
                pass
            await sandbox.outward.send(second)
            while sandbox.outward.data:
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            assert link.failure is None
            sandbox.may_return.set()
            sandbox.kill()
            await link.ended.wait()


async def test_frames_of_ours_are_bounded_and_a_worker_that_takes_none_is_given_up() -> None:
    sandbox = FakeSandbox()
    link = Link(sandbox)
    link.channel = Channel(sandbox, link, max_frame=100)
    with pytest.raises(ValueError, match="at most 100 are possible"):
        link.channel.send(Execute(cell=1, code="x" * 200))
    with pytest.raises(RuntimeError, match="starting, not idle"):
        link.channel.begin_cell(1)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(link.run)
            sandbox.inward.close()
            link.channel.send(Execute(cell=1, code="x"))
            await link.ended.wait()
    assert sandbox.killed.is_set()
    assert sandbox.closed == 1
