"""What must hold when something ends early: the host, a worker, the calling task. Nothing stays, nothing goes on."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import psutil
import pytest

from asyncrlm import AsyncRLM, Repl, RLMLogger

from .cases.models import QUESTION, ScriptedRoot, SubModel, cell, submit
from .cases.runs import nothing_left, processes
from .helpers import killed_at_the_end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from pathlib import Path

    from asyncrlm.events import Event
    from asyncrlm.observe.jsonl import TreeLog

pytestmark = pytest.mark.anyio

one = pytest.mark.parametrize("anyio_backend", ["asyncio"])
both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where logs and temporary files go in this test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


DAEMONS = """
import os, subprocess, sys, time
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(f'{os.getpid()}.txt', 'w').write('here')
            time.sleep(600)
        os._exit(0)
for _ in range(4):
    daemon()
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)
while len([n for n in os.listdir() if n.endswith('.txt')]) < 4:
    time.sleep(0.01)
print('started')
"""
"""A cell that leaves four daemons (double fork, new session) and a process in a session of its own."""
STARTED = 5


HOST = """
import sys, anyio
from asyncrlm import AsyncRLM
async def root(messages):
    return "```repl\\n" + sys.argv[1] + "\\n```"
async def sub(messages):
    if messages[-1]["content"] == "up":
        print("up", flush=True)
        return "ok"
    await anyio.sleep(600)
async def main():
    await AsyncRLM(root, other_backends=[sub]).acompletion("c" * 3_000_000)
anyio.run(main)
"""


@contextmanager
def host(then: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A host in the middle of a cell that has left daemons and now does `then`, and all that descends from it."""
    command = [sys.executable, "-c", HOST, f"{DAEMONS}\nllm_query('up')\n{then}"]
    env = dict(os.environ, TMPDIR=str(folder))
    pipe = subprocess.PIPE
    started = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    with killed_at_the_end(started) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        descendants = psutil.Process(process.pid).children(recursive=True)
        assert len(descendants) >= STARTED + 2  # and at least a template and a worker
        yield process, descendants
        process.communicate(timeout=10)
    _gone, alive = psutil.wait_procs(descendants, timeout=10)
    assert alive == []


ENDLESS = {"loop": "while True: pass", "sleep": "import time\ntime.sleep(600)", "call": "llm_query('hang')"}


@pytest.mark.parametrize(
    ("ends", "then"),
    [*((signal.SIGKILL, then) for then in ENDLESS), (signal.SIGTERM, "loop"), (signal.SIGINT, "sleep")],
    ids=str,
)
def test_a_host_that_ends_leaves_nothing(then: str, ends: signal.Signals, folder: Path) -> None:
    with host(ENDLESS[then], folder) as (process, _descendants):
        process.send_signal(ends)
    assert [path.name for path in folder.rglob("*")] == []


def test_ctrl_c_reaches_them_where_the_shell_has_it_ignored() -> None:
    test = f"{__file__}::test_a_host_that_ends_leaves_nothing[{signal.SIGINT}-sleep]"
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    shell = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *run]
    done = subprocess.run(shell, capture_output=True, text=True, check=False, timeout=60)
    assert "1 passed" in done.stdout, done.stdout


def test_a_host_killed_together_with_its_template_leaves_no_process(folder: Path) -> None:
    with host(ENDLESS["loop"], folder) as (process, _descendants):
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        for member in family:
            member.suspend()  # so that none of them sees another one die
        for member in family:
            member.kill()


@both
@pytest.mark.soak
async def test_what_such_a_death_left_on_disk_is_swept_at_the_next_start(folder: Path) -> None:
    await anyio.to_thread.run_sync(test_a_host_killed_together_with_its_template_leaves_no_process, folder)
    with anyio.fail_after(10):
        async with Repl(environment="local") as repl:
            await repl.execute("print('up')")
    assert [path.name for path in folder.rglob("*")] == []


