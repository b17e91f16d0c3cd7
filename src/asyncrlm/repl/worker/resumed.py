"""One end of a stream that may break and be there anew, when what was on its way is lost: nothing is lost or doubled.

What is sent goes in pieces that say where they belong and how much of the other direction was taken, and is kept until
the other end has taken it. After a break the host asks to go on from what it has, by a word that nothing said before
can hold; all that it hears until then is passed over.
"""

from __future__ import annotations

import binascii
import os

WINDOW = 1 << 22
"""Bytes that are kept for an end that has not taken them yet, beyond which nothing but short orders is sent."""
OWED = 1 << 20
"""Bytes taken, after which the other end is told without anything else to say, and without being asked."""
PIECE = 1 << 17
_LONGEST_HEAD = 200


class Link:
    """One end; it does no input or output itself."""

    def __init__(self, most_useless: float = float("inf")) -> None:
        """`most_useless`: pieces of nothing new that may come at once; each takes time, which liars could use up."""
        self._most_useless = most_useless
        self.kept = bytearray()
        self.base = 0  # where `kept` begins in all that was ever sent
        self.got = 0
        self.taken = 0  # of `got`: what the other end need not keep any more
        self.resumed = False  # set when the other end goes on, or wants us to
        self.unclear = False  # what came is no such stream: pass over it, or give up
        self.missed = False  # something that was sent before what came did not come: it has to be asked for
        self._told = 0
        self._asked = False  # by a piece of nothing
        self._word = b""  # which the other end awaits before it goes on
        self._epoch = 0
        self._inbox = bytearray()
        self._awaited = b""

    @property
    def full(self) -> bool:
        return len(self.kept) >= WINDOW

    @property
    def owes(self) -> bool:
        """The other end is to be told how much was taken."""
        return self.taken - self._told >= (1 if self._asked else OWED)

    def wrap(self, data: bytes) -> bytes:
        """A piece with this data, which may be none: that asks how much was taken."""
        at = self.base + len(self.kept)
        self.kept += data
        return self._piece(at, data)

    def _piece(self, at: int, data: bytes) -> bytes:
        self._told, self._asked = self.taken, False
        return b"%d %d %d\n" % (at, self.taken, len(data)) + data

    def again(self) -> list[bytes]:
        """All that is kept, in pieces; after the word, if one is awaited."""
        word, self._word = self._word, b""
        pieces = [
            self._piece(self.base + at, bytes(self.kept[at : at + PIECE])) for at in range(0, len(self.kept), PIECE)
        ]
        return [word, *pieces] if word else pieces

    def fill(self, raw: bytearray, data: bytearray) -> None:
        """Move as much of `data` to `raw` as fits."""
        while data and not self.full and len(raw) < PIECE:
            raw += self.wrap(bytes(data[:PIECE]))
            del data[:PIECE]
        if self.owes:
            raw += self.wrap(b"")

    def expect(self) -> None:
        """The stream broke: pass over what comes until the other end goes on."""
        self._epoch += 1
        self._awaited = b"\n%d %s\n" % (self._epoch, binascii.hexlify(os.urandom(16)))
        self.unclear = self.missed = False
        self._inbox.clear()

    def request(self) -> bytes:
        """What makes the other end go on; it may be said more than once."""
        return b"0 %d 0 " % self.got + self._awaited[1:]

    @property
    def broken(self) -> bool:
        return bool(self._awaited)

    def feed(self, data: bytes) -> bytes:
        """What is new in what came."""
        inbox, new = self._inbox, bytearray()
        inbox += data
        if self._awaited:
            at = inbox.find(self._awaited)
            if at < 0:
                del inbox[: max(0, len(inbox) - len(self._awaited))]
                return b""
            del inbox[: at + len(self._awaited)]
            self._awaited = b""
            self.resumed = True
        useless = 0
        while not self.unclear:
            end = inbox.find(b"\n", 0, _LONGEST_HEAD)
            if end < 0:
                self.unclear = len(inbox) >= _LONGEST_HEAD
                break
            words = bytes(inbox[:end]).split(b" ")
            resume = words[4:]
            try:
                where, had, length, *epoch = map(int, words[:4])
            except ValueError:
                where = had = length = -1
                epoch = []
            odd = min(where, had, length) < 0 or length > WINDOW or len(epoch) != len(resume)
            if odd or useless > self._most_useless:
                self.unclear = True
                break
            start = end + 1
            stop = start + length
            if len(inbox) < stop:
                break
            if resume:
                self._resume(had, epoch[0], resume[0])
            else:
                self._release(had)
                self._asked = self._asked or not length
                self.missed = self.missed or where > self.got
                if where <= self.got < where + length:
                    new += inbox[start + self.got - where : stop]
                    self.got = where + length
                else:
                    useless += 1
            del inbox[:stop]
        return bytes(new)

    def _resume(self, got: int, epoch: int, word: bytes) -> None:
        if epoch > self._epoch and got >= self.base:
            self._epoch = epoch
            self._release(got)
            self._word = b"\n%d %s\n" % (epoch, word)
            self.resumed = True

    def _release(self, taken: int) -> None:
        if self.base < taken <= self.base + len(self.kept):
            del self.kept[: taken - self.base]
            self.base = taken
