"""The text of a file that is larger than memory: read where it is looked at."""

from __future__ import annotations

import operator
import os
import sys
import threading
from array import array
from typing import TYPE_CHECKING, Any

from .characters import BLOCK, Counts, begun, characters
from .searching import LONGEST, Bytes, Found, matches

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterator

    Ask = Callable[[int, "int | None", "int | None"], "tuple[bytes, str]"]

WINDOW = 4 << 20
"""Bytes read at a time."""
NEAR = 1 << 20
"""Characters from either end that are found without counting those between."""
SMALL = 4 << 20
"""Bytes of a file whose characters are counted here: the host would take longer to be asked."""
LARGEST_STR = 64 << 20
"""Bytes of the largest text that `str()` gives."""


class Source:
    """The bytes of a file, through a descriptor of its own. Reading never maps: a file that shrinks is an error."""

    def __init__(self, fd: int, name: str, size: int) -> None:
        """`size`: how many of its bytes count, whatever is added to it."""
        self.fd, self.name, self.size = fd, name, size

    def read(self, start: int, stop: int) -> bytes:
        """All bytes between the two.

        Raises:
            OSError: if the file has become shorter than it was.
        """
        parts: list[bytes] = []
        stop = min(stop, self.size)
        while start < stop:
            data = os.pread(self.fd, stop - start, start)
            if not data:
                raise OSError(
                    f"the file {self.name!r} has become shorter than its {self.size:,} bytes since it was opened"
                )
            parts.append(data)
            start += len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Index:
    """Character ↔ byte. The host counts in the background; where it can't be asked, what is needed is counted here."""

    def __init__(self, source: Source, ask: Ask) -> None:
        self._source = source
        self._ask = ask
        self._counts = Counts(source.size)
        self._lock = threading.Lock()

    def length(self) -> int:
        """Characters in all."""
        self._know(self._source.size, None)
        return self._counts.before[-1]

    def byte_of(self, character: int) -> int:
        """Where the character begins; the end of the text for one beyond it."""
        counts = self._counts
        self._know(None, character)
        if character >= counts.before[-1]:
            return self._source.size
        block = counts.block_of(character)
        at = block * BLOCK
        data = self._source.read(at, at + BLOCK)
        lead = next(i for i, byte in enumerate(data) if not 0x80 <= byte < 0xC0)
        text = data[lead : begun(data)].decode("utf-8")
        return at + lead + len(text[: character - counts.before[block]].encode("utf-8"))

    def characters_before(self, byte: int) -> int:
        """Characters before a byte that begins one."""
        block = byte // BLOCK
        self._know(block * BLOCK, None)
        return self._counts.before[block] + characters(self._source.read(block * BLOCK, byte))

    def _know(self, nbytes: int | None, character: int | None) -> None:
        counts = self._counts
        while not counts.reaches(nbytes, character):
            have = counts.blocks
            try:
                packed, order = (b"", "") if self._source.size <= SMALL else self._ask(have, nbytes, character)
            except RuntimeError:  # a process that the cell forked, or a thread that outlived it
                packed, order = b"", ""
            if not order:
                new = array("I", [characters(self._source.read(have * BLOCK, (have + 1) * BLOCK))])
            else:
                new = array("I", packed)
                if order != sys.byteorder:
                    new.byteswap()
            if not new:
                raise OSError("the characters of this text could not be counted")
            with self._lock:
                counts.add(new, have)


