"""What the end of a run must not be spoilt by: a stream left early, resources that can't be closed."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from asyncrlm import AsyncRLM, LMError, RLMLogger, SandboxLost
from asyncrlm.observe.jsonl import TreeLog
from asyncrlm.repl.sandbox import Sandbox, Scope
from asyncrlm.testing import ScriptedLM

from .helpers import cell, scripted, submit
from .repl_fakes import FakeEnvironment, Worker

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("events", [1, 5, 8])
async def test_a_stream_left_early_has_no_failed_listener(
    events: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rlm = AsyncRLM(scripted(cell("print(1)"), submit("'done'")), logger=RLMLogger(tmp_path))
    with anyio.fail_after(20):
        async with rlm.astream("CTX") as stream:
            for _ in range(events):
                await anext(stream)
    (log,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert "ListenerFailed" not in [line.get("type") for line in lines]
    assert (lines[-1]["type"], lines[-1]["stop_reason"]) == ("RunFinished", "cancelled")
    assert caplog.records == []


async def answering(worker: Worker) -> None:
    await worker.hello()
    number, _ = await worker.cell()
    await worker.send(t="answer", ready=True, content="fine")
    await worker.done(number)


@asynccontextmanager
async def sticking() -> AsyncGenerator[None]:
    yield
    raise OSError("it sticks")


class Sticking(FakeEnvironment, frozen=True, kw_only=True, dict=True):
    """Has a resource that fails to close."""

    async def open(self, scope: Scope) -> Sandbox:
        await scope.shared("sticking", sticking)
        return await super().open(scope)


@pytest.mark.parametrize("fails", [False, True])
async def test_what_fails_while_closing_is_logged_and_the_run_stands(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = ScriptedLM([cell("x"), LMError("down", kind="authentication")][fails:])
    async with anyio.create_task_group() as group:
        rlm = AsyncRLM(model, environment=Sticking(script=answering, group=group, opened=[]))
        with anyio.fail_after(20):
            if fails:
                with pytest.raises(LMError, match="down"):
                    await rlm.acompletion("CTX")
            else:
                assert (await rlm.acompletion("CTX")).response == "fine"
        group.cancel_scope.cancel()
    assert ["it sticks" in record.getMessage() for record in caplog.records] == [True]


class Preparing(FakeEnvironment, frozen=True, kw_only=True, dict=True):
    """Says in which order it is prepared and opened."""

    told: list[str]
    fails: bool = False

    async def prepare(self, scope: Scope) -> None:
        self.told.append("prepared")
        await scope.shared("ending", self._ending)
        if self.fails:
            raise SandboxLost("no room")

    @asynccontextmanager
    async def _ending(self) -> AsyncGenerator[None]:
        yield
        self.told.append("ended")

    async def open(self, scope: Scope) -> Sandbox:
        self.told.append("opened")
        return await super().open(scope)


async def test_an_environment_is_prepared_when_the_engine_is_entered(no_leaks: None) -> None:
    told: list[str] = []
    async with anyio.create_task_group() as group:
        place = Preparing(script=answering, group=group, opened=[], told=told)
        async with AsyncRLM(scripted(cell("x")), environment=place) as rlm:
            assert told[0] == "prepared"
            assert (await rlm.acompletion("CTX")).response == "fine"
        assert told == ["prepared", "opened", "ended"]
        told.clear()
        rlm = AsyncRLM(scripted(), environment=msgspec.structs.replace(place, fails=True), persistent=True)
        with pytest.raises(SandboxLost, match="no room"):
            await rlm.__aenter__()
        assert told == ["prepared", "ended"]
        assert "idle" in repr(rlm)
        group.cancel_scope.cancel()


class Sealed(TreeLog):
    async def aclose(self) -> None:
        await super().aclose()
        raise OSError("it sticks")


class Sealing(RLMLogger):
    """Gives logs that fail to close."""

    def for_tree(self, root_run_id: str) -> TreeLog:
        return Sealed(None, root_run_id)


async def test_a_log_that_fails_to_close_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    with anyio.fail_after(20):
        completion = await AsyncRLM(scripted(submit("'fine'")), logger=Sealing()).acompletion("CTX")
    assert completion.response == "fine"
    assert ["it sticks" in record.getMessage() for record in caplog.records] == [True]
