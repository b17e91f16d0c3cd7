"""Sub-calls: one frame an item, sent as the credit allows, from any thread and from any event loop."""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .bounds import MAX_CONTAINERS, MAX_FRAME
from .wire import Waiter, Wire

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

T = TypeVar("T")

_MAX_CONTAINERS = MAX_CONTAINERS - 1_000
"""Lists and dicts in one call: a few are the frame's own."""
_QUOTED = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')

_PIECE = 256 * 1024
_OVER = "the cell that made this sub-call is over: join threads and await tasks before a cell ends"
_FORKED = (
    "sub-calls can't be made in a forked process; use threads (concurrent.futures.ThreadPoolExecutor) "
    "or one llm_query_batched(prompts) call"
)


class _Outbox(Generic[T]):
    """The calls of one waiter on their way out: encoded a piece at a time, so that a batch never exists twice."""

    __slots__ = ("_encode", "_group", "_items", "_next", "frames", "waiter")

    def __init__(self, waiter: Waiter, items: Sequence[T], encode: Callable[[T], str]) -> None:
        self.waiter = waiter
        self.frames: deque[tuple[int, bytes]] = deque()
        """Id and bytes of what is encoded and not admitted yet."""
        self._items = items
        self._encode = encode
        self._next = 0
        self._group = f',"group":{waiter.first}' if len(items) > 1 else ""

    def fill(self) -> bool:
        """Have at least one frame ready; False once all are gone."""
        frames = self.frames
        if not frames:
            size = 0
            while self._next < len(self._items) and size < _PIECE:
                call = self.waiter.first + self._next
                body = self._encode(self._items[self._next])
                frame = f'{{"t":"call","id":{call}{self._group},{body}}}\n'.encode("ascii")
                if len(frame) > MAX_FRAME:
                    raise ValueError(f"too long: {len(frame):,} bytes in one call, at most {MAX_FRAME:,} can be sent")
                if len(frame) > 2 * _MAX_CONTAINERS and _containers(body) > _MAX_CONTAINERS:
                    raise ValueError(
                        f"more than {_MAX_CONTAINERS:,} lists and dicts in one call: "
                        "send them as text, json.dumps(...), or in several calls"
                    )
                frames.append((call, frame))
                size += len(frame)
                self._next += 1
        return bool(frames)


def _containers(text: str) -> int:
    """Lists and dicts in JSON."""
    if text.count("[") + text.count("{") <= _MAX_CONTAINERS:
        return 0
    bare = _QUOTED.sub("", text)
    return bare.count("[") + bare.count("{")


