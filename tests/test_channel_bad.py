"""Bad workers: each ends its own session with a `ProtocolError`, and nothing else."""

from __future__ import annotations

import json
import time

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repl_fakes import FakeSandbox, FunctionServices, Worker, fake_session

from asyncrlm.errors import ProtocolError, SandboxLost
from asyncrlm.repl import channel as channel_module
from asyncrlm.repl.channel import FrameParser
from asyncrlm.repl.link import Link
from asyncrlm.repl.session import SubCall

pytestmark = pytest.mark.anyio

# ---- bad workers -----------------------------------------------------------------------------------------------------

DEEP = b"[" * 100_000 + b"\n"
BAD_IN_A_CELL = {
    "garbage, then a frame": b'{"t":\n{"t":"done","cell":1}\n',
    "garbage twice": b"x\ny\n",
    "garbage alone": b"\x00\xff\n",
    "no object": b"[1]\n[2]\n",
    "deeply nested": DEEP + DEEP,
    "unknown tag": b'{"t":"reply","id":1}\n{"t":"x"}\n',
    "wrong type": b'{"t":"done","cell":"1"}\n\n{"t":"done","cell":1}\n',
    "no UTF-8": b'{"t":"call","id":1,"kind":"\xff"}\n{"t":"done","cell":1}\n',
    "ready again": b'{"t":"ready","version":1,"python":""}\n',
    "done of another cell": b'{"t":"done","cell":2}\n',
    "too many variables": b'{"t":"done","cell":1,"variables":{'
    + b",".join(b'"v%d":""' % number for number in range(300))
    + b"}}\n",
    "variables of long names": b'{"t":"done","cell":1,"variables":{"' + b"v" * 2_000_000 + b'":""}}\n\n{"t":"done"}\n',
    "too much output": b'{"t":"output","stream":1,"data":"' + b"A" * 200_000 + b'"}\n{"t":"done","cell":1}\n',
    "a long name": b'{"t":"call","id":1,"kind":"tool","name":"' + b"n" * 20_000 + b'"}\n{"t":"done","cell":1}\n',
    "loaded": b'{"t":"loaded","id":1}\n',
    "an id twice": b'{"t":"call","id":1,"kind":"llm","prompt":"hang"}\n' * 2,
    "cancel of a call never made": b'{"t":"cancel","id":3}\n',
    "unknown kind": b'{"t":"call","id":1,"kind":"shell"}\n',
    "unknown tool": b'{"t":"call","id":1,"kind":"tool","name":"rm"}\n',
    "output": b'{"t":"output","stream":1,"data":""}\n',
    "output of no stream": b'{"t":"output","stream":9,"data":""}\n',
    "a frame after the end": b'{"t":"exited"}\n{"t":"done","cell":1}\n',
    "a call after the end": b'{"t":"exited"}\n{"t":"call","id":1,"kind":"llm"}\n',
    "garbage after the end": b'{"t":"exited"}\nx\n',
    "an answer that is no text": b'{"t":"answer","content":[1]}\n\n{"t":"done","cell":1}\n',
    "an answer in a form of its own": b'{"t":"answer","content":{"$":"int","v":"0x1"}}\n{"t":"done","cell":1}\n',
    "an answer that is no base64": b'{"t":"answer","content":{"$":"str","v":"?"}}\n{"t":"done","cell":1}\n',
    "too long": b"x" * 5000,
}


