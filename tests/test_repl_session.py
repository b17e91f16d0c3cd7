"""A session's life with workers in memory: time limits, deaths, answers, cancellation."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from repl_fakes import FakeSandbox, FunctionServices, Worker, fake_session

from asyncrlm.errors import ConfigurationError, SandboxLost
from asyncrlm.repl import session as session_module
from asyncrlm.repl.sandbox import Printed
from asyncrlm.repl.session import SubCall
from asyncrlm.repl.tools import HostTools

pytestmark = pytest.mark.anyio


async def hang(worker: Worker) -> None:
    await worker.hello()
    await worker.cell()
    await anyio.sleep_forever()


async def echo(worker: Worker) -> None:
    await worker.hello()
    while True:
        cell, code = await worker.cell()
        await worker.done(cell, variables={"code": code})


async def test_a_worker_that_ends_as_it_gets_a_context_is_replaced_until_a_cell_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeSandbox, "another_is_free", True)
    workers: list[Worker] = []

    async def script(worker: Worker) -> None:
        workers.append(worker)
        await worker.hello()
        if len(workers) == 1:
            assert (await worker.take())["t"] == "load"
            return
        cell, _ = await worker.cell()
        await worker.done(cell)
        assert (await worker.take())["t"] == "load"

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, opened = fake_session(group, script)
            async with session:
                await session.load("context", "text")
                assert (await session.execute("pass")).error is None
                with pytest.raises(SandboxLost):
                    await session.load("more", "text")
    assert len(opened) == 2
    assert [load["name"] for load in workers[1].loads] == ["context"]


# ---- time limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("obeys", ["first", "second", "never"])
async def test_a_cell_over_its_time_is_interrupted_then_killed(obeys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SECOND_INTERRUPT", 0.05)
    monkeypatch.setattr(session_module, "GRACE", 0.1)

    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, _ = await worker.cell()
        await worker.send(t="answer", content="made in time")
        sandbox = worker.sandbox
        await sandbox.interrupted.wait()
        if obeys == "second":
            sandbox.interrupted = anyio.Event()
            await sandbox.interrupted.wait()
        if obeys == "never":
            await anyio.sleep_forever()
        await worker.done(
            cell,
            error={
                "type": "KeyboardInterrupt",
                "traceback": "Traceback: here\nKeyboardInterrupt\n",
                "interrupted": True,
            },
        )
        await anyio.sleep_forever()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, opened = fake_session(group, script, settings={"cell_timeout": 0.05})
            async with session:
                outcome = await session.execute("")
            group.cancel_scope.cancel()
    assert outcome.answer is not None
    assert outcome.answer.content == "made in time"
    if obeys == "never":
        assert outcome.lost is not None
        assert "ran for more than 0.05 s (cell_timeout) and did not stop" in outcome.lost
        assert opened[0].killed.is_set()
    else:
        assert outcome.lost is None
        assert outcome.error is not None
        assert outcome.error.traceback.endswith("stopped: the cell ran for more than 0.05 s (cell_timeout)")


async def test_calls_in_flight_are_not_charged_to_the_cell() -> None:
    async def answer(call: SubCall) -> str:
        await anyio.sleep(0.12)  # longer than the limit: it is what is measured
        return "ok"

    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, _ = await worker.cell()
        for number in range(4):
            await worker.send(t="call", id=number, kind="llm", prompt="x")
            await worker.take()
        if worker.sandbox.interrupted.is_set():
            return
        await worker.send(t="call", id=9, kind="llm", prompt="x")
        await worker.take()
        await worker.sandbox.interrupted.wait()  # the rest of its own time runs out
        await worker.done(cell, error={"type": "KeyboardInterrupt", "interrupted": True})
        await anyio.sleep_forever()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, script, services=FunctionServices(answer), settings={"cell_timeout": 0.1})
            async with session:
                outcome = await session.execute("")
            group.cancel_scope.cancel()
    assert outcome.lost is None
    assert outcome.subcalls == 5
    assert outcome.error is not None
    assert outcome.error.message == "stopped: the cell ran for more than 0.1 s (cell_timeout)"


async def test_cpu_time_counts_while_a_call_is_in_flight() -> None:
    async def script(worker: Worker) -> None:
        worker.sandbox.cpu = 7.0
        await worker.hello()
        cell, _ = await worker.cell()
        await worker.send(t="call", id=0, kind="llm", prompt="x")
        while not worker.sandbox.interrupted.is_set():
            worker.sandbox.cpu += 0.01
            await anyio.sleep(0.005)
        await worker.done(cell, error={"type": "KeyboardInterrupt", "interrupted": True})
        await anyio.sleep_forever()

    async def answer(call: SubCall) -> str:
        await anyio.sleep_forever()
        return ""

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, opened = fake_session(
                group, script, services=FunctionServices(answer), settings={"cell_timeout": 0.1}
            )
            async with session:
                outcome = await session.execute("")
            group.cancel_scope.cancel()
    assert outcome.error is not None
    assert outcome.error.message == "stopped: the cell used more than 0.1 s of CPU time (cell_timeout)"
    assert opened[0].cpu is not None
    assert opened[0].cpu >= 7.1


async def test_no_limit_is_no_limit() -> None:
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, echo, settings={"cell_timeout": None})
            async with session:
                assert (await session.execute("x")).variables == {"code": "x"}
            group.cancel_scope.cancel()


# ---- deaths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'{"t":"exited","status":3}\n', "exited with code 3"),
        (b'{"t":"exited","status":-9}\n', "killed by signal 9 (SIGKILL), perhaps for using too much memory"),
        (b'{"t":"exited","status":-250,"reason":"odd"}\n', "killed by signal 250 (unknown): odd"),
        (b'{"t":"exited","status":-11,"reason":"the program crashed"}\n', "SIGSEGV): the program crashed"),
        (b'{"t":"call","id":9,"ki\n{"t":"exited","status":-9}\n', "SIGKILL"),
        (b'{"t":"call","id":9,"ki', "is gone: it ended"),
        (b"", "is gone: it ended"),
    ],
)
async def test_a_dead_worker_is_told_and_replaced_with_its_contexts(raw: bytes, text: str) -> None:
    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, code = await worker.cell()
        loaded = {load["name"]: load["value"] for load in worker.loads}
        if code == "die":
            await worker.send(t="answer", content="[1, 2]")
            worker.sandbox.printed = (Printed(head=b"last words"), Printed())
            await worker.raw(raw)
            return
        await worker.done(cell, variables={name: str(value) for name, value in loaded.items()})
        await anyio.sleep_forever()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, opened = fake_session(group, script, tools=HostTools({"K": 5, "f": print}))
            async with session:
                await session.load("context", "hello")
                await session.load("history", [1])
                outcome = await session.execute("die")
                assert outcome.lost is not None
                assert text in outcome.lost
                assert outcome.stdout == "last words"
                assert outcome.answer is not None
                assert outcome.answer.content == "[1, 2]"
                outcome = await session.execute("live")
                assert outcome.lost is None
                assert outcome.answer is None
                assert outcome.variables == {"K": "5", "context": "hello", "history": "[1]"}
            assert [sandbox.closed for sandbox in opened] == [1, 1]
            group.cancel_scope.cancel()


async def test_what_a_dying_worker_had_sent_counts_though_it_takes_nothing_any_more() -> None:
    async def script(worker: Worker) -> None:
        await worker.hello()
        await worker.cell()
        worker.sandbox.inward.close()
        worker.sandbox.outward.put(
            b'{"t":"call","id":0,"kind":"llm","prompt":"x"}\n'
            + b"\n" * 1000
            + b'{"t":"answer","content":"counts"}\n{"t":"exited","status":-11}\n'
        )
        await worker.sandbox.killed.wait()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, script, chunk=16)
            async with session:
                outcome = await session.execute("")
            group.cancel_scope.cancel()
    assert outcome.answer is not None
    assert outcome.answer.content == "counts"
    assert outcome.lost is not None
    assert "SIGSEGV" in outcome.lost


async def test_a_worker_that_died_between_two_cells_is_told_with_the_next() -> None:
    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, code = await worker.cell()
        await worker.done(cell)
        if code == "one":
            await worker.send(t="exited", status=-9)
            return
        await anyio.sleep_forever()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, opened = fake_session(group, script)
            async with session:
                await session.execute("one")
                while not opened[0].closed:
                    await anyio.lowlevel.checkpoint()
                outcome = await session.execute("two")
                assert outcome.lost is None
                assert outcome.lost_before is not None
                assert "SIGKILL" in outcome.lost_before
            group.cancel_scope.cancel()


async def test_setup_code_runs_before_the_first_cell_of_each_worker() -> None:
    codes: list[str] = []

    async def script(worker: Worker) -> None:
        await worker.hello()
        while True:
            cell, code = await worker.cell()
            codes.append(code)
            if code == "die":
                return
            if code == "setup" and codes.count("setup") == 3:
                await worker.done(cell, error={"type": "NameError", "traceback": "NameError: nothing"})
            else:
                await worker.done(cell)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, script, settings={"setup_code": "setup"})
            async with session:
                for code in ("a", "b", "die", "c", "die"):
                    await session.execute(code)
                with pytest.raises(ConfigurationError, match="setup_code failed:\nNameError: nothing"):
                    await session.execute("d")
                await session.execute("e")
            group.cancel_scope.cancel()
    assert codes == ["setup", "a", "b", "die", "setup", "c", "die", "setup", "setup", "e"]


async def test_setup_code_that_ends_the_worker_is_an_error() -> None:
    async def script(worker: Worker) -> None:
        await worker.hello()
        await worker.cell()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, script, settings={"setup_code": "setup"})
            async with session:
                with pytest.raises(SandboxLost, match="setup_code ended the worker"):
                    await session.execute("a")
            group.cancel_scope.cancel()


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "content"),
    [
        ([{"content": "a"}], "a"),
        ([{"content": "a"}, {"content": "b"}], "b"),
        ([{"content": "a"}, {"ready": False}], None),
        ([{"content": {"$": "str", "v": "7aCA"}}], "\ud800"),
        ([{"content": "", "empty": True}], ""),
    ],
)
async def test_an_answer_is_what_was_ready_last(frames: list[dict[str, Any]], content: str | None) -> None:
    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, _ = await worker.cell()
        for frame in frames:
            await worker.send(t="answer", **frame)
        await worker.done(cell)
        cell, _ = await worker.cell()
        await worker.done(cell)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, script)
            async with session:
                for _ in range(2):  # it stays ready until it is changed
                    outcome = await session.execute("")
                    answer = outcome.answer
                    assert (None if answer is None else answer.content) == content
                    assert answer is None or answer.empty is (content == "")
            group.cancel_scope.cancel()
