"""What a prompt may be, what it is called in prompts, and how it gets to the worker."""

from __future__ import annotations

import io
import json
import pickle
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from msgspec import Struct

from ..errors import ConfigurationError
from .worker import codec

MAX_PATH_BYTES = 256 * 1024 * 1024
"""Largest text file that can be given as a path: it becomes a `str` in the worker."""
INLINE = 256 * 1024
"""Up to so many characters of text, or bytes, travel in the frame itself: a file costs more than it saves."""
INLINE_JSON = 1024 * 1024
SLICE = 4 * 1024 * 1024
"""Characters or bytes made ready at a time, so that no second copy of a large value is ever held."""
MOST_NAMES = 50

SUPPORTED = (
    "a str, bytes, a dict or list of plain data (None, bool, numbers, str, bytes, dates, and list, tuple, set, dict of "
    "these), or a pathlib.Path to a text file"
)

Kind = Literal["str", "bytes", "dict", "list", "file", "value"]


class ContextInfo(Struct, frozen=True, kw_only=True):
    """What prompts tell about a context."""

    kind: Kind
    size: int
    """Characters of a str, bytes of bytes or of a file; for other values the characters of all text in them."""
    count: int | None = None
    """Items of a dict or list; None for the rest."""
    names: tuple[str, ...] = ()
    """The first keys of a dict, or the name of a file."""


class LoadPlan(Struct, frozen=True, kw_only=True):
    """How one variable gets to a worker, any number of times. One of `value`, `content` and `path` is given."""

    name: str
    form: Literal["text", "bytes", "json", "pickle", "code"]
    value: Any = None
    """The codec's form of a small value, sent in the frame."""
    content: str | bytes | None = None
    """Text or bytes for a file, encoded as it is written."""
    path: Path | None = None
    """A file of the host."""
    also: str | None = None
    """Another name for the same value."""

    def chunks(self) -> Iterator[bytes]:
        """The bytes of the file in the sandbox, made slice by slice."""
        if self.path is not None:
            with self.path.open("rb") as file:
                while data := file.read(SLICE):
                    yield data
        elif isinstance(self.content, str):
            # A str is sliced between code points, and each lone surrogate is one: the slices join exactly.
            for start in range(0, len(self.content), SLICE):
                yield self.content[start : start + SLICE].encode("utf-8", "surrogatepass")
        elif self.content is not None:
            for start in range(0, len(self.content), SLICE):
                yield self.content[start : start + SLICE]


def check_prompt_type(value: Any) -> None:
    """Whether `value` may be the prompt of a run.

    Raises:
        ConfigurationError: if not; the message names what may.
    """
    if not isinstance(value, (str, bytes, dict, list, Path)):
        raise _unsupported("the prompt", value)


def describe(value: Any) -> ContextInfo:
    """What to tell about `value`. Looks at a file's size, at no content.

    Raises:
        ConfigurationError: for a path that can't be a context.
    """
    if isinstance(value, str):
        return ContextInfo(kind="str", size=len(value))
    if isinstance(value, (bytes, bytearray)):
        return ContextInfo(kind="bytes", size=len(value))
    if isinstance(value, Path):
        return ContextInfo(kind="file", size=_file_size(value), names=(value.name,))
    if isinstance(value, Mapping):
        keys = cast("Mapping[Any, Any]", value)
        names = tuple(str(key)[:80] for key, _ in zip(keys, range(MOST_NAMES), strict=False))
        return ContextInfo(kind="dict", size=_text_size(keys), count=len(keys), names=names)
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return ContextInfo(kind="list", size=_text_size(items), count=len(items))
    return ContextInfo(kind="value", size=_text_size(value))


def plan_load(name: str, value: Any, *, tool: bool = False) -> LoadPlan:
    """How to load `value`, which stays as it is. Encodes dicts and lists, so it may take time: call it in a thread.

    Args:
        name: The variable.
        value: What `SUPPORTED` names, or any plain data.
        tool: Whether it is a value of `custom_tools`: a path then is a path, and what the codec refuses is pickled
            (host → worker only).

    Raises:
        ConfigurationError: for what can't be loaded; the message names the offending item.
    """
    if isinstance(value, str):
        text = str.__str__(value)
        if len(text) <= INLINE:
            return LoadPlan(name=name, form="json", value=codec.encode(text))
        return LoadPlan(name=name, form="text", content=text)
    if isinstance(value, (bytes, bytearray)):
        data = bytes(value)
        if len(data) <= INLINE:
            return LoadPlan(name=name, form="json", value=codec.encode(data))
        return LoadPlan(name=name, form="bytes", content=data)
    if isinstance(value, Path) and not tool:
        _file_size(value)
        return LoadPlan(name=name, form="text", path=value.absolute())
    try:
        encoded = codec.encode(value, name)
        text = json_text(encoded, separators=(",", ":"))
    except Exception as error:
        if tool:
            return LoadPlan(name=name, form="pickle", content=_pickled(name, value))
        if isinstance(value, (dict, list)):
            raise ConfigurationError(f"{error}. {name} may be {SUPPORTED}.") from error
        raise _unsupported(name, value) from error
    if len(text) <= INLINE_JSON:
        return LoadPlan(name=name, form="json", value=encoded)
    return LoadPlan(name=name, form="json", content=text)


def plan_tool(name: str, value: Any) -> LoadPlan:
    """`plan_load` of a value of `custom_tools`."""
    return plan_load(name, value, tool=True)


def json_text(value: Any, **options: Any) -> str:
    """What `json.dumps(value, **options)` gives, and other threads go on meanwhile: that is one call in C."""
    text = io.StringIO()
    text.writelines(json.JSONEncoder(**options).iterencode(value))
    return text.getvalue()


def _pickled(name: str, value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise ConfigurationError(
            f"{name!r} holds a {type(value).__name__}, which can neither be encoded nor pickled: {error}"
        ) from error


def _unsupported(what: str, value: Any) -> ConfigurationError:
    kind = cast("type[Any]", type(value))
    full = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return ConfigurationError(
        f"{what} is of type {full}; it may be {SUPPORTED}. Turn it into one of these first, such as with "
        "str(...), .to_csv(), .to_dict() or .tolist()."
    )


def _file_size(path: Path) -> int:
    """Bytes of a text file that can be a context.

    Raises:
        ConfigurationError: if it is none.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the file {str(path)!r} can't be read: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigurationError(f"{str(path)!r} is no regular file; a path must lead to a text file")
    if status.st_size > MAX_PATH_BYTES:
        raise ConfigurationError(
            f"{str(path)!r} has {status.st_size:,} bytes; as a path at most {MAX_PATH_BYTES:,} are possible. "
            "Split it, or pass a part of it as a str."
        )
    return status.st_size


def _text_size(value: Any) -> int:
    """Characters of all text in nested plain data; each container once, so that one holding itself ends too."""
    total = 0
    seen: set[int] = set()
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, (dict, list, tuple, set, frozenset)):
            container = cast("Any", item)
            if id(container) not in seen:
                seen.add(id(container))
                stack.extend(container)
                if isinstance(item, dict):
                    stack.extend(cast("dict[Any, Any]", item).values())
        elif item is not None:
            total += len(str(item)) if isinstance(item, (int, float)) else 0
    return total