@both
async def test_a_closed_worker_takes_what_it_started_and_nothing_of_its_neighbours() -> None:
    with nothing_left(), anyio.fail_after(10):
        async with Repl(environment="local") as neighbour:
            assert "started" in (await neighbour.execute(DAEMONS)).stdout
            theirs = processes()
            assert len(theirs) >= STARTED + 2
            async with Repl(environment="local") as repl:
                assert "started" in (await repl.execute(DAEMONS)).stdout
                assert len(processes() - theirs) >= STARTED + 1
            assert processes() == theirs
            assert (await neighbour.execute("print('here')")).stdout == "here\n"


@both
async def test_a_killed_worker_takes_what_it_started() -> None:
    with nothing_left(), anyio.fail_after(10):
        async with Repl(environment="local") as repl:
            before = processes()
            assert "started" in (await repl.execute(DAEMONS)).stdout
            daemons = processes() - before
            assert len(daemons) >= STARTED
            await repl.execute("import os\nos.kill(os.getpid(), 9)")
            assert not processes() & daemons


@both
async def test_a_cell_that_tries_to_kill_everybody_kills_only_itself() -> None:
    with nothing_left(), anyio.fail_after(10):
        async with Repl(environment="local") as neighbour, Repl(environment="local") as repl:
            await neighbour.execute("mine = 7")
            await repl.execute("import os, signal\nos.kill(-1, signal.SIGKILL)")
            await repl.execute("import os, signal\nos.killpg(0, signal.SIGKILL)")
            assert (await repl.execute("print('up')")).stdout == "up\n"
            assert (await neighbour.execute("print(mine)")).stdout == "7\n"


class Trip(RLMLogger):
    """A logger that cancels `scope` at the event of number `at`, and keeps the names of all."""

    def __init__(self, folder: Path, at: int | None = None) -> None:
        super().__init__(log_dir=folder)
        self.at = at
        self.events: list[str] = []
        self.scope = anyio.CancelScope()

    def for_tree(self, root_run_id: str) -> TreeLog:
        log = super().for_tree(root_run_id)
        trip = self

        class Tripping(type(log)):
            def __call__(self, event: Event) -> None:
                super().__call__(event)
                trip.events.append(type(event).__name__)
                if len(trip.events) == trip.at:
                    trip.scope.cancel()

        log.__class__ = Tripping
        return log


def _tree(logger: RLMLogger | None = None) -> tuple[AsyncRLM, ScriptedRoot, SubModel]:
    """A run with everything in it: cells, a batch, children, a tool, a killed worker."""

    async def tool(x: int) -> int:
        await anyio.lowlevel.checkpoint()
        return x + 1

    def child(_text: str, turn: int) -> str:
        return cell("x = llm_query('leaf')") if turn == 1 else submit("x")

    turns = [
        cell("rs = llm_query_batched(['a', 'b', 'c'])\nprint(add(1))"),
        cell("import subprocess\nsubprocess.Popen(['sleep', '600'])\nrs += rlm_query_batched(['d', 'e'])"),
        cell("import os\nos._exit(1)"),
        submit("'done'"),
    ]
    root, sub = ScriptedRoot(turns, child=child), SubModel(str.upper, child=child, delay=0.001)
    return AsyncRLM(root, other_backends=[sub], max_depth=2, custom_tools={"add": tool}, logger=logger), root, sub


async def _nothing_goes_on(root: ScriptedRoot, sub: SubModel) -> None:
    asked = root.asked + sub.asked
    assert (root.in_flight, sub.in_flight) == (0, 0)
    await anyio.wait_all_tasks_blocked()
    assert root.asked + sub.asked == asked


async def _sweep(folder: Path, step: int) -> None:
    whole = Trip(folder)
    rlm, _root, _sub = _tree(whole)
    with anyio.fail_after(10):
        assert (await rlm.acompletion("CTX", QUESTION)).response == "done"
    assert len(whole.events) > 40, whole.events
    for at in range(1, len(whole.events) + 1, step):
        trip = Trip(folder, at)
        rlm, root, sub = _tree(trip)
        with nothing_left(), anyio.fail_after(10):
            with trip.scope:
                await rlm.acompletion("CTX", QUESTION)
            await _nothing_goes_on(root, sub)
    assert not [path for path in folder.iterdir() if path.suffix != ".jsonl"]


@both
@pytest.mark.usefixtures("no_leaks")
async def test_cancelling_at_any_event_leaves_nothing(folder: Path) -> None:
    await _sweep(folder, 4)


