"""The first command: a real run over a real text, without a key and without a network."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

from .ask import Detail, ask
from .exits import FAILED, fail, say

QUESTION: Final = "What happens when a generator function executes a return statement?"


def reference_text() -> str:
    """Python's language reference as it ships with Python: some 460,000 characters."""
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415 - large, and for this command alone
    except ImportError:
        fail("this Python comes without its language reference (pydoc_data); try `asyncrlm run FILE`", FAILED)
    return "\n\n".join(f"{text.strip()}\n" for _, text in sorted(topics.items()))


def run_demo(question: str | None, *, progress: Detail | None, as_json: bool) -> None:
    """Ask `question`, or the demo's own, about Python's language reference."""
    text = reference_text()
    if progress is not None:
        version = ".".join(str(part) for part in sys.version_info[:2])
        say(f"A question about the language reference of Python {version}, {len(text):,} characters that came with it.")
        say("The model is the offline one: no language model, no network, it ranks sentences. All else is real.")
        say("")
    asked = question or QUESTION
    ask(text, asked, {"backend": "offline"}, name="pydoc_data.topics", progress=progress, as_json=as_json)
    if progress is not None:
        say("")
        command = _command()
        say(f"The code of each turn: {command} demo --verbose")
        say(f"With a model: {command} run FILE -q QUESTION --backend openai --model NAME   ({command} run --help)")


def _command() -> str:
    """How to call this command again: a virtual environment need not be on the path."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return "python -m asyncrlm"
    found = shutil.which(called.name)
    return called.name if found is not None and Path(found).absolute() == called.absolute() else str(called)