class Text:
    """A text that stays in its file. What it has of str works alike; `for line in text` goes by line, as of a file.

    Attributes:
        name: The file's.
        nbytes: Its size in bytes, known at once; `len(text)` counts characters, which may have to be waited for.
    """

    __slots__ = ("_index", "_source", "name")

    def __init__(self, source: Source, ask: Ask) -> None:
        self._source = source
        self._index = Index(source, ask)
        self.name = source.name

    @property
    def nbytes(self) -> int:
        return self._source.size

    def __len__(self) -> int:
        return self._index.length()

    def __bool__(self) -> bool:
        return self.nbytes > 0

    def raw(self, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes between two positions in bytes, also of what is no UTF-8 text."""
        start, stop, _ = slice(start, stop).indices(self.nbytes)
        return self._source.read(start, stop)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> str:
        if not isinstance(key, slice):
            at = operator.index(key)
            character = self._between(at, at + 1 if at != -1 else None)
            if not character:
                raise IndexError("text index out of range")
            return character
        start, stop, step = (None if part is None else operator.index(part) for part in _parts(key))
        if step is None or step == 1:
            return self._between(start, stop)
        places = range(len(self))[key]
        if not places:
            return ""
        low, high = min(places[0], places[-1]), max(places[0], places[-1])
        return self._between(low, high + 1)[::step]

    def _between(self, start: int | None, stop: int | None) -> str:
        size = self.nbytes
        start = start or 0
        if start >= 0 and stop is not None and 0 <= stop <= NEAR:
            return self._text(0, 4 * stop)[start:stop]
        if -NEAR <= start < 0 and (stop is None or stop < 0):
            return self._tail(-start)[start:stop]
        if start < 0 or (stop is not None and stop < 0):
            start, stop, _ = slice(start, stop).indices(len(self))
        if stop is not None and stop <= start:
            return ""
        begin = self._index.byte_of(start) if start else 0
        return self._text(begin, size if stop is None else self._index.byte_of(stop))

    def _text(self, start: int, stop: int) -> str:
        """The text from a character's first byte on, without one that is cut off at the end."""
        data = self._source.read(start, stop)
        return self._decode(data[: begun(data)] if stop < self.nbytes else data, start)

    def _tail(self, count: int) -> str:
        """At least so many of the last characters, if there are."""
        start = max(self.nbytes - 4 * count, 0)
        data = self._source.read(start, self.nbytes)
        lead = next((i for i, byte in enumerate(data) if not 0x80 <= byte < 0xC0), 0) if start else 0
        return self._decode(data[lead:], start + lead)

    def _decode(self, data: bytes, start: int) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"the file {self.name!r} is not UTF-8 text: byte 0x{data[error.start]:02x} at position "
                f"{start + error.start:,} ({error.reason}); .raw(start, stop) gives its bytes"
            ) from None

    def _pieces(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, str]]:
        """The text piece by piece, each with the byte that it begins at."""
        stop = self.nbytes if stop is None else stop
        while start < stop:
            data = self._source.read(start, min(start + WINDOW, stop))
            if start + len(data) < stop:
                data = data[: begun(data)]
            yield start, self._decode(data, start)
            start += len(data)

    def __iter__(self) -> Iterator[str]:
        """The lines, each with its newline."""
        rest: list[str] = []
        for _, piece in self._pieces():
            lines = piece.split("\n")
            last = lines.pop()
            for line in lines:
                yield "".join([*rest, line, "\n"]) if rest else line + "\n"
                rest = []
            if last:
                rest.append(last)
        if rest:
            yield "".join(rest)

    def chunks(self, size: int, overlap: int = 0, *, on: str | None = None) -> Iterator[str]:
        """The whole text in pieces of at most `size` characters, of which each repeats the last `overlap` of the one
        before; with `on`, a piece ends after the last `on` in it, where that leaves more than the overlap."""
        if size <= 0 or not 0 <= overlap < size:
            raise ValueError("chunks() takes a size above 0 and an overlap from 0 to below the size")
        held, at = "", 0
        pieces = self._pieces()
        more = True
        while True:
            while more and len(held) - at <= size:
                _, piece = next(pieces, (0, ""))
                more = bool(piece)
                held, at = held[at:] + piece, 0
            end = min(at + size, len(held))
            if not more and end == len(held):
                break
            if on:
                cut = held.rfind(on, at + overlap, end)
                end = cut + len(on) if cut >= 0 and cut + len(on) > at + overlap else end
            yield held[at:end]
            at = end - overlap
        if at < len(held):
            yield held[at:]

    def __str__(self) -> str:
        if self.nbytes > LARGEST_STR:
            raise ValueError(
                f"a text of {self.nbytes:,} bytes is too large for one str; take a part, text[a:b], or go through "
                "`for line in text` or `text.chunks(size)`"
            )
        return self._text(0, self.nbytes)

    def __repr__(self) -> str:
        start = self._between(0, 60)
        return f"<Text {self.name!r}, {self.nbytes:,} bytes: {start!r}{'...' if self.nbytes > 60 else ''}>"

    # ---- finding -----------------------------------------------------------------------------------------------------

    def __contains__(self, part: str) -> bool:
        return self._find(part, 0, self.nbytes) >= 0

    def find(self, part: str, start: int = 0, end: int | None = None) -> int:
        """The first character of the first `part` between two positions; -1 if there is none."""
        first, last = self._bytes(start, end)
        at = self._find(part, first, last)
        return at if at <= 0 else self._index.characters_before(at)

    def rfind(self, part: str, start: int = 0, end: int | None = None) -> int:
        """The first character of the last `part`."""
        needle, (first, stop) = _needle(part), self._bytes(start, end)
        while needle is not None and stop - first >= len(needle):
            low = max(first, stop - WINDOW - len(needle))
            at = self._source.read(low, stop).rfind(needle)
            if at >= 0:
                return self._index.characters_before(low + at)
            if low == first:
                break
            stop = low + len(needle) - 1
        return -1

    def index(self, part: str, start: int = 0, end: int | None = None) -> int:
        """As `find`, with a ValueError if there is none."""
        at = self.find(part, start, end)
        if at < 0:
            raise ValueError("substring not found")
        return at

    def count(self, part: str) -> int:
        """How many times `part` occurs, one after another."""
        needle = _needle(part)
        if not needle:
            return 0 if needle is None else len(self) + 1
        total, at, size = 0, 0, self.nbytes
        alone = not any(needle.startswith(needle[i:]) for i in range(1, len(needle)))
        while size - at >= len(needle):
            data = self._source.read(at, at + WINDOW + len(needle) - 1)
            if alone:  # it can't overlap itself
                total += data.count(needle)
                at += WINDOW
                continue
            found = data.find(needle)
            end = WINDOW
            while found >= 0:
                total += 1
                end = found + len(needle)
                found = data.find(needle, end)
            at += max(end, WINDOW)
        return total

    def startswith(self, part: str | tuple[str, ...]) -> bool:
        """Whether it begins with `part`, or with one of several."""
        parts = part if isinstance(part, tuple) else (part,)
        return any(self[: len(each)] == each for each in parts)

    def endswith(self, part: str | tuple[str, ...]) -> bool:
        """Whether it ends with `part`, or with one of several."""
        parts = part if isinstance(part, tuple) else (part,)
        return any(not each or self[-len(each) :] == each for each in parts)

    def search(self, pattern: str | re.Pattern[str], flags: int = 0, *, longest: int = LONGEST) -> Found | None:
        """The first match of a regular expression, as `re.search`; None if there is none.

        A match, with what it looks at around it, may have `longest` characters.
        """
        return next(self.finditer(pattern, flags, longest=longest), None)

    def finditer(self, pattern: str | re.Pattern[str], flags: int = 0, *, longest: int = LONGEST) -> Iterator[Found]:
        """All matches, one after another, as `re.finditer`."""
        text = Bytes(self.nbytes, self._source.read, self._decode)
        return matches(pattern, flags, longest, text, self._index.characters_before)

    def _bytes(self, start: int, end: int | None) -> tuple[int, int]:
        if start < 0 or (end is not None and end < 0):
            start, end, _ = slice(start, end).indices(len(self))
        first = self._index.byte_of(start) if start else 0
        return first, self.nbytes if end is None else self._index.byte_of(end)

    def _find(self, part: str, start: int, stop: int) -> int:
        needle = _needle(part)
        if needle is None:
            return -1
        while stop - start >= len(needle):
            at = self._source.read(start, min(start + WINDOW + len(needle), stop)).find(needle)
            if at >= 0:
                return start + at
            start += WINDOW
        return -1

    # ---- what it is not ----------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            data = _needle(other)
            return data is not None and len(data) == self.nbytes and self._find(other, 0, self.nbytes) == 0
        return self is other

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        hint = "; it is no str: take a part, text[a:b], which is one" if hasattr(str, name) else ""
        raise AttributeError(f"a Text has no {name!r}{hint}")

    def __reduce__(self) -> Any:
        raise TypeError("a Text can't be pickled; pass a part of it, text[a:b]")


def _parts(key: Any) -> tuple[Any, Any, Any]:
    return key.start, key.stop, key.step


def _needle(part: Any) -> bytes | None:
    """The bytes to look for; None for what no UTF-8 text has."""
    if not isinstance(part, str):
        raise TypeError(f"'in <Text>' requires a str as left operand, not {type(part).__name__}")
    try:
        return part.encode("utf-8")
    except UnicodeEncodeError:
        return None
