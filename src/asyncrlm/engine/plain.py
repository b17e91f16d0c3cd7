"""A prompt as one plain message, for a run that has no REPL."""

from __future__ import annotations

import re
from typing import Any, cast

import anyio
import anyio.to_thread

from ..errors import ConfigurationError
from ..repl.context import MAX_PATH_BYTES, file_text, json_text
from ..repl.files import HostFile, HostFiles
from ..repl.tables import library_of, table_text
from ..repl.worker.records import fields_of


async def plain_text(prompt: Any, root_prompt: str | None, threads: anyio.CapacityLimiter) -> str:
    """The message a model is sent when the depth limit allows no REPL: the question, then the prompt itself.

    Raises:
        ConfigurationError: if the prompt has no text form.
    """
    if isinstance(prompt, str):
        text = prompt
    else:
        text = await anyio.to_thread.run_sync(_as_text, prompt, abandon_on_cancel=True, limiter=threads)
    return f"{root_prompt}\n\n{text}" if root_prompt else text


def _as_text(prompt: Any) -> str:
    """The text of a file or of bytes, a table as CSV; others as JSON, or as Python writes what has no such form."""
    kind = prompt.__class__.__name__
    try:
        if isinstance(prompt, (HostFile, HostFiles)):
            kind = "path"
        if isinstance(prompt, (HostFile, HostFiles)) and prompt.size > MAX_PATH_BYTES:
            raise ValueError(f"it has {prompt.size:,} bytes, and at most {MAX_PATH_BYTES:,} can be read at once")
        if isinstance(prompt, HostFile):
            return file_text(prompt)
        if isinstance(prompt, HostFiles):
            return "\n\n".join([f"# {file.name}\n\n{file_text(file)}" for file in prompt.files])
        if isinstance(prompt, (bytes, bytearray, memoryview)):
            return bytes(cast("bytes", prompt)).decode("utf-8")
        if library_of(prompt) is not None:
            return table_text(prompt)
        value: Any = _plain(cast("object", prompt))
        try:
            return json_text(value, ensure_ascii=False, default=_plain)
        except (TypeError, ValueError):  # keys that are no text, or a value that contains itself
            return repr(prompt)
    except Exception as error:
        raise ConfigurationError(
            f"with max_depth=0 the prompt is sent as text, and this {kind} has none: {error}"
        ) from error


def _plain(value: Any) -> Any:
    fields = fields_of(value)
    if fields is not None:
        return fields
    if isinstance(value, (set, frozenset, range)):
        return list(cast("set[Any]", value))
    return cast("Any", value) if isinstance(value, (dict, list, tuple, int, float)) else str(value)


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
