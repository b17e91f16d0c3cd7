"""What a local worker writes to its output streams, as the host reads it."""

from __future__ import annotations

import contextlib
import fcntl
import os

import anyio
import anyio.lowlevel

from ..repl.sandbox import Printed
from ..repl.worker.kept import CHUNK, KeptPipe

__all__ = ["CHUNK", "Output", "open_pipes"]

_PIPE_SIZE = 1 << 16


class Output(KeptPipe):
    """One output stream of a worker."""

    def __init__(self, fd: int, keep: int) -> None:
        super().__init__(fd, keep)
        self._widened = False

    def printed(self) -> Printed:
        """What was written since the last call."""
        head, tail, omitted = self.take()
        return Printed(head=head, tail=tail, omitted=omitted)

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
