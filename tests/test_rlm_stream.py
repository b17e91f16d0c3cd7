"""`RLM.stream`, and what an `RLM` leaves behind however it ends."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asyncrlm import RLM, CancellationError, ConfigurationError, LMError, RLMLogger
from asyncrlm.events import CellStarted, RunFinished, RunStarted, SandboxOpened, SubcallStarted, TurnStarted
from asyncrlm.testing import ScriptedLM

from .helpers import cell, echo, scripted, submit

pytestmark = pytest.mark.usefixtures("no_leaks")


def portals() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "portal" in thread.name]


def wait_until(fact: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not fact():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_the_events_of_a_run_and_its_result() -> None:
    with RLM(scripted(cell("print(llm_query('x'))"), submit("'ok'")), other_backends=[echo()]) as rlm:
        with rlm.stream("CTX", "What?", tags={"a": 1}) as events:
            seen = list(events)
        assert events.result is not None
        assert (events.result.response, events.result.tags) == ("ok", {"a": 1})
        assert list(events) == []
        kinds = [type(event) for event in seen]
        assert (kinds[0], kinds[-1]) == (RunStarted, RunFinished)
        assert {SandboxOpened, TurnStarted, CellStarted, SubcallStarted} <= set(kinds)
        assert all(event.run_id == events.result.run_id for event in seen)
        assert events.result.metadata is not None


def test_inside_a_running_loop() -> None:
    async def notebook() -> list[str]:
        with RLM(scripted(submit("'ok'"))) as rlm, rlm.stream("CTX") as events:
            return [event.response or "" for event in events if isinstance(event, RunFinished)]

    assert anyio.run(notebook) == ["ok"]


def test_leaving_early_cancels_the_run() -> None:
    asked, cancelled = threading.Event(), threading.Event()

    async def never(messages: list[dict[str, str]]) -> str:
        asked.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()
        return ""

    with RLM(scripted(cell("llm_query('x')")), other_backends=[never]) as rlm:
        with rlm.stream("CTX") as events:
            for event in events:
                if isinstance(event, SubcallStarted):
                    assert asked.wait(10)
                    break
        # All is over when the block is left, not some time later.
        assert cancelled.is_set()
        assert events.result is None
        assert list(events) == []


def test_an_error_in_the_block_cancels_it_too() -> None:
    with RLM(scripted(submit("'ok'"))) as rlm:
        with pytest.raises(TypeError), rlm.stream("CTX") as events:
            len(events)  # type: ignore[arg-type]
        with rlm.stream("CTX") as events:
            pass


def test_a_failed_run_raises_from_the_iteration() -> None:
    with RLM(scripted(LMError("down", kind="server"))) as rlm, rlm.stream("CTX") as events:
        first = next(events)
        assert isinstance(first, RunStarted)
        with pytest.raises(LMError, match="down") as caught:
            list(events)
        assert caught.value.run_id == first.run_id
        assert caught.value.metadata is not None
        assert list(events) == []


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    rlm = RLM(scripted())
    with pytest.raises(ConfigurationError, match="max_depth"), rlm.stream("CTX", max_depth=-1):
        pass
    with pytest.raises(ConfigurationError, match="of type object"), rlm.stream(object()) as events:
        list(events)
    rlm.close()


def test_streams_side_by_side() -> None:
    with RLM(ScriptedLM(lambda request: submit("context"))) as rlm, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(rlm.stream(f"ctx{i}")) for i in range(4)]
        for stream in reversed(streams):
            list(stream)
        assert [s.result.response for s in streams if s.result] == ["ctx0", "ctx1", "ctx2", "ctx3"]


def test_ctrl_c_while_waiting_for_an_event() -> None:
    cancelled = threading.Event()

    async def never(messages: list[dict[str, str]]) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()
        return ""

    cells = cell("answer['content'] = 'so far'") + "\n" + cell("llm_query('x')")
    with RLM(scripted(cells), other_backends=[never]) as rlm:
        with rlm.stream("CTX") as events, pytest.raises(CancellationError) as caught:
            list(events)
        assert cancelled.is_set()
        assert caught.value.run_id
        assert caught.value.partial_answer == "so far"
        assert caught.value.usage_summary is not None
        assert list(events) == []


# ---- the end of an RLM -----------------------------------------------------------------------------------------------


def test_an_abandoned_rlm_collected_in_the_portal_thread_is_closed() -> None:
    held: list[Any] = [RLM(scripted(submit("'first'")))]
    assert held[0].completion("CTX").response == "first"
    where: list[str] = []

    def drop(*_: Any) -> None:
        held.clear()
        gc.collect()
        where.append(threading.current_thread().name)

    with RLM(scripted(submit("'second'")), on_iteration_start=drop) as rlm:
        assert rlm.completion("CTX").response == "second"
        assert "portal" in where[0]
    wait_until(lambda: not portals())


def test_an_abandoned_rlm_collected_anywhere_else_is_closed() -> None:
    rlm = RLM(scripted(submit("'ok'")))
    rlm.completion("CTX")
    assert portals()
    del rlm
    gc.collect()
    wait_until(lambda: not portals())


def test_an_engine_that_does_not_open_keeps_no_portal(monkeypatch: pytest.MonkeyPatch) -> None:
    rlm = RLM(scripted(submit("'ok'")))

    async def refuse(**_: Any) -> None:
        raise ConfigurationError("not today")

    with monkeypatch.context() as patch:
        patch.setattr(rlm._completions._engine, "acquire", refuse)
        for _ in range(3):
            with pytest.raises(ConfigurationError, match="not today"):
                rlm.completion("CTX")
            assert not portals()
    assert rlm.completion("CTX").response == "ok"
    rlm.close()
    assert not portals()


@pytest.mark.parametrize("end", ["", "del rlm", "rlm.close()", "os._exit(0)", "raise SystemExit(0)"])
def test_a_script_that_never_closes_ends(end: str) -> None:
    code = f"""
import os
from asyncrlm import RLM
rlm = RLM("offline")
print(rlm.completion({{"a": ["The cat sat on the mat."]}}, "Where did the cat sit?").stop_reason, flush=True)
{end}
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "answer\n", "")


def test_what_isolation_is_in_force_is_told(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with RLM(scripted(submit("'ok'")), logger=RLMLogger(tmp_path), verbose=True) as rlm, rlm.stream("CTX") as events:
        opened = [event for event in events if isinstance(event, SandboxOpened)]
    assert len(opened) == 1
    rows = opened[0].in_force
    assert {"network", "read_outside", "outliving"} <= rows.keys()
    assert events.result is not None
    assert events.result.metadata is not None
    assert events.result.metadata["run_metadata"]["in_force"] == rows
    (log,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["in_force"] for line in lines if line.get("type") == "SandboxOpened"] == [rows]
    told = capfd.readouterr().err
    for row, holder in rows.items():
        assert row in told, holder
