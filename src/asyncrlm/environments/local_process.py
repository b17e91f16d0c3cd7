"""One template process as the host has it: start, hello, requests, end, and the folder that it lives in."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from ..errors import ConfigurationError, SandboxLost
from ..repl.worker import homes
from ..repl.worker.removing import remove_tree
from .local_order import ENVIRON, Facts

START_LIMIT = 60.0
"""Seconds a template may take to come up; it needs a twentieth of one."""
STOP_LIMIT = 10.0
"""Seconds to hang up on a template in, and again to see the end of one that was killed."""
_WORKER_IMPORT = """\
import importlib.util as u, sys
at = sys.argv[1]
s = u.spec_from_file_location("_asyncrlm_worker", at + "/__init__.py", submodule_search_locations=[at])
sys.modules[s.name] = m = u.module_from_spec(s)
s.loader.exec_module(m)
"""
"""How a bare interpreter gets the worker's package from its folder, the first argument, without the rest of ours."""
_BOOTSTRAP = (
    _WORKER_IMPORT
    + "from _asyncrlm_worker import forking\nforking.put_off()\n"
    + "from _asyncrlm_worker import template\ntemplate.main(sys.argv[2])\n"
)


class KilledError(SandboxLost):
    """A process ended by a signal before it was up."""


class Process:
    """One template process and its folder."""

    def __init__(
        self,
        python: str,
        mode: str,
        packages: list[str],
        package: Path,
        threads: anyio.CapacityLimiter,
        shell: bool,
    ) -> None:
        """Start it; blocks for milliseconds, so call it in a thread.

        Raises:
            ConfigurationError: if `python` can't be run.
        """
        self._threads = threads
        self.control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end = lock = -1
        try:
            end = homes.above_standard(far.detach())
            self.home, lock = make_home()
            options = {
                "control": end,
                "host": os.getpid(),
                "home": str(self.home),
                "lock": lock,
                "mode": mode,
                "packages": packages,
                "shell": shell,
            }
            with (self.home / "log").open("wb") as log:
                self._popen = subprocess.Popen(  # noqa: S603 - the interpreter the caller named
                    [python, "-I", "-c", _BOOTSTRAP, str(package), json.dumps(options)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=ENVIRON,
                    cwd="/",
                    pass_fds=[end, lock],
                    start_new_session=True,  # a signal to the host's group is the host's to handle
                )
            self._pidfd = os.pidfd_open(self._popen.pid)
        except OSError as e:
            self.control.close()
            if lock >= 0:
                remove_tree(self.home, last="lock")
            if isinstance(e, (FileNotFoundError, PermissionError)) and e.filename == python:
                raise ConfigurationError(f"python={python!r} can't be run: {e.strerror}") from e
            raise
        finally:
            for fd in (end, lock):
                if fd >= 0:
                    os.close(fd)
        self.control.setblocking(False)
        self.tokens: list[str] = []
        """Names of workers that have ended, to be given again: their folders may still be there."""

    async def hello(self) -> Facts:
        """What the process found; the first and last thing it says.

        Raises:
            KilledError: if somebody else killed it.
            SandboxLost: if it ended instead, or took too long.
        """
        with anyio.move_on_after(START_LIMIT):
            await anyio.wait_readable(self.control)
            data = self.control.recv(1 << 16)
            if data:
                return msgspec.json.decode(data, type=Facts)
            await self._gone()
            if self._popen.returncode < 0:
                raise KilledError(f"the local environment's template was killed ({-self._popen.returncode})")
        log = await anyio.to_thread.run_sync(self._log, limiter=self._threads)
        raise SandboxLost(f"the local environment's template did not come up: {log or 'it said nothing'}")

    def _log(self) -> str:
        try:
            return (self.home / "log").read_bytes()[-2000:].decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def send(self, request: bytes, fds: list[int]) -> None:
        """Ask for a worker. Raises BlockingIOError if the process is busy, another OSError if it is gone."""
        socket.send_fds(self.control, [request], fds, getattr(socket, "MSG_NOSIGNAL", 0))

    async def stop(self) -> None:
        """Hang up and wait until the process, all workers and its folder are gone. Cancelled, it kills the process."""
        anyio.notify_closing(self.control)
        self._hang_up()
        try:
            with anyio.move_on_after(STOP_LIMIT):
                await self._gone()
            with anyio.move_on_after(STOP_LIMIT):
                self._kill()
                await self._gone()
        finally:
            self._kill()
            os.close(self._pidfd)
        # It removes its home itself, unless it was killed; then its wardens, who hold the lock too, are ending.
        with anyio.move_on_after(STOP_LIMIT):
            await anyio.to_thread.run_sync(self._remove_home, abandon_on_cancel=True, limiter=self._threads)

    def abandon(self) -> None:
        """As `stop`, for a process that no task waits for; blocks."""
        self._hang_up()
        try:
            self._popen.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        os.close(self._pidfd)
        self._remove_home()

    def _hang_up(self) -> None:
        # A forked child of the host has a copy of this end, so that closing ours alone would not hang up.
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()

    async def _gone(self) -> None:
        while self._popen.poll() is None:
            await anyio.wait_readable(self._pidfd)

    def _kill(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()

    def _remove_home(self) -> None:
        try:
            lock = os.open(self.home / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            pass
        else:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            finally:
                os.close(lock)
        remove_tree(self.home, last="lock")


class Start:
    """A process that is being started in a thread, which ends it where no task waits for it any more.

    No shield holds a task that `asyncio.run` cancels at its end.
    """

    def __init__(self, start: Callable[[], Process]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._abandoned = False

    def run(self) -> None:
        """Start it; in a thread."""
        process = self._start()
        with self._lock:
            if not self._abandoned:
                self._process = process
                return
        process.abandon()

    @property
    def process(self) -> Process:
        """Once `run` has returned."""
        if self._process is None:
            raise RuntimeError("it was not started")
        return self._process

    def abandon(self) -> Process | None:
        """Nobody waits for it any more. Returns what is to be stopped, if it is there already."""
        with self._lock:
            self._abandoned = True
            return self._process


def make_home() -> tuple[Path, int]:
    """A new folder in that of temporary files, and the descriptor that holds its lock; what others left there is
    removed first."""
    sweep_homes()
    home = Path(tempfile.mkdtemp(prefix=homes.PREFIX))
    try:
        return home, homes.lock_home(str(home))
    except BaseException:
        remove_tree(home)
        raise


def sweep_homes() -> list[str]:
    """Remove the homes of templates that were killed together with all their wardens.

    Returns: those that were removed.
    """
    return homes.sweep_homes(tempfile.gettempdir())
