"""A worker that dies: in its own cell, or between two cells, which the next one is told of."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from asyncrlm import AsyncRLM, ErrorThresholdExceededError, Repl, TimeoutExceededError
from asyncrlm.events import CellFinished, SandboxDied
from asyncrlm.repl import outcome as outcome_module
from asyncrlm.testing import ScriptedLM

from .helpers import cell, scripted, told
from .repl_fakes import FakeEnvironment, FakeSandbox, Worker

pytestmark = pytest.mark.anyio


async def mortal(worker: Worker) -> None:
    """A worker that dies of "die", and after "one"; "answer" is an answer, all else is done."""
    await worker.hello()
    while True:
        number, code = await worker.cell()
        if code == "die":
            return
        if code == "answer":
            await worker.send(t="answer", ready=True, content="fine")
        await worker.done(number)
        if code == "one":
            await worker.send(t="exited", status=-9)
            return


def fake(group: anyio.abc.TaskGroup) -> tuple[FakeEnvironment, list[FakeSandbox]]:
    opened: list[FakeSandbox] = []
    return FakeEnvironment(script=mortal, group=group, opened=opened), opened


async def gone(sandbox: FakeSandbox) -> None:
    while not sandbox.closed:
        await anyio.lowlevel.checkpoint()


async def test_a_worker_lost_between_two_turns_costs_the_next_turn_no_cell() -> None:
    async def wait(request: Any) -> str:
        await gone(opened[0])
        return f"{cell('two')}\n\n{cell('three')}"

    root = ScriptedLM([cell("one"), wait, cell("answer")])
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            environment, opened = fake(group)
            rlm = AsyncRLM(root, environment=environment, max_errors=1)
            async with rlm.astream("CTX") as events:
                seen = [event async for event in events]
            group.cancel_scope.cancel()
    assert events.result is not None
    assert events.result.response == "fine"
    read = told(root, 3)
    assert read.index("[Cell 1]\nBefore this cell, the process that runs cells had gone: it was killed") == 0
    assert "[Cell 2]\n(The cell ran" in read
    assert "did not run" not in read
    assert [event.error for event in seen if isinstance(event, CellFinished)] == [None] * 4
    assert ["SIGKILL" in event.reason for event in seen if isinstance(event, SandboxDied)] == [True]


async def test_a_worker_lost_in_its_cell_ends_the_turn_and_is_the_error_of_the_cell() -> None:
    root = scripted(f"{cell('die')}\n\n{cell('two')}", cell("answer"))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            environment, _ = fake(group)
            async with AsyncRLM(root, environment=environment).astream("CTX") as events:
                errors = [event.error async for event in events if isinstance(event, CellFinished)]
            with pytest.raises(ErrorThresholdExceededError) as caught:
                await AsyncRLM(scripted(cell("die")), environment=environment, max_errors=1).acompletion("CTX")
            group.cancel_scope.cancel()
    assert "1 later block of your reply did not run" in told(root, 2)
    assert errors[1:] == [None]
    assert "the process that ran the cell is gone" in str(errors[0])
    assert "the process that ran the cell is gone" in str(caught.value.last_error)


async def test_a_repl_tells_of_a_worker_lost_before_and_reports_no_error() -> None:
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            environment, opened = fake(group)
            async with Repl(environment) as repl:
                await repl.execute("one")
                await gone(opened[0])
                result = await repl.execute("two")
                assert result.error is None
                assert "Before this cell, the process that runs cells had gone" in result.stderr
                assert (await repl.execute("three")).stderr == ""
                await repl.execute("one")
                await gone(opened[1])
                lost = await repl.execute("die")
                assert "is gone: it ended" in str(lost.error)
                assert "SIGKILL" in lost.stderr
                assert (await repl.execute("two")).stderr == ""
            group.cancel_scope.cancel()


async def test_a_cell_that_is_too_long_to_be_sent_is_told_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome_module, "MAX_CODE", 100)
    root = ScriptedLM([cell("x = 1\n" + "#" * 100), cell("answer")])
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            environment, _ = fake(group)
            result = await AsyncRLM(root, environment=environment).acompletion("CTX")
            group.cancel_scope.cancel()
    assert result.response == "fine"
    assert "characters and was not run; at most 100" in told(root, 2)


async def test_no_time_at_all_is_said_to_be_none() -> None:
    with pytest.raises(TimeoutExceededError, match="of 0 s"):
        await AsyncRLM(scripted(), max_timeout=0).acompletion("CTX")
