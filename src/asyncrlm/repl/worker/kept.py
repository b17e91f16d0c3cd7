"""What is kept of a stream that may be endless."""

from __future__ import annotations

import fcntl
import os
import struct
import termios

CHUNK = 1 << 18


class Kept:
    """A head and a tail of at most `keep` bytes each; the rest is only counted."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        if (room := self._keep - len(self._head)) > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data[-self._keep :]
            del self._tail[: -self._keep]

    def skip(self, count: int) -> None:
        """Count bytes that somebody else left out."""
        self._total += count

    def take(self) -> tuple[bytes, bytes, int]:
        """Head, tail and how much lay between, of what came since the last call."""
        kept = bytes(self._head), bytes(self._tail)
        omitted = self._total - len(kept[0]) - len(kept[1])
        self._head.clear()
        self._tail.clear()
        self._total = 0
        return (*kept, omitted)


class KeptPipe(Kept):
    """The reading end, which never blocks, of a pipe."""

    def __init__(self, fd: int, keep: int) -> None:
        super().__init__(keep)
        self.fd = fd

    def drain(self) -> None:
        """Read what the pipe holds now, and no more: a daemon may print for ever."""
        left = struct.unpack("i", fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)))[0]
        while left > 0:
            try:
                data = os.read(self.fd, min(left, CHUNK))
            except BlockingIOError:
                return
            if not data:
                return
            self.add(data)
            left -= len(data)
