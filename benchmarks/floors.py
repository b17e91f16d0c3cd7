"""The same work with no engine: the same requests by a bare client at the same concurrency, or plain Python."""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import Memory, Stalls, cpu_seconds, median, settle

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Iterable

    from adapters.base import Ask, Bare, Plain
    from control import Figures, Params, Server

FILL_PART, FILL_TIMES = " abcd efgh ijkl", 133
FILL = FILL_PART * FILL_TIMES
PRINTS = 'line = "y" * 999\nfor i in range({lines}):\n    print(line)'
FAULTS: dict[str, Any] = {"latency": {"sub": 0.05}, "p429": 0.1, "p500": 0.05, "retry_after": 0.1}
GATE = 64
"""Requests at once where a row leaves an engine's default: that of asyncrlm."""


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def echo(ask: Ask, name: object, fill: str = "") -> bool:
    try:
        return await ask(user(f"ECHO:{name};{fill}")) == f"ECHO:{name}"
    except Exception:  # counted as a wrong answer, as in an engine's row
        return False


async def gated(calls: Iterable[Awaitable[bool]], width: int) -> int:
    """How many of the calls came out right, `width` of them at once."""
    gate = asyncio.Semaphore(width)

    async def one(call: Awaitable[bool]) -> bool:
        async with gate:
            return await call

    return sum(await asyncio.gather(*[one(call) for call in calls]))


def turn_times(times: list[float]) -> dict[str, float | None]:
    """Milliseconds a turn, from when the requests arrived; the first turn, which starts everything, is left out."""
    spans = [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(times)]
    return {"first_ms": median(spans[1:21]), "last_ms": median(spans[-20:])}


@asynccontextmanager
async def warmed(client: Bare, width: int, server: Server) -> AsyncGenerator[Ask]:
    """The client after its first call, as the engines are after their first completion."""
    async with client.open(server.url, width) as ask:
        server.configure()
        await echo(ask, "warm")
        settle()
        yield ask


async def trivial(client: Bare, p: Params, server: Server) -> Figures:
    spans: list[float] = []
    async with warmed(client, 1, server) as ask:
        server.configure(scripts={"root": {"turns": ["done"]}})
        for i in range(p["n"]):
            start = time.perf_counter()
            await ask(user(f"CID:a{i};"))
            await ask(user(f"CID:a{i};"))
            spans.append((time.perf_counter() - start) * 1e3)
    return {"ms": median(spans), "right": p["n"], "of": p["n"]}


async def many_turns(client: Bare, p: Params, server: Server) -> Figures:
    history = user("CID:b; please proceed")
    async with warmed(client, 1, server) as ask:
        server.configure(scripts={"root": {"turns": ["```repl\n#T=@@TURN@@;\nx = 1\n```"]}})
        start = time.perf_counter()
        for _ in range(p["n"] + 1):
            reply = await ask(history)
            history = [*history, {"role": "assistant", "content": reply}, *user("The cell printed nothing.")]
        seconds = time.perf_counter() - start
    return {**turn_times(server.stats()["root_times"]), "seconds": seconds, "right": 1, "of": 1}


async def fan_out(client: Bare, p: Params, server: Server) -> Figures:
    async with warmed(client, p["width"], server) as ask:
        server.configure(latency={"sub": p["latency"]})
        async with Stalls() as stalls:
            start, cpu = time.perf_counter(), cpu_seconds()
            right = await gated([echo(ask, i, FILL) for i in range(p["n"])], p["width"])
            seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    in_flight = server.stats()["most_in_flight"]["sub"]
    figures = {"seconds": seconds, "cpu_s": cpu, **stalls.figures(), "most_in_flight": in_flight}
    return {**figures, "right": right, "of": p["n"]}


async def sequential(client: Bare, p: Params, server: Server) -> Figures:
    async with warmed(client, 1, server) as ask:
        start = time.perf_counter()
        right = sum([await echo(ask, i) for i in range(p["n"])])
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "a_second": p["n"] / seconds, "right": right, "of": p["n"]}


