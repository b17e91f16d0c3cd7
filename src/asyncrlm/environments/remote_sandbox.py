"""The host's end of a worker under a keeper: frames, files, interrupts and output over one stream."""

from __future__ import annotations

import base64
import functools
import json
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import anyio.to_thread

from ..caught import described
from ..errors import ConfigurationError
from ..repl.raised import innermost
from ..repl.sandbox import Printed, Report, Sandbox, check_file_name
from ..repl.worker.kept import Kept
from .remote_boot import bundle

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .machine import Machine
    from .remote_boot import Options

DESTROY_GRACE = 10.0
"""Seconds to destroy a sandbox in, whatever is cancelled meanwhile."""
KILL_GRACE = 3.0
"""Seconds the keeper has to end the worker and say so; then the stream is cut."""
_INTERRUPT = b'{"t":"interrupt"}\n'
_EXITED = b'{"t":"exited"'
_CLOSE = b'{"t":"close"}\n'


class RemoteSandbox(Sandbox):
    """A worker that is reached through a `Machine`; see `Sandbox` for what each method promises."""

    def __init__(
        self,
        machine: Machine,
        options: Options,
        report: Report,
        *,
        threads: anyio.CapacityLimiter,
        required: Sequence[str] = (),
    ) -> None:
        """`required`: rows of the report that something must hold."""
        self.report = report
        self.machine = machine
        self._options = options
        self._threads = threads
        self._required = required
        self._outputs = Kept(options.keep), Kept(options.keep)
        self._sending = anyio.Lock(fast_acquire=True)
        self._booted = anyio.Event()
        self._boot_begun = False
        self._desynced = False
        """Something was sent by half: the keeper understands nothing that follows."""
        self._rest = b""
        """Of a frame that was sent in part and is held to be sent."""
        self._orders = anyio.Event()  # set when there is a rest, an interrupt or a kill to be sent
        self._interrupts = 0
        self._killing = False
        self._receiving: anyio.CancelScope | None = None
        self._cut = False
        """Nothing more is received."""
        self._last_words = b""
        self._ended = anyio.Event()
        self._lost = ""
        self._closing: anyio.Event | None = None  # set once `aclose`, by whoever called it first, is through

    @property
    def closed(self) -> bool:
        return self._closing is not None and self._closing.is_set()

    # ---- the stream ----

    async def boot(self) -> None:
        """Hand the keeper its program and its options; once. `pump` does it, unless it was done ahead."""
        if self._boot_begun:
            return await self._booted.wait()
        self._boot_begun = True
        program = await anyio.to_thread.run_sync(bundle, None, self.machine.with_library, limiter=self._threads)
        await self._send(program + self._options.line())
        self.machine.begin()
        self._booted.set()
        return None

    async def _send(self, data: bytes) -> None:
        """Send all of it, and nothing else between."""
        async with self._sending:
            if self._desynced:
                raise anyio.BrokenResourceError
            self._desynced = True
            if self._rest:
                data, self._rest = self._rest + data, b""
            for start in range(0, len(data), self.machine.piece):
                await self.machine.send(data[start : start + self.machine.piece])
            self._desynced = False

    async def send(self, data: bytes) -> None:
        await self._booted.wait()
        await self._send(data)

    def send_nowait(self, data: bytes) -> int:
        if self._sending.locked() or self._desynced or not self._booted.is_set():
            return 0
        if self._rest:
            return 0
        sent = self.machine.send_nowait(data)
        if 0 < sent < len(data):  # an order must not come between: the rest is ahead of whatever is sent next
            self._rest = bytes(data[sent:])
            self._orders.set()
            return len(data)
        return sent

    async def receive(self) -> bytes:
        if not self._cut:
            with anyio.CancelScope() as self._receiving:
                try:
                    data = await self.machine.receive()
                    if self._killing:
                        self._look_for_end(data)
                    return data
                except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
                    self._cut = True
            self._receiving = None
        self._ended.set()
        await anyio.lowlevel.checkpoint()
        raise anyio.EndOfStream

    def _look_for_end(self, data: bytes) -> None:
        """Some streams go on after the keeper's last frame, which nobody reads any more of a worker that was killed."""
        self._last_words = (self._last_words + data)[-4096:]
        _, exited, rest = self._last_words.partition(_EXITED)
        self._cut = bool(exited) and b"\n" in rest

    def _hang_up(self) -> None:
        self._cut = True
        if self._receiving is not None:
            self._receiving.cancel()

    async def pump(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._run_machine)
            group.start_soon(self._boot_or_cut)
            while not self._killing:
                await self._orders.wait()
                self._orders = anyio.Event()
                if self._rest:
                    await self._order(b"")
                while self._interrupts and not self._killing:
                    self._interrupts -= 1
                    await self._order(_INTERRUPT)
            with anyio.move_on_after(KILL_GRACE):
                if not self._desynced or self._sending.locked():
                    await self._order(_CLOSE)
                    await self._ended.wait()
            self._hang_up()
            await self._ended.wait()
            group.cancel_scope.cancel()

    async def _order(self, frame: bytes) -> None:
        try:
            await self.send(frame)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._hang_up()

    async def _boot_or_cut(self) -> None:
        try:
            await self.boot()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # what the machine says about its end is still to be received

    async def _run_machine(self) -> None:
        try:
            await self.machine.run()
        except Exception as failed:  # noqa: BLE001 -- it ends this sandbox, and `fate` tells
            self._lost = described(innermost(failed))
            self._hang_up()

    # ---- output ----

    def add_output(self, stream: int, data: bytes, omitted: int) -> None:
        kept = self._outputs[stream - 1]
        kept.skip(omitted)
        kept.add(data)

    def take_output(self) -> tuple[Printed, Printed]:
        out, err = (Printed(head=h, tail=t, omitted=o) for h, t, o in (kept.take() for kept in self._outputs))
        return out, err

    # ---- files ----

    async def put_file(self, name: str, chunks: Iterable[bytes]) -> str:
        check_file_name(name)
        path = f"{self._options.folder}/files/{name}"
        await self._booted.wait()
        if await self.machine.put_file(path, chunks):
            return path
        pieces = self._pieces(name, chunks)
        while data := await anyio.to_thread.run_sync(next, pieces, b"", limiter=self._threads):
            await self._send(data)
        return path

    def _pieces(self, name: str, chunks: Iterable[bytes]) -> Iterator[bytes]:
        encode = bytes if self.machine.binary else base64.b64encode
        header = functools.partial(json.dumps, separators=(",", ":"))
        for chunk in chunks:
            data = encode(chunk)
            yield header({"t": "file", "name": name, "size": len(data), "more": True}).encode("ascii") + b"\n" + data
        yield header({"t": "file", "name": name, "size": 0}).encode("ascii") + b"\n"

    # ---- the worker ----

    def interrupt(self) -> None:
        self._interrupts += 1
        self._orders.set()

    def kill(self) -> None:
        self._killing = True
        self._orders.set()

    def check_report(self, report: Report) -> None:
        if failing := [row for row in self._required if not report.isolation.get(row)]:
            raise ConfigurationError(
                f'isolation="strict" does not hold in this sandbox for {", ".join(failing)}; use isolation="auto"'
            )

    def fate(self) -> str:
        return self.machine.fate() or self._lost

    # ---- the end ----

    async def aclose(self) -> None:
        if self._closing is not None:
            with anyio.CancelScope(shield=True):
                await self._closing.wait()
            return
        self._closing = anyio.Event()
        self._killing = True
        self._hang_up()
        try:
            with anyio.move_on_after(DESTROY_GRACE, shield=True):
                await self.machine.destroy()
        finally:
            self._closing.set()

    def __repr__(self) -> str:
        state = "closed" if self._closing is not None else "ended" if self._ended.is_set() else "open"
        return f"<RemoteSandbox {self.report.environment}, {state}>"
