"""Cases about many runs in one process, event loops, threads and cancellation."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from asyncrlm import RLM, AsyncRLM, RLMLogger

from .cases import CASES, covers, scripted
from .cases.models import PlannedRoot, ScriptedRoot, SubModel, cell, submit
from .cases.runs import nothing_left, processes, run, run_case, together

pytestmark = pytest.mark.anyio

both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
one = pytest.mark.parametrize("anyio_backend", ["asyncio"])

CONTEXTS = [f"ctx{i}" for i in range(8)]


def steady(id: str) -> PlannedRoot:
    """A root that plays the case in any number of conversations at once."""
    turns = scripted(CASES[id])
    return PlannedRoot(lambda _text, turn: turns[turn - 1])


@both
@covers("C01")
async def test_runs_at_once_have_each_their_own_folder() -> None:
    before = os.getcwd()
    rlm = AsyncRLM(backend=steady("C01"))

    async def ask(context: str) -> str:
        return (await rlm.acompletion(context)).response

    with anyio.fail_after(10):
        answers = await together(*[lambda c=c: ask(c) for c in CONTEXTS])
    assert answers == CONTEXTS
    assert os.getcwd() == before


@covers("C01")
def test_runs_at_once_in_threads_have_each_their_own_folder() -> None:
    before = os.getcwd()
    with RLM(backend=steady("C01")) as rlm, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda c: rlm.completion(c).response, CONTEXTS, timeout=20))
    assert answers == CONTEXTS
    assert os.getcwd() == before


@both
@covers("C02")
async def test_each_run_sees_its_own_output_and_the_host_keeps_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    turns = scripted(CASES["C02"])
    roots = [ScriptedRoot(turns) for _ in CONTEXTS]

    async def ask(root: ScriptedRoot, context: str) -> str:
        return (await AsyncRLM(backend=root).acompletion(context)).response

    printed: list[str] = []
    stop = threading.Event()

    def talk() -> None:
        while not stop.is_set():
            printed.append(f"host line {len(printed)}")
            print(printed[-1], flush=True)
            stop.wait(0.002)

    talker = threading.Thread(target=talk)
    talker.start()
    try:
        with anyio.fail_after(10):
            assert set(await together(*[lambda r=r, c=c: ask(r, c) for r, c in zip(roots, CONTEXTS, strict=True)])) == {
                "ok"
            }
    finally:
        stop.set()
        talker.join()
    for root, context in zip(roots, CONTEXTS, strict=True):
        seen = root.seen(2)
        assert seen.count(f"tok-{context}\n") == 20
        assert seen.count("tok-") == 20
        assert "host line" not in seen
    assert capfd.readouterr().out.splitlines() == printed


@covers("C03")
def test_the_blocking_face_works_inside_a_running_loop() -> None:
    async def main() -> str:
        return RLM(backend=steady("C03")).completion("CTX").response

    assert asyncio.run(main()) == "ok"


@both
@covers("C05")
async def test_a_run_leaves_the_loop_to_others() -> None:
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await anyio.sleep(0.02)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            outcome = await run_case("C05")
            group.cancel_scope.cancel()
    assert outcome.answer == "ok"
    assert len(ticks) >= 5 * outcome.seconds
    assert max(later - earlier for earlier, later in itertools.pairwise(ticks)) < 0.5


@both
@covers("C07")
async def test_parents_hold_nothing_that_their_children_need() -> None:
    def child(_text: str, _turn: int) -> str:
        return cell('rs = llm_query_batched(["a", "b", "c", "d"])\nanswer.update(content="".join(rs), ready=True)')

    sub = SubModel(str.upper, child=child, delay=0.05)
    with anyio.fail_after(30):
        outcome = await run_case("C07", sub=sub, max_depth=2, max_concurrent_subcalls=4, max_concurrent_requests=4)
    assert outcome.answer == "48"
    assert len(sub.plain) == 48 * 4
    assert sub.max_in_flight <= 4


@both
@covers("C08")
async def test_one_instance_keeps_two_calls_apart() -> None:
    rlm = AsyncRLM(backend=steady("C08"), logger=RLMLogger())
    with anyio.fail_after(10):
        results = await together(lambda: rlm.acompletion("AAA"), lambda: rlm.acompletion("BBB"))
    assert [r.response for r in results] == ["AAA", "BBB"]
    for result in results:
        assert result.metadata is not None
        turns = result.metadata["iterations"]
        assert len(turns) == 2
        assert turns[0]["code_blocks"][0]["result"]["stdout"] == result.response + "\n"
        assert result.usage_summary.total_calls == 2


@covers("C08")
def test_one_instance_keeps_two_threads_apart() -> None:
    with RLM(backend=steady("C08"), logger=RLMLogger()) as rlm, ThreadPoolExecutor(2) as pool:
        results = list(pool.map(rlm.completion, ["AAA", "BBB"], timeout=20))
    assert [(r.response, len((r.metadata or {})["iterations"])) for r in results] == [("AAA", 2), ("BBB", 2)]


@both
@covers("C09")
async def test_cancelling_the_caller_stops_everything() -> None:
    with nothing_left():
        root = ScriptedRoot(scripted(CASES["C09"]))
        sub = SubModel(lambda _prompt: "late", delay=30)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(AsyncRLM(backend=root, other_backends=[sub]).acompletion, "CTX")
                await sub.wait_for_calls(8)
                began = time.monotonic()
                group.cancel_scope.cancel()
        assert time.monotonic() - began < 3
        assert sub.in_flight == 0
        assert sub.asked == 8


@covers("C09")
def test_asyncio_wait_for_cancels_a_run() -> None:
    root = ScriptedRoot(scripted(CASES["C09"]))
    sub = SubModel(lambda _prompt: "late", delay=30)

    async def main() -> None:
        before = processes()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(AsyncRLM(backend=root, other_backends=[sub]).acompletion("CTX"), 1)
        assert time.monotonic() - began < 3
        assert processes() == before
        assert sub.in_flight == 0

    asyncio.run(main())


@one
@covers("C09")
async def test_code_that_never_yields_is_cancelled_too() -> None:
    with nothing_left(), anyio.fail_after(10):
        sub = SubModel(lambda _prompt: "go")
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: run([cell("llm_query('started')\nwhile True: pass"), submit("'no'")], sub=sub))
            await sub.wait_for_calls(1)
            group.cancel_scope.cancel()
