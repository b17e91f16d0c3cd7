"""What a text must hold for a regular expression to match: far from there, nothing has to be decoded or tried."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

UNBOUNDED = 1 << 31
"""A width from here on is none."""
_FIRST, _MOST = 1 << 16, 1 << 22
"""Bytes looked through at first, and at most, at a time."""
_CLUES, _ALTERNATIVES = 2, 8
# Letters that ignoring case takes for others than those of ASCII: the dotless i, the long s, the sign of kelvin.
_MANY_FACED = frozenset("isk")


class Clue(NamedTuple):
    """One of `parts` is in whatever matches."""

    parts: tuple[bytes, ...]
    folded: bool
    """Whether upper and lower case of ASCII are one; `parts` are lower."""
    before: int
    """Characters that a match may have before it, or `UNBOUNDED`."""

    @property
    def worth(self) -> int:
        return min(map(len, self.parts))


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
        parsed = parser.parse(pattern, flags & ~re.DEBUG)
        reader = _Reader()
        reader.read(parsed, bool(flags & re.IGNORECASE), 0)
        reader.end()
        width = _width(parsed)
    except Exception:  # Python's own parser is private, and may be another any day: then nothing is known
        return Known()
    best = sorted(reader.clues, key=lambda clue: -clue.worth)[:_CLUES]
    return Known(tuple(best), UNBOUNDED if reader.looks_beyond else min(width + 4, UNBOUNDED))


def _parser() -> Any:
    try:
        return re._parser  # type: ignore[attr-defined]
    except AttributeError:  # before Python 3.11
        import sre_parse  # noqa: PLC0415

        return sre_parse


def _width(parsed: Any) -> int:
    return min(parsed.getwidth()[1], UNBOUNDED)


class _Reader:
    """Goes through what Python's parser makes of a pattern."""

    def __init__(self) -> None:
        self.clues: list[Clue] = []
        self.looks_beyond = False
        """More than what is matched decides, or nobody knows how much is matched."""
        self._run = ""
        self._folded = False  # the run is
        self._before = 0  # the run

    def end(self) -> None:
        """Nothing that follows goes on with the run."""
        if self._run:
            self.clues.append(Clue((self._run.encode("utf-8"),), self._folded, self._before))
            self._run = ""

    def read(self, items: Any, folded: bool, before: int) -> int:
        """Take a sequence, of which a match has `before` characters before it; returns those before what follows."""
        for code, given in items:
            name = str(code)
            if name == "LITERAL" and (character := _certain(given, folded)):
                if folded != self._folded:
                    self.end()
                if not self._run:
                    self._folded, self._before = folded, before
                self._run += character
                before += 1
            elif name == "AT":
                continue
            elif name in ("ASSERT", "ASSERT_NOT"):
                self.looks_beyond = True
            elif name == "SUBPATTERN":
                _, added, removed, part = given
                inner = (folded or bool(added & re.IGNORECASE)) and not removed & re.IGNORECASE
                before = self.read(part, inner, before)
            elif name == "ATOMIC_GROUP":
                before = self.read(given, folded, before)
            else:
                self.end()
                before = min(before + self._other(name, given, folded, before), UNBOUNDED)
                self.end()
        return before

    def _other(self, name: str, given: Any, folded: bool, before: int) -> int:
        """Take what is no literal; returns its width."""
        if name == "BRANCH":
            self._branch(given[1], folded, before)
            return max(map(_width, given[1]))
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, part = given
            if least:
                self.read(part, folded, before)
            else:
                self._beyond(part)
            return min(int(most) * _width(part), UNBOUNDED)
        if name in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "RANGE", "CATEGORY"):
            return 1
        self.looks_beyond = True  # a reference to a group, or what is not known yet
        return UNBOUNDED

    def _branch(self, branches: Sequence[Any], folded: bool, before: int) -> None:
        best: list[Clue] = []
        for branch in branches:
            reader = _Reader()
            reader.read(branch, folded, before)
            reader.end()
            self.looks_beyond |= reader.looks_beyond
            best += sorted(reader.clues, key=lambda clue: -clue.worth)[:1]
        parts = tuple(part for clue in best for part in clue.parts)
        if len(best) < len(branches) or len(parts) > _ALTERNATIVES or len({clue.folded for clue in best}) > 1:
            return
        self.clues.append(Clue(parts, best[0].folded, max(clue.before for clue in best)))

    def _beyond(self, part: Any) -> None:
        reader = _Reader()
        reader.read(part, False, 0)
        self.looks_beyond |= reader.looks_beyond


def _certain(code: int, folded: bool) -> str:
    """The character that stands for a literal in UTF-8; empty if several may."""
    character = chr(code)
    if not folded:
        return "" if 0xD800 <= code < 0xE000 else character
    return character.lower() if code < 128 and character.lower() not in _MANY_FACED else ""


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
            if clue.folded:
                data = data.lower()
            found = [at for part in clue.parts if (at := data.find(part)) >= 0]
            if found:
                return start + min(found)
            start += step
            step = min(2 * step, _MOST)
        return self._size
