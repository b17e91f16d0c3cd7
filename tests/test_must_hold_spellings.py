"""However a model spells its sub-calls, they run, and where the spelling says at once they run at once."""

from __future__ import annotations

import anyio
import pytest

from .cases.models import SubModel, cell, submit
from .cases.runs import run

pytestmark = pytest.mark.anyio

WIDTH = 6
ASK = {
    "batch": "rs = llm_query_batched(qs)",
    "async batch": "rs = await allm_query_batched(qs)",
    "awaited batch": "rs = await llm_query_batched(qs)",
    "children": "rs = rlm_query_batched(qs)",
    "async children": "rs = await arlm_query_batched(qs)",
    "gather": "import asyncio\nrs = await asyncio.gather(*[allm_query(q) for q in qs])",
    "gather of children": "import asyncio\nrs = await asyncio.gather(*[arlm_query(q) for q in qs])",
    "run": (
        "import asyncio\nasync def main():\n    return await asyncio.gather(*(allm_query(q) for q in qs))\n"
        "rs = asyncio.run(main())"
    ),
    "task group": (
        "import asyncio, sys\nif sys.version_info >= (3, 11):\n    async with asyncio.TaskGroup() as group:\n"
        "        tasks = [group.create_task(allm_query(q)) for q in qs]\n    rs = [t.result() for t in tasks]"
    ),
    "as completed": (
        "import asyncio\ndone = []\nfor next_one in asyncio.as_completed([allm_query(q) for q in qs]):\n"
        "    done.append(await next_one)\nrs = sorted(done)"
    ),
    "wait": (
        "import asyncio\ntasks = [asyncio.ensure_future(allm_query(q)) for q in qs]\n"
        "await asyncio.wait(tasks)\nrs = [t.result() for t in tasks]"
    ),
    "pool": (
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(len(qs)) as pool:\n"
        "    rs = list(pool.map(llm_query, qs))"
    ),
    "threads": (
        "import threading\nrs = [None] * len(qs)\ndef ask(i):\n    rs[i] = llm_query(qs[i])\n"
        "ts = [threading.Thread(target=ask, args=(i,)) for i in range(len(qs))]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]"
    ),
    "to thread": "import asyncio\nrs = await asyncio.gather(*[asyncio.to_thread(llm_query, q) for q in qs])",
    "executor": (
        "import asyncio\nloop = asyncio.get_running_loop()\n"
        "rs = await asyncio.gather(*[loop.run_in_executor(None, llm_query, q) for q in qs])"
    ),
    "loop in a thread": (
        "import asyncio, threading\nrs = []\nasync def main():\n"
        "    rs.extend(await asyncio.gather(*[allm_query(q) for q in qs]))\n"
        "t = threading.Thread(target=lambda: asyncio.run(main()))\nt.start(); t.join()"
    ),
    "batches in threads": (
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(2) as pool:\n"
        "    a, b = pool.map(llm_query_batched, [qs[:3], qs[3:]])\nrs = a + b"
    ),
}
"""Spellings that ask all of `qs` at once and leave the replies in `rs`."""

ONE_BY_ONE = {
    "loop": "rs = [llm_query(q) for q in qs]",
    "awaited": "rs = [await llm_query(q) for q in qs]",
    "async": "rs = [await allm_query(q) for q in qs]",
    "gather of plain calls": "import asyncio\nrs = await asyncio.gather(*[llm_query(q) for q in qs])",
    "plain call in a coroutine": (
        "import asyncio\nasync def ask(q):\n    return llm_query(q)\nrs = await asyncio.gather(*map(ask, qs))"
    ),
    "plain call in run": (
        "import asyncio\nasync def main():\n    return [llm_query(q) for q in qs]\nrs = asyncio.run(main())"
    ),
    "child": "rs = [rlm_query(q) for q in qs]",
    "messages": 'rs = [llm_query([{"role": "user", "content": q}]) for q in qs]',
    "generator": "def ask():\n    for q in qs:\n        yield llm_query(q)\nrs = list(ask())",
}
"""Spellings that may ask one after another."""


def _turns(code: str) -> list[str]:
    return [cell(f"qs = ['q%d' % i for i in range({WIDTH})]\n{code}"), submit("'|'.join(rs)"), submit("'lost'")]


WANTED = "|".join(f"Q{i}" for i in range(WIDTH))


@pytest.mark.parametrize(
    ("anyio_backend", "spelling"), [*(("asyncio", s) for s in ASK), *(("trio", s) for s in ("batch", "gather", "pool"))]
)
async def test_asked_at_once(spelling: str) -> None:
    sub = SubModel(str.upper, hold=True)

    async def release() -> None:
        await sub.wait_for_calls(WIDTH)  # only if all are in flight together
        sub.release.set()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(release)
            outcome = await run(_turns(ASK[spelling]), sub=sub)
    assert outcome.answer == WANTED, outcome.root.seen(2)
    assert sub.max_in_flight == WIDTH


@pytest.mark.parametrize(
    ("anyio_backend", "spelling"), [*(("asyncio", s) for s in ONE_BY_ONE), *(("trio", s) for s in ("loop", "async"))]
)
async def test_asked_one_by_one(spelling: str) -> None:
    with anyio.fail_after(10):
        outcome = await run(_turns(ONE_BY_ONE[spelling]), sub=SubModel(str.upper))
    assert outcome.answer == WANTED, outcome.root.seen(2)
    assert outcome.sub.asked == WIDTH
