"""The rows of the table: what each asks of an engine. `floors.py` has the same work without one, `rows.py` the sizes.

Code of cells and the expected answers are written here, in the words the engine's adapter gives. An answer is checked
in full, and a figure is only as good as the answers beside it: `right` of `of`.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import floors
from adapters.base import Options
from measure import Memory, Stalls, cpu_seconds, median, settle

if TYPE_CHECKING:
    from adapters.base import Complete, Engine
    from control import Figures, Params, Server

ID = 'context[:40].split("-")[1]'  # a slice: splitting all of a large context would copy it
PRINT_ID = 'print("OU" + "T:@@CID@@;")'
LINE = "the quick brown fox jumps over it\n"


@dataclass
class Attempt:
    """One completion as its caller sees it."""

    answer: str = ""
    error: str | None = None
    seconds: float = 0.0


async def attempt(complete: Complete, context: str | Path, cid: str) -> Attempt:
    one, start = Attempt(), time.perf_counter()
    try:
        one.answer = await complete(context, f"Task CID:{cid}; please proceed")
    except Exception as error:  # a contender's failure is a result
        one.error = f"{type(error).__name__}: {error}"[:300]
    one.seconds = time.perf_counter() - start
    return one


def named(cid: str) -> str:
    return f"CTX-{cid}-END"


def counted(one: Attempt, cid: str) -> int:
    """The number an answer `ID|n` gives, 0 unless it is this completion's answer."""
    head, _, tail = one.answer.partition("|")
    return int(tail) if head == cid and tail.isdigit() else 0


def matches(name: str) -> str:
    """An expression: how many replies of the list are what their prompts ask for."""
    return f'sum({name}[i] == "ECHO:%d" % i for i in range(len({name})))'


async def warm_up(engine: Engine, complete: Complete, server: Server) -> None:
    """One completion with a sub-call, so that what is loaded and started at first use is no part of a figure."""
    call = engine.query('"ECHO:warm;"')
    server.configure(scripts={"root": {"turns": [engine.cell(f"x = {call}"), engine.submit(ID)]}})
    await attempt(complete, named("warm"), "warm")
    settle()


async def trivial(engine: Engine, p: Params, server: Server) -> Figures:
    turns = [engine.cell(PRINT_ID), engine.submit(ID)]
    server.configure(expect_output=True, scripts={"root": {"turns": turns}})
    async with engine.open(server.url, Options()) as complete:
        cold = await attempt(complete, named("cold"), "cold")
        warm = [await attempt(complete, named(f"a{i}"), f"a{i}") for i in range(p["n"])]
    seen = server.stats()
    return {
        "ms": median(one.seconds * 1e3 for one in warm),
        "cold_ms": cold.seconds * 1e3,
        "right": sum(one.answer == f"a{i}" for i, one in enumerate(warm)) - seen["missing_output"],
        "of": p["n"],
        "error": next((one.error for one in [cold, *warm] if one.error), None),
    }


async def many_turns(engine: Engine, p: Params, server: Server) -> Figures:
    n = p["n"]
    script = {"default": engine.cell("x = 1"), "final_at": n, "final": engine.submit(ID)}
    async with engine.open(server.url, Options(max_iterations=n + 5)) as complete:
        await warm_up(engine, complete, server)
        server.configure(scripts={"root": script})
        one = await attempt(complete, named("b"), "b")
    return {
        **floors.turn_times(server.stats()["root_times"]),
        "seconds": one.seconds,
        "right": int(one.answer == "b"),
        "of": 1,
        "error": one.error,
    }


async def fan_out(engine: Engine, p: Params, server: Server) -> Figures:
    n = p["n"]
    batch = (
        f'fill = "{floors.FILL_PART}" * {floors.FILL_TIMES}\n'
        f'ps = ["ECHO:%d;" % i + fill for i in range({n})]\nrs = {engine.batch("ps")}'
    )
    turns = [engine.cell(batch), engine.submit(f'{ID} + "|" + str({matches("rs")})')]
    async with engine.open(server.url, Options(max_concurrent_requests=p["width"])) as complete:
        await warm_up(engine, complete, server)
        server.configure(latency={"sub": p["latency"]}, scripts={"root": {"turns": turns}})
        async with Stalls() as stalls:
            cpu = cpu_seconds()
            one = await attempt(complete, named("c"), "c")
            cpu = cpu_seconds() - cpu
    seen = server.stats()
    return {
        "seconds": one.seconds,
        "cpu_s": cpu,
        **stalls.figures(),
        "most_in_flight": seen["most_in_flight"]["sub"],
        "connections": seen["connections"],
        "right": counted(one, "c"),
        "of": n,
        "error": one.error,
    }


