"""The channel to the host: who writes, who reads, who waits for what.

Nobody reads for a living, since a thread would make the process unforkable. **Whoever waits reads.** A thread that
waits is in one of these states, and moves between them only under `Wire.lock`:

    leader    alone: sleeps in poll, reads what comes, hands each reply to the call it answers
    follower  sleeps on its gate until its own wait is over or the lead is free
    over      `left` is 0: nothing of this wait will change any more

An event loop that waits registers the channel with its selector and reads too; reads are short, locked and never block,
so several readers are harmless. The main thread between cells is a waiter like any other: it waits for a control frame.

What must hold whenever `Wire.lock` is free:
 1. If no thread leads, either no follower sleeps or one of them has been woken to take the lead.
 2. A waiter with `left` 0 has been woken, once it is.
 3. `outstanding` is the sum of `owed`, which holds every call that is sent, being sent or granted its credit.
 4. A call in `granted` is written by whoever granted it, as soon as that thread holds no lock: the thread that made the
    call may be the very one that waits, in a plain call inside a coroutine, for credit that comes back after it.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import threading
from collections import deque
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any

from . import codec
from .guard import Guard, get_ident, leave, open_gate

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_PIECE = 256 * 1024
_LEAST_SPACE = socket.CMSG_SPACE(16 * struct.calcsize("i"))
_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_decode_json = json.JSONDecoder().raw_decode
_encode_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def dump(value: Any, where: str = "value") -> str:
    """ASCII JSON of any value that `codec` takes."""
    if type(value) is str and codec.is_text(value):
        return encode_basestring_ascii(value)
    return _encode_json(codec.encode(value, where))


class Waiter:
    """What one caller waits for. Every field is written under `Wire.lock`, or before anyone else sees it."""

    __slots__ = ("call", "count", "first", "frame", "future", "gate", "left", "loop", "replies", "stopped", "thread")

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.count = count
        self.left = count
        """Replies still missing. It only falls."""
        self.first = 0
        """The id of its first call; the others follow. 0 for a waiter that made no call."""
        self.replies: list[Any] = [None] * count
        self.call, self.frame = 0, b""
        """For a waiter for credit: id and frame of the call that waits to be sent."""
        self.stopped = False
        """It is over because the cell was interrupted, not because all was answered."""
        self.gate: threading.Lock | None = None
        """A follower sleeps on it. Unlocked means: look again."""
        self.loop = loop
        self.future: asyncio.Future[None] | None = loop.create_future() if loop is not None else None
        self.thread = get_ident()

    def future_or_fail(self) -> asyncio.Future[None]:
        """What the coroutine awaits; only of a waiter made with a loop."""
        assert self.future is not None
        return self.future

    def finish(self) -> None:
        """In the thread of its loop: let the coroutine go on."""
        future = self.future
        if future is not None and not future.done():
            if self.stopped:
                future.cancel()
            else:
                future.set_result(None)


class Wire:
    """One end of the channel; the process has exactly one."""

    fd: int
    """The channel. It and all that is made of descriptors is there from `attach` on."""
    socket: socket.socket
    kick_out: int

    def __init__(self, on_close: Callable[[], None] = lambda: leave(0)) -> None:
        self.on_close = on_close
        self.guard = Guard(self.stop, self.kick)
        self.lock = threading.Lock()
        """Held briefly, never while sleeping; guards the fields down to `inbox`."""
        self.calls: dict[int, Waiter] = {}
        """Id → who waits for the reply. No entry for calls that were given up."""
        self.owed: dict[int, int] = {}
        """Id → bytes of a call frame that the host has not replied to, given up or not."""
        self.outstanding = 0
        self.credit = 1 << 62
        """Most that `outstanding` may be, unless a single frame is larger."""
        self.most_calls = 1 << 62  # that `owed` may hold
        self.hungry: deque[Waiter] = deque()
        """Waiters for credit, served in order."""
        self.granted: list[Waiter] = []
        """Those whose credit is there and whose frame is about to be written."""
        self.last_id = 0
        self.leader: Waiter | None = None
        self.leader_thread = 0
        self.followers: dict[Waiter, None] = {}
        self.readers: dict[asyncio.AbstractEventLoop, int] = {}
        """Calls in flight per event loop; the channel is registered with a loop while it has any."""
        self.inbox: deque[dict[str, Any]] = deque()
        self.descriptors: deque[int] = deque()
        """Passed by the host and not yet taken by a frame, in order."""
        self.main: Waiter | None = None
        """The main thread, while it waits for a control frame."""
        self._buffer = bytearray()
        self._chunk = bytearray(_PIECE)
        self._view = memoryview(self._chunk)
        self.write_lock = threading.Lock()
        """Held while a frame is written, so that frames never mix. Taken before `lock`, never after it."""
        self.writer = 0
        """The thread that holds `write_lock`. It writes what is granted before it lets go."""
        self.open = False
        """A cell runs: only then may its frames be written. Changed under `write_lock`."""

    def attach(self, fd: int) -> None:
        """Take the channel; once, in the process that will use it."""
        self.fd = fd
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)
        self.kick_out, self._kick_in = os.pipe()
        os.set_blocking(self.kick_out, False)
        os.set_blocking(self._kick_in, False)
        self._poll = select.poll()  # used by the leader alone
        self._poll.register(fd, select.POLLIN)
        self._poll.register(self.kick_out, select.POLLIN)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Read what is there, never block, and hand each frame to whom it belongs."""
        if self.guard.child:
            return
        with self.guard, self.lock:
            try:
                size, extra, _, _ = self.socket.recvmsg_into([self._chunk], _LEAST_SPACE, _FLAGS)
            except BlockingIOError:
                return
            except OSError:
                size, extra = 0, []
            for level, kind, data in extra:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    count = len(data) // struct.calcsize("i")
                    self.descriptors.extend(struct.unpack(f"{count}i", data[: count * struct.calcsize("i")]))
            if not size:
                self.on_close()
                return
            buffer, at, start = self._buffer, len(self._buffer), 0
            buffer += self._view[:size]
            while (end := buffer.find(b"\n", at)) >= 0:
                line = str(buffer[start:end], "ascii")
                start = at = end + 1
                if line and not line.isspace():
                    self._take(_decode_json(line)[0])  # what the host writes is well formed
            del buffer[:start]
        if self.granted:
            self.ship()

    def _take(self, frame: dict[str, Any]) -> None:
        if frame["t"] == "reply":
            if frame.get("descriptor"):
                frame["fd"] = self.descriptors.popleft()
            self._replied(frame["id"], frame)
        elif frame["t"] == "dropped":
            for call in (call for first, last in frame["ids"] for call in range(first, last + 1)):
                self._replied(call, {"error": "cancelled", "kind": "cancelled"})
        elif frame["t"] == "close":
            self.on_close()
        else:
            self.inbox.append(frame)
            if self.main is not None and self.main.left:
                self.main.left = 0
                self.wake(self.main)
        if self.hungry:
            self.grant()

    def _replied(self, call: int, frame: dict[str, Any]) -> None:
        self.outstanding -= self.owed.pop(call, 0)
        waiter = self.calls.pop(call, None)
        if waiter is not None:
            waiter.replies[call - waiter.first] = frame
            waiter.left -= 1
            if not waiter.left:
                self.wake(waiter)
        elif "fd" in frame:  # nobody waits for it any more
            os.close(frame["fd"])

    def fits(self, size: int) -> bool:
        """Whether a frame of `size` may go now. Under the lock."""
        return not self.outstanding or (self.outstanding + size <= self.credit and len(self.owed) < self.most_calls)

    def grant(self) -> None:
        """Give the credit that came back to those who wait for it. Under the lock; to be followed by `ship`."""
        while self.hungry and self.fits(len(self.hungry[0].frame)):
            turn = self.hungry.popleft()
            self.outstanding += len(turn.frame)
            self.owed[turn.call] = len(turn.frame)
            self.granted.append(turn)

    def revoke(self, turn: Waiter) -> None:
        """Take the credit of a granted turn back. Under the lock."""
        self.outstanding -= self.owed.pop(turn.call, 0)

    def wake(self, waiter: Waiter) -> None:
        """Under the lock, after `left` became 0."""
        if waiter.loop is not None:
            if waiter.thread == get_ident():
                waiter.finish()
            else:
                try:
                    waiter.loop.call_soon_threadsafe(waiter.finish)
                except RuntimeError:  # the loop was closed meanwhile: nobody waits there any more
                    return
        elif waiter is self.leader:
            if self.leader_thread != get_ident():
                self.kick()
        elif waiter.gate is not None:
            open_gate(waiter.gate)

    def kick(self) -> None:
        """Get the leader out of its poll. Safe in a signal handler."""
        try:
            os.write(self._kick_in, b"x")
        except BlockingIOError:  # full of kicks: it will wake
            return

    def stop(self) -> None:
        """Interrupt: every wait of the cell is over."""
        with self.guard, self.lock:
            for turn in self.granted:
                self.revoke(turn)
            for waiter in {*self.calls.values(), *self.hungry, *self.granted}:
                if waiter.left:
                    waiter.left, waiter.stopped = 0, True
                    self.wake(waiter)
            self.calls.clear()
            self.hungry.clear()
            self.granted.clear()
        self.kick()

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, waiter: Waiter) -> None:
        """Sleep until `waiter` is over, reading for all meanwhile if no other thread does. Never raises in between:
        an interrupt ends the wait like a reply does, and is raised when the caller's guard is left."""
        me = get_ident()
        main = me == self.guard.thread
        with self.guard:
            try:
                while True:
                    if main and self.guard.pending:
                        self.stop()
                    with self.lock:
                        if not waiter.left:
                            return
                        if self.leader is None or self.leader is waiter:
                            self.leader, self.leader_thread = waiter, me
                        else:
                            self.followers[waiter] = None
                            if waiter.gate is None:
                                waiter.gate = threading.Lock()
                                waiter.gate.acquire()
                    if self.leader is waiter:
                        self._lead(waiter, main)
                    elif waiter.gate is not None:
                        if main:
                            self.guard.gate = waiter.gate
                            if self.guard.pending:  # came before the handler could see the gate
                                continue
                        waiter.gate.acquire()
            finally:
                if main:
                    self.guard.gate = None
                with self.lock:
                    self.followers.pop(waiter, None)
                    if self.leader is waiter:
                        self.leader = None
                    if self.leader is None and self.followers:
                        heir = next(iter(self.followers))
                        if heir.gate is not None:
                            open_gate(heir.gate)

    def _lead(self, waiter: Waiter, main: bool) -> None:
        guard = self.guard
        while waiter.left and not (main and guard.pending):
            for fd, _ in self._poll.poll():
                if fd == self.kick_out:
                    os.read(fd, 4096)
                else:
                    self.pump()

    def next_frame(self) -> dict[str, Any]:
        """The next control frame. Main thread only."""
        while not self.inbox:
            with self.lock:
                waiter = self.main = None if self.inbox else Waiter(1)
            if waiter is not None:
                self.wait(waiter)
        self.main = None
        return self.inbox.popleft()

    # ---- writing -----------------------------------------------------------------------------------------------------

    def _push(self, data: bytes) -> None:
        """Write it and what is granted meanwhile. With `write_lock` held."""
        self.writer = get_ident()
        if data:
            self._write(data)
        while self.granted:
            self._ship_granted()
        self.writer = 0

    def _write(self, data: bytes) -> None:
        """Write all of it, taking replies while the channel is full: the host may be waiting for that."""
        view = memoryview(data)
        while view:
            try:
                sent = self.socket.send(view, socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0))
            except BlockingIOError:
                poll = select.poll()
                poll.register(self.fd, select.POLLIN | select.POLLOUT)
                if poll.poll()[0][1] & select.POLLIN:
                    self.pump()
            except OSError:
                self.on_close()
                return
            else:
                view = view[sent:]

    def post(self, data: bytes) -> bool:
        """Write frames of the running cell; False if none runs."""
        if self.guard.child:
            return False
        with self.guard, self.write_lock:
            if not self.open:
                return False
            self._push(data)
            return True

    def ship(self) -> None:
        """Write what is granted, unless this thread is in the middle of a frame and will do so after it."""
        if self.writer != get_ident():
            with self.guard, self.write_lock:
                self._push(b"")

    def _ship_granted(self) -> None:
        """With `write_lock` held by this thread."""
        with self.lock:
            turns, self.granted = self.granted, []
        if self.open:
            self._write(b"".join([turn.frame for turn in turns]))
        with self.lock:
            for turn in turns:
                if not self.open:
                    self.revoke(turn)
                    turn.stopped = True
                if turn.left:
                    turn.left = 0
                    self.wake(turn)

    def send(self, frame: dict[str, Any], *, opens: bool = False, closes: bool = False) -> None:
        """Write a frame of the worker itself; `opens` and `closes` a cell. Main thread only."""
        data = f"{_encode_json(frame)}\n".encode("ascii") if frame else b""
        with self.guard, self.write_lock:
            self.open = opens or (self.open and not closes)
            self._push(data)

    # ---- forks -------------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """In a process that a cell forked: it never touches the channel."""
        guard = self.guard
        guard.child, guard.thread, guard.depth, guard.pending = True, get_ident(), 0, False
        self.lock, self.write_lock = threading.Lock(), threading.Lock()  # a thread that is not here may have held them
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, self.fd, inheritable=False)
        os.close(null)
