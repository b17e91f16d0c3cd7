"""What a local worker writes to its output streams, as the host reads it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios

import anyio
import anyio.lowlevel

from ..repl.sandbox import Printed

CHUNK = 1 << 18
_PIPE_SIZE = 1 << 16


class Output:
    """One output stream of a worker. Kept: a head and a tail of at most `keep` bytes each; the rest is only counted."""

    def __init__(self, fd: int, keep: int) -> None:
        self.fd = fd
        self._keep = keep
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0
        self._widened = False

    def add(self, data: bytes) -> None:
        self._total += len(data)
        if (room := self._keep - len(self._head)) > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data[-self._keep :]
            del self._tail[: -self._keep]

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

    def take(self) -> Printed:
        """What was written since the last call."""
        omitted = self._total - len(self._head) - len(self._tail)
        printed = Printed(head=bytes(self._head), tail=bytes(self._tail), omitted=omitted)
        self._head.clear()
        self._tail.clear()
        self._total = 0
        return printed

    async def last_writer_gone(self) -> None:
        """Read until nobody can write any more."""
        while True:
            try:
                data = os.read(self.fd, CHUNK)
            except BlockingIOError:
                try:
                    await anyio.wait_readable(self.fd)
                except anyio.BusyResourceError:  # `pump` was just reading and has not noticed yet
                    anyio.notify_closing(self.fd)
                    await anyio.lowlevel.checkpoint()
                continue
            if not data:
                return
            self.add(data)

    async def pump(self) -> None:
        """Read until the last writer is gone or the descriptor is being closed."""
        while True:
            try:
                await anyio.wait_readable(self.fd)
                data = os.read(self.fd, CHUNK)
            except BlockingIOError:
                continue
            except (anyio.ClosedResourceError, anyio.BusyResourceError, OSError):
                return
            if not data:
                return
            self.add(data)
            if len(data) >= _PIPE_SIZE and not self._widened:
                self._widen()

    def _widen(self) -> None:
        # Only for who floods: what a user's pipes may hold in all is bounded.
        self._widened = True
        with contextlib.suppress(OSError, AttributeError):  # not on every system
            fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, CHUNK)


def open_pipes(keep: int) -> tuple[tuple[Output, Output], tuple[int, int]]:
    """Two output pipes: the ends the host reads, and those a worker writes."""
    made: list[int] = []
    try:
        for _ in range(2):
            made += os.pipe()
    except OSError:
        for fd in made:
            os.close(fd)
        raise
    for fd in made[::2]:
        os.set_blocking(fd, False)
    outputs = Output(made[0], keep), Output(made[2], keep)
    return outputs, (made[1], made[3])
