"""A session used wrongly, cancelled anywhere, over drivers that fail."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from repl_fakes import FakeSandbox, FunctionServices, Worker, fake_session

from asyncrlm.errors import ConfigurationError, SandboxLost
from asyncrlm.repl.session import Session, SubCall

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


# ---- use and cancellation --------------------------------------------------------------------------------------------


async def test_one_at_a_time_and_only_while_open() -> None:
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, _ = fake_session(group, hang)
            with pytest.raises(ConfigurationError, match="not entered"):
                await session.execute("")
            async with session:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(session.execute, "")
                    await anyio.wait_all_tasks_blocked()
                    with pytest.raises(ConfigurationError, match="`execute` while `execute`"):
                        await session.execute("")
                    with pytest.raises(ConfigurationError, match="`load` while `execute`"):
                        await session.load("context", "x")
                    inner.cancel_scope.cancel()
                for wrong in (5, "x" * 6_000_000):
                    with pytest.raises(ConfigurationError):
                        await session.execute(wrong)  # type: ignore[arg-type]
                with pytest.raises(ConfigurationError, match="once"):
                    await session.__aenter__()
            for use in (session.execute("x"), session.load("context", "x"), session.ready()):
                with pytest.raises(ConfigurationError, match="closed"):
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


@pytest.mark.parametrize("how", ["ends", "stops sending", "says nothing"])
async def test_a_variable_that_does_not_arrive_is_given_up(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrlm.repl.link.STILL", 60.0 if how == "ends" else 0.05)
    monkeypatch.setattr(FakeSandbox, "fate", lambda _: "it is paused")

    async def never_sent(_: FakeSandbox, name: str, chunks: Any) -> str:
        return await anyio.sleep_forever()

    if how != "says nothing":
        monkeypatch.setattr(FakeSandbox, "put_file", never_sent)

    async def script(worker: Worker) -> None:
        await worker.hello()
        if how != "ends":
            await anyio.sleep_forever()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            session, opened = fake_session(group, script)
            async with session:
                with pytest.raises(SandboxLost, match="it is paused"):
                    await session.load("context", "x" * 300_000)
            group.cancel_scope.cancel()
    assert opened[0].closed == 1


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
                assert outcome.lost is None
                assert "because its cell was cancelled" in (outcome.lost_before or "")
                assert len(opened) == 2
            group.cancel_scope.cancel()


async def test_a_driver_that_fails_is_a_lost_sandbox() -> None:
    class Broken(FakeSandbox):
        async def pump(self) -> None:
            raise OSError("the pipe broke")

    from repl_fakes import FakeEnvironment

    from asyncrlm.repl.resources import ResourceScope

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
