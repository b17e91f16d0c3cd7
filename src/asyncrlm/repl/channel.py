"""Frames over a sandbox's byte stream: parsing, checks, credit, and writing that nobody has to wait for.

The reader never waits for the writer, a model or a gate: it hands each frame to a synchronous `Receiver` and reads on.
So the worker can always write, and since it takes replies while it waits to write, no pair of them can block.

Phases and what a worker may send in each (anything else is a `ProtocolError`):

    starting   ready                    until the first `ready`
    idle       cancel, output
    loading    loaded, cancel, output   from `begin_load` until its `loaded`
    cell       call, cancel, answer, done, output   from `begin_cell` until its `done`
    any        exited, then only the end of the stream
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

import anyio
import anyio.lowlevel
import anyio.to_thread
from msgspec import Raw

from ..errors import ProtocolError
from .framing import LARGE, FrameParser, decode_frame, decode_large, encode_frame
from .messages import (
    Answer,
    Call,
    Cancel,
    Done,
    Dropped,
    Exited,
    FromWorker,
    Loaded,
    Output,
    Ready,
    Reply,
    ToWorker,
)
from .sandbox import Exit, Sandbox
from .worker.bounds import CREDIT, MAX_CALLS, MAX_FRAME, PROTOCOL_VERSION

FEW = 4
"""Up to so many calls outstanding, a reply is sent at once; beyond, those of one pass of the loop travel together."""
FAIR_FRAMES = 16
"""Frames taken in a row before other tasks get their turn, so that a flood starves nobody."""
FAIR_BYTES = 1 << 16
GARBAGE_GRACE = 1.0
"""Seconds in which `exited` must follow a line that is no frame; a worker killed while it writes leaves such a line."""
END_GRACE = 1.0
"""Seconds in which the stream ends after `exited`; some vendors' streams never do."""

Phase = Literal["starting", "idle", "loading", "cell", "closed"]


class Receiver(Protocol):
    """Who hears a worker's frames. None of these may wait."""

    def on_ready(self, frame: Ready) -> None: ...
    def on_loaded(self, frame: Loaded) -> None: ...
    def on_call(self, frame: Call) -> None: ...
    def on_cancel(self, frame: Cancel) -> None: ...
    def on_answer(self, frame: Answer) -> None: ...
    def on_done(self, frame: Done) -> None: ...
    def on_output(self, frame: Output) -> None: ...


