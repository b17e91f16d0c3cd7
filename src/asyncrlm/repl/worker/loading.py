"""Variables from the host: contexts, values of tools."""

from __future__ import annotations

import codecs
import importlib
import io
import json
import mmap
import os
from typing import TYPE_CHECKING, Any

from . import codec
from .documents import Documents, index, packed
from .folder import folder_of
from .lazytext import Source, Text

if TYPE_CHECKING:
    from collections import deque

PIECE = 8 << 20
"""Bytes of a user's file that are read at a time."""


def load(frame: dict[str, Any], descriptors: deque[int], files: Any) -> Any:
    """The value of a `load` frame of any form but "code"; `files` has `counter` and `opener`, which ask the host.

    Raises:
        ValueError: for text that is no UTF-8, or a value of an unknown form.
    """
    form = frame.get("form", "json")
    if "value" in frame and form not in ("lazy", "table", "folder"):
        value = codec.decode(frame["value"])
        return _unpickle(value) if form == "pickle" else value
    own = frame.get("path") is not None
    if own:
        fd = os.open(frame["path"], os.O_RDONLY | os.O_CLOEXEC)
    elif frame.get("descriptor") and descriptors:
        fd = descriptors.popleft()
    else:
        raise ValueError("nothing to load: no value, no path and no descriptor came")
    try:
        if form == "lazy":
            key, name, size = frame["value"]
            return Text(Source(os.dup(fd), codec.decode(name), size), files.counter(key))
        if form == "binary":
            return open(os.dup(fd), "rb")  # the cell's own
        if form == "table":
            return table(frame["value"], _read(fd, "bytes", own))
        if form == "folder":
            entries, _ = index(_read(fd, "bytes", own))
            return Documents(entries, folder_of(entries, frame["value"], files).text)
        return _read(fd, form, own)
    finally:
        os.close(fd)
        if own:
            os.unlink(frame["path"])


def _unpickle(data: Any) -> Any:
    import pickle  # noqa: PLC0415 - few hosts send any

    return pickle.loads(data)


def table(kind: str, data: bytes) -> Any:
    """A table of the library that `kind` names."""
    library, _, name = kind.partition(".")
    try:
        if library == "pandas":
            return _unpickle(data)
        if library == "polars":
            polars: Any = importlib.import_module("polars")
            frame = polars.read_ipc_stream(io.BytesIO(data))
            return frame.to_series() if name == "Series" else frame
        stream: Any = importlib.import_module("pyarrow.ipc").open_stream(data)
        return stream.read_next_batch() if name == "RecordBatch" else stream.read_all()
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the context is a table of {library}, and here there is no {error.name}: install it where cells run, or "
            "give the table as text, such as by .to_csv()"
        ) from None


def _read(fd: int, form: str, own: bool) -> Any:
    """Mapped, not read: a context of a gigabyte must not be there twice, not even for a moment. Not so a file of the
    user's: if that shrank meanwhile, the process would be killed."""
    if form == "text" and not own:
        return _their_text(fd)
    data: Any
    if own:
        try:
            data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        except (ValueError, OSError):  # empty, or nothing that can be mapped
            with open(fd, "rb", closefd=False) as file:
                data = file.read()
    else:
        size = os.fstat(fd).st_size
        data = Source(os.dup(fd), "that was given", size).read(0, size)
    if form == "documents":
        return packed(data)
    try:
        if form == "text":
            return str(data, "utf-8", "surrogatepass")  # what the host encoded may hold lone surrogates
        if form == "bytes":
            return data[:]
        if form == "json":
            return codec.decode(json.loads(data[:]))
        if form == "pickle":
            return _unpickle(data)
        raise ValueError(f"unknown form {form!r}")
    finally:
        if isinstance(data, mmap.mmap):
            data.close()


def _their_text(fd: int) -> str:
    """The text of a user's file. It grows in its place by the pieces that are read, so that it is there once."""
    size = os.fstat(fd).st_size
    source = Source(os.dup(fd), "that was given", size)
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, at = "", 0
    try:
        for at in range(0, size, PIECE):
            text += decoder.decode(source.read(at, at + PIECE), at + PIECE >= size)
    except UnicodeDecodeError as error:
        # The decoder's bytes begin with those of a character that the piece before cut in two.
        position = min(at + PIECE, size) - len(error.object) + error.start
        raise ValueError(
            f"the file is not UTF-8 text: byte 0x{error.object[error.start]:02x} at position {position:,} "
            f"({error.reason}); pass its bytes, or text decoded with the right encoding"
        ) from None
    return text