async def sequential(engine: Engine, p: Params, server: Server) -> Figures:
    n = p["n"]
    call = engine.query('("ECHO:%d;" % i)')
    turns = [engine.cell(f"rs = [{call} for i in range({n})]"), engine.submit(f'{ID} + "|" + str({matches("rs")})')]
    async with engine.open(server.url, Options()) as complete:
        await warm_up(engine, complete, server)
        server.configure(scripts={"root": {"turns": turns}})
        one = await attempt(complete, named("d"), "d")
    times = server.stats()["root_times"]
    span = times[1] - times[0] if len(times) > 1 else one.seconds
    return {"seconds": span, "a_second": n / span, "right": counted(one, "d"), "of": n, "error": one.error}


async def cache_hits(engine: Engine, p: Params, server: Server) -> Figures:
    n = p["n"]
    call = engine.query('"ECHO:0;"')
    right = 'sum(r == "ECHO:0" for r in rs)'
    turns = [engine.cell(f"rs = [{call} for i in range({n})]"), engine.submit(f'{ID} + "|" + str({right})')]
    with tempfile.TemporaryDirectory() as folder:
        async with engine.open(server.url, Options(cache=Path(folder))) as complete:
            await warm_up(engine, complete, server)
            server.configure(scripts={"root": {"turns": turns}})
            one = await attempt(complete, named("m"), "m")
    seen = server.stats()
    times = seen["root_times"]
    span = times[1] - times[0] if len(times) > 1 else one.seconds
    return {"seconds": span, "ms": span / n * 1e3, "right": counted(one, "m"), "of": n, "error": one.error}


async def children(engine: Engine, p: Params, server: Server) -> Figures:
    n = p["n"]
    batch = f'ps = ["CHILD-%d-END" % i for i in range({n})]\nrs = {engine.children("ps")}'
    right = 'sum(rs[i] == "%d" % i for i in range(len(rs)))'
    scripts = {
        "root": {"turns": [engine.cell(batch), engine.submit(f'{ID} + "|" + str({right})')]},
        "child": {"turns": [engine.cell('print("hello")'), engine.submit(ID)]},
    }
    async with engine.open(server.url, Options(max_concurrent_subcalls=p["width"], children=True)) as complete:
        await warm_up(engine, complete, server)
        server.configure(latency=dict.fromkeys(("root", "child", "sub"), p["latency"]), scripts=scripts)
        one = await attempt(complete, named("e"), "e")
    return {
        "seconds": one.seconds,
        "most_in_flight": server.stats()["most_in_flight"]["child"],
        "right": counted(one, "e"),
        "of": n,
        "error": one.error,
    }


async def many_completions(engine: Engine, p: Params, server: Server) -> Figures:
    n, width = p["n"], p["width"]
    batch = engine.batch(f'["ECHO:@@CID@@.%d;" % i for i in range({width})]')
    turns = [engine.cell(f"rs = {batch}\n{PRINT_ID}"), engine.submit(f'{ID} + "|" + ",".join(rs)')]
    wanted = [f"{i}|" + ",".join(f"ECHO:{i}.{k}" for k in range(width)) for i in range(n)]
    scripts = {"root": {"turns": turns}}
    async with engine.open(server.url, Options(at_once=n)) as complete:
        await warm_up(engine, complete, server)
        latency = dict.fromkeys(("root", "child", "sub"), p["latency"])
        server.configure(latency=latency, scripts=scripts, expect_output=True)
        start = time.perf_counter()
        async with Stalls() as stalls:
            got = await asyncio.gather(*[attempt(complete, named(str(i)), str(i)) for i in range(n)])
            seconds = time.perf_counter() - start
    seen = server.stats()
    return {
        "seconds": seconds,
        "median_s": median(one.seconds for one in got),
        **stalls.figures(),
        "most_in_flight": sum(seen["most_in_flight"].values()),
        "mixed_up": seen["foreign_output"] + seen["missing_output"],
        "right": sum(one.answer == want for one, want in zip(got, wanted, strict=True)),
        "of": n,
        "error": next((one.error for one in got if one.error), None),
    }


