"""The wire and the broker against workers in memory: good ones never deadlock, bad ones hurt only their own session."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from repl_fakes import FunctionServices, Worker, fake_session

from asyncrlm.errors import ProtocolError
from asyncrlm.repl.channel import FrameParser, encode_frame
from asyncrlm.repl.messages import Execute, Reply
from asyncrlm.repl.session import SubCall

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
    texts = [f"{number}:" + "x" * 700 for number in range(250)]
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
