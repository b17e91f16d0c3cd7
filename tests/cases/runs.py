"""Run a case, or a script of the test's own, on the local environment."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import psutil
import trio

from asyncrlm import AsyncRLM

from . import CASES, scripted
from .expect import Evidence
from .models import QUESTION, Rule, ScriptedRoot, SubModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncrlm.types import RLMChatCompletion


def _parts(prompt: str) -> str:
    if prompt == "part 1":
        raise RuntimeError("503 upstream down")
    return "text" + prompt.removeprefix("part ")


RULES: dict[str, Rule] = {
    "any prompt -> 'SUB'": lambda _prompt: "SUB",
    "any prompt -> 'ok'": lambda _prompt: "ok",
    "'part 1' -> raises RuntimeError('503 upstream down'); 'part N' -> 'textN'": _parts,
    "as U01": _parts,
}
"""The `sub_answers` of the cases, as code."""

SETUPS: dict[str, dict[str, Any]] = {"max_iter=1": {"max_iterations": 1}, "max_errors=2": {"max_errors": 2}}
"""The `setup` of the cases, as arguments."""


class Outcome(Evidence):
    """What `run` gives: the evidence, and the completion itself."""

    def __init__(self, completion: RLMChatCompletion, root: ScriptedRoot, sub: SubModel, seconds: float) -> None:
        super().__init__(completion.response, root, sub, seconds)
        self.completion = completion


async def run(
    turns: Sequence[str | Exception], prompt: Any = "CTX", *, sub: SubModel | None = None, **settings: Any
) -> Outcome:
    """One run of a scripted root; `settings` are `AsyncRLM`'s."""
    sub = sub or SubModel()
    root = ScriptedRoot(turns, child=sub.child)
    settings.setdefault("max_iterations", len(turns) + 1)
    rlm = AsyncRLM(backend=root, other_backends=[sub], **settings)
    began = time.monotonic()
    completion = await rlm.acompletion(prompt, QUESTION if sub.child else None)
    return Outcome(completion, root, sub, time.monotonic() - began)


async def run_case(id: str, prompt: Any = None, *, sub: SubModel | None = None, **settings: Any) -> Outcome:
    """One run of a case's script; `prompt` is its context unless given."""
    case = CASES[id]
    if sub is None and case.sub_answers is not None:
        sub = SubModel(RULES[case.sub_answers])
    settings = SETUPS.get(case.setup or "", {}) | settings
    return await run(scripted(case), case.context if prompt is None else prompt, sub=sub, **settings)


def living_tasks() -> int:
    """Tasks on this event loop."""
    try:
        return trio.lowlevel.current_statistics().tasks_living
    except RuntimeError:
        return len(asyncio.all_tasks())


def processes() -> set[int]:
    """Process ids of all that this process has started, and that have not ended."""
    return {p.pid for p in psutil.Process().children(recursive=True) if p.is_running()}


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if the block leaves a task or a process of ours behind."""
    tasks, children = living_tasks(), processes()
    yield
    left = processes() - children
    assert not left, f"processes left: {[_name(pid) for pid in left]}"
    assert living_tasks() <= tasks, f"{living_tasks() - tasks} tasks left"


def _name(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline()) or str(pid)
    except psutil.Error:
        return str(pid)


async def together(*jobs: Any) -> list[Any]:
    """The results of coroutine functions run at once, in order."""
    results: list[Any] = [None] * len(jobs)

    async def one(index: int, job: Any) -> None:
        results[index] = await job()

    async with anyio.create_task_group() as group:
        for index, job in enumerate(jobs):
            group.start_soon(one, index, job)
    return results
