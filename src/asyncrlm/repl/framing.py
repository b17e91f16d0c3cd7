"""Frames as bytes: one line of ASCII JSON each."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import ProtocolError
from .messages import Answer, Call, Done, FromWorker, Output, ToWorker
from .reading import Stopped, read_json
from .worker.bounds import MAX_FRAME, MAX_VARIABLES

LARGE = 1 << 17
"""Bytes of a frame beyond which it is read in a worker thread."""
MOST_OF_VARIABLES = 1 << 20
"""Characters of their names and types, and of their values."""
MOST_OF_A_NAME = 10_000
"""Characters of what a call may name: a tool, a file, a model."""

_parse_frame = msgspec.json.Decoder(FromWorker).decode
_encode_json = msgspec.json.Encoder().encode


def encode_frame(frame: ToWorker) -> bytes:
    """One line of ASCII JSON. Text that is no valid UTF-8 is escaped as JSON allows."""
    return _ascii(frame) + b"\n"


def packed(value: Any) -> msgspec.Raw:
    """What may stand for `value` in a frame, which then takes no time to encode."""
    return msgspec.Raw(_ascii(value))


def _ascii(value: Any) -> bytes:
    try:
        data = _encode_json(value)
    except (UnicodeEncodeError, OverflowError):
        data = b"\xff"
    if not data.isascii():
        data = json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode("ascii")
    return data


def decode_frame(line: bytes | bytearray) -> FromWorker:
    """One line of the worker's.

    Raises:
        ValueError: if it is no frame.
        RecursionError: likewise.
    """
    return _checked(_parse_frame(line))


def decode_large(line: bytes | bytearray, stopped: Callable[[], bool]) -> FromWorker | str | None:
    """The same for a long line, in a worker thread; what is wrong with it if it is no frame; None if it was stopped.

    What it holds is freed here, too, if it is nothing to go on with: that takes its time.
    """
    try:
        return _checked(msgspec.convert(read_json(line, stopped), FromWorker))
    except Stopped:
        return None
    except (ValueError, RecursionError) as error:
        return str(error)


def _checked(frame: FromWorker) -> FromWorker:
    if type(frame) is Answer:
        _ = frame.text
    elif type(frame) is Done:
        for names in (frame.variables, frame.values):
            if len(names) > MAX_VARIABLES:
                raise ValueError(f"more than {MAX_VARIABLES} variables")
            if sum(len(name) + len(text) for name, text in names.items()) > MOST_OF_VARIABLES:
                raise ValueError(f"more than {MOST_OF_VARIABLES:,} characters of variables")
    elif type(frame) is Output and len(frame.data) > LARGE:
        raise ValueError("output in too large a piece")
    elif type(frame) is Call and frame.name is not None and len(frame.name) > MOST_OF_A_NAME:
        raise ValueError(f"a name of {len(frame.name):,} characters")
    return frame


class FrameParser:
    """Cuts a stream into lines; takes any chunking, skips blank lines, drops spaces around a frame.

    Linear: each byte is copied into the partial line at most once, and out of it once.
    """

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[bytes | bytearray]:
        """The lines that `data` completes; a long one with the spaces around it, and without another copy.

        Raises:
            ProtocolError: if a line is longer than the limit, complete or not.
        """
        lines: list[bytes | bytearray] = [*data.split(b"\n")]
        rest = lines.pop()
        if lines and self._partial:
            self._partial += lines[0]
            lines[0] = self._partial
            self._partial = bytearray()
        if rest:
            self._partial += rest
        if len(self._partial) > self._limit or any(len(line) > self._limit for line in lines):
            raise ProtocolError(f"the worker sent a frame of more than {self._limit:,} bytes")
        return [bare for line in lines if line and (bare := line if len(line) > LARGE else line.strip())]
