"""Runs without a REPL: the prompt itself is the message."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asyncrlm import AsyncRLM, ConfigurationError
from asyncrlm.testing import ScriptedLM

pytestmark = pytest.mark.anyio


async def sent(prompt: Any, question: str | None = None) -> str:
    """The message that the model is sent."""
    model = ScriptedLM(["ok"])
    with anyio.fail_after(20):
        await AsyncRLM(model, max_depth=0).acompletion(prompt, question)
    return model.prompts[0]


KEYS = {(1, 2): "a", "(1, 2)": "b", "in": [{b"k": {3}}]}
AROUND: list[Any] = ["x"]
AROUND.append(AROUND)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("text", "text"),
        (b"caf\xc3\xa9", "café"),
        ({"é": [1, None, 0.5], "at": Path("x")}, '{"é": [1, null, 0.5], "at": "x"}'),
        (KEYS, repr(KEYS)),
        (AROUND, "['x', [...]]"),
    ],
    ids=["str", "bytes", "json", "keys", "cycle"],
)
async def test_the_prompt_as_text(prompt: Any, text: str) -> None:
    assert await sent(prompt) == text
    assert await sent(prompt, "WHAT?") == f"WHAT?\n\n{text}"


async def test_a_file_is_read_and_one_that_is_no_text_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"caf\xc3\xa9")
    assert await sent(file) == "café"
    file.write_bytes(b"\xff\xff")
    for wrong in (file, b"\xff"):
        with pytest.raises(ConfigurationError, match=r"sent as text, and this .* has none"):
            await sent(wrong)


class Slow:
    """Its text is there once the event loop has gone on."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.goes_on = threading.Event()

    def __str__(self) -> str:
        self.asked.set()
        return "went on" if self.goes_on.wait(10) else "stood still"


async def test_the_loop_goes_on_while_a_prompt_becomes_text() -> None:
    slow = Slow()

    async def release() -> None:
        while not slow.asked.is_set():
            await anyio.lowlevel.checkpoint()
        slow.goes_on.set()

    async with anyio.create_task_group() as group:
        group.start_soon(release)
        assert await sent([slow]) == '["went on"]'
