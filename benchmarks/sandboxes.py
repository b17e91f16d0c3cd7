"""What a sandbox costs in each environment that can be had here: its start, its cells, its sub-calls, its contexts.

    python benchmarks/sandboxes.py                   # everything: two minutes
    python benchmarks/sandboxes.py --only local      # some places
    python benchmarks/sandboxes.py --quick           # does it work at all?
    python benchmarks/sandboxes.py --write           # and put the table into README.md

Docker is the engine that `docker` would use; where there is none, the tests' own is started, if that can be (root, and
`dockerd` installed). Models are functions that answer at once, so what is measured is ours and the sandbox's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from asyncrlm import AsyncRLM, ConfigurationError, Repl, SandboxLost
from asyncrlm.events import SandboxOpened

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "README.md"
BEGIN, END = "<!-- sandboxes: begin, written by sandboxes.py --write -->", "<!-- sandboxes: end -->"

TURN = "```repl\nx = 1\n```"
ANSWER = '```repl\nanswer.update(content="done", ready=True)\n```'
CALLS = """\
import time
for _ in range(20): llm_query("a")
began = time.perf_counter()
for _ in range({count}): llm_query("a")
print((time.perf_counter() - began) / {count})
"""
PAUSE = 0.5
"""Seconds in which a sandbox is made ahead."""
LINE = "Every line of the context has a letter that takes two bytes: é.\n"


@dataclass(frozen=True)
class Place:
    title: str
    environment: str
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    pooled: bool = False
    reach: dict[str, float] = field(default_factory=dict[str, float])
    """Row → what the project set itself: ms, or MB/s."""

    def at_once(self, runs: int) -> dict[str, Any]:
        return self.kwargs | ({"pool_size": runs} if self.pooled else {})


PLACES = [
    Place("local", "local", reach={"call": 0.5, "load": 200}),
    Place("ipython", "ipython"),
    Place("docker, cold", "docker", reach={"first": 300, "call": 1, "load": 200}),
    Place("docker, pooled", "docker", pooled=True, reach={"first": 30, "call": 1, "load": 200}),
    Place("ipython, a kernel of Jupyter's", "ipython", {"kernel": "python3"}),
]
ROWS = {
    "start": "sandbox ready, ms",
    "first": "first cell done, ms",
    "cell": "one more cell, ms",
    "call": "a sub-call, ms",
    "load": "a context of 100 MB, MB/s",
    "many": "16 at once: first cells done, ms",
}


@dataclass(frozen=True)
class Size:
    runs: int = 15
    many: int = 16
    rounds: int = 3
    cells: int = 200
    calls: int = 500
    megabytes: int = 100


QUICK = Size(runs=1, many=2, rounds=1, cells=3, calls=20, megabytes=1)


class Run:
    """One completion of two turns, and when the first cell was done."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.began = 0.0
        self.ready = 0.0

    async def model(self, messages: list[dict[str, str]]) -> str:
        self.asked.append(time.perf_counter())
        return TURN if len(self.asked) == 1 else ANSWER

    @property
    def first(self) -> float:
        return self.asked[1] - self.began


async def runs(place: Place, size: Size) -> dict[str, float]:
    """Runs one after another, and many at once."""
    found: list[Run] = []
    many: list[float] = []
    current: dict[str, Run] = {}

    async def model(messages: list[dict[str, str]]) -> str:
        number = re.search(r"question (\d+)", " ".join(message["content"] for message in messages))
        assert number is not None
        return await current[number[1]].model(messages)

    async def complete(rlm: AsyncRLM, number: int) -> Run:
        run = current[str(number)] = Run()
        run.began = time.perf_counter()
        async with rlm.astream("a context", f"question {number}") as events:
            async for event in events:
                if isinstance(event, SandboxOpened):
                    run.ready = event.seconds
        assert events.result is not None
        assert events.result.response == "done"
        return run

    async with AsyncRLM(model, environment=place.environment, environment_kwargs=place.at_once(1)) as rlm:
        await complete(rlm, 0)
        for number in range(size.runs):
            if place.pooled:
                await asyncio.sleep(PAUSE)
            found.append(await complete(rlm, number))
    async with AsyncRLM(model, environment=place.environment, environment_kwargs=place.at_once(size.many)) as rlm:
        await complete(rlm, 0)
        for _ in range(size.rounds):
            await asyncio.sleep(PAUSE * (size.many if place.pooled else 1))
            began = time.perf_counter()
            group = await asyncio.gather(*(complete(rlm, number) for number in range(size.many)))
            many.append(max(run.asked[1] for run in group) - began)
    return {
        "start": median(run.ready for run in found) * 1e3,
        "first": median(run.first for run in found) * 1e3,
        "many": median(many) * 1e3,
    }


