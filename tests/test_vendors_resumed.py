"""Streams of vendors that don't say again what was missed: both ends go on where they were; see `test_vendors.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from asyncrlm import Repl

from .vendors import SDK_WARNINGS, echo, fact, said, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.soak,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
    *SDK_WARNINGS,
]


@pytest.fixture(params=["e2b", "prime"])
def vendor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    with serving(request.param, tmp_path) as one:
        yield one


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrlm.environments.remote_resumed.SHORTEST_REST", 0.02)
    monkeypatch.setattr("asyncrlm.environments.remote_resumed.TICK", 0.1)


BATCH = "print(llm_query_batched([str(n) for n in range(200)]) == [f're: {n}' for n in range(200)], x)"


async def test_while_many_sub_calls_fly_none_is_lost_or_asked_twice(vendor: Any) -> None:
    asked: list[str] = []

    async def answer(messages: list[dict[str, str]]) -> str:
        asked.append(messages[-1]["content"])
        if len(asked) in (20, 90, 150):
            vendor.server.cut = 1
        if len(asked) in (50, 120):
            vendor.server.deaf = [True]
        if len(asked) in (70, 100):
            vendor.server.deaf = [False]
        await anyio.sleep(0.001 * (len(asked) % 7))
        return "re: " + messages[-1]["content"]

    with anyio.fail_after(30):
        async with Repl(environment=vendor.name, lm=answer) as r:
            await r.execute("x = 5")
            assert (await r.execute(BATCH)).stdout == "True 5\n"
    assert sorted(asked, key=int) == [str(n) for n in range(200)]
    assert (vendor.server.cut, vendor.server.deaf, len(vendor.server.made)) == (0, [], 1)


@pytest.mark.parametrize("lost", [True, False])
async def test_a_reply_that_is_the_last_to_be_sent_arrives_once(vendor: Any, lost: bool) -> None:
    async def answer(messages: list[dict[str, str]]) -> str:
        vendor.server.deaf = [lost]
        return await echo(messages)

    with anyio.fail_after(30):
        async with Repl(environment=vendor.name, lm=answer) as r:
            for n in range(3):
                assert (await r.execute(f"x = {n}\nprint(llm_query('a'), x)")).stdout == f"re: a {n}\n"
                assert vendor.server.deaf == []
    assert len(vendor.server.made) == 1


async def test_a_file_arrives_whole(vendor: Any) -> None:
    context = {"bytes": bytes(range(256)) * 20_000, "text": "é\0\x01" * 500_000}

    async def break_it() -> None:
        await fact(lambda: vendor.server.boxes)
        box = next(iter(vendor.server.boxes.values()))
        runs = lambda: [s.run for s in box.sessions.values()] if vendor.name == "prime" else [*box.runs.values()]  # noqa: E731
        for size in (1_000_000, 2_000_000, 4_000_000):
            await fact(lambda: any(run is not None and run.written > size for run in runs()))  # noqa: B023
            vendor.server.deaf = [size == 2_000_000]
            vendor.server.cut = 1

    with anyio.fail_after(60):
        async with Repl(environment=vendor.name, lm=echo, context=context) as r, anyio.create_task_group() as group:
            group.start_soon(break_it)
            same = "context['bytes'] == bytes(range(256)) * 20_000, context['text'] == 'é\\0\\x01' * 500_000"
            assert (await r.execute(f"print({same})")).stdout == "True True\n"
    assert (vendor.server.cut, vendor.server.deaf, len(vendor.server.made)) == (0, [], 1)


async def test_it_may_break_from_the_start(vendor: Any) -> None:
    vendor.server.cut = 2
    with anyio.fail_after(30):
        async with Repl(environment=vendor.name, lm=echo) as r:
            assert (await r.execute("print(llm_query('a'))")).stdout == "re: a\n"
    assert (vendor.server.cut, len(vendor.server.made)) == (0, 1)


async def test_what_is_said_while_nobody_listens_is_heard_later(vendor: Any) -> None:
    """More than the keeper keeps: then the worker waits."""
    asked: list[int] = []

    async def answer(messages: list[dict[str, str]]) -> str:
        asked.append(len(messages[-1]["content"]))
        return str(asked[-1])

    code = "print(sum(map(int, llm_query_batched(['x' * 1_000_000] * 12))), x)"
    with anyio.fail_after(60):
        async with Repl(environment=vendor.name, lm=answer) as r, anyio.create_task_group() as group:
            await r.execute("x = 5")
            vendor.server.cut = 1
            vendor.server.held.add("attach")
            group.start_soon(_release, vendor, "attach")
            assert (await r.execute(code)).stdout == "12000000 5\n"
    assert asked == [1_000_000] * 12


async def _release(vendor: Any, name: str) -> None:
    await fact(lambda: vendor.server.waiting[name])
    await anyio.to_thread.run_sync(vendor.server.release, name)


async def test_a_worker_that_ends_while_nobody_listens_is_told_of(vendor: Any) -> None:
    with anyio.fail_after(30):
        async with Repl(environment=vendor.name, lm=echo) as r:
            await r.execute("x = 5")
            vendor.server.cut = 1
            result = await r.execute("import os; print('word', flush=True); os._exit(7)")
            assert "it exited with code 7" in said(result)
            assert result.stdout == "word\n"
            assert (await r.execute("print(1)")).stdout == "1\n"


async def test_an_interrupt_arrives_though_the_stream_breaks(vendor: Any) -> None:
    with anyio.fail_after(30):
        async with Repl(environment=vendor.environment(cell_timeout=0.5), lm=echo) as r:
            await r.execute("x = 5")
            vendor.server.deaf = [False, True]
            assert "0.5 s" in said(await r.execute("while True: pass"))
            assert (await r.execute("print(x)")).stdout == "5\n"
    assert len(vendor.server.made) == 1


async def test_one_that_does_not_go_on_in_time_is_lost(vendor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrlm.environments.remote_resumed.PATIENCE", 0.3)
    refused = (503, "not now")
    if vendor.name == "e2b":
        from connectrpc.code import Code

        refused = (Code.RESOURCE_EXHAUSTED, "not now")
    with anyio.fail_after(30):
        async with Repl(environment=vendor.name, lm=echo) as r:
            await r.execute("x = 5")
            vendor.server.failing["attach"] = [refused] * 1000
            vendor.server.cut = 1
            result = await r.execute("print(llm_query('a'))")
            assert "its stream broke, and did not go on within 0.3 s: " in said(result)
            assert "not now" in said(result)
            vendor.server.failing.clear()
            assert (await r.execute("print(llm_query('b'))")).stdout == "re: b\n"
    assert len(vendor.server.made) == 2


@pytest.mark.parametrize("stage", ["attach", "input"])
async def test_cancelled_while_it_is_broken_nothing_is_left(vendor: Any, stage: str) -> None:
    async def answer(messages: list[dict[str, str]]) -> str:
        vendor.server.held.add(stage)
        vendor.server.cut = stage == "attach"
        vendor.server.deaf = [True] * (stage == "input")
        return await echo(messages)

    async def use() -> None:
        async with Repl(environment=vendor.name, lm=answer) as r:
            await r.execute("print(llm_query('a'))")

    before = asyncio.all_tasks()
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(use)
            await fact(lambda: vendor.server.waiting[stage])
            group.cancel_scope.cancel()
        await fact(lambda: asyncio.all_tasks() <= before)
    await anyio.to_thread.run_sync(vendor.server.release, stage)
    assert (len(vendor.server.made), vendor.leaked) == (1, [])


async def test_in_a_sandbox_of_others_the_keeper_ends_after_a_break_too(vendor: Any) -> None:
    with anyio.fail_after(30):
        async with Repl(environment=vendor.name, lm=echo) as keeps:
            await keeps.execute("x = 1")
            theirs = vendor.environment(sandbox_id=vendor.server.made[0])
            async with Repl(environment=theirs, lm=echo) as r:
                await r.execute("y = 1")
                vendor.server.cut = 1
                assert (await r.execute("print(llm_query('a'), y)")).stdout == "re: a 1\n"
                pid = int((await r.execute("import os; print(os.getppid())")).stdout)
            await fact(lambda: not Path(f"/proc/{pid}").exists())
            assert (await keeps.execute("print(x)")).stdout == "1\n"
    assert len(vendor.server.made) == 1
