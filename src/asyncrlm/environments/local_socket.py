"""The sending half of a socket of this machine, as sandboxes and machines here have it."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod

import anyio


class Sender(ABC):
    """Sends over a non-blocking socket."""

    @abstractmethod
    def open_socket(self) -> socket.socket:
        """The socket.

        Raises:
            anyio.BrokenResourceError: if it is closed.
        """

    async def send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            sent = self.send_nowait(left)
            left = left[sent:]
            if not sent:
                await self.wait_writable()

    def send_nowait(self, data: bytes | memoryview) -> int:
        try:
            return self.open_socket().send(data, getattr(socket, "MSG_NOSIGNAL", 0))
        except BlockingIOError:
            return 0
        except OSError as e:
            raise anyio.BrokenResourceError from e

    async def wait_writable(self) -> None:
        """Wait until it takes more, or is closed."""
        try:
            await anyio.wait_writable(self.open_socket())
        except (anyio.ClosedResourceError, OSError, ValueError) as e:
            raise anyio.BrokenResourceError from e
