"""The rows of the table and their sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import floors
import scenarios
from adapters.base import Contender, Engine
from control import Figures, Params, Server

OnEngine = Callable[[Engine, Params, Server], Awaitable[Figures]]
OnFloor = Callable[[Any, Params, Server], Awaitable[Figures]]
WITH_REQUESTS = ("asyncrlm", "openai", "aiohttp", "rlms")
WITHOUT = ("asyncrlm", "plain", "rlms")


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    name: str
    """Letter and, where a scenario has several, what tells them apart."""
    title: str
    engine: OnEngine
    floor: OnFloor | None
    contenders: tuple[str, ...]
    params: Params = field(default_factory=dict[str, Any])
    quick: Params = field(default_factory=dict[str, Any])
    """What differs in `params` for a run that only proves that the suite works."""
    memory: bool = False
    """Watch the memory of the contender's process tree."""
    limit: float = 120.0
    """Seconds after which a contender is killed."""


async def cold_import(contender: Contender, p: Params, server: Server) -> Figures:
    return await asyncio.to_thread(floors.import_cost, contender.import_statement, p["n"])


def fan_out(n: int, ms: int, width: int) -> Row:
    title = f"one batch of {n:,} sub-calls of 2 kB at {ms} ms, {width:,} at once"
    params = {"n": n, "latency": ms / 1e3, "width": width}
    quick = {"n": 40, "width": 20}
    return Row(f"c-{n}", title, scenarios.fan_out, floors.fan_out, WITH_REQUESTS, params, quick)


def context(name: str, what: str, contenders: tuple[str, ...], **params: object) -> Row:
    title = f"{what} as context: until after the first cell"
    run, floor = scenarios.big_context, floors.write_and_decode
    return Row(name, title, run, floor, contenders, params, {"mb": 1}, memory=True)


def many_runs(n: int) -> Row:
    title = f"{n} runs at once, each a batch of 16 at 50 ms from a callable model"
    params = {"n": n, "width": 16, "latency": 0.05}
    return Row(f"l-{n}", title, scenarios.many_runs, floors.sleeps, ("asyncrlm", "plain"), params, {"n": 4})


ROWS = [
    Row(
        "a",
        "a completion of two turns",
        scenarios.trivial,
        floors.trivial,
        WITH_REQUESTS,
        {"n": 20},
        {"n": 3},
    ),
    Row(
        "b",
        "200 turns: a turn of the first 20 → of the last 20",
        scenarios.many_turns,
        floors.many_turns,
        WITH_REQUESTS,
        {"n": 200},
        {"n": 45},
    ),
    fan_out(1_000, 200, 1_000),
    fan_out(10_000, 50, 256),
    Row(
        "d",
        "500 sub-calls one after another",
        scenarios.sequential,
        floors.sequential,
        WITH_REQUESTS,
        {"n": 500},
        {"n": 20},
    ),
    Row(
        "e",
        "64 children of 2 turns at 100 ms, 64 at once",
        scenarios.children,
        floors.children,
        WITH_REQUESTS,
        {"n": 64, "latency": 0.1, "width": 64},
        {"n": 4},
    ),
    Row(
        "f",
        "200 completions at once, each 2 turns and 10 sub-calls at 100 ms",
        scenarios.many_completions,
        floors.many_completions,
        WITH_REQUESTS,
        {"n": 200, "latency": 0.1, "width": 10},
        {"n": 8},
    ),
    context("g-10", "10 MB", WITHOUT, mb=10),
    context("g-100", "100 MB", WITHOUT, mb=100),
    context("g-1000", "1 GB", WITHOUT, mb=1000),
    context("g-path", "a file of 200 MB", ("asyncrlm", "plain"), mb=200, file=True),
    Row(
        "h",
        "100 MB printed in a cell",
        scenarios.much_output,
        floors.prints,
        WITHOUT,
        {"lines": 100_000},
        {"lines": 1_000},
        memory=True,
    ),
    Row(
        "i",
        "an endless cell under a limit of 2 s",
        scenarios.endless_cell,
        None,
        ("asyncrlm", "rlms"),
        {"limit": 2.0},
        limit=20.0,
    ),
    Row(
        "k",
        "two batches of 200 with 10 % 429 and 5 % 500",
        scenarios.faults,
        floors.faults,
        WITH_REQUESTS,
        {"n": 200},
        {"n": 20},
    ),
    Row(
        "m",
        "a sub-call that is answered from the cache on disk",
        scenarios.cache_hits,
        None,
        ("asyncrlm",),
        {"n": 1_000},
        {"n": 20},
    ),
    many_runs(16),
    many_runs(64),
    many_runs(256),
    Row(
        "import",
        "CPU of a fresh interpreter that imports it",
        cold_import,
        cold_import,
        (*WITH_REQUESTS, "plain"),
        {"n": 7},
        {"n": 1},
    ),
]
