"""What many tests say to a scripted model."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from asyncrlm.testing import ScriptedLM


def cell(code: str) -> str:
    """A reply with one cell."""
    return f"```repl\n{code}\n```"


def submit(expression: str) -> str:
    """A reply whose cell submits the value of an expression."""
    return cell(f'answer["content"] = {expression}\nanswer["ready"] = True')


def scripted(*replies: Any, **settings: Any) -> ScriptedLM:
    """A root model that says these replies, in order."""
    return ScriptedLM(list(replies), **settings)


def echo(prefix: str = "echo:", **settings: Any) -> ScriptedLM:
    """A sub-model that repeats its prompt."""
    return ScriptedLM(lambda request: prefix + request.messages[-1].content, **settings)


def told(model: ScriptedLM, turn: int) -> str:
    """What a scripted root model was told before its `turn`-th reply, from 1."""
    return model.calls[turn - 1].messages[-1].content


@contextmanager
def killed_at_the_end(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that no failed test waits for: `Popen` alone waits without end when its block is left."""
    with process:
        try:
            yield process
        finally:
            process.kill()