class Channel:
    """The frames of one worker. `read` and `write` each run in a task of their own for as long as the worker lives."""

    def __init__(
        self,
        sandbox: Sandbox,
        receiver: Receiver,
        *,
        credit: int = CREDIT,
        max_frame: int = MAX_FRAME,
        threads: anyio.CapacityLimiter | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._receiver = receiver
        self._credit = credit
        self._max_frame = max_frame
        self._threads = threads
        self._parser = FrameParser(max_frame)
        self._phase: Phase = "starting"
        self._expected = 0  # the id of the load or the number of the cell that the phase is about
        self._outstanding: dict[
            int, int
        ] = {}  # call id → bytes of its frame; only `_on_call` adds, only `_credit_back` removes
        self._leaving: list[int] = []  # those whose replies are in `_out`
        self._owed = 0  # the sum of those bytes
        self._highest = -1  # the highest call id seen: a cancel beyond it is a lie
        self._garbage: str | None = None
        self._exit: Exit | None = None
        self._out: deque[bytes | memoryview] = deque()
        self._mute = False  # the worker takes nothing any more
        self.unsent = 0
        """Bytes in `_out` and those that `sandbox.send` has not taken yet."""
        self.on_sent: Callable[[], None] = lambda: None
        """Called when `unsent` has become less."""
        self._kick = anyio.Event()
        self._sending = anyio.Lock(fast_acquire=True)  # held by whoever is inside `sandbox.send`

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def exit(self) -> Exit | None:
        """What the worker's warden said about its end, or None if it has not (yet)."""
        return self._exit

    # ---- to the worker -----------------------------------------------------------------------------------------------

    def begin_load(self, number: int) -> None:
        """Expect `loaded` for this load, whose frame the caller sends next."""
        self._begin("loading", number)

    def begin_cell(self, number: int) -> None:
        """Expect the frames of this cell, whose `execute` the caller sends next."""
        self._begin("cell", number)

    def _begin(self, phase: Phase, number: int) -> None:
        if self._phase != "idle":
            raise RuntimeError(f"the channel is {self._phase}, not idle")
        self._phase, self._expected = phase, number

    def close(self) -> None:
        """Send nothing more and drop whatever still comes: the worker is being killed."""
        self._phase = "closed"
        self._drop_queue()

    def send(self, frame: ToWorker) -> None:
        """Queue a frame; sent at once where nothing is ahead of it.

        Raises:
            ValueError: if the frame is longer than a frame may be.
        """
        data = encode_frame(frame)
        if len(data) > self._max_frame:
            raise ValueError(
                f"{len(data):,} bytes in one message to the worker; at most {self._max_frame:,} are possible"
            )
        self._post(data, at_once=True)

    async def pass_file(self, open_file: Callable[[], int]) -> None:
        """Pass the descriptor that `open_file` gives. The frame that says what it is for is to be sent before anything
        else is waited for: the worker takes descriptors in the order of those frames.

        Raises:
            Exception: what `open_file` raises.
            anyio.BrokenResourceError: if the worker is gone.
        """
        async with self._sending:
            await self._flush()
            await self._sandbox.pass_file(open_file)

    async def encode_large(self, reply: Reply) -> bytes | None:
        """The frame of a reply that is large, made in a thread; None for others."""
        if not isinstance(reply.value, (str, Raw)) or len(reply.value) <= LARGE:
            return None
        return await anyio.to_thread.run_sync(encode_frame, reply, abandon_on_cancel=True, limiter=self._threads)

    def reply(self, reply: Reply, data: bytes | None = None) -> int:
        """Answer one call and return the size. Each call is answered exactly once. `data`: of `encode_large`.

        Its credit is given back as the reply leaves: a worker that takes no replies gets to make no more calls, which
        bounds what is queued for it.
        """
        data = data or encode_frame(reply)
        if len(data) > self._max_frame:
            text = f"the result takes {len(data):,} bytes; at most {self._max_frame:,} can be handed to a cell"
            data = encode_frame(Reply(id=reply.id, error=text, kind="too_long", raises=reply.raises))
        if self._post(data, at_once=len(self._outstanding) - len(self._leaving) <= FEW):
            self._credit_back(reply.id)
        else:
            self._leaving.append(reply.id)
        return len(data)

    def size_of(self, number: int) -> int:
        """Bytes of the frame of a call that has no reply yet."""
        return self._outstanding.get(number, 0)

    def drop(self, numbers: list[int]) -> None:
        """These calls, in rising order, get no reply: their cell is over. Tells the worker so once."""
        rows: list[tuple[int, int]] = []
        for number in numbers:
            self._credit_back(number)
            if rows and rows[-1][1] == number - 1:
                rows[-1] = (rows[-1][0], number)
            else:
                rows.append((number, number))
        if rows:
            self._post(encode_frame(Dropped(ids=rows)), at_once=True)

    def _credit_back(self, number: int) -> None:
        self._owed -= self._outstanding.pop(number)

    def _credit_leaving(self) -> None:
        for number in self._leaving:
            self._credit_back(number)
        self._leaving.clear()

    def _drop_queue(self) -> None:
        self._out.clear()
        self._credit_leaving()
        self._sent(self.unsent)

    def _sent(self, size: int) -> None:
        self.unsent = max(0, self.unsent - size)
        self.on_sent()

    def _post(self, data: bytes, *, at_once: bool) -> bool:
        """Send or queue; False if any of it is still to be sent."""
        if self._mute or self._phase == "closed":
            return True
        if at_once and not self._out and not self._sending.locked():
            try:
                sent = self._sandbox.send_nowait(data)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                sent = 0  # the worker is gone: `write` meets that too, and ends the channel
            if sent == len(data):
                return True
            self._out.append(memoryview(data)[sent:])
            self.unsent += len(data) - sent
        else:
            self._out.append(data)
            self.unsent += len(data)
        self._kick.set()
        return False

    async def write(self) -> None:
        """Send what is queued, until the worker is gone."""
        try:
            while True:
                if not self._out:
                    self._kick = anyio.Event()
                    await self._kick.wait()
                async with self._sending:
                    await self._flush()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            # What the worker had sent by then is still read: an answer, or how it ended.
            self._mute = True
            self._drop_queue()
            self._sandbox.kill()

    async def _flush(self) -> None:
        while self._out:
            data = self._out.popleft() if len(self._out) == 1 else b"".join(self._out)
            self._out.clear()
            self._credit_leaving()  # before the bytes: the worker may spend it as soon as it has read them
            await self._sandbox.send(bytes(data))
            self._sent(len(data))

    def abandon(self) -> None:
        """Kill the worker: what was sent to it can't be taken back, so nothing else would be sound."""
        self.close()
        self._sandbox.kill()

    # ---- from the worker ---------------------------------------------------------------------------------------------

    async def read(self) -> Exit:
        """Hand over frames until the stream ends, and say how the worker ended.

        Raises:
            ProtocolError: the worker broke the protocol. It is still alive.
        """
        frames = unfair = 0
        while (data := await self._receive()) is not None:
            if self._phase == "closed":
                continue
            for start in range(0, len(data), FAIR_BYTES):
                for line in self._parser.feed(data[start : start + FAIR_BYTES]):
                    if len(line) > LARGE:
                        await self._take_large(line)
                    else:
                        self._take(line)
                    frames += 1
                    if frames % FAIR_FRAMES == 0:
                        await anyio.lowlevel.checkpoint()
                if start:
                    await anyio.lowlevel.checkpoint()
            unfair += len(data)
            if unfair >= FAIR_BYTES:
                unfair = 0
                await anyio.lowlevel.checkpoint()
        if self._garbage is not None and self._exit is None and self._phase != "closed":
            raise ProtocolError(self._garbage)
        return self._exit or Exit()

    async def _receive(self) -> bytes | None:
        try:
            if self._exit is not None:
                with anyio.move_on_after(END_GRACE):
                    return await self._sandbox.receive()
                return None
            if self._garbage is None:
                return await self._sandbox.receive()
            with anyio.move_on_after(GARBAGE_GRACE):
                return await self._sandbox.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            return None
        raise ProtocolError(self._garbage)

    def _take(self, line: bytes | bytearray) -> None:
        if self._phase == "closed":
            return
        try:
            frame = decode_frame(line)
        except (ValueError, RecursionError) as error:
            self._no_frame(line, str(error))
        else:
            self._on_frame(frame, len(line))

    async def _take_large(self, line: bytes | bytearray) -> None:
        read = functools.partial(decode_large, line, self._is_closed)
        frame = await anyio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=self._threads)
        if frame is None or self._is_closed():
            return
        if isinstance(frame, str):
            self._no_frame(line, frame)
        else:
            self._on_frame(frame, len(line))

    def _is_closed(self) -> bool:
        return self._phase == "closed"

    def _no_frame(self, line: bytes | bytearray, error: str) -> None:
        if self._garbage is not None or self._exit is not None:
            raise ProtocolError(self._garbage or "the worker sent what is no frame after its end")
        # Not yet an error: a worker killed in the middle of a frame leaves a cut line before `exited`.
        self._garbage = f"the worker sent what is no frame: {error} in {bytes(line[:60])!r}"

    def _on_frame(self, frame: FromWorker, size: int) -> None:
        if isinstance(frame, Exited):
            self._exit = Exit(status=frame.status, reason=frame.reason[:1000])
        elif self._garbage is not None and not isinstance(frame, Output):  # which a keeper sends before `exited`
            raise ProtocolError(self._garbage)
        elif isinstance(frame, Call):
            self._on_call(frame, size + 1)
        else:
            self._on_other(frame)

    def _on_call(self, frame: Call, size: int) -> None:
        if self._phase != "cell" or self._exit is not None:
            raise self._out_of_phase("call")
        if frame.id in self._outstanding:
            raise ProtocolError(f"the worker used the id {frame.id} for two calls at once")
        if self._outstanding and (self._owed + size > self._credit or len(self._outstanding) >= MAX_CALLS):
            raise ProtocolError(
                f"the worker went beyond its credit of {self._credit:,} bytes of calls and {MAX_CALLS:,} calls"
            )
        self._outstanding[frame.id] = size
        self._owed += size
        self._highest = max(self._highest, frame.id)
        self._receiver.on_call(frame)

    def _on_other(self, frame: FromWorker) -> None:
        phase = self._phase
        match frame:
            case _ if self._exit is not None:
                raise ProtocolError("the worker sent a frame after its end")
            case Ready() if phase == "starting":
                if frame.version != PROTOCOL_VERSION:
                    raise ProtocolError(
                        f"the worker speaks version {frame.version} of the protocol, not {PROTOCOL_VERSION}"
                    )
                self._phase = "idle"
                self._receiver.on_ready(frame)
            case Loaded() if phase == "loading" and frame.id == self._expected:
                self._phase = "idle"
                self._receiver.on_loaded(frame)
            case Cancel() if phase != "starting" and frame.id <= self._highest:
                if frame.id in self._outstanding:
                    self._receiver.on_cancel(frame)
            case Answer() if phase == "cell":
                self._receiver.on_answer(frame)
            case Done() if phase == "cell" and frame.cell == self._expected:
                self._phase = "idle"
                self._receiver.on_done(frame)
            case Output() if frame.stream in (1, 2):
                self._receiver.on_output(frame)
            case _:
                raise self._out_of_phase(type(frame).__name__.lower())

    def _out_of_phase(self, name: str) -> ProtocolError:
        return ProtocolError(f"the worker sent `{name}` where it may not (the channel is {self._phase})")