async def big_context(engine: Engine, p: Params, server: Server) -> Figures:
    size = int(p["mb"] * 1e6)
    length = size // len(LINE) * len(LINE) + len(named("g"))
    turns = [engine.cell("print(len(context))"), engine.submit(f'{ID} + "|" + str(len(context))')]
    with tempfile.TemporaryDirectory() as folder:
        text = named("g") + LINE * (size // len(LINE))
        if p.get("file"):
            context: str | Path = Path(folder, "context.txt")
            context.write_text(text)
            text = ""
        else:
            context = text
        async with engine.open(server.url, Options()) as complete:
            await warm_up(engine, complete, server)
            server.configure(scripts={"root": {"turns": turns}})
            memory, start = Memory(), time.monotonic()
            one = await attempt(complete, context, "g")
            figures = memory.figures()
    times = server.stats()["root_times"]
    return {
        "seconds": times[1] - start if len(times) > 1 else one.seconds,
        "whole_s": one.seconds,
        "size_mb": length / 1e6,
        **figures,
        "largest_request_kb": server.stats()["largest_body"] / 1e3,
        "right": int(counted(one, "g") == length),
        "of": 1,
        "error": one.error,
    }


async def much_output(engine: Engine, p: Params, server: Server) -> Figures:
    turns = [engine.cell(floors.PRINTS.format(lines=p["lines"])), engine.submit(ID)]
    async with engine.open(server.url, Options()) as complete:
        await warm_up(engine, complete, server)
        server.configure(scripts={"root": {"turns": turns}})
        memory = Memory()
        one = await attempt(complete, named("h"), "h")
        figures = memory.figures()
    seen = server.stats()
    times = seen["root_times"]
    return {
        "seconds": times[1] - times[0] if len(times) > 1 else one.seconds,
        **figures,
        "largest_request_kb": seen["largest_body"] / 1e3,
        "right": int(one.answer == "h"),
        "of": 1,
        "error": one.error,
    }


async def endless_cell(engine: Engine, p: Params, server: Server) -> Figures:
    turns = [engine.cell("while True:\n    pass"), engine.submit(ID)]
    async with engine.open(server.url, Options(cell_timeout=p["limit"])) as complete:
        await warm_up(engine, complete, server)
        server.configure(scripts={"root": {"turns": turns}})
        one = await attempt(complete, named("i"), "i")
    return {"seconds": one.seconds, "right": int(one.answer == "i"), "of": 1, "error": one.error}


async def faults(engine: Engine, p: Params, server: Server) -> Figures:
    n = p["n"]
    batch = engine.batch(f'["ECHO:%d;" % i for i in range({n})]')
    turns = [
        engine.cell(f"r1 = {batch}"),
        engine.cell(f"r2 = {batch}"),
        engine.submit(f'{ID} + "|" + str({matches("r1")} + {matches("r2")})'),
    ]
    async with engine.open(server.url, Options()) as complete:
        await warm_up(engine, complete, server)
        server.configure(**floors.FAULTS, scripts={"root": {"turns": turns}})
        one = await attempt(complete, named("k"), "k")
    return {
        "seconds": one.seconds,
        "faults": server.stats()["faults"],
        "right": counted(one, "k"),
        "of": 2 * n,
        "error": one.error,
    }


async def many_runs(engine: Engine, p: Params, server: Server) -> Figures:
    n, width = p["n"], p["width"]
    first = engine.cell(f'rs = {engine.batch(f"""["ECHO:%d;" % i for i in range({width})]""")}').replace(
        "@@TURN@@", "0"
    )
    last = engine.submit(f'{ID} + "|" + str({matches("rs")})').replace("@@TURN@@", "1")

    async def model(messages: list[dict[str, str]]) -> str:
        await asyncio.sleep(p["latency"])
        if messages[-1]["content"].startswith("ECHO:"):
            return messages[-1]["content"].partition(";")[0]
        return last if any("#T=0;" in message["content"] for message in messages) else first

    async with engine.open(server.url, Options(model=model, at_once=n)) as complete:
        await attempt(complete, named("warm"), "warm")
        settle()
        start = time.perf_counter()
        async with Stalls() as stalls:
            got = await asyncio.gather(*[attempt(complete, named(str(i)), str(i)) for i in range(n)])
            seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        **stalls.figures(),
        "right": sum(counted(one, str(i)) == width for i, one in enumerate(got)),
        "of": n,
        "error": next((one.error for one in got if one.error), None),
    }
