"""What a text must hold for a regular expression to match: far from there, nothing has to be decoded or tried."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

UNBOUNDED = 1 << 31
"""A width from here on is none."""
_FIRST, _MOST = 1 << 16, 1 << 22
"""Bytes looked through at first, and at most, at a time."""
_LEAST = 0.25
"""What a clue must be worth: one letter, digit or space is enough, one of a word is not."""
_CLUES, _ALTERNATIVES, _LONGEST = 2, 8, 64
_LOWER = bytes(range(256)).lower()
_KINDS = re.ASCII | re.LOCALE | re.UNICODE
_SINGLE = ("LITERAL", "NOT_LITERAL", "ANY", "IN")
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
# Letters that ignoring case takes for others than those of ASCII: the dotless i, the long s, the sign of kelvin.
_MANY_FACED = frozenset("isk")


class Clue(NamedTuple):
    """One of `parts` is in whatever matches."""

    parts: tuple[bytes, ...]
    table: bytes | None
    """Through which the text is seen: of letters of ASCII the lower ones, or 1 for the bytes of a set of characters."""
    before: int
    """Characters that a match may have before it, or `UNBOUNDED`."""

    @property
    def worth(self) -> float:
        """The more, the rarer it is likely to be."""
        shortest = min(map(len, self.parts))
        if self.table is None or self.table == _LOWER:
            return shortest
        return shortest * (1 - math.log2(max(self.table[:128].count(1), 1)) / 7)


class Known(NamedTuple):
    """Of a pattern."""

    clues: tuple[Clue, ...] = ()
    """All of them hold."""
    width: int = UNBOUNDED
    """Characters that a match has at most, with what is looked at around it; or `UNBOUNDED`."""


def known(pattern: str, flags: int) -> Known:
    """What can be told of a pattern that compiles."""
    try:
        parser: Any = _parser()
        flags &= ~re.DEBUG
        parsed = parser.parse(pattern, flags)
        reader = _Reader()
        reader.read(parsed, flags, 0)
        reader.end()
        width = _width(parsed)
    except Exception:  # Python's own parser is private, and may be another any day: then nothing is known
        return Known()
    best = [clue for clue in sorted(reader.clues, key=lambda clue: -clue.worth) if clue.worth >= _LEAST][:_CLUES]
    return Known(tuple(best), UNBOUNDED if reader.looks_beyond else min(width + 4, UNBOUNDED))


def _parser() -> Any:
    try:
        return re._parser  # type: ignore[attr-defined]
    except AttributeError:  # before Python 3.11
        import sre_parse  # noqa: PLC0415

        return sre_parse


def _compiler() -> Any:
    try:
        return re._compiler  # type: ignore[attr-defined]
    except AttributeError:
        import sre_compile  # noqa: PLC0415

        return sre_compile


def _width(parsed: Any) -> int:
    return min(parsed.getwidth()[1], UNBOUNDED)


class _Reader:
    """Goes through what Python's parser makes of a pattern."""

    def __init__(self) -> None:
        self.clues: list[Clue] = []
        self.looks_beyond = False
        """More than what is matched decides, or nobody knows how much is matched."""
        self._run = b""
        self._table: bytes | None = None  # of the run, as `_before`
        self._before = 0

    def end(self) -> None:
        """Nothing that follows goes on with the run."""
        if self._run:
            self.clues.append(Clue((self._run,), self._table, self._before))
            self._run = b""

    def read(self, items: Any, flags: int, before: int) -> int:
        """Take a sequence, of which a match has `before` characters before it; returns those before what follows."""
        for number, (code, given) in enumerate(items):
            name = str(code)
            if name == "AT":
                continue
            if name in ("ASSERT", "ASSERT_NOT"):
                self.looks_beyond = True
            elif name == "SUBPATTERN":
                _, added, removed, part = given
                kept = flags & ~_KINDS if added & _KINDS else flags
                before = self.read(part, (kept | added) & ~removed, before)
            elif name == "ATOMIC_GROUP":
                before = self.read(given, flags, before)
            elif name in _SINGLE:
                self._take(items[number : number + 1], flags, 1, before)
                before += 1
            elif name in _REPEATS and given[0] and len(given[2]) == 1 and str(given[2][0][0]) in _SINGLE:
                least, most, part = given
                self._take(part, flags, int(least), before)
                before = min(before + int(most), UNBOUNDED)
                if least != most:
                    self.end()
            else:
                self.end()
                before = min(before + self._other(name, given, flags, before), UNBOUNDED)
                self.end()
        return before

    def _take(self, one: Any, flags: int, times: int, before: int) -> None:
        """Take what stands for one character, so often."""
        code, given = one[0]
        folded = bool(flags & re.IGNORECASE)
        character = _certain(given, folded) if str(code) == "LITERAL" else ""
        table = (_LOWER if folded else None) if character else _set(one, flags)
        if table != self._table or not (character or table):
            self.end()
        if character or table:
            if not self._run:
                self._table, self._before = table, before
            self._run += (character.encode("utf-8") or b"\1") * min(times, _LONGEST)
            if times > _LONGEST:
                self.end()

    def _other(self, name: str, given: Any, flags: int, before: int) -> int:
        """Take what is no single character; returns its width."""
        if name == "BRANCH":
            self._branch(given[1], flags, before)
            return max(map(_width, given[1]))
        if name in _REPEATS:
            least, most, part = given
            if least:
                self.read(part, flags, before)
            else:
                self._beyond(part)
            return min(int(most) * _width(part), UNBOUNDED)
        self.looks_beyond = True  # a reference to a group, or what is not known yet
        return UNBOUNDED

    def _branch(self, branches: Sequence[Any], flags: int, before: int) -> None:
        best: list[Clue] = []
        for branch in branches:
            reader = _Reader()
            reader.read(branch, flags, before)
            reader.end()
            self.looks_beyond |= reader.looks_beyond
            best += sorted(reader.clues, key=lambda clue: -clue.worth)[:1]
        parts = tuple(part for clue in best for part in clue.parts)
        if len(best) < len(branches) or len(parts) > _ALTERNATIVES or len({clue.table for clue in best}) > 1:
            return
        self.clues.append(Clue(parts, best[0].table, max(clue.before for clue in best)))

    def _beyond(self, part: Any) -> None:
        reader = _Reader()
        reader.read(part, 0, 0)
        self.looks_beyond |= reader.looks_beyond


