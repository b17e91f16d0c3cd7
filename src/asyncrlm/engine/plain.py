"""A prompt as one plain message, for a run that has no REPL."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import anyio

from ..errors import ConfigurationError


async def plain_text(prompt: Any, root_prompt: str | None) -> str:
    """The message a model is sent when the depth limit allows no REPL: the question, then the prompt itself.

    Raises:
        ConfigurationError: if the prompt has no text form.
    """
    if isinstance(prompt, Path):
        text = await anyio.Path(prompt).read_text("utf-8")
    elif isinstance(prompt, bytes):
        try:
            text = prompt.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"with max_depth=0 the prompt is sent as text; these bytes are none: {error}"
            ) from None
    elif isinstance(prompt, str):
        text = prompt
    else:
        text = json.dumps(prompt, ensure_ascii=False, default=str)
    return f"{root_prompt}\n\n{text}" if root_prompt else text


_THOUGHTS = re.compile(r"\s*<think(?:ing)?>.*?(?:</think(?:ing)?>\s*|\Z)", re.DOTALL | re.IGNORECASE)
_THOUGHTS_END = re.compile(r"</think(?:ing)?>\s*", re.IGNORECASE)
_FENCED = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,}).*?(?:^[ \t]*(?P=fence)[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


def strip_thinking(text: str) -> str:
    """A sub-model's reply without the thoughts that come before it.

    Where a chat template opened them for the model, only their end is in the text.
    """
    thoughts = _THOUGHTS.match(text)
    if thoughts is not None:
        return text[thoughts.end() :]
    end = _THOUGHTS_END.search(text)
    return text[end.end() :] if end is not None and "<think" not in text[: end.start()].lower() else text


def without_code(text: str) -> str:
    """What a reply says besides its thoughts and its fenced blocks."""
    return _FENCED.sub("", strip_thinking(text)).strip()
