"""Programs written for the reference's documented API run with only their imports changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import anyio
import pytest

from asyncrlm.testing import FakeReply

from .cases.http import Asked, serving
from .cases.models import cell, submit
from .cases.programs import PROGRAMS, here

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio


def quickstart(asked: Asked) -> FakeReply:
    if asked.turn == 1:
        return FakeReply(cell("hits = [l for l in context.splitlines() if 'CODE IS' in l]\nprint(hits)"))
    assert "THE CODE IS 493817256" in asked.newest
    return FakeReply("Got it.\n" + submit("hits[0].split()[-1]"))


def trajectory(asked: Asked) -> FakeReply:
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    if not asked.is_conversation:
        return FakeReply(asked.newest.upper(), usage=usage)
    if asked.turn == 1:
        assert "What is the sum?" in asked.text
        return FakeReply(cell("total = sum(context['numbers'])\nprint(total, llm_query('check'))"), usage=usage)
    return FakeReply(submit("total"), usage=usage)


def recursion(asked: Asked) -> FakeReply:
    if "Which colours?" in asked.text:
        ask = "rs = rlm_query_batched(['red', 'green', 'blue'])"
        return FakeReply(cell(ask + "\nanswer.update(content='+'.join(rs), ready=True)"))
    if asked.is_conversation:
        return FakeReply(
            cell("n = rlm_query('how long is ' + context)\nanswer.update(content=context + n, ready=True)")
        )
    assert asked.body["model"] == "gpt-5-nano"
    return FakeReply(str(len(asked.newest.split()[-1])))


def limits(asked: Asked) -> FakeReply:
    usage = {"prompt_tokens": 100_000, "completion_tokens": 100, "total_tokens": 100_100}
    if asked.turn == 1:
        return FakeReply("Looking.\n" + cell("print('RUN', context)\nanswer['content'] = 'so far'"), usage=usage)
    (name,) = set(re.findall(r"RUN (slow|tokens|budget|errors|turns)", asked.text))
    if name == "slow":
        return FakeReply("late", latency=30)
    if name == "turns" and asked.turn > 2:
        return FakeReply("as far as I got: 3")
    return FakeReply(cell("1 / 0" if name == "errors" else "x = 1"), usage=usage)


def callbacks(asked: Asked) -> FakeReply:
    if not asked.is_conversation:
        return FakeReply("leaf")
    if "Anything?" not in asked.text:
        return FakeReply(submit("'from the child'"))
    if asked.turn == 1:
        return FakeReply(cell("a = llm_query('plain one')\nb = rlm_query('a task')"))
    return FakeReply(submit("a + ', ' + b"))


def custom_tools(asked: Asked) -> FakeReply:
    for told in ("price_of", "Looks up what one fruit costs", "Adds up a basket", "shout", "SETTINGS", "FRUITS"):
        assert told in asked.text, f"{told!r} is not in the prompt"
    if asked.turn == 1:
        return FakeReply(cell("print(price_of('pear'), price_of('kiwi'), math.pi > 3, SHOP, shout('ok'))"))
    assert "{'price': 2.5, 'unit': 'piece'} {'error': 'kiwi is not sold here'} True corner OK" in asked.newest
    return FakeReply(
        submit("f\"{total({f: n for f, n in zip(FRUITS, (4, 2))}):.{SETTINGS['decimals']}f} {SETTINGS['currency']}\"")
    )


PRINTS = {
    "quickstart": (
        quickstart,
        ["found: 493817256", "model: gpt-5-nano time: True", "usage: 2", "logs: 1"],
    ),
    "trajectory": (
        trajectory,
        [
            "response: 10",
            "root model: gpt-5-nano",
            "1 code: total = sum(context['numbers'])",
            "1 stdout: 10 CHECK",
            "1 sub-call: check -> CHECK",
            "1 final: None",
            '2 code: answer["content"] = total',
            "2 stdout:",
            "2 final: 10",
            "again: 10 30",
        ],
    ),
    "recursion": (
        recursion,
        [
            "response: red3+green5+blue4",
            *("gpt-5 blue -> blue4 True", "  gpt-5-nano how long is blue -> 4 False"),
            *("gpt-5 green -> green5 True", "  gpt-5-nano how long is green -> 5 False"),
            *("gpt-5 red -> red3 True", "  gpt-5-nano how long is red -> 3 False"),
            *("gpt-5 4", "gpt-5-nano 3"),
        ],
    ),
    "limits": (
        limits,
        [
            "turns as far as I got: 3",
            "timeout True 2.0 True",
            "tokens True 250000 True",
            "budget True 0.012",
            "errors 3 3 True True",
            "cancelled True",
            "refused",
        ],
    ),
    "callbacks": (
        callbacks,
        [
            "start 0 1",
            "sub-call 1 gpt-5-nano plain one",
            "sub-call done 1 gpt-5-nano True None",
            "sub-call 1 gpt-5 a task",
            "start 1 1",
            "complete 1 1 True",
            "sub-call done 1 gpt-5 True None",
            "complete 0 1 True",
            "start 0 2",
            "complete 0 2 True",
            "answer leaf, from the child",
        ],
    ),
    "custom tools": (custom_tools, ["answer 11.50 EUR"]),
}
"""Program → what its model replies, and what it prints."""


async def _run(program: str, plan: Callable[[Asked], FakeReply], folder: Path, **env: str) -> list[str]:
    async with serving(plan) as server:
        surroundings = dict(os.environ, LM_URL=server.url, LOGS=str(folder), OPENAI_API_KEY="key") | env
        done = await anyio.to_thread.run_sync(
            lambda: subprocess.run(
                [sys.executable, "-c", program],
                env=surroundings,
                capture_output=True,
                timeout=30,
                check=False,
                text=True,
            )
        )
    assert server.problems == []
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_each_program_is_the_references() -> None:
    assert PROGRAMS.keys() == PRINTS.keys()
    for program in PROGRAMS.values():
        assert "from rlm import" in program
        assert "asyncrlm" not in program
        changed = [new for old, new in zip(program.splitlines(), here(program).splitlines(), strict=True) if old != new]
        assert all(line.startswith("from asyncrlm import ") for line in changed)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_of_the_reference(name: str, tmp_path: Path) -> None:
    plan, wanted = PRINTS[name]
    printed = await _run(here(PROGRAMS[name]), plan, tmp_path)
    if name == "quickstart":  # verbose: its progress may stand between
        assert [line for line in printed if line in wanted] == wanted
    else:
        assert [line.rstrip() for line in printed] == wanted


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_system_prompt_of_ones_own_may_hold_braces(tmp_path: Path) -> None:
    own = 'Reply with ```repl``` blocks. Say {"like": "this"}, not {that}; {0} %s $x. Tools: {custom_tools_section}'

    def plan(asked: Asked) -> FakeReply:
        assert 'Say {"like": "this"}, not {that}; {0} %s $x.' in asked.text
        return custom_tools(asked)

    assert await _run(here(PROGRAMS["custom tools"]), plan, tmp_path, SYSTEM_PROMPT=own) == ["answer 11.50 EUR"]
