"""Many runs at once on one instance, each of which must come back with its own id.

Also a program, so that it can run under limits of its own and with its standard output watched:

    python -m tests.cases.load RUNS WIDTH [DESCRIPTORS]

prints numbered lines of its own all the while, then one line of JSON.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import threading

import anyio
import psutil

from asyncrlm import AsyncRLM

from .models import PlannedRoot, SubModel, cell, submit
from .runs import living_tasks

_ID = re.compile(r"\bID=(\d+);")


class Load:
    """`runs` runs at once, two turns each, the first with a batch of `width` sub-calls."""

    def __init__(self, runs: int, width: int, *, delay: float = 0.0) -> None:
        self.runs = runs
        self.width = width
        self.wrong: list[str] = []
        self.root = PlannedRoot(self._turn)
        self.sub = SubModel(lambda prompt: prompt + "!", delay=delay)

    def _turn(self, text: str, turn: int) -> str:
        (mine,) = set(_ID.findall(text))
        if turn == 1:
            return cell(
                f"rs = llm_query_batched([f'{{context}}/{{i}}' for i in range({self.width})])\n"
                "print('printed by', context)\n"
                f"open('mine.txt', 'w').write(context)"
            )
        others = set(re.findall(r"printed by run-(\d+)", text)) - {mine}
        if others or f"printed by run-{mine}" not in text:
            self.wrong.append(f"run {mine} was shown the output of {sorted(others) or 'nobody'}")
        right = f"[f'{{context}}/{{i}}!' for i in range({self.width})]"
        return submit(f"open('mine.txt').read() + ':' + str(rs == {right})")

    async def _one(self, rlm: AsyncRLM, number: int) -> None:
        result = await rlm.acompletion(f"run-{number}", root_prompt=f"ID={number};")
        if result.response != f"run-{number}:True":
            self.wrong.append(f"run {number} answered {result.response!r}")
        if result.usage_summary.total_calls != 2 + self.width:
            self.wrong.append(f"run {number} counted {result.usage_summary.total_calls} calls")

    async def go(self) -> None:
        """Run them all; `wrong` then says what was not right."""
        rlm = AsyncRLM(backend=self.root, other_backends=[self.sub], max_iterations=3)
        async with anyio.create_task_group() as group:
            for number in range(self.runs):
                group.start_soon(self._one, rlm, number)


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


async def _main(runs: int, width: int) -> dict[str, object]:
    await Load(1, 1).go()  # what loads late is loaded, so that the count before is fair
    before = descriptors(), living_tasks(), threading.active_count()
    load = Load(runs, width)
    stop = threading.Event()
    lines = 0

    def talk() -> None:
        nonlocal lines
        while not stop.is_set():
            print("host line", lines, flush=True)
            lines += 1
            stop.wait(0.001)

    talker = threading.Thread(target=talk)
    talker.start()
    try:
        with anyio.fail_after(60):
            await load.go()
    finally:
        stop.set()
        talker.join()
    after = descriptors(), living_tasks(), threading.active_count()
    children = len(psutil.Process().children(recursive=True))
    return {"wrong": load.wrong, "before": before, "after": after, "children": children, "lines": lines}


if __name__ == "__main__":
    if len(sys.argv) > 3:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), int(sys.argv[3])))
    print(json.dumps(anyio.run(_main, int(sys.argv[1]), int(sys.argv[2]))))
