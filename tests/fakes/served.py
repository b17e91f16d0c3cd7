"""What the fake vendors share: a loop in a thread, requests that can be held or failed, processes that are counted."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

T = TypeVar("T")

CAP = 30.0


class FakeVendor:
    """Serves from a thread of its own, so that a caller's loop may stop, block or be another one.

    What a test sets (`failing`, `held`) is looked at when the next request comes; what it reads is only ever added to.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.requests: collections.Counter[str] = collections.Counter()
        self.unknown: list[str] = []
        self.failing: dict[str, list[Any]] = {}
        """Request → what its next calls end with, first to last; the driver's protocol says what that may be."""
        self.held: set[str] = set()
        """Requests that wait before they do anything, until they are not in here any more."""
        self.late: set[str] = set()
        """Requests that do what they are asked, and wait before they say so."""
        self.waiting: collections.Counter[str] = collections.Counter()
        self.seen: list[Any] = []
        """Every sandbox that was ever made, as the protocol's module shows it."""
        self.made: list[str] = []
        self.destroyed: list[str] = []
        self.errors: list[str] = []
        self._released = asyncio.Condition()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def __enter__(self) -> Self:
        self._thread.start()
        self.call(self.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self.stop())
        self.call(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CAP)
        self.loop.close()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def call(self, action: Coroutine[Any, Any, T]) -> T:
        """Do something in the server's thread and wait for it."""
        return asyncio.run_coroutine_threadsafe(action, self.loop).result(CAP)

    async def start(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    def release(self, *names: str) -> None:
        """Let requests of these names go on."""
        self.held.difference_update(names)
        self.late.difference_update(names)
        self.call(self._notify())

    async def _notify(self) -> None:
        async with self._released:
            self._released.notify_all()

    async def gate(self, name: str, names: set[str]) -> None:
        if name in names:
            self.waiting[name] += 1
            async with self._released:
                await self._released.wait_for(lambda: name not in names)

    def fault(self, name: str) -> Any:
        """What this request is to end with, if anything."""
        left = self.failing.get(name)
        return left.pop(0) if left else None


class Run:
    """A command in a sandbox: a process here, and all it wrote."""

    def __init__(self, process: asyncio.subprocess.Process, changed: Callable[[], None]) -> None:
        self.process = process
        self.written = 0
        self.outputs = (bytearray(), bytearray())
        self.ended = [False, False]
        self._changed = changed
        self._readers = [
            asyncio.ensure_future(self._bury()),
            *(
                asyncio.ensure_future(self._read(number, stream))
                for number, stream in enumerate((process.stdout, process.stderr))
            ),
        ]

    @classmethod
    async def start(cls, args: Sequence[str], changed: Callable[[], None], env: dict[str, str]) -> Run:
        path = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin"
        process = await asyncio.create_subprocess_exec(
            *args, stdin=-1, stdout=-1, stderr=-1, cwd="/", env={"PATH": path, **env}, start_new_session=True
        )
        return cls(process, changed)

    async def _read(self, number: int, stream: Any) -> None:
        while data := await stream.read(1 << 18):
            self.outputs[number].extend(data)
            self._changed()
        self.ended[number] = True
        self._changed()

    async def _bury(self) -> None:
        await self.process.wait()
        self._changed()

    async def write(self, data: bytes) -> None:
        self.process.stdin.write(data)
        self.written += len(data)
        await self.process.stdin.drain()

    async def kill(self) -> None:
        """It and all that came of it, as the end of a sandbox does."""
        if self.process.returncode is None:
            victims: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):
                victims.append(psutil.Process(self.process.pid))
                victims += victims[0].children(recursive=True)
            for victim in victims:
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)
        await self.process.wait()
        self.process._transport.close()  # its pipes: nothing public closes them
        for reader in self._readers:
            reader.cancel()
        self.ended[:] = [True, True]
        self._changed()
