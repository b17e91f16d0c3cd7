"""What must hold when something ends early: the host, a worker, the calling task. Nothing stays, nothing goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import anyio
import psutil
import pytest
from cases.models import ScriptedRoot, SubModel, cell, submit
from cases.runs import living_tasks, nothing_left, processes

from asyncrlm import AsyncRLM, Repl

if TYPE_CHECKING:
    from pathlib import Path

    from asyncrlm.events import Event

pytestmark = pytest.mark.anyio

one = pytest.mark.parametrize("anyio_backend", ["asyncio"])
both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])

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


@pytest.mark.parametrize(
    "then", ["while True: pass", "import time\ntime.sleep(600)", "llm_query('hang')"], ids=["loop", "sleep", "call"]
)
def test_a_killed_host_leaves_nothing(then: str, tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
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
            await AsyncRLM(backend=root, other_backends=[sub]).acompletion("c" * 3_000_000)
        anyio.run(main)
        """
    )
    code = f"{DAEMONS}\nllm_query('up')\n{then}"
    env = dict(os.environ, TMPDIR=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", program, code], env=env, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "up\n"
        descendants = psutil.Process(host.pid).children(recursive=True)
        assert len(descendants) >= STARTED + 2  # and at least a template and a worker
        host.send_signal(signal.SIGKILL)
        host.wait(10)
        _gone, alive = psutil.wait_procs(descendants, timeout=10)
    assert alive == []
    assert [path.name for path in tmp_path.rglob("*")] == []


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


class Trip:
    """A listener that cancels a scope at the n-th event, and counts them."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.events: list[str] = []
        self.scope = anyio.CancelScope()

    def __call__(self, event: Event) -> None:
        self.events.append(type(event).__name__)
        if len(self.events) == self.at:
            self.scope.cancel()


def _tree() -> tuple[AsyncRLM, ScriptedRoot, SubModel, Trip]:
    """A run with everything in it: cells, a batch, children, a tool, a killed worker."""

    async def tool(x: int) -> int:
        await anyio.lowlevel.checkpoint()
        return x + 1

    turns = [
        cell("rs = llm_query_batched(['a', 'b', 'c'])\nprint(add(1))"),
        cell("import subprocess\nsubprocess.Popen(['sleep', '600'])\nrs += rlm_query_batched(['d', 'e'])"),
        cell("import os\nos._exit(1)"),
        submit("'done'"),
    ]
    root = ScriptedRoot(turns)
    sub = SubModel(
        str.upper, child=lambda _text, turn: cell("x = llm_query('leaf')") if turn == 1 else submit("x"), delay=0.001
    )
    trip = Trip()
    rlm = AsyncRLM(backend=root, other_backends=[sub], max_depth=2, custom_tools={"add": tool}, logger=trip)
    return rlm, root, sub, trip


async def _sweep(step: int) -> None:
    rlm, _root, _sub, trip = _tree()
    with anyio.fail_after(10):
        assert (await rlm.acompletion("CTX")).response == "done"
    total = len(trip.events)
    assert total > 40, trip.events
    for at in range(1, total + 1, step):
        rlm, root, sub, trip = _tree()
        trip.at = at
        with nothing_left(), anyio.fail_after(10):
            with trip.scope:
                await rlm.acompletion("CTX")
            calls = root.asked + sub.asked
            assert (root.in_flight, sub.in_flight) == (0, 0), f"cancelled at event {at}"
            await anyio.wait_all_tasks_blocked()
            assert root.asked + sub.asked == calls, f"cancelled at event {at}"


@both
async def test_cancelling_at_any_event_leaves_nothing() -> None:
    await _sweep(4)


@both
@pytest.mark.soak
async def test_cancelling_at_every_event_leaves_nothing() -> None:
    await _sweep(1)


@both
@pytest.mark.parametrize(
    "first", [range(0, 40, 8), pytest.param(range(400), marks=pytest.mark.soak)], ids=["some", "every"]
)
async def test_cancelling_at_any_step_of_the_loop_leaves_nothing(first: range) -> None:
    for steps in first:
        rlm, root, sub, _trip = _tree()
        with nothing_left(), anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(rlm.acompletion, "CTX")
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            assert (root.in_flight, sub.in_flight) == (0, 0)
            assert living_tasks() >= 1