async def one_worker(place: Place, size: Size) -> dict[str, float]:
    """Cells, sub-calls and contexts of one worker."""

    async def model(messages: list[dict[str, str]]) -> str:
        return "b"

    text = LINE * (size.megabytes * 1_000_000 // len(LINE.encode()))
    megabytes = len(text.encode()) / 1e6
    cells: list[float] = []
    calls: list[float] = []
    loads: list[float] = []
    async with Repl(place.environment, environment_kwargs=place.at_once(1), lm=model) as repl:
        await repl.execute("x = 1")
        for _ in range(size.cells):
            began = time.perf_counter()
            await repl.execute("x = 1")
            cells.append(time.perf_counter() - began)
        for _ in range(size.rounds):
            result = await repl.execute(CALLS.format(count=size.calls))
            assert result.error is None, result.error
            calls.append(float(result.stdout))
            began = time.perf_counter()
            await repl.load("context", text)
            loads.append(time.perf_counter() - began)
            length = await repl.execute("print(len(context))")
            assert length.stdout == f"{len(text)}\n"
    return {"cell": median(cells) * 1e3, "call": median(calls) * 1e3, "load": megabytes / median(loads)}


async def measure(place: Place, size: Size) -> dict[str, float] | str:
    try:
        return await runs(place, size) | await one_worker(place, size)
    except (ConfigurationError, SandboxLost) as error:
        return " ".join(str(error).split())


def table(found: dict[str, dict[str, float] | str], size: Size) -> str:
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    lines = [
        f"Medians of {size.runs} runs, {size.cells} cells, {size.rounds} times {size.calls} sub-calls, {size.rounds}",
        f"contexts and {size.rounds} times {size.many} runs at once; {datetime.now(UTC):%Y-%m-%d}, {machine};",
        f"load {os.getloadavg()[0]:.1f}. To reach in brackets.",
        "",
        f"| | {' | '.join(ROWS.values())} |",
        "|---|" + "---|" * len(ROWS),
    ]
    for place in PLACES:
        figures = found.get(place.title)
        if isinstance(figures, dict):
            cells = [_figure(row, figures[row], place.reach.get(row)) for row in ROWS]
            lines.append(f"| {place.title} | {' | '.join(cells)} |")
        elif figures is not None:
            lines.append(f"| {place.title} | not to be had here: {figures} |{' |' * (len(ROWS) - 1)}")
    if size == QUICK:
        lines.append("\n(--quick: the figures mean nothing.)")
    return "\n".join(lines)


def _figure(row: str, value: float, reach: float | None) -> str:
    text = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    if reach is None:
        return text
    met = value >= reach if row == "load" else value <= reach
    return f"{text} ({'≥' if row == 'load' else '≤'} {reach:g})" if met else f"**{text}, missed** ({reach:g})"


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """A Docker Engine, unless there is one."""
    from asyncrlm.environments.docker_endpoints import find_engine

    try:
        find_engine()
    except ConfigurationError:
        sys.path.insert(0, str(ROOT))
        try:
            from tests import docker_engine
        except ImportError:
            yield
            return
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(docker_engine.NoEngine):
                os.environ["DOCKER_HOST"] = stack.enter_context(docker_engine.engine())
            yield
    else:
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", help="titles, or what they begin with, by comma", default="")
    given = parser.parse_args()
    wanted = [one.strip() for one in given.only.split(",") if one.strip()]
    places = [place for place in PLACES if not wanted or place.title.startswith(tuple(wanted))]
    size = QUICK if given.quick else Size()
    needs_engine = any(place.environment == "docker" for place in places)
    found: dict[str, dict[str, float] | str] = {}
    with engine() if needs_engine else contextlib.nullcontext():
        for place in places:
            print(place.title, file=sys.stderr, flush=True)
            found[place.title] = asyncio.run(measure(place, size))
    text = table(found, size)
    print(text)
    if given.write:
        page = PAGE.read_text("utf-8")
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
