"""The wire and the broker against workers in memory: good ones never deadlock, bad ones hurt only their own session."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from repl_fakes import FunctionServices, Worker, fake_session

from asyncrlm.errors import BudgetExceededError, LMError, ProtocolError, SandboxLost
from asyncrlm.repl import broker as broker_module
from asyncrlm.repl.channel import FrameParser, encode_frame
from asyncrlm.repl.messages import Execute, Reply
from asyncrlm.repl.session import SubCall
from asyncrlm.repl.tools import HostTools

pytestmark = pytest.mark.anyio

# ---- lines -----------------------------------------------------------------------------------------------------------

lines = st.lists(st.binary(min_size=1, max_size=40).map(lambda b: b"x" + b.replace(b"\n", b" ").strip() + b"x"))


@given(lines, st.lists(st.integers(1, 30)), st.sampled_from([b"\n", b"\n\n", b"  \n", b"\r\n", b" \n \n"]))
def test_parser_takes_any_chunking(frames: list[bytes], sizes: list[int], end: bytes) -> None:
    stream = b"".join(frame + end for frame in frames)
    parser = FrameParser(100)
    out: list[bytes] = []
    at = 0
    for size in [*sizes, len(stream) + 1]:
        out += parser.feed(stream[at : at + size])
        at += size
    assert out == frames


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("complete", [True, False])
def test_parser_bounds_a_line(chunk: int, complete: bool) -> None:
    parser = FrameParser(100)
    data = b"x" * 101 + (b"\n" if complete else b"")
    pieces = [data[at : at + chunk] for at in range(0, len(data), chunk)]
    with pytest.raises(ProtocolError, match="more than 100 bytes"):
        list(map(parser.feed, pieces))


def test_parser_is_linear_in_many_small_chunks() -> None:
    parser = FrameParser()
    for _ in range(200_000):
        assert parser.feed(b"abcdefgh") == []
    assert [len(line) for line in parser.feed(b"\n")] == [1_600_000]


@given(st.text(st.characters(codec=None), max_size=50), st.integers())
def test_frames_are_ascii_json_whatever_they_hold(text: str, number: int) -> None:
    data = encode_frame(Reply(id=1, value=[text, number]))
    assert data.isascii()
    assert data.index(b"\n") == len(data) - 1
    assert json.loads(data) == {"t": "reply", "id": 1, "value": [text, number]}
    assert json.loads(encode_frame(Execute(cell=0, code=text)))["code"] == text


# ---- good workers ----------------------------------------------------------------------------------------------------


async def test_cells_calls_and_loads_pass() -> None:
    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, code = await worker.cell()
        await worker.send(t="call", id=0, kind="llm", prompt="a")
        reply = await worker.take()
        await worker.send(t="call", id=1, kind="limits")
        limits = await worker.take()
        await worker.done(cell, variables={"x": "int"}, values={"code": code, "r": json.dumps([reply, limits])})
        await worker.cell()

    services = FunctionServices()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, opened = fake_session(group, script, services=services, raise_errors=True, show_values=True)
            await session.load("early", {"a": 1})
            async with session:
                await session.load("context", "text")
                outcome = await session.execute("code!")
                assert session.report is not None
                assert session.report.isolation == {"net": "fake"}
            assert opened[0].closed >= 1
            group.cancel_scope.cancel()
    assert outcome.variables == {"x": "int"}
    assert outcome.values["code"] == "code!"
    assert json.loads(outcome.values["r"]) == [
        {"t": "reply", "id": 0, "value": "re: a"},
        {"t": "reply", "id": 1, "value": {"calls": 5}},
    ]
    assert outcome.subcalls == 1
    assert outcome.answer is None
    assert outcome.lost is None
    assert services.calls == [SubCall("llm", "a", None, None, None)]


async def calls_at_once(worker: Worker, prompts: list[str]) -> dict[int, Any]:
    """Sends all calls and takes replies while it waits to write, as a good worker does."""
    replies: dict[int, Any] = {}

    async def take() -> None:
        while len(replies) < len(prompts):
            frame = await worker.take()
            assert frame["id"] not in replies
            replies[frame["id"]] = frame

    async with anyio.create_task_group() as group:
        group.start_soon(take)
        for number, prompt in enumerate(prompts):
            await worker.send(t="call", id=number, kind="llm", prompt=prompt)
    return replies


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("capacity", [100, 4096])
async def test_back_pressure_both_ways_never_deadlocks(capacity: int, direct: bool) -> None:
    texts = [f"{number}:" + "x" * 700 for number in range(600)]
    got: dict[int, Any] = {}

    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, _ = await worker.cell()
        got.update(await calls_at_once(worker, texts))
        await worker.done(cell)
        await worker.cell()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, script, capacity=capacity, chunk=333, direct=direct)
            async with session:
                outcome = await session.execute("")
            group.cancel_scope.cancel()
    assert outcome.subcalls == len(texts)
    assert [got[number]["value"] for number in range(len(texts))] == [f"re: {text}" for text in texts]


async def test_calls_run_at_once_and_are_answered_as_they_finish() -> None:
    order: list[int] = []
    gates = [anyio.Event() for _ in range(20)]

    async def answer(call: SubCall) -> str:
        number = int(str(call.prompt))
        if number:
            await gates[number].wait()
        if number < 19:  # the last to be sent is answered first, the first last
            gates[number + 1].set()
        return "ok"

    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, _ = await worker.cell()
        for number in reversed(range(1, 20)):
            await worker.send(t="call", id=number, kind="rlm", prompt=str(number))
        await worker.send(t="call", id=0, kind="llm", prompt="0")
        for _ in range(20):
            order.append((await worker.take())["id"])
        await worker.done(cell)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, script, services=FunctionServices(answer))
            async with session:
                await session.execute("")
    assert order == list(range(20))


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
            assert frame.pop("t") == "reply"
            assert frame["id"] not in replies
            replies[frame.pop("id")] = frame

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
    kinds = ["authentication", "permission", "authentication", "server", "server", "server", "authentication"]
    errors = [LMError(kind, kind=kind) for kind in kinds]  # type: ignore[arg-type]
    replies, outcome = await replies_to([{"kind": "llm", "prompt": ""} for _ in kinds], services=raising(*errors))
    assert [replies[number].get("raises", False) for number in range(7)] == [False] * 6 + [True]
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
    assert replies == {0: cancelled, 1: cancelled, 2: cancelled}  # the third by the end of the cell
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


async def test_the_end_of_a_cell_answers_calls_that_had_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "MOST_TASKS", 2)
    calls = [{"kind": "llm", "prompt": "hang"} for _ in range(5)]

    async def answer(call: SubCall) -> str:
        await anyio.sleep_forever()
        return ""

    replies, outcome = await replies_to(calls, services=FunctionServices(answer), expect=0)
    assert list(replies.values()) == [{"error": "cancelled", "kind": "cancelled"}] * 5
    assert outcome.failures == {}


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
