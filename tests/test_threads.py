"""An application whose threads all wait for us gets its answers: our blocking calls have threads of their own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from asyncrlm import AsyncRLM
from asyncrlm.engine import run
from asyncrlm.environments.local import LocalEnvironment
from asyncrlm.errors import TimeoutExceededError
from asyncrlm.testing import ScriptedLM

pytestmark = pytest.mark.anyio

CELL = "```repl\nanswer['content'] = str(len(context))\nanswer['ready'] = True\n```"
LONG = "The keeper of the lighthouse is called Marta. " * 600


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "list": ({}, ["x" * 2_000_000]),
    "text": ({}, "x" * 400_000),
    "file": ({}, Path(__file__)),
    "portable": ({"environment": LocalEnvironment(_mode="portable")}, {"a": "x"}),
    "tool values": ({"custom_tools": {"k": 5}}, {"a": "x"}),
    "no REPL": ({"max_depth": 0}, {"a": "x"}),
    "offline": ({"backend": "offline", "max_depth": 0}, f"Question: Who keeps it?\n\nPassage: {LONG}"),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_run_needs_no_thread_of_the_application(case: str) -> None:
    options, prompt = CASES[case]
    options = dict(options)
    backend = options.pop("backend", None) or ScriptedLM([CELL])
    limiter = anyio.to_thread.current_default_thread_limiter()
    answers: list[str] = []

    async def ask() -> None:
        async with AsyncRLM(backend, **options) as rlm:
            answers.append((await rlm.acompletion(prompt)).response)

    def endpoint() -> None:
        anyio.from_thread.run(ask)

    before, limiter.total_tokens = limiter.total_tokens, 1
    try:
        with anyio.fail_after(20):
            await anyio.to_thread.run_sync(endpoint, abandon_on_cancel=True)
    finally:
        limiter.total_tokens = before
    assert answers


async def test_looking_at_a_prompt_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(run, "describe", lambda _prompt: over.wait(10))
    try:
        with anyio.fail_after(5), pytest.raises(TimeoutExceededError):
            await AsyncRLM(ScriptedLM([CELL]), max_timeout=0.05).acompletion(["x"])
    finally:
        over.set()
