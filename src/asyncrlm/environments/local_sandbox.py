"""The host's end of one local worker: its channel, its two output pipes, its pidfd."""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from ..repl.sandbox import Printed, Report, Sandbox, check_file_name
from .local_output import CHUNK
from .local_socket import Sender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .local_output import Output

GRACE = 10.0
"""Seconds `aclose` waits for a killed worker to be gone; the kernel needs milliseconds, a swapping machine more."""
_YIELD_EVERY = 16


class LocalSandbox(Sender, Sandbox):
    """A worker on this machine. Four descriptors; see `Sandbox` for what each method promises.

    The channel reads as ended after everything the worker started has been ended, unless a cell ends it; once `aclose`
    returns all of it is gone, whoever ended the channel.
    """

    passes_files: ClassVar[bool] = True
    another_is_free: ClassVar[bool] = True

    def __init__(
        self,
        channel: socket.socket,
        outputs: tuple[Output, Output],
        files: str,
        report: Report,
        *,
        copies_passed: bool,
        threads: anyio.CapacityLimiter,
        on_closed: Callable[[LocalSandbox], None],
        held: bool = True,
    ) -> None:
        """`held`: whoever sweeps holds standard output until all is swept. The end of the channel proves nothing, since
        a cell can end it and go on; a pipe ends when its last writer is gone."""
        self.report = report
        self._channel = channel
        self._outputs = outputs
        self._files = files
        self._copies_passed, self._threads = copies_passed, threads
        self._on_closed = on_closed
        self._held = held
        self._gone = False
        self._pidfd = -1
        self._served = self._given_files = False
        self._ahead = b""  # read before anybody asked, by `is_fresh`
        self._ended = False  # the channel has ended: the worker is gone
        self.ended_alone = False  # and nobody here had asked for it
        self._killing = False
        self._closing = False
        self._closed: anyio.Event | None = None  # set once `aclose`, by whoever called it first, is through
        self._at_once = 0

    # ---- the channel ----

    def open_socket(self) -> socket.socket:
        if self._closing:
            raise anyio.BrokenResourceError
        return self._channel

    async def receive(self) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        while not self._closing:
            try:
                data = self._read()
            except BlockingIOError:
                self._at_once = 0
                try:
                    await anyio.wait_readable(self._channel)
                except anyio.ClosedResourceError:
                    break
                except anyio.BusyResourceError:
                    if not self._closing:
                        raise
                    break  # `aclose` reads it now
                continue
            if not data:
                self.kill()  # of a cell that ended the channel the worker is still there
                break
            # A worker that never pauses must not keep the loop to itself.
            self._at_once += 1
            if self._at_once >= _YIELD_EVERY:
                self._at_once = 0
                self._ahead = data
                await anyio.lowlevel.checkpoint()
                self._ahead = b""
            return data
        raise anyio.EndOfStream

    def _read(self) -> bytes:
        """What the channel holds; b"" at its end."""
        try:
            data = self._channel.recv(CHUNK) if self._pidfd >= 0 else self._read_with_descriptor()
        except ConnectionResetError:
            data = b""
        if not data and not self._ended:
            self._ended, self.ended_alone = True, not self._killing
        return data

    def _read_with_descriptor(self) -> bytes:
        # The first byte carries the worker's pidfd; it is sent before the worker could run anything of a model's.
        size = socket.CMSG_SPACE(array.array("i").itemsize)
        data, ancillary, _, _ = self._channel.recvmsg(CHUNK, size, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._pidfd = array.array("i", raw[: array.array("i").itemsize])[0]
                self._served = True
                if self._killing:
                    self.kill()
        return data

    @property
    def over(self) -> bool:
        """The worker that was there and all that it started are gone, and no file is on its way to it."""
        return self._gone and not self._given_files

    def is_fresh(self) -> bool:
        """Whether a worker started ahead is still there; what it has said meanwhile is kept for `receive`."""
        while not self._ended and len(self._ahead) < CHUNK:
            try:
                self._ahead += self._read()
            except BlockingIOError:
                return True
        return False

    async def started(self) -> None:
        """Wait until a worker started ahead has said something, or has ended; what it said is kept for `receive`."""
        while self.is_fresh() and not self._ahead:
            await anyio.wait_readable(self._channel)

    # ---- output ----

    async def pump(self) -> None:
        async with anyio.create_task_group() as group:
            for output in self._outputs:
                group.start_soon(output.pump)

    def take_output(self) -> tuple[Printed, Printed]:
        for output in self._outputs:
            if not self._closing:
                output.drain()
        out, err = self._outputs
        return out.printed(), err.printed()

    # ---- files ----

    async def put_file(self, name: str, chunks: Iterable[bytes]) -> str:
        check_file_name(name)
        return await anyio.to_thread.run_sync(self._write_file, Path(self._files, name), chunks, limiter=self._threads)

    def _write_file(self, path: Path, chunks: Iterable[bytes]) -> str:
        self._make_folder()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor
            for chunk in chunks:
                self._look_up()
                left = memoryview(chunk)
                while left:
                    left = left[file.write(left) :]
        return str(path)

    def _look_up(self) -> None:
        """In a thread that is not abandoned, for what it writes: whether anybody still wants it."""
        if self._closing:
            raise anyio.BrokenResourceError
        anyio.from_thread.check_cancelled()

    async def pass_file(self, open_file: Callable[[], int]) -> None:
        fd = await anyio.to_thread.run_sync(self._open_to_pass, open_file, limiter=self._threads)
        try:
            while True:
                try:
                    socket.send_fds(self.open_socket(), [b"\n"], [fd], getattr(socket, "MSG_NOSIGNAL", 0))
                except BlockingIOError:
                    await self.wait_writable()
                except OSError as e:
                    raise anyio.BrokenResourceError from e
                else:
                    return
        finally:
            os.close(fd)

    def _open_to_pass(self, open_file: Callable[[], int]) -> int:
        fd = open_file()
        status = os.fstat(fd)
        # Of a file without a name nothing is left that could be changed.
        if not (self._copies_passed and status.st_uid == os.geteuid() and status.st_nlink):
            return fd
        # A descriptor comes with the host's mount, which is not read-only: through it the owner's mode and times could
        # be changed. So an owner's file is opened as the worker's own mounts have it, or passed as an unnamed copy.
        if (seen := self._as_the_worker_sees_it(fd)) >= 0:
            os.close(fd)
            return seen
        copy = Path(self._files, f".pass-{os.urandom(8).hex()}")
        try:
            self._make_folder()
            with open(fd, "rb") as source, copy.open("xb") as target:  # noqa: PTH123 - a descriptor
                while data := source.read(CHUNK):
                    self._look_up()
                    target.write(data)
            return os.open(copy, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as e:  # the folder went, with the worker
            raise anyio.BrokenResourceError from e
        finally:
            copy.unlink(missing_ok=True)

    def _as_the_worker_sees_it(self, fd: int) -> int:
        """The same file through the worker's read-only mounts; -1 where it can't be had so."""
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 -- no path would do
            seen = os.open(f"/proc/{self._pid()}/root{path}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (OSError, KeyError, ValueError):
            return -1
        # The process may have ended, and its number be another's, by now: nothing but what was found counts.
        if os.path.sameopenfile(fd, seen) and os.fstatvfs(seen).f_flag & os.ST_RDONLY:
            return seen
        os.close(seen)
        return -1

    def _pid(self) -> int:
        """The worker's number here."""
        fields = dict(line.split(":\t", 1) for line in _read_proc(f"self/fdinfo/{self._pidfd}").splitlines())
        return int(fields["Pid"])

    def _make_folder(self) -> None:
        self._given_files = True
        Path(self._files).mkdir(mode=0o700, parents=True, exist_ok=True)

    # ---- the worker ----

    def interrupt(self) -> None:
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        self._killing = True
        if self._pidfd >= 0:
            self._signal(signal.SIGKILL)
        elif not self._ended and self._channel.fileno() >= 0:
            # Not yet known: it has run nothing, ends when its channel does, and is killed as soon as it is known.
            try:
                self._channel.shutdown(socket.SHUT_WR)
            except OSError:
                self._ended = True

    def _signal(self, number: int) -> None:
        if self._pidfd < 0:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return

    def cpu_seconds(self) -> float | None:
        if self._pidfd < 0:
            return None
        try:
            stat = _read_proc(f"{self._pid()}/stat").rpartition(")")[2].split()
        except (OSError, KeyError, ValueError):
            return None
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    # ---- the end ----

    async def aclose(self) -> None:
        if self._closed is not None:
            with anyio.CancelScope(shield=True):
                await self._closed.wait()
            return
        self._closed = anyio.Event()
        self.kill()
        self._closing = True
        with anyio.CancelScope(shield=True):
            try:
                await self._wake_waiters()
                with anyio.move_on_after(GRACE):
                    await self._wait_for_end()
                await self._wake_waiters()
            finally:
                self.release()
                self._closed.set()

    async def _wake_waiters(self) -> None:
        # Closed under a waiting task, a descriptor stays registered with the loop, and may meanwhile be another file's.
        for handle in (self._channel, *(output.fd for output in self._outputs)):
            anyio.notify_closing(handle)
        await anyio.lowlevel.checkpoint()

    async def _wait_for_end(self) -> None:
        while not self._ended:
            try:
                self._read()
            except BlockingIOError:
                try:
                    await anyio.wait_readable(self._channel)
                except anyio.BusyResourceError:  # whoever received was just reading and has not noticed yet
                    anyio.notify_closing(self._channel)
                    await anyio.lowlevel.checkpoint()
        if self._held and self._served:
            self.kill()  # known by now, if it was not when `aclose` began
            await self._outputs[0].last_writer_gone()
            self._gone = True

    def release(self) -> None:
        """Close the descriptors. The worker, if it is still there, reads the end of its channel and ends."""
        self._closing = True
        # A forked child of the host has a copy of this end, so that closing ours alone would not end the channel.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()
        for output in self._outputs:
            output.drain()  # so that what a killed cell had printed can still be taken
            os.close(output.fd)
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._on_closed(self)

    def __repr__(self) -> str:
        state = "closed" if self._closing else "ended" if self._ended else "open"
        return f"<LocalSandbox {state}, Python {self.report.python}>"


def _read_proc(name: str) -> str:
    # pread: these files are made up by the kernel and never block.
    fd = os.open(f"/proc/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, 4096, 0).decode("ascii", "replace")
    finally:
        os.close(fd)
