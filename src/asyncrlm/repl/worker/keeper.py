"""The keeper: the program in a sandbox, whose standard input and output are the host's stream; parent of one worker.

A single-threaded loop that runs no model's code. It passes frames both ways untouched and speaks a few of its own:

    host → keeper   interrupt; close; file (see `inward.py`)
    keeper → host   output, before the `done` whose cell wrote it; exited, last of all

What a cell writes is read at once and kept as head and tail, so neither a flood nor a host that is slow stops the loop.
Nothing outlives it: when the worker or the host ends, it ends the rest.
"""

from __future__ import annotations

import binascii
import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from . import confine, sandboxed, warden
from . import main as worker_main
from .inward import Inward
from .kept import CHUNK, KeptPipe
from .removing import remove_tree
from .resumed import Link

if TYPE_CHECKING:
    from typing import Any, NoReturn

    from .sandboxed import Options

MOST_OUT = 1 << 20
"""Bytes that wait for the host, beyond which the worker has to wait too."""
MOST_IN = 1 << 26
"""Bytes that wait for the worker, beyond which the host has to wait too: then nothing but ending the sandbox helps."""
PIECE = 48 * 1024
"""Bytes of output in one frame; a multiple of 3."""
LAST_STEPS = 1.0
"""Seconds between the end of the worker's channel and its own."""
_DONE = b'{"t":"done"'
_PRINTABLE = bytes(b if b == 10 or 32 <= b < 127 else 63 for b in range(256))


class Gone(Exception):
    """The host hung up."""


