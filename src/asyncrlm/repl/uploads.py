"""Files on their way into a sandbox: one after another, told of as they go, each that a cell asks for only once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import anyio
import anyio.abc
import anyio.from_thread

from ..errors import ConfigurationError
from .context import exactly
from .files import HostFile, Tell
from .sandbox import Sandbox


class _Kept:
    """A file that stays in the sandbox. `done` is set once there is a path, or an error."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.path = ""
        self.error: Exception | None = None


class Uploads:
    """The files of one sandbox."""

    def __init__(self, sandbox: Sandbox, tell: Tell | None, moved: Callable[[int], None]) -> None:
        """`moved` is called when something of a file was sent."""
        self._sandbox = sandbox
        self._tell = tell
        self._moved = moved
        self._one = anyio.Lock()  # a stream takes one file at a time
        self._kept: dict[str, _Kept] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        self._count = 0

    async def run(self) -> None:
        """Upload what cells ask for, for as long as the sandbox lives: one that is cut off could not be gone on with,
        so it does not end with the cell."""
        try:
            async with anyio.create_task_group() as self._tasks:
                await anyio.sleep_forever()
        finally:
            self._tasks = None

    async def put(self, name: str, what: str, chunks: Iterable[bytes], total: int | None) -> str:
        """Write a file of this name there; returns its path. `what` is what listeners are told of it.

        Raises:
            ConfigurationError, OSError: if it can't be read or written.
            anyio.BrokenResourceError: if the sandbox is gone.
        """
        async with self._one:
            if self._sandbox.passes_files:  # there, a file is only written beside
                return await self._sandbox.put_file(name, chunks)
            sent, home = 0, threading.get_ident()

            def heard(now: int) -> None:
                nonlocal sent
                sent = now
                self._moved(0)
                if self._tell is not None:
                    self._tell(what, now, total)

            def hear(now: int) -> None:  # where the chunk was taken
                if threading.get_ident() == home:
                    heard(now)
                else:
                    anyio.from_thread.run_sync(heard, now)

            path = await self._sandbox.put_file(name, _counted(chunks, hear))
            if sent != total and self._tell is not None:
                self._tell(what, sent, sent)
            return path

    async def path_of(self, key: str, file: HostFile) -> str:
        """Where a file of the host is in the sandbox, once it is.

        Raises:
            ConfigurationError, OSError: if it can't be had.
        """
        kept = self._kept.get(key)
        if kept is None:
            if self._tasks is None:
                raise anyio.BrokenResourceError
            kept = self._kept[key] = _Kept()
            self._count += 1
            self._tasks.start_soon(self._keep, key, kept, file, f"file-{self._count}")
        await kept.done.wait()
        if kept.error is not None:
            raise kept.error
        return kept.path

    async def _keep(self, key: str, kept: _Kept, file: HostFile, name: str) -> None:
        kept.error = anyio.BrokenResourceError()
        try:
            kept.path = await self.put(name, file.name, exactly(file), file.size)
            kept.error = None
        except (ConfigurationError, OSError) as error:
            kept.error = error
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the worker is gone, and with it whoever asked
        finally:
            if kept.error is not None:
                self._kept.pop(key, None)  # who asks again has another try
            kept.done.set()


def _counted(chunks: Iterable[bytes], heard: Callable[[int], None]) -> Iterator[bytes]:
    """The same chunks; `heard` is told how many bytes of them are taken and used."""
    size = 0
    for chunk in chunks:
        yield chunk
        size += len(chunk)
        heard(size)
