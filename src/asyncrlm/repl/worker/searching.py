"""Regular expressions over a text that comes in pieces, with the meaning that they have on a str."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .characters import begun
from .clues import Trail, known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONGEST = 1 << 20
"""Characters that a match and what it looks at around it may have."""
_AHEAD = 8 << 20
"""Characters searched at a time, beside those."""


class Found:
    """A match, as of `re`, with positions in the whole text. It keeps what it matched, not the text around."""

    __slots__ = ("_base", "_before", "_groups", "_spans", "lastgroup", "lastindex", "re")

    def __init__(self, match: re.Match[str], base: int, before: Callable[[int], int]) -> None:
        self._base, self._before = base, before
        self._groups = (match.group(), *match.groups())
        self._spans = [match.span(number) for number in range(len(self._groups))]
        self.re, self.lastgroup, self.lastindex = match.re, match.lastgroup, match.lastindex

    def _number(self, group: int | str) -> int:
        number = self.re.groupindex[group] if isinstance(group, str) else group
        if not 0 <= number < len(self._groups):
            raise IndexError("no such group")
        return number

    def __getitem__(self, group: int | str) -> Any:
        return self._groups[self._number(group)]

    def group(self, *groups: int | str) -> Any:
        found = tuple(self[group] for group in groups or (0,))
        return found[0] if len(found) == 1 else found

    def groups(self, default: Any = None) -> tuple[Any, ...]:
        return tuple(default if group is None else group for group in self._groups[1:])

    def groupdict(self, default: Any = None) -> dict[str, Any]:
        values = {name: self._groups[number] for name, number in self.re.groupindex.items()}
        return {name: default if value is None else value for name, value in values.items()}

    def span(self, group: int | str = 0) -> tuple[int, int]:
        first, last = self._spans[self._number(group)]
        if first < 0:
            return -1, -1
        base = self._before(self._base)
        return base + first, base + last

    def start(self, group: int | str = 0) -> int:
        return self.span(group)[0]

    def end(self, group: int | str = 0) -> int:
        return self.span(group)[1]

    def __repr__(self) -> str:
        return f"<match of {self.re.pattern!r}: {self._groups[0][:100]!r}>"


class Bytes:
    """What is searched: UTF-8 text of `size` bytes.

    Args:
        read: Bytes of it between two places, fewer at the end.
        decode: Text of whole characters, which begin at this place.
    """

    def __init__(self, size: int, read: Callable[[int, int], bytes], decode: Callable[[bytes, int], str]) -> None:
        self.size, self.read, self._decode = size, read, decode

    def text(self, start: int, stop: int) -> tuple[str, int]:
        """The characters that begin before `stop`, but for one that is cut off there, and where those end."""
        data = self.read(start, stop)
        stop = start + len(data)
        if stop < self.size:
            stop = start + begun(data)
            data = data[: stop - start]
        return self._decode(data, start), stop

    def character_at(self, byte: int) -> int:
        """Where the character begins that this byte is one of."""
        low = max(byte - 3, 0)
        data = self.read(low, byte + 1)
        back = next((back for back, each in enumerate(reversed(data)) if not 0x80 <= each < 0xC0), 0)
        return byte - back


def matches(
    pattern: str | re.Pattern[str], flags: int, longest: int, text: Bytes, before: Callable[[int], int]
) -> Iterator[Found]:
    """All matches, in order.

    Args:
        pattern: The expression, or one that is compiled.
        flags: As of `re`.
        longest: How many characters a match has at most, with what it looks at before and after.
        text: What is searched.
        before: How many characters there are before a byte.

    Raises:
        ValueError: for a match that is longer than that.
    """
    compiled: re.Pattern[Any] = re.compile(pattern, flags)
    if not isinstance(compiled.pattern, str):
        raise TypeError("a Text is searched with a pattern that is a str")
    return _matches(compiled, longest, text, before)


def _matches(compiled: re.Pattern[str], longest: int, text: Bytes, before: Callable[[int], int]) -> Iterator[Found]:
    clues, width = known(compiled.pattern, compiled.flags)
    longest = max(min(longest, width), 4)
    trail = Trail(clues, longest, text.size, text.read) if clues else None
    held, base, end, at = (
        "",
        0,
        0,
        0,
    )  # some of the text, the bytes it begins and ends at, where the search goes on in it
    while True:
        if trail is not None:
            place = trail.next(base + _size(held[:at]))
            if place is None:
                return
            if place > end + longest:
                place = text.character_at(place)
                base = text.character_at(max(place - 4 * longest, 0))
                held, end = text.text(base, place)
                at = len(held)
        parts = [held] if held else []
        length = len(held)
        while end < text.size and length - at < _AHEAD + longest:
            piece, end = text.text(end, end + max(_AHEAD + longest - (length - at), 4))  # a whole character at least
            parts.append(piece)
            length += len(piece)
        held = "".join(parts)
        more = end < text.size
        limit = len(held) - longest if more else len(held) + 1  # what begins from here on may not all be there
        for match in compiled.finditer(held, at):
            if match.start() >= limit:
                break
            if more and match.end() >= len(held) - 1:  # where `$` may take a newline for the last
                raise ValueError(
                    f"a match of {compiled.pattern!r} has more than {longest:,} characters; bound the pattern, such as "
                    "`.{0,1000}` instead of `.*`, or pass longest="
                )
            at = match.end()
            yield Found(match, base, before)
        if not more:
            return
        at = max(at, limit)
        drop = max(at - longest, 0)
        base += _size(held[:drop])
        held, at = held[drop:], at - drop


def _size(text: str) -> int:
    """In bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-8"))
