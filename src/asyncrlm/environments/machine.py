"""What a driver of a vendor gives: how one sandbox is made, spoken with and destroyed."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Machine(ABC):
    """One sandbox of a vendor and the one program in it: the keeper, whose stdin and stdout are the stream.

    `create` and `start` are called once, in this order; then `run`, `send` and `receive`, each by one task at a time;
    `destroy` ends it at any stage.
    """

    piece: ClassVar[int] = 256 * 1024
    """Longest single `send`, in bytes."""
    binary: ClassVar[bool] = False
    """The stream takes any byte, both ways. Otherwise it is given ASCII lines only."""
    padding: ClassVar[int] = 0
    """Spaces of a blank line that the keeper sends after each line, for a stream that holds back its last few bytes."""
    with_library: ClassVar[bool] = False
    """The keeper brings along what it imports of the standard library, compiled: half a megabyte more to send, and a
    start that is quicker by a tenth of a second where a sandbox has the sources only, of the same version."""
    resumed: ClassVar[bool] = False
    """The stream may break and be there anew without what was on its way; see `remote_resumed.py`."""
    scratch: str = "/tmp"  # noqa: S108 - of the sandbox
    """A folder of the sandbox that the keeper may write to."""

    def new_folder(self) -> str:
        """A path for the folder of one keeper, which makes it."""
        return f"{self.scratch.rstrip('/')}/asyncrlm-{secrets.token_hex(8)}"

    @abstractmethod
    async def create(self) -> None:
        """Make the vendor's sandbox. If that fails, or is cancelled in the middle, `destroy` follows."""

    @abstractmethod
    async def start(self, command: Sequence[str]) -> None:
        """Run the keeper in it, with its standard input and output as the stream."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Send all of `data`, at most `piece` bytes.

        Raises:
            anyio.BrokenResourceError: if the keeper is gone.
        """

    def send_nowait(self, data: bytes) -> int:
        """Send what fits without waiting and return how many bytes that was; 0 where that can't be told."""
        return 0

    @abstractmethod
    async def receive(self) -> bytes:
        """At least one byte of the keeper's standard output, in any chunking. Cancelled, it loses nothing.

        Raises:
            anyio.EndOfStream: at its end.
        """

    def begin(self) -> None:
        """What was sent until now was for the interpreter; what follows is for the keeper."""

    async def run(self) -> None:
        """Beside the others for as long as the sandbox lives: renewal of a lease, the SDK's pumps.

        What it raises ends the sandbox. It may return early.
        """

    async def put_file(self, path: str, chunks: Iterable[bytes]) -> bool:
        """Write a new file by a way that is quicker than the stream; False, and nothing consumed, if there is none."""
        return False

    @abstractmethod
    async def destroy(self) -> None:
        """At any stage, and twice is fine: whatever was created is gone afterwards. The caller shields it."""

    def fate(self) -> str:
        """Why the sandbox ended, if the vendor says; "" if not. Asked after `receive`, which may wait for it, ended."""
        return ""