@both
@pytest.mark.soak
@pytest.mark.usefixtures("no_leaks")
async def test_cancelling_at_every_event_leaves_nothing(folder: Path) -> None:
    await _sweep(folder, 1)


@both
async def test_leaving_a_stream_of_events_early_leaves_nothing() -> None:
    for at in (1, 10, 20):
        rlm, root, sub = _tree()
        with nothing_left(), anyio.fail_after(10):
            async with rlm.astream("CTX", QUESTION) as events:
                for _ in range(at):
                    await anext(events)
            await _nothing_goes_on(root, sub)


SOME = [0, 1, 5, 40, 300]
MANY = [*range(50), *(int(1.3**n) for n in range(15, 36))]


@both
@pytest.mark.parametrize("first", [SOME, pytest.param(MANY, marks=pytest.mark.soak)], ids=["some", "many"])
async def test_cancelling_at_any_step_of_the_loop_leaves_nothing(first: Sequence[int]) -> None:
    for steps in first:
        rlm, root, sub = _tree()
        with nothing_left(), anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(rlm.acompletion, "CTX", QUESTION)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            await _nothing_goes_on(root, sub)


async def _completion(rlm: AsyncRLM) -> None:
    await rlm.acompletion("CTX", QUESTION)


async def _stream(rlm: AsyncRLM) -> None:
    async with rlm.astream("CTX", QUESTION) as events:
        async for _ in events:
            pass


async def _entered(rlm: AsyncRLM) -> None:
    async with rlm:
        await rlm.acompletion("CTX", QUESTION)


async def _chat(rlm: AsyncRLM) -> None:
    async with rlm, rlm.session() as chat:
        await chat.acompletion("CTX", QUESTION)


async def _chat_closed(rlm: AsyncRLM) -> None:
    async with rlm.session() as chat:
        async with chat.astream("CTX", QUESTION) as events:
            async for _ in events:
                pass
        await chat.aclose()
    await rlm.aclose()


async def _persistent(rlm: AsyncRLM) -> None:
    async with AsyncRLM(ScriptedRoot([submit("'done'")] * 2), persistent=True) as kept:
        await kept.acompletion("CTX", QUESTION)


async def _repl(rlm: AsyncRLM) -> None:
    async with Repl(context="CTX") as repl:
        await repl.load("context_1", "more")
        await repl.execute("print(context, context_1)")
        await repl.execute("import time\ntime.sleep(600)")


DOORS = [_completion, _stream, _entered, _chat, _chat_closed, _persistent, _repl]


@one
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("first", [SOME, pytest.param(MANY, marks=pytest.mark.soak)], ids=["some", "many"])
@pytest.mark.usefixtures("no_leaks")
async def test_a_cancelled_task_leaves_nothing(
    first: Sequence[int], times: int, door: Callable[[AsyncRLM], Awaitable[None]], folder: Path
) -> None:
    for steps in first:
        rlm, root, sub = _tree()
        with nothing_left(), anyio.fail_after(10):
            task = asyncio.ensure_future(door(rlm))
            for _ in range(times):
                for _ in range(steps if not task.cancelling() else 2):
                    await anyio.lowlevel.checkpoint()
                ended = task.done()
                task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or (ended and task.exception() is None)
            await _nothing_goes_on(root, sub)
        assert [path.name for path in folder.rglob("*")] == []


@pytest.mark.usefixtures("no_leaks")
def test_a_loop_that_ends_while_a_template_starts_leaves_nothing(folder: Path) -> None:
    """Nobody waits for the run, so the end of `asyncio.run` cancels all its tasks, ours too, whatever shields them."""

    async def main() -> None:
        run = asyncio.ensure_future(_tree()[0].acompletion("CTX", QUESTION))
        while not list(folder.iterdir()):
            await asyncio.sleep(0)
        assert not run.done()

    before = processes()
    for _ in range(3):
        asyncio.run(main())
        give_up = time.monotonic() + 10
        while processes() - before or list(folder.rglob("*")):
            assert time.monotonic() < give_up, list(folder.rglob("*"))
            gc.collect()
            time.sleep(0.01)