def _certain(code: int, folded: bool) -> str:
    """The character that stands for a literal in UTF-8; empty if several may."""
    character = chr(code)
    if not folded:
        return "" if 0xD800 <= code < 0xE000 else character
    return character.lower() if code < 128 and character.lower() not in _MANY_FACED else ""


def _set(one: Any, flags: int) -> bytes | None:
    """A table with 1 for the bytes that the characters may have which an expression of one character matches; None if
    that is not known."""
    if one.state.flags & ~flags:
        return None  # switched off in a group, which this compiler would not hear of
    fits = _compiler().compile(one, flags).fullmatch
    low = bytes(fits(chr(code)) is not None for code in range(128))
    code, given = one[0]
    ascii_only = (
        str(code) == "IN"
        and not flags & re.IGNORECASE
        and all(
            (str(kind) == "LITERAL" and what < 128) or (str(kind) == "RANGE" and what[1] < 128) for kind, what in given
        )
    )
    return low + bytes([not ascii_only]) * 128


class Trail:
    """Where in a file the next match may begin.

    Args:
        clues: What must be there.
        longest: Characters that a match may have.
        size: Of the file.
        read: Bytes of it.
    """

    def __init__(self, clues: Sequence[Clue], longest: int, size: int, read: Callable[[int, int], bytes]) -> None:
        self._clues = clues
        self._longest = longest
        self._size = size
        self._read = read
        self._seen = [-1] * len(clues)

    def next(self, byte: int) -> int | None:
        """A place from `byte` on before which no match begins; None if none begins at all."""
        for number, clue in enumerate(self._clues):
            if self._seen[number] < byte:
                self._seen[number] = self._find(clue, byte)
            if self._seen[number] == self._size:
                return None
            # A character has four bytes at most.
            byte = max(byte, self._seen[number] - 4 * min(clue.before, self._longest))
        return byte

    def _find(self, clue: Clue, start: int) -> int:
        more = max(map(len, clue.parts)) - 1
        step = _FIRST
        while start < self._size:
            data = self._read(start, start + step + more)
            if clue.table is not None:
                data = data.translate(clue.table)
            found = [at for part in clue.parts if (at := data.find(part)) >= 0]
            if found:
                return start + min(found)
            start += step
            step = min(2 * step, _MOST)
        return self._size
