"""A session's life with workers in memory: time limits, deaths, answers, cancellation."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from repl_fakes import FakeSandbox, FunctionServices, Worker, fake_session

from asyncrlm.errors import ConfigurationError, SandboxLost
from asyncrlm.repl import session as session_module
from asyncrlm.repl.sandbox import Printed, Settings
from asyncrlm.repl.session import Session, SubCall
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
            session, opened = fake_session(group, script, settings=Settings(cell_timeout=0.05))
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
            session, _ = fake_session(
                group, script, services=FunctionServices(answer), settings=Settings(cell_timeout=0.1)
            )
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
                group, script, services=FunctionServices(answer), settings=Settings(cell_timeout=0.1)
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
            session, _ = fake_session(group, echo, settings=Settings(cell_timeout=None))
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
            await worker.send(t="answer", content={"$": "tuple", "v": [1, 2]})
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
                assert (outcome.answer.content, outcome.answer.value) == ("[1, 2]", (1, 2))
                outcome = await session.execute("live")
                assert outcome.lost is None
                assert outcome.answer is None
                assert outcome.variables == {"K": "5", "context": "hello", "history": "[1]"}
            assert [sandbox.closed for sandbox in opened] == [1, 1]
            group.cancel_scope.cancel()


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
                assert outcome.lost is not None
                assert "before this cell" in outcome.lost
                assert "SIGKILL" in outcome.lost
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
            session, _ = fake_session(group, script, settings=Settings(setup_code="setup"))
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
            session, _ = fake_session(group, script, settings=Settings(setup_code="setup"))
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
        ([{"content": 5}], "5"),
        ([{"content": {"a": [1, None, True, "é"]}}], '{"a": [1, null, true, "é"]}'),
        ([{"content": {"$": "float", "v": "nan"}}], "nan"),
        ([{"content": {"$": "set", "v": [1]}}], "{1}"),
        ([{"content": {"$": "lie", "v": 1}}], "{'$': 'lie', 'v': 1}"),
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


# ---- use and cancellation --------------------------------------------------------------------------------------------


async def test_one_at_a_time_and_only_while_open() -> None:
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, hang)
            with pytest.raises(RuntimeError, match="not entered"):
                await session.execute("")
            async with session:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(session.execute, "")
                    await anyio.wait_all_tasks_blocked()
                    with pytest.raises(RuntimeError, match="`execute` while `execute`"):
                        await session.execute("")
                    with pytest.raises(RuntimeError, match="`load` while `execute`"):
                        await session.load("context", "x")
                    inner.cancel_scope.cancel()
                for wrong in (5, "x" * 6_000_000):
                    with pytest.raises(ConfigurationError):
                        await session.execute(wrong)  # type: ignore[arg-type]
                with pytest.raises(RuntimeError, match="once"):
                    await session.__aenter__()
            for use in (session.execute("x"), session.load("context", "x"), session.ready()):
                with pytest.raises(RuntimeError, match="closed"):
                    await use
            group.cancel_scope.cancel()


async def test_errors_in_the_body_come_out_as_they_are() -> None:
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, opened = fake_session(group, echo)

            async def use() -> None:
                async with session:
                    await session.ready()
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await use()
            assert opened[0].closed == 1
            group.cancel_scope.cancel()


async def test_loads_are_refused_with_a_reason() -> None:
    async def script(worker: Worker) -> None:
        await worker.hello()
        frame = await worker.take()
        await worker.send(t="loaded", id=frame["id"], error="not UTF-8")
        cell, _ = await worker.cell()
        await worker.done(cell, variables={load["name"]: "" for load in worker.loads})
        frame = await worker.take()
        assert frame["t"] == "load"

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, script)
            async with session:
                with pytest.raises(ConfigurationError, match="history could not be loaded: not UTF-8"):
                    await session.load("history", "x")
                await session.load("context", "y")
                assert (await session.execute("")).variables == {"context": ""}
                with pytest.raises(SandboxLost, match="the worker is gone"):
                    await session.load("context", "z")
            group.cancel_scope.cancel()


async def use_all(session: Session) -> None:
    async with session:
        await session.load("context", "x" * 300_000)
        await session.load("context_1", [1])
        await session.execute("one")
        await session.execute("two")


@pytest.mark.parametrize("step", range(0, 90, 3))
async def test_cancelled_anywhere_it_closes(step: int) -> None:
    running = 0

    async def answer(call: SubCall) -> str:
        nonlocal running
        running += 1
        try:
            await anyio.lowlevel.checkpoint()
        finally:
            running -= 1
        return "ok"

    async def script(worker: Worker) -> None:
        await worker.hello()
        while True:
            cell, _ = await worker.cell()
            for number in range(2):
                await worker.send(t="call", id=number, kind="llm", prompt="x")
            for _ in range(2):
                await worker.take()
            await worker.done(cell)

    finished = anyio.Event()

    async def user(session: Session) -> None:
        try:
            await use_all(session)
        finally:
            finished.set()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, opened = fake_session(group, script, services=FunctionServices(answer))
            async with anyio.create_task_group() as inner:
                inner.start_soon(user, session)
                for _ in range(step):
                    await anyio.lowlevel.checkpoint()
                inner.cancel_scope.cancel()
            assert finished.is_set() or step < 3
            assert all(sandbox.closed == 1 for sandbox in opened)
            assert running == 0
            group.cancel_scope.cancel()


async def test_a_cancelled_cell_costs_the_worker_not_the_session() -> None:
    entered = anyio.Event()

    async def script(worker: Worker) -> None:
        await worker.hello()
        cell, code = await worker.cell()
        if code == "long":
            entered.set()
            await anyio.sleep_forever()
        await worker.done(cell)
        await anyio.sleep_forever()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, opened = fake_session(group, script)
            async with session:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(session.execute, "long")
                    await entered.wait()
                    inner.cancel_scope.cancel()
                outcome = await session.execute("short")
                assert outcome.lost is not None
                assert "because its cell was cancelled" in outcome.lost
                assert len(opened) == 2
            group.cancel_scope.cancel()


async def test_a_driver_that_fails_is_a_lost_sandbox() -> None:
    class Broken(FakeSandbox):
        async def pump(self) -> None:
            raise OSError("the pipe broke")

    from repl_fakes import FakeEnvironment

    from asyncrlm.repl.scope import ResourceScope

    class BrokenEnvironment(FakeEnvironment, frozen=True, kw_only=True, dict=True):
        async def open(self, scope: Any) -> FakeSandbox:
            sandbox = Broken()
            self.opened.append(sandbox)
            return sandbox

    class NoEnvironment(FakeEnvironment, frozen=True, kw_only=True, dict=True):
        async def open(self, scope: Any) -> FakeSandbox:
            raise SandboxLost("no template")

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for kind, error in ((BrokenEnvironment, "the pipe broke"), (NoEnvironment, "no template")):
                opened: list[FakeSandbox] = []
                environment = kind(script=hang, group=group, opened=opened)
                async with Session(environment, ResourceScope(), FunctionServices()) as session:
                    for _ in range(2):
                        with pytest.raises(SandboxLost, match=error):
                            await session.execute("")
                assert all(sandbox.closed == 1 for sandbox in opened)
