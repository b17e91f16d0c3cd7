"""What a prompt may be, what it is called in prompts, and how it gets to the worker."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
import os
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

from msgspec import Struct, structs

from ..errors import ConfigurationError
from .files import HostFile, HostFiles, found, found_all
from .tables import describe_table, encode_table, library_of
from .worker import codec
from .worker.records import fields_of

MAX_PATH_BYTES = 256 * 1024 * 1024
"""Largest text file that becomes a `str` in the worker, and most that all files of a folder may have in sum to become
such; what is larger becomes a `Text`, or many."""
INLINE = 256 * 1024
"""Up to so many characters of text, or bytes, travel in the frame itself: a file costs more than it saves."""
INLINE_JSON = 1024 * 1024
SLICE = 4 * 1024 * 1024
"""Characters or bytes made ready at a time, so that no second copy of a large value is ever held."""
MOST_NAMES = 20
_LONGEST_NAME = 80
_LONG_INT = 10_000
"""Bits beyond which Python refuses to write an int in digits."""

SUPPORTED = (
    "a str, bytes, a number or date, a dict, list, tuple or set of plain data, a dataclass, msgspec.Struct or pydantic "
    "model of it, a pathlib.Path to a text file, a folder or a pattern such as docs/*.md, a list of such paths, an "
    "httpx.URL, a file opened in binary mode, an asynchronous iterator of str or bytes, or a table of pandas, polars "
    "or pyarrow"
)

Kind = Literal[
    "str", "bytes", "number", "dict", "list", "tuple", "set", "record", "file", "text", "binary", "documents", "texts",
    "table", "value",
]  # fmt: skip


class ContextInfo(Struct, frozen=True, kw_only=True):
    """What prompts tell about a context."""

    kind: Kind
    size: int
    """Characters of a str, bytes of bytes or of files; for other values the characters of all text in them."""
    count: int | None = None
    """Items, fields or files of what has any; None for the rest."""
    names: tuple[str, ...] = ()
    """The first keys of a dict, the fields of a record, the names of files; as a cell would write them."""
    type: str = ""
    """The class, where the kind does not say it."""


class LoadPlan(Struct, frozen=True, kw_only=True):
    """How one variable gets to a worker, any number of times. One of `value`, `content`, `file`, `files` is given."""

    name: str
    form: Literal["text", "bytes", "json", "pickle", "documents", "folder", "code", "lazy", "binary", "table"]
    value: Any = None
    """The codec's form of a small value, sent in the frame; for "lazy" key, name and bytes of the file, for "folder" a
    key."""
    content: str | bytes | None = None
    """Text or bytes for a file, encoded as it is written."""
    file: HostFile | None = None
    files: HostFiles | None = None
    also: str | None = None
    """Another name for the same value."""

    @property
    def inline(self) -> bool:
        """Whether the value is in the frame."""
        return self.content is None and self.file is None and self.files is None

    @property
    def nbytes(self) -> int | None:
        """How many bytes `chunks` gives, where that is known."""
        if self.file is not None:
            return self.file.size
        content = self.content
        return len(content) if isinstance(content, bytes) or (content and content.isascii()) else None

    @property
    def most_bytes(self) -> int:
        """How many bytes `chunks` gives at most."""
        if self.files is not None:
            return sum(file.size for file in self.files.files)
        if (known := self.nbytes) is not None:
            return known
        return 4 * len(self.content or "")

    def chunks(self) -> Iterator[bytes]:
        """The bytes of the file in the sandbox, made slice by slice.

        Raises:
            ConfigurationError, OSError: for a file of the host that can't be read, or is another than it was.
        """
        if self.file is not None:
            yield from _contents(self.file)
        elif self.files is not None:
            yield _index(self.files)
            for file in () if self.files.lazy else self.files.files:
                yield from exactly(file)
        elif isinstance(self.content, str):
            # A str is sliced between code points, and each lone surrogate is one: the slices join exactly.
            for start in range(0, len(self.content), SLICE):
                yield self.content[start : start + SLICE].encode("utf-8", "surrogatepass")
        elif self.content is not None:
            for start in range(0, len(self.content), SLICE):
                yield self.content[start : start + SLICE]


def _contents(file: HostFile) -> Iterator[bytes]:
    fd = file.open()
    try:
        at = 0
        while data := os.pread(fd, SLICE, at):  # a descriptor may have a position that others share
            yield data
            at += len(data)
    finally:
        os.close(fd)


def file_text(file: HostFile) -> str:
    """All of a text file.

    Raises:
        ConfigurationError, OSError, UnicodeDecodeError: if it can't be read, or is no UTF-8 text.
    """
    return b"".join(_contents(file)).decode("utf-8")


def _index(files: HostFiles) -> bytes:
    index = [[codec.encode(file.name), file.size] for file in files.files]
    return json.dumps(index, separators=(",", ":")).encode("ascii") + b"\n"


def exactly(file: HostFile) -> Iterator[bytes]:
    """All of a file.

    Raises:
        ConfigurationError, OSError: if it can't be read, or has another size than when it was found.
    """
    size = 0
    for data in _contents(file):
        size += len(data)
        yield data
    if size != file.size:
        raise ConfigurationError(f"the file {str(file.path)!r} changed while it was loaded: it had {file.size:,} bytes")


_NUMBERS = (int, float, complex, decimal.Decimal)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_OTHERS = (dt.date, dt.time, dt.timedelta, uuid.UUID, range)


def check_prompt_type(value: Any) -> None:
    """Whether `value` may be the prompt of a run.

    Raises:
        ConfigurationError: if not; the message names what may.
    """
    known = (str, bytes, bytearray, memoryview, Path, *_NUMBERS, *_CONTAINERS, *_OTHERS)
    if not isinstance(value, known) and fields_of(value) is None and library_of(value) is None:
        raise _unsupported("the prompt", value)


def resolved(value: Any, *, lazy: bool = False) -> Any:
    """`value`, or the files that it leads to. Looks at folders: call it in a thread.

    Args:
        value: Anything.
        lazy: Whether files stay files, whatever their size.

    Raises:
        ConfigurationError: for paths that can't be a context.
    """
    if isinstance(value, (Path, HostFile)):
        what: Any = value if isinstance(value, HostFile) else found(value)
        if isinstance(what, HostFile):
            return structs.replace(what, lazy=lazy or what.lazy or what.size > MAX_PATH_BYTES)
    elif isinstance(value, (list, tuple)) and value and all(isinstance(item, Path) for item in cast("Any", value)):
        what = found_all(cast("list[Path]", value))
    else:
        if lazy:
            raise ConfigurationError("lazy=True is for a pathlib.Path, a list of them, or a stream of text")
        return cast("Any", value)
    return structs.replace(what, lazy=lazy or what.size > MAX_PATH_BYTES)


def describe(value: Any) -> ContextInfo:
    """What to tell about `value`. Looks at files' sizes, at no content.

    Raises:
        ConfigurationError: for a path that can't be a context.
    """
    value = resolved(value)
    if isinstance(value, str):
        return ContextInfo(kind="str", size=len(value))
    if isinstance(value, (bytes, bytearray)):
        return ContextInfo(kind="bytes", size=len(value))
    if isinstance(value, memoryview):
        return ContextInfo(kind="bytes", size=cast("memoryview[Any]", value).nbytes)
    if isinstance(value, HostFile):
        names = _names([value.name] if value.name else [])
        kinds: dict[str, Kind] = {"lazy": "text", "text": "file", "binary": "binary", "bytes": "bytes"}
        return ContextInfo(kind=kinds[_FORMS[value.text, value.lazy]], size=value.size, names=names)
    if isinstance(value, HostFiles):
        names = _names([file.name for file in value.files[:MOST_NAMES]])
        kind = "texts" if value.lazy else "documents"
        return ContextInfo(kind=kind, size=value.size, count=len(value.files), names=names)
    if library_of(value) is not None:
        table = describe_table(value)
        names = _names(table.columns)
        return ContextInfo(kind="table", size=table.size, count=table.rows, names=names, type=table.type)
    size, name = _text_size(value), type(value).__name__
    if isinstance(value, _NUMBERS):
        return ContextInfo(kind="number", size=size, type=name)
    if isinstance(value, dict):
        keys = cast("dict[Any, Any]", value)
        return ContextInfo(kind="dict", size=size, count=len(keys), names=_names(keys))
    if isinstance(value, list):
        return ContextInfo(kind="list", size=size, count=len(cast("list[Any]", value)))
    if isinstance(value, (set, frozenset)):
        return ContextInfo(kind="set", size=size, count=len(cast("set[Any]", value)), type=name)
    if isinstance(value, tuple):
        row = cast("Any", value)
        fields = getattr(row, "_fields", ())
        return ContextInfo(kind="tuple", size=size, count=len(row), names=_names(fields), type=name if fields else "")
    if (record := fields_of(value)) is not None:
        return ContextInfo(kind="record", size=size, count=len(record), names=_names(record), type=name)
    return ContextInfo(kind="value", size=size, type=name)


def _names(keys: Any) -> tuple[str, ...]:
    shown: list[str] = []
    for key in keys:
        if len(shown) == MOST_NAMES:
            break
        short: Any = key[:_LONGEST_NAME] if isinstance(key, (str, bytes)) else key
        try:
            shown.append(repr(short)[: _LONGEST_NAME + 10])
        except Exception:  # noqa: BLE001 -- an int of too many digits, or a class of the caller's
            shown.append(f"<{type(short).__name__}>")
    return tuple(shown)


_FORMS: dict[tuple[bool, bool], Literal["lazy", "text", "binary", "bytes"]] = {
    (True, True): "lazy",
    (True, False): "text",
    (False, True): "binary",
    (False, False): "bytes",
}
"""Whether a file is text, and whether it stays a file → how it is loaded."""


def plan_load(name: str, value: Any, *, tool: bool = False, lazy: bool = False, records: bool = True) -> LoadPlan:
    """How to load `value`, which stays as it is. Encodes dicts and lists, so it may take time: call it in a thread.

    Args:
        name: The variable.
        value: What `SUPPORTED` names, what `resolved` made of it, or any plain data.
        tool: Whether it is a value of `custom_tools`: a path then is a path.
        lazy: As of `resolved`.
        records: Whether objects with named fields go as data; else they are pickled, as is whatever the codec refuses
            (host → worker only).

    Raises:
        ConfigurationError: for what can't be loaded; the message names the offending item.
    """
    if not tool:
        value = resolved(value, lazy=lazy)
    if isinstance(value, str):
        text = str.__str__(value)
        if len(text) <= INLINE:
            return LoadPlan(name=name, form="json", value=codec.encode(text))
        return LoadPlan(name=name, form="text", content=text)
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(cast("Any", value))
        if len(data) <= INLINE:
            return LoadPlan(name=name, form="json", value=codec.encode(data))
        return LoadPlan(name=name, form="bytes", content=data)
    if isinstance(value, HostFile):
        return LoadPlan(name=name, form=_FORMS[value.text, value.lazy], file=value)
    if isinstance(value, HostFiles):
        return LoadPlan(name=name, form="folder" if value.lazy else "documents", files=value)
    if not tool and library_of(value) is not None:
        return _plan_table(name, value)
    try:
        encoded = codec.encode(value, name, strict=not records)
        text = json_text(encoded, separators=(",", ":"))
    except Exception as error:
        if not records:
            return LoadPlan(name=name, form="pickle", content=_pickled(name, value))
        if isinstance(value, _CONTAINERS) or fields_of(value) is not None:
            raise ConfigurationError(f"{error}. {name} may be {SUPPORTED}.") from error
        raise _unsupported(name, value) from error
    if len(text) <= INLINE_JSON:
        return LoadPlan(name=name, form="json", value=encoded)
    return LoadPlan(name=name, form="json", content=text)


def _plan_table(name: str, value: Any) -> LoadPlan:
    try:
        library, data = encode_table(value)
    except Exception as error:
        kind = type(value).__name__
        raise ConfigurationError(f"{name}, a {kind}, can't be written for a sandbox: {error}") from error
    return LoadPlan(name=name, form="table", value=library, content=data)


def plan_tool(name: str, value: Any, *, records: bool = False) -> LoadPlan:
    """`plan_load` of a value of `custom_tools`."""
    return plan_load(name, value, tool=True, records=records)


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


def _text_size(value: Any) -> int:
    """Characters of all text in nested plain data; each container once, so that one holding itself ends too."""
    total = 0
    seen: set[int] = set()
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, _CONTAINERS):
            container = cast("Any", item)
            if id(container) not in seen:
                seen.add(id(container))
                stack.extend(container)
                if isinstance(item, dict):
                    stack.extend(cast("dict[Any, Any]", item).values())
        elif isinstance(item, int) and item.bit_length() > _LONG_INT:
            total += item.bit_length() * 3 // 10
        elif isinstance(item, (*_NUMBERS, *_OTHERS)):
            total += len(str(item))
        elif item is not None and id(item) not in seen and (fields := fields_of(item)) is not None:
            seen.add(id(item))
            stack.extend(fields.values())
    return total