async def children(client: Bare, p: Params, server: Server) -> Figures:
    latency = dict.fromkeys(("root", "child", "sub"), p["latency"])
    async with warmed(client, p["width"], server) as ask:
        server.configure(latency=latency, scripts={kind: {"turns": ["done"]} for kind in ("root", "child")})

        async def child(i: int) -> bool:
            return [await ask(user(f"CHILD-{i}-END")) for _ in range(2)] == ["done", "done"]

        start = time.perf_counter()
        await ask(user("CID:e;"))
        right = await gated([child(i) for i in range(p["n"])], p["width"])
        await ask(user("CID:e;"))
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "right": right, "of": p["n"]}


async def many_completions(client: Bare, p: Params, server: Server) -> Figures:
    latency = dict.fromkeys(("root", "child", "sub"), p["latency"])
    async with warmed(client, p["n"] * p["width"], server) as ask:
        server.configure(latency=latency, scripts={"root": {"turns": ["done"]}})

        async def one(i: int) -> bool:
            first = await ask(user(f"CID:{i};"))
            got = await asyncio.gather(*[echo(ask, f"{i}.{k}") for k in range(p["width"])])
            return all(got) and first == await ask(user(f"CID:{i};")) == "done"

        start = time.perf_counter()
        async with Stalls() as stalls:
            right = sum(await asyncio.gather(*[one(i) for i in range(p["n"])]))
            seconds = time.perf_counter() - start
    return {"seconds": seconds, **stalls.figures(), "right": right, "of": p["n"]}


async def faults(client: Bare, p: Params, server: Server) -> Figures:
    async with warmed(client, GATE, server) as ask:
        server.configure(**FAULTS)
        start = time.perf_counter()
        right = sum([await gated([echo(ask, i) for i in range(p["n"])], GATE) for _ in range(2)])
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "faults": server.stats()["faults"], "right": right, "of": 2 * p["n"]}


async def sleeps(plain: Plain, p: Params, server: Server) -> Figures:
    async def one() -> None:
        await asyncio.sleep(p["latency"])
        await asyncio.gather(*[asyncio.sleep(p["latency"]) for _ in range(p["width"])])
        await asyncio.sleep(p["latency"])

    start = time.perf_counter()
    async with Stalls() as stalls:
        await asyncio.gather(*[one() for _ in range(p["n"])])
        seconds = time.perf_counter() - start
    return {"seconds": seconds, **stalls.figures(), "right": p["n"], "of": p["n"]}


async def write_and_decode(plain: Plain, p: Params, server: Server) -> Figures:
    """Write the text to a file and make a str of the file, or only the latter where the caller has a file."""
    text = "x" * int(p["mb"] * 1e6)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "context.txt")
        if p.get("file"):
            path.write_text(text)
        memory, start = Memory(), time.perf_counter()
        if not p.get("file"):
            path.write_bytes(text.encode())
        got = path.read_bytes().decode()
        seconds = time.perf_counter() - start
        figures = memory.figures()
    return {"seconds": seconds, "size_mb": len(text) / 1e6, **figures, "right": int(got == text), "of": 1}


async def prints(plain: Plain, p: Params, server: Server) -> Figures:
    """A Python that prints the same, with its start, and a reader of the pipe."""
    memory, start = Memory(), time.perf_counter()
    command = [sys.executable, "-ISc", PRINTS.format(lines=p["lines"])]
    seen = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        while chunk := os.read(process.stdout.fileno(), 1 << 20):
            seen += len(chunk)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, **memory.figures(), "right": int(seen == 1000 * p["lines"]), "of": 1}


def import_cost(statement: str, times: int) -> Figures:
    """CPU of a fresh interpreter that runs `statement` and of one that does nothing, one after the other."""

    def cpu(code: str) -> float:
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
        _, status, used = os.wait4(pid, 0)
        if status:
            raise RuntimeError(f"`{code}` failed")
        return used.ru_utime + used.ru_stime

    cpu(statement)  # leaves the compiled files behind
    spent = [(cpu(statement), cpu("pass")) for _ in range(times)]
    seconds, bare = (statistics.median(each) for each in zip(*spent, strict=True))
    return {"seconds": seconds, "ratio": seconds / bare, "right": 1, "of": 1}
