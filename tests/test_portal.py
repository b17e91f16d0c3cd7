"""The thread that all `RLM` share: what ends there, by itself, by Ctrl-C or with the process, ends nothing else."""

from __future__ import annotations

import asyncio
import itertools
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

import anyio
import anyio.to_thread
import pytest

import asyncrlm
from asyncrlm import RLM, CancellationError, LMError

from .helpers import cell, scripted, submit

pytestmark = pytest.mark.usefixtures("no_leaks")

PLAIN: dict[str, Any] = {"max_depth": 0}
"""Without a worker."""


class Stop(BaseException):
    pass


def portals() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "portal" in thread.name]


def wait_until(fact: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not fact():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


def ending(error: BaseException) -> Callable[..., Any]:
    async def model(messages: list[dict[str, str]]) -> str:
        raise error

    return model


# ---- what one raises the others do not hear of -----------------------------------------------------------------------


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Stop("x")], ids=repr)
@pytest.mark.parametrize("place", ["model", "sub-model", "task"])
def test_what_ends_a_program_ends_one_run_of_many(place: str, error: BaseException) -> None:
    asked, go_on = threading.Event(), threading.Event()

    async def neighbour(messages: list[dict[str, str]]) -> str:
        asked.set()
        await anyio.to_thread.run_sync(go_on.wait, 10)
        return "unharmed"

    async def leaves_a_task(messages: list[dict[str, str]]) -> str:
        async def fails() -> None:
            raise error

        task = asyncio.ensure_future(fails())
        await asyncio.wait([task])
        assert task.exception() is error
        return "went on"

    async def goes_on(messages: list[dict[str, str]]) -> str:
        go_on.set()
        return "went on"

    answers: list[str] = []
    with RLM(neighbour, **PLAIN) as other, RLM(goes_on, **PLAIN) as later:
        waiting = threading.Thread(target=lambda: answers.append(other.completion("CTX").response))
        waiting.start()
        assert asked.wait(10)
        if place == "model":
            with RLM(ending(error), **PLAIN) as rlm, pytest.raises(LMError, match=type(error).__name__):
                rlm.completion("CTX")
        elif place == "sub-model":
            cells = cell("print(llm_query('x'))"), submit("'went on'")
            with RLM(scripted(*cells), other_backends=[ending(error)]) as rlm:
                assert rlm.completion("CTX").response == "went on"
        else:
            with RLM(leaves_a_task, **PLAIN) as rlm:
                assert rlm.completion("CTX").response == "went on"
        assert later.completion("CTX").response == "went on"
        waiting.join(10)
        assert answers == ["unharmed"]
    assert not portals()


def test_a_task_that_cancels_all_others_leaves_later_runs_alone() -> None:
    async def cancels(messages: list[dict[str, str]]) -> str:
        for task in asyncio.all_tasks():
            task.cancel()
        return await anyio.sleep_forever()

    with RLM(cancels, **PLAIN) as rlm, pytest.raises(CancellationError):
        rlm.completion("CTX")
    with RLM(scripted("later"), **PLAIN) as rlm:
        assert rlm.completion("CTX").response == "later"


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_while_it_is_closed_stops_what_is_waited_for() -> None:
    asked = threading.Event()
    errors: list[BaseException] = []

    async def never(messages: list[dict[str, str]]) -> str:
        asked.set()
        return await anyio.sleep_forever()

    def complete() -> None:
        try:
            rlm.completion("CTX")
        except CancellationError as error:
            errors.append(error)

    rlm = RLM(scripted(cell("answer['content'] = 'so far'") + "\n" + cell("llm_query('x')")), other_backends=[never])
    thread = threading.Thread(target=complete)
    thread.start()
    assert asked.wait(10)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        rlm.close()
    thread.join(10)
    assert [(type(error), error.partial_answer) for error in errors] == [(CancellationError, "so far")]  # type: ignore[attr-defined]
    assert not portals()


OURS = tuple(str(Path(asyncrlm.__file__).with_name(name)) for name in ("sync.py", "blocking.py", "portal.py"))


class CtrlC:
    """Ctrl-C before the n-th line of ours that the calling thread runs."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in OURS else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        # No signal comes at these lines: at that of a `with`, traced again when its block is left, before the lock is
        # free; and at a `try`, which does nothing.
        code = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not code.lstrip().startswith(("with ", "try:")):
            self.left -= 1
            if not self.left:
                sys.settrace(self._before)
                raise KeyboardInterrupt
        return self._line


def _completion(rlm: RLM) -> None:
    rlm.completion("CTX")


def _stream(rlm: RLM) -> None:
    with rlm.stream("CTX") as events:
        list(events)


def _session(rlm: RLM) -> None:
    with rlm.session() as chat:
        chat.completion("CTX")


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(("door", "step"), [(_completion, 1), (_stream, 1), (_session, 11), (RLM.close, 1)])
def test_ctrl_c_at_any_line_leaves_nothing_under_way(door: Callable[[RLM], None], step: int, opened: bool) -> None:
    in_flight = 0

    async def model(messages: list[dict[str, str]]) -> str:
        nonlocal in_flight
        in_flight += 1
        try:
            await anyio.lowlevel.checkpoint()
        finally:
            in_flight -= 1
        return "answered"

    for line in itertools.count(1, step):
        rlm = RLM(model, **PLAIN)
        if opened:
            rlm.completion("CTX")
        try:
            with CtrlC(line) as pressed:
                door(rlm)
        except (KeyboardInterrupt, CancellationError):
            assert not pressed.left
        assert in_flight == 0
        assert rlm.completion("CTX").response == "answered"
        rlm.close()
        wait_until(lambda: not portals())
        if pressed.left:
            break
    assert line > (1 if door is RLM.close and not opened else 10)


# ---- the end of the process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["", "raise SystemExit(0)", "rlm.stream('CTX').__enter__()"])
def test_a_daemon_thread_in_a_completion_does_not_keep_the_process(ends: str) -> None:
    code = f"""
import threading
import time
import anyio
from asyncrlm import RLM
asked = threading.Event()
async def never(messages):
    asked.set()
    try:
        await anyio.sleep_forever()
    finally:
        print("cleaned up", flush=True)
rlm = RLM(never)
threading.Thread(target=rlm.completion, args=("CTX",), daemon=True).start()
asked.wait(10)
{ends}
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert set(ran.stdout.splitlines()) == {"cleaned up"}