class Keeper:
    """The loop and what it knows of the worker."""

    def __init__(self, options: Options, wire: tuple[int, int], link: Link | None) -> None:
        self.inp, self.out = wire
        self.options = options
        padding = 0 if options["binary"] else options["padding"]
        # A whole line: what passes lines on holds back parts of one.
        self.pad = b" " * padding + b"\n" if padding else b""
        lodging = sandboxed.Lodging(options)
        self.mode, self.files = lodging.mode, lodging.files
        self.host = Inward(self, options["binary"])
        self.to_host = bytearray()
        self.link = link  # if the stream may break
        self.raw = self.to_host if link is None else bytearray()  # what goes out as it is
        self.inbox = bytearray()
        self.begun = b""  # of a line of the worker's that may be `done`
        self.starting = bool(options["kernel"])  # what it says before it is a worker is no cell's
        self.at_start = True  # nothing of the worker's line that is to be passed on next has been passed on
        self.reason = ""
        self.stopped = False
        self.hung_up = False  # the worker ended its channel
        self.status: int | None = None
        self.wake, wake_in = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_in, False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wake_in)
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pipes = [os.pipe(), os.pipe()]
        self.worker = os.fork()
        if self.worker == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            lodging.become_worker(far.fileno(), pipes[0][1], pipes[1][1])
        far.close()
        for rule, _ in lodging.rules:
            os.close(rule)
        self.outputs: list[KeptPipe] = []
        for near_end, far_end in pipes:
            os.close(far_end)
            os.set_blocking(near_end, False)
            self.outputs.append(KeptPipe(near_end, options["keep"]))
        near.setblocking(False)
        self.channel = near
        for fd in wire:
            os.set_blocking(fd, False)
        self._poll = select.poll()
        self._watched: dict[int, int] = {}

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the worker has ended or was stopped. Raises `Gone` if the host is."""
        channel, wake = self.channel.fileno(), self.wake
        pipes = {output.fd: output for output in self.outputs}
        self._watch(wake, select.POLLIN)
        for fd in pipes:
            self._watch(fd, select.POLLIN)
        while self.status is None and not self.stopped:
            out_full, in_full = len(self.to_host) > MOST_OUT, len(self.inbox) > MOST_IN
            self._watch(self.inp, 0 if in_full else select.POLLIN)
            self._watch(self.out, select.POLLOUT if self.raw else 0)
            wanted = 0 if out_full else select.POLLIN
            if not self.hung_up:
                self._watch(channel, wanted | (select.POLLOUT if self.inbox else 0))
            events = self._poll.poll(LAST_STEPS * 1000 if self.hung_up else None)
            if not events:
                self.stop("it ended its channel")
            for fd, event in events:
                if fd == channel:
                    if self.inbox:
                        self.flush_to_worker()
                    if event & ~select.POLLOUT and not out_full:
                        self.read_worker()
                elif fd == wake:
                    os.read(wake, 4096)
                    self.reap()
                elif fd in pipes:
                    self._read_pipe(pipes[fd])
                elif fd == self.inp:
                    self.read_host()
                elif event & ~select.POLLOUT:
                    raise Gone
                else:
                    self.flush()

    def _watch(self, fd: int, events: int) -> None:
        if self._watched.get(fd) != events:
            self._watched[fd] = events
            self._poll.register(fd, events)

    def _read_pipe(self, output: KeptPipe) -> None:
        try:
            data = os.read(output.fd, CHUNK)
        except BlockingIOError:
            return
        if data:
            output.add(data)
        else:  # the worker and its children closed it: its own copy is for ever, so they are gone
            self.unwatch(output.fd)

    def unwatch(self, fd: int) -> None:
        if self._watched.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def read_host(self) -> None:
        try:
            data = os.read(self.inp, CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise Gone
        self.take_in(data)

    def take_in(self, data: bytes) -> None:
        """What the host said."""
        if (link := self.link) is not None:
            data = link.feed(data)
            if link.unclear:
                raise ValueError("the host says what is no stream of pieces")
            link.taken = link.got
            if link.resumed:
                link.resumed = False
                self.raw[:] = b"".join(link.again())
            self.flush()
        self.host.feed(data)

    def to_worker(self, data: bytes) -> None:
        if not data:
            return
        self.inbox += data
        self.flush_to_worker()

    def flush_to_worker(self) -> None:
        try:
            while self.inbox:
                sent = self.channel.send(self.inbox, getattr(socket, "MSG_NOSIGNAL", 0))
                del self.inbox[:sent]
        except BlockingIOError:
            return
        except OSError:  # the worker is gone, which SIGCHLD tells
            self.inbox.clear()

    def interrupt(self) -> None:
        if self.status is None:
            warden.signal_quietly(self.worker, signal.SIGINT)

    def stop(self, reason: str) -> None:
        """End the worker and all the rest."""
        self.stopped = True
        self.reason = self.reason or reason

    def reap(self) -> None:
        """Bury who ended; orphans are ours too."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self.worker:
                    self.status = status

    # ---- to the host -------------------------------------------------------------------------------------------------

    def read_worker(self) -> bool:
        """Pass on what the worker says; False if there is nothing more."""
        try:
            data = self.channel.recv(CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            if not self.hung_up:
                self.hung_up = True
                self.unwatch(self.channel.fileno())
            return False
        if self.starting:
            self.starting = False
            for output in self.outputs:
                output.drain()
                output.take()
        data = self.begun + data
        self.begun = b""
        start = 0
        while (at := self._find_done(data, start)) >= 0:
            self._pass_on(data[start:at])
            self.tell_output()
            start = data.find(b"\n", at) + 1 or len(data)
            self._pass_on(data[at:start])
        rest = data[start:]
        line = rest[rest.rfind(b"\n") + 1 :]
        if len(line) < len(_DONE) and _DONE.startswith(line) and (self.at_start or b"\n" in rest):
            self.begun = line
            rest = rest[: len(rest) - len(line)]
        self._pass_on(rest)
        self.flush()
        return True

    def _find_done(self, data: bytes, start: int) -> int:
        """Where a `done` begins, at the start of a line."""
        if self.at_start and data.startswith(_DONE, start):
            return start
        at = data.find(b"\n" + _DONE, start)
        return at + 1 if at >= 0 else -1

    def _pass_on(self, data: bytes) -> None:
        if not data:
            return
        self.at_start = data.endswith(b"\n")
        if not self.options["binary"]:
            if not data.isascii():
                data = data.translate(_PRINTABLE)
            if self.pad:
                data = data.replace(b"\n", b"\n" + self.pad)
        self.to_host += data

    def say(self, frame: dict[str, Any]) -> None:
        """A frame of our own, at the start of a line."""
        self.to_host += json.dumps(frame, separators=(",", ":")).encode("ascii") + b"\n" + self.pad

    def tell_output(self) -> None:
        """All that was written by now; each part says what was left out before it."""
        for number, output in enumerate(self.outputs, 1):
            output.drain()
            head, tail, omitted = output.take()
            for part, before in ((head, 0), (tail, omitted)):
                for at in range(0, len(part), PIECE):
                    data = binascii.b2a_base64(part[at : at + PIECE], newline=False).decode("ascii")
                    frame = {"t": "output", "stream": number, "data": data}
                    if before:
                        frame["omitted"], before = before, 0
                    self.say(frame)

    def flush(self) -> None:
        """Write what the stream takes. Raises `Gone` if it takes nothing any more."""
        try:
            while True:
                if self.link is not None:
                    self.link.fill(self.raw, self.to_host)
                if not self.raw:
                    return
                del self.raw[: os.write(self.out, memoryview(self.raw)[:CHUNK])]
        except BlockingIOError:
            return
        except OSError as error:
            raise Gone from error

    # ---- the end -----------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """End the worker, if it is still there, and everything that it started."""
        signal.set_wakeup_fd(-1)
        warden.signal_quietly(self.worker, signal.SIGKILL)
        if self.status is None:
            self.status = os.waitpid(self.worker, 0)[1]
        if self.mode == "group":
            with contextlib.suppress(OSError):
                os.killpg(self.worker, signal.SIGKILL)
        else:
            warden.sweep(self.mode)  # type: ignore[arg-type]

    def part(self) -> None:
        """Tell the host all that is left, if it is there to hear it."""
        while self.read_worker():
            pass
        if self.begun or not self.at_start:
            self._pass_on(self.begun + b"\n")
        self.tell_output()
        status = self.status or 0
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        self.say({"t": "exited", "status": code, "reason": self.reason})
        if self.link is None:
            sandboxed.farewell(self.out, self.to_host)
        else:
            self._take_leave(self.link)

    def _take_leave(self, link: Link) -> None:
        """Until the host took all of it, though the stream may break meanwhile."""
        end, poll = time.monotonic() + sandboxed.FAREWELL, select.poll()
        poll.register(self.inp, select.POLLIN)
        with contextlib.suppress(Gone):
            self.flush()
            while (self.to_host or self.raw or link.kept) and (left := end - time.monotonic()) > 0:
                if not self.to_host and not self.raw:
                    self.raw += link.wrap(b"")
                self.flush()
                poll.register(self.out, select.POLLOUT if self.raw else 0)
                poll.poll(min(left, 1) * 1000)
                self.read_host()


def main(begun: bytes) -> NoReturn:
    """Keep one worker; `begun` is what came of the host's stream after this program itself."""
    inp, out = sandboxed.take_wire(MOST_OUT)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what started it may have blocked some
    folder, link = "", None
    try:
        while b"\n" not in begun:
            data = os.read(inp, CHUNK)
            if not data:
                os._exit(0)
            begun += data
        line, _, rest = begun.partition(b"\n")
        options: Options = json.loads(line)
        link = Link() if options["resumed"] else None
        if confine.LINUX:
            confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
            confine.prctl(confine.PR_SET_DUMPABLE, 0)  # no cell reads our memory or opens our descriptors
        sandboxed.extend_path(options["packages"])
        worker = worker_main.prepare()
        if options["shell"]:
            from . import shell  # noqa: PLC0415 - others start without it

            shell.install(worker)
        folder = options["folder"]
        keeper = Keeper(options, (inp, out), link)
        try:
            keeper.take_in(rest)
            keeper.run()
        except Gone:
            keeper.sweep()
        else:
            keeper.sweep()
            keeper.part()
    except Exception as error:
        sys.stderr.write(f"the keeper failed: {type(error).__name__}: {error}\n")
        frame = {"t": "exited", "reason": f"its keeper failed: {type(error).__name__}: {error}"[:1000]}
        data = b"\n" + json.dumps(frame).encode("ascii") + b"\n" + b" " * 8 + b"\n"
        sandboxed.farewell(out, bytearray(data if link is None else link.wrap(data)))
    finally:
        if folder:
            remove_tree(folder, last="lock")
        os._exit(0)
