"""Where the characters of a file of UTF-8 text are: how many begin in each block of it."""

from __future__ import annotations

from array import array
from bisect import bisect_right

BLOCK = 1 << 18
"""Bytes of a block."""
_CONTINUATION = bytes(range(0x80, 0xC0))


def characters(data: bytes) -> int:
    """How many characters begin in these bytes, wherever they were cut."""
    return len(data) if data.isascii() else len(data.translate(None, _CONTINUATION))


def begun(data: bytes) -> int:
    """The length without a character at the end that is not all there."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            whole = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if back >= whole else len(data) - back
    return len(data)


class Counts:
    """The characters before each block, for the blocks known so far; those come in order."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Bytes of the file."""
        self.before = array("Q", [0])
        """Characters before each known block, and after the last of them."""

    @property
    def blocks(self) -> int:
        return len(self.before) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the known blocks."""
        return min(self.blocks * BLOCK, self.size)

    @property
    def complete(self) -> bool:
        return self.blocks * BLOCK >= self.size

    def add(self, counts: array[int], after: int) -> None:
        """The counts of the blocks after the first `after`; those known already are left out."""
        for count in counts[self.blocks - after :]:
            self.before.append(self.before[-1] + count)

    def since(self, block: int) -> array[int]:
        """The count of each known block from this one on."""
        before = self.before
        return array("I", [before[i + 1] - before[i] for i in range(block, self.blocks)])

    def block_of(self, character: int) -> int:
        """The block that this character begins in."""
        return bisect_right(self.before, character) - 1

    def reaches(self, nbytes: int | None, character: int | None) -> bool:
        """Whether both are inside the known blocks; None is nowhere."""
        return self.complete or (
            (nbytes is None or nbytes <= self.nbytes) and (character is None or character < self.before[-1])
        )