@pytest.mark.parametrize("name", BAD_IN_A_CELL)
async def test_a_bad_worker_ends_its_own_session_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "GARBAGE_GRACE", 0.05)
    if name == "too long":
        monkeypatch.setattr(FrameParser.__init__, "__defaults__", (4000,))
        monkeypatch.setattr(channel_module.Channel.__init__, "__kwdefaults__", {"credit": 1 << 20, "max_frame": 4000})
    stopped = anyio.Event()
    started = anyio.Event()

    async def answer(call: SubCall) -> str:
        if call.prompt == "hang":
            started.set()
            try:
                await anyio.sleep_forever()
            finally:
                stopped.set()
        return "ok"

    bad = [True]

    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, code = await worker.cell()
        if bad.pop():
            bad.append(False)
            await worker.send(t="call", id=0, kind="llm", prompt="hang")
            await started.wait()
            await worker.raw(BAD_IN_A_CELL[name])
            await anyio.sleep_forever()
        bad.append(False)
        await worker.send(t="call", id=0, kind="llm", prompt="fine")
        assert (await worker.take())["value"] == "ok"
        await worker.done(cell, variables={"code": code})
        await anyio.sleep_forever()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, opened = fake_session(group, script, services=FunctionServices(answer))
            neighbour, _ = fake_session(group, script, services=FunctionServices(answer))
            async with session:
                with pytest.raises(ProtocolError):
                    await session.execute("a")
                assert stopped.is_set()  # its pending calls are cancelled
                assert opened[0].killed.is_set()
                async with neighbour:
                    assert (await neighbour.execute("b")).variables == {"code": "b"}
                again = await session.execute("c")
                assert again.variables == {"code": "c"}
                assert again.lost is None  # it was told already
            assert [sandbox.closed for sandbox in opened] == [1, 1]
            group.cancel_scope.cancel()


@pytest.mark.parametrize(
    "raw", [b'{"t":"call","id":1,"kind":"llm"}\n', b'{"t":"answer"}\n', b'{"t":"done","cell":1}\n']
)
async def test_frames_between_cells_are_refused(raw: bytes) -> None:
    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, _ = await worker.cell()
        await worker.done(cell)
        await worker.raw(raw)
        await anyio.sleep_forever()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, opened = fake_session(group, script)
            async with session:
                await session.execute("")
                await opened[0].killed.wait()
                with pytest.raises(ProtocolError, match="where it may not"):
                    await session.execute("")
            group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b'{"t":"ready","version":2,"python":"3"}\n', "version 2"),
        (b'{"t":"done","cell":0}\n', "where it may not"),
        (b'{"t":"exited","status":7,"reason":"no Python"}\n', "exited with code 7: no Python"),
        (b"", "it ended"),
    ],
)
async def test_a_worker_that_never_was_ready(raw: bytes, error: str) -> None:
    async def script(worker: Worker) -> None:
        await worker.take()
        await worker.raw(raw)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, script)
            async with session:
                for _ in range(2):  # not only the first time
                    with pytest.raises((ProtocolError, SandboxLost), match=error):
                        await session.execute("")
            group.cancel_scope.cancel()


async def test_credit_is_checked_and_one_large_frame_passes() -> None:
    prompt = "x" * 500

    def frame(number: int) -> bytes:
        return json.dumps({"t": "call", "id": number, "kind": "llm", "prompt": prompt}).encode() + b"\n"

    for count, fine in ((1, True), (2, False)):
        sandbox = FakeSandbox()
        link = Link(sandbox)
        link.channel = channel_module.Channel(sandbox, link, credit=100)
        sandbox.outward.put(b'{"t":"ready","version":1,"python":"3"}\n')
        async with anyio.create_task_group() as group:
            group.start_soon(link.run)
            await link.ready.wait()
            link.channel.begin_cell(1)
            for number in range(count):
                sandbox.outward.put(frame(number))
            sandbox.outward.put(b'{"t":"done","cell":1}\n')
            await link.changed.wait()
            assert (link.done is not None) is fine
            assert (link.failure is None) is fine
            link.kill("enough")


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.sampled_from(
                [
                    b"\n",
                    b'{"t":"call","id":0,"kind":"llm","prompt":"x"}\n',
                    b'{"t":"cancel","id":0}\n',
                    *BAD_IN_A_CELL.values(),
                ]
            ).filter(lambda raw: len(raw) < 6000),
        ),
        max_size=8,
    ),
    st.sampled_from(["asyncio", "trio"]),
)
@settings(max_examples=60, deadline=None)
def test_noise_ends_in_an_outcome_or_a_protocol_error(noise: list[bytes], backend: str) -> None:
    async def script(worker: Worker) -> None:
        await worker.hello()
        await worker.cell()
        for piece in noise:
            await worker.raw(piece)

    async def main() -> None:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                session, opened = fake_session(group, script, chunk=17)
                async with session:
                    try:
                        outcome = await session.execute("")
                    except ProtocolError:
                        pass
                    else:
                        assert outcome.lost or any(b'"done"' in piece for piece in noise)
                assert opened[0].closed == 1
                group.cancel_scope.cancel()

    anyio.run(main, backend=backend)


