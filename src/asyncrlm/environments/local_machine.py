"""The smallest machine: the keeper in a process on this one, with no sandbox around it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from typing import TYPE_CHECKING, ClassVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from ..errors import ConfigurationError
from .local_order import ENVIRON
from .local_socket import Sender
from .machine import Machine

if TYPE_CHECKING:
    from collections.abc import Sequence

STOP_GRACE = 5.0
"""Seconds a keeper has to end what it started once it is hung up on; it needs milliseconds."""
_CHUNK = 1 << 18


class LocalMachine(Sender, Machine):
    """A keeper on this machine, which hears and says everything over one socket."""

    binary: ClassVar[bool] = True

    def __init__(self, scratch: str, *, threads: anyio.CapacityLimiter, pass_fds: Sequence[int] = ()) -> None:
        self.scratch = scratch
        self._threads = threads
        self._pass_fds = pass_fds
        self._socket: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    async def create(self) -> None:
        """Nothing: this machine is there."""

    async def start(self, command: Sequence[str]) -> None:
        with anyio.CancelScope(shield=True):  # a thread's result that nobody takes would be a process nobody stops
            await anyio.to_thread.run_sync(self._spawn, command, limiter=self._threads)

    def _spawn(self, command: Sequence[str]) -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.process = subprocess.Popen(  # noqa: S603 - the interpreter the caller named
                command,
                stdin=far.fileno(),
                stdout=far.fileno(),
                stderr=subprocess.DEVNULL,
                env=ENVIRON,
                cwd="/",
                pass_fds=self._pass_fds,
                start_new_session=True,  # a signal to the host's group is the host's to handle
            )
        except OSError as e:
            near.close()
            raise ConfigurationError(f"python={command[0]!r} can't be run: {e.strerror}") from e
        finally:
            far.close()
        near.setblocking(False)
        self._socket = near

    async def receive(self) -> bytes:
        await anyio.lowlevel.checkpoint()
        while True:
            try:
                data = self.open_socket().recv(_CHUNK)
            except BlockingIOError:
                await anyio.wait_readable(self.open_socket())
                continue
            except ConnectionResetError:
                data = b""
            if not data:
                await self._wait()  # for `fate`
                raise anyio.EndOfStream
            return data

    def open_socket(self) -> socket.socket:
        if self._socket is None:
            raise anyio.BrokenResourceError
        return self._socket

    async def destroy(self) -> None:
        if self._socket is not None:
            near, self._socket = self._socket, None
            anyio.notify_closing(near)
            await anyio.lowlevel.checkpoint()
            # A forked child of the host has a copy of this end.
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)
            near.close()
        if self.process is not None:
            try:
                await self._wait()
            finally:
                if self.process.poll() is None:
                    self.process.kill()
                    self.process.wait()

    async def _wait(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with anyio.move_on_after(STOP_GRACE):
                await anyio.to_thread.run_sync(self.process.wait, abandon_on_cancel=True, limiter=self._threads)

    def fate(self) -> str:
        status = self.process.poll() if self.process is not None else None
        return f"its keeper ended with status {status}" if status else ""
