"""Reads JSON of any length in a worker thread, a piece at a time: a parser in C holds up every other thread until it is
done, which for a large frame is long, and for a frame made to be slow is very long."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import msgspec

from .worker.bounds import MAX_CONTAINERS

PIECE = 1 << 15
"""Characters that are parsed in one go."""
MAX_DEPTH = 350
"""Deepest nesting; of values, `worker/codec.py` allows less."""

_SPACE = re.compile(r"[ \t\r]*+")
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_PLAIN = rf'(?:{_STRING}|[^"\[\]{{}},]++)'
_FLAT = rf'[\[{{](?:{_STRING}|[^"\[\]{{}}]++)*+[\]}}]'
_NESTED = rf'[\[{{](?:{_STRING}|[^"\[\]{{}}]++|{_FLAT})*+[\]}}]'
_QUOTED = re.compile(_STRING, re.DOTALL)
# What ends in a comma and nests little, as often as it comes: all of it may be parsed at once.
_SIMPLE = re.compile(rf"(?:(?:{_PLAIN}|{_NESTED})++,)*+", re.DOTALL)
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]{1,40}")
# Of the inside of a text, what may be parsed at once: it ends neither in an escape nor between two surrogates.
_TEXT = re.compile(
    r'(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+',
    re.DOTALL,
)
_parse = msgspec.json.Decoder().decode


class Stopped(Exception):
    """Nobody wants to know any more."""


class Reader:
    """Parses one text.

    Args:
        text: The JSON.
        stopped: Asked before each piece.
    """

    def __init__(self, text: str, stopped: Callable[[], bool]) -> None:
        self._text = text
        self._stopped = stopped
        self._containers = 0

    def read(self) -> Any:
        """The value.

        Raises:
            ValueError: if the text is no JSON, or holds too many containers.
            Stopped: if it was stopped.
        """
        value, at = self._value(self._skip(0), 0)
        if self._skip(at) != len(self._text):
            raise ValueError(f"characters after the end of the JSON at {at}")
        return value

    def _skip(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        return found.end() if found else at

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        if self._stopped():
            raise Stopped
        match self._text[at : at + 1]:
            case "[":
                return self._list(at + 1, depth + 1)
            case "{":
                return self._dict(at + 1, depth + 1)
            case '"':
                return self._string(at + 1)
            case _:
                found = _SCALAR.match(self._text, at)
                if found is None:
                    raise ValueError(f"no JSON at {at}")
                return _parse(found.group()), found.end()

    def _simple(self, at: int, brackets: str) -> tuple[Any, int]:
        """The items from `at` on that can be parsed at once, up to the last comma; None if there are none."""
        found = _SIMPLE.match(self._text, at, at + PIECE)
        if found is None or found.end() == at:
            return None, at
        if self._stopped():
            raise Stopped
        piece = found.group()
        bare = _QUOTED.sub("", piece) if '"' in piece else piece
        self._count(bare.count("[") + bare.count("{"))
        return _parse(f"{brackets[0]}{piece[:-1]}{brackets[1]}"), found.end()

    def _count(self, containers: int) -> None:
        self._containers += containers
        if self._containers > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS:,} lists and dicts in one frame")

    def _nest(self, depth: int) -> None:
        self._count(1)
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        self._nest(depth)
        items: list[Any] = []
        more = False
        while True:
            at = self._skip(at)
            if not more and self._text[at : at + 1] == "]":
                return items, at + 1
            several, after = self._simple(at, "[]")
            if several is not None:
                items += several
                at, more = after, True
                continue
            item, at = self._value(at, depth)
            items.append(item)
            at, more = self._after(at, "]")
            if not more:
                return items, at

    def _dict(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        self._nest(depth)
        items: dict[str, Any] = {}
        more = False
        while True:
            at = self._skip(at)
            if not more and self._text[at : at + 1] == "}":
                return items, at + 1
            several, after = self._simple(at, "{}")
            if several is not None:
                items.update(several)
                at, more = after, True
                continue
            if self._text[at : at + 1] != '"':
                raise ValueError(f"no key at {at}")
            key, at = self._string(at + 1)
            at = self._skip(at)
            if self._text[at : at + 1] != ":":
                raise ValueError(f"no colon at {at}")
            items[key], at = self._value(self._skip(at + 1), depth)
            at, more = self._after(at, "}")
            if not more:
                return items, at

    def _after(self, at: int, closing: str) -> tuple[int, bool]:
        """Where to go on after an item, and whether another one follows."""
        at = self._skip(at)
        follows = self._text[at : at + 1]
        if follows not in (",", closing) or not follows:
            raise ValueError(f"neither comma nor end at {at}")
        return at + 1, follows == ","

    def _string(self, at: int) -> tuple[str, int]:
        parts: list[str] = []
        while True:
            if self._stopped():
                raise Stopped
            found = _TEXT.match(self._text, at, at + PIECE)
            after = found.end() if found else at
            if after > at:
                parts.append(_parse(f'"{self._text[at:after]}"'))
            if self._text[after : after + 1] == '"':
                return "".join(parts), after + 1
            if after == at:
                raise ValueError(f"no text at {at}")
            at = after


def read_json(line: bytes | bytearray, stopped: Callable[[], bool]) -> Any:
    """The value of one line of ASCII JSON; as `Reader.read`."""
    return Reader(line.decode("ascii"), stopped).read()


def holds_more(value: Any, most: int) -> bool:
    """Whether there are more than `most` values in this one; quick, whatever it holds."""
    level = [value]
    seen = 0
    while level:
        deeper: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                deeper += cast("dict[str, Any]", each).values()
            elif isinstance(each, list):
                deeper += cast("list[Any]", each)
            if seen + len(deeper) > most:
                return True
        seen += len(deeper)
        level = deeper
    return False