async def test_a_stream_that_does_not_end_after_its_worker_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "END_GRACE", 0.05)

    async def script(worker: Worker) -> None:
        await worker.hello()
        await worker.cell()
        await worker.send(t="exited", status=9, reason="its end")
        await anyio.sleep_forever()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, script)
            async with session:
                assert "its end" in ((await session.execute("")).lost or "")
            group.cancel_scope.cancel()


async def test_a_flood_starves_nobody() -> None:
    turns = 0

    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, _ = await worker.cell()
        sandbox = worker.sandbox
        for _ in range(5):  # all there at once, so that receiving never has to wait
            sandbox.outward.put(b'{"t":"answer","ready":false}\n' * 20_000)
        await worker.done(cell)
        await anyio.sleep_forever()

    async def neighbour() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, script)
            async with session:
                await session.ready()
                group.start_soon(neighbour)
                await session.execute("")
            group.cancel_scope.cancel()
    assert turns > 100_000 / channel_module.FAIR_FRAMES


async def test_a_long_frame_is_read_in_order_and_holds_up_nobody() -> None:
    """What is nested takes a C parser seconds, and all other threads wait for it."""
    pairs = b"[" + b'["a",0],' * 200_000 + b"0]"
    stalls: list[float] = []

    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, _ = await worker.cell()
        await worker.raw(
            b'{"t":"call","id":0,"kind":"llm","prompt":[{"role":"user","content":%s}]}\n' % pairs
            + b'{"t":"call","id":1,"kind":"llm","prompt":"%s"}\n' % (rb"\u00e9\ud83d\ude00\n" * 50_000)
            + b'{"t":"call","id":2,"kind":"llm","prompt":"short"}\n'
        )
        replies = [await worker.take() for _ in range(3)]
        assert {reply["id"]: reply.get("kind") for reply in replies} == {0: "bad_request", 1: None, 2: None}
        await worker.done(cell)
        await anyio.sleep_forever()

    async def neighbour() -> None:
        while True:
            began = time.thread_time()
            await anyio.lowlevel.checkpoint()
            stalls.append(time.thread_time() - began)

    services = FunctionServices()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, script, services=services)
            async with session:
                await session.ready()
                group.start_soon(neighbour)
                await session.execute("")
            group.cancel_scope.cancel()
    assert sorted(call.prompt for call in services.calls) == ["short", "é😀\n" * 50_000]
    assert max(stalls) < 0.15  # seconds of this thread's own work: nothing of it was done here


async def test_a_worker_may_have_so_many_calls_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_CALLS", 5)

    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, _ = await worker.cell()
        for number in range(6 if more else 5):
            await worker.send(t="call", id=number, kind="llm", prompt="hang")
        await worker.done(cell)
        await anyio.sleep_forever()

    async def answer(call: SubCall) -> str:
        await anyio.sleep_forever()
        return ""

    for more in (False, True):
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                session, _ = fake_session(group, script, services=FunctionServices(answer))
                async with session:
                    if more:
                        with pytest.raises(ProtocolError, match="and 5 calls"):
                            await session.execute("")
                    else:
                        assert (await session.execute("")).lost is None
                group.cancel_scope.cancel()


async def test_a_flood_of_blank_lines_and_cancels_starves_nobody() -> None:
    turns = 0

    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, _ = await worker.cell()
        worker.sandbox.outward.put(b'{"t":"call","id":0,"kind":"llm","prompt":"hang"}\n')
        worker.sandbox.outward.put(b'{"t":"cancel","id":0}\n' * 20_000 + b"\n" * 4_000_000)
        await worker.done(cell)
        await anyio.sleep_forever()

    async def answer(call: SubCall) -> str:
        await anyio.sleep_forever()
        return ""

    async def neighbour() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, script, services=FunctionServices(answer))
            async with session:
                await session.ready()
                group.start_soon(neighbour)
                await session.execute("")
            group.cancel_scope.cancel()
    assert turns > 20_000 / channel_module.FAIR_FRAMES + 4_000_000 / channel_module.FAIR_BYTES