class Calls:
    """Makes the sub-calls of cells over one wire."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.guard = wire.guard

    def call(self, items: Sequence[T], encode: Callable[[T], str]) -> list[dict[str, Any]]:
        """Make one call for each item and wait for all replies; `encode` gives the fields of its frame. Any thread."""
        if not items:
            return []
        wire = self.wire
        with self.guard:
            waiter = self._begin(len(items))
            try:
                outbox = _Outbox(waiter, items, encode)
                while outbox.fill():
                    frames = self._admit(outbox)
                    if frames:
                        self._send(frames)
                        continue
                    turn = self._queue(outbox)
                    wire.wait(turn)
                    if turn.stopped:
                        self._check()
                wire.wait(waiter)
                if waiter.stopped:
                    raise KeyboardInterrupt("the cell was interrupted")
            except BaseException:
                self._abandon(waiter)
                raise
            return waiter.replies

    async def acall(self, items: Sequence[T], encode: Callable[[T], str]) -> list[dict[str, Any]]:
        """The same for a coroutine of any event loop."""
        if not items:
            return []
        import asyncio  # noqa: PLC0415 - there already, where a loop runs

        loop = asyncio.get_running_loop()
        waiter = self._begin(len(items), loop)
        self._attach(loop)
        try:
            outbox = _Outbox(waiter, items, encode)
            while outbox.fill():
                frames = self._admit(outbox)
                if frames:
                    self._send(frames)
                else:
                    await self._credit(outbox, loop)
            await waiter.future_or_fail()
        except BaseException:
            self._abandon(waiter)
            raise
        finally:
            self._detach(loop)
        return waiter.replies

    def _begin(self, count: int, loop: asyncio.AbstractEventLoop | None = None) -> Waiter:
        if self.guard.child:
            raise RuntimeError(_FORKED)
        wire = self.wire
        waiter = Waiter(count, loop)
        with self.guard, wire.lock:
            if self.guard.stopped:
                raise KeyboardInterrupt("the cell was interrupted")
            if not wire.open:
                raise RuntimeError(_OVER)
            first = waiter.first = wire.last_id + 1
            wire.last_id += count
            for call in range(first, first + count):
                wire.calls[call] = waiter
        return waiter

    def _admit(self, outbox: _Outbox[Any]) -> list[tuple[int, bytes]]:
        """Frames that the credit lets go now; none if the first has to wait."""
        wire, frames = self.wire, outbox.frames
        admitted: list[tuple[int, bytes]] = []
        with self.guard, wire.lock:
            while frames and not wire.hungry and wire.fits(len(frames[0][1])):
                call, frame = item = frames.popleft()
                wire.outstanding += len(frame)
                wire.owed[call] = len(frame)
                admitted.append(item)
        return admitted

    def _send(self, frames: list[tuple[int, bytes]]) -> None:
        """Write admitted frames; where their cell is over their credit comes back, since no reply will bring it."""
        wire = self.wire
        if wire.post(frames[0][1] if len(frames) == 1 else b"".join([frame for _, frame in frames])):
            return
        with self.guard, wire.lock:
            for call, _ in frames:
                wire.outstanding -= wire.owed.pop(call, 0)
            wire.grant()
        wire.ship()
        raise RuntimeError(_OVER)

    def _check(self) -> None:
        """A place in the queue ended before its frame was written: say why."""
        raise KeyboardInterrupt("the cell was interrupted") if self.guard.stopped else RuntimeError(_OVER)

    def _queue(self, outbox: _Outbox[Any], loop: asyncio.AbstractEventLoop | None = None) -> Waiter:
        """Line up for the credit of the first frame, which is then written by whoever sees the credit come back."""
        wire = self.wire
        turn = Waiter(1, loop)
        turn.call, turn.frame = outbox.frames.popleft()
        with self.guard, wire.lock:
            if outbox.waiter.stopped or self.guard.stopped:
                turn.left, turn.stopped = 0, True
                turn.finish()
            else:
                wire.hungry.append(turn)
                wire.grant()
        wire.ship()
        return turn

    async def _credit(self, outbox: _Outbox[Any], loop: asyncio.AbstractEventLoop) -> None:
        turn = self._queue(outbox, loop)
        try:
            await turn.future_or_fail()
        except BaseException:
            self._give_up(turn)
            raise

    def _give_up(self, turn: Waiter) -> None:
        """Leave the queue; credit that was granted goes to the next."""
        wire = self.wire
        with self.guard, wire.lock:
            if turn in wire.hungry:
                wire.hungry.remove(turn)
            elif turn in wire.granted:
                wire.granted.remove(turn)
                wire.revoke(turn)
            wire.grant()
        wire.ship()

    def _abandon(self, waiter: Waiter) -> None:
        """Nobody waits any more: forget what is not answered and tell the host."""
        wire = self.wire
        if self.guard.child:
            return
        calls = range(waiter.first, waiter.first + waiter.count)
        with self.guard, wire.lock:
            for call in calls:
                wire.calls.pop(call, None)
            sent = [call for call in calls if call in wire.owed]
        if sent:
            wire.post("".join([f'{{"t":"cancel","id":{call}}}\n' for call in sent]).encode("ascii"))

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop read the channel for as long as it has calls in flight."""
        wire = self.wire
        with self.guard:
            with wire.lock:
                count = wire.readers[loop] = wire.readers.get(loop, 0) + 1
            if count == 1:
                loop.add_reader(wire.fd, wire.pump)

    def _detach(self, loop: asyncio.AbstractEventLoop) -> None:
        wire = self.wire
        with self.guard:
            with wire.lock:
                count = wire.readers.pop(loop) - 1
                if count:
                    wire.readers[loop] = count
            if not count and not loop.is_closed():
                loop.remove_reader(wire.fd)
