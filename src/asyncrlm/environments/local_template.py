"""The host's end of the template: the process that local workers are cloned from, shared by the runs of a scope."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from .. import repl
from ..errors import ConfigurationError, SandboxLost
from .local_order import Facts, Order
from .local_sandbox import LocalSandbox, open_pipes

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import TracebackType


START_LIMIT = 60.0
"""Seconds a template may take to come up; it needs a twentieth of one."""
STOP_LIMIT = 10.0
SPARES = 4
"""Workers kept ahead by a scope that lives long; each costs 4 MB."""
AT_ONCE = 8
"""Workers asked for before others get their turn at the loop; each takes a fraction of a millisecond."""
PATIENCE = 5.0
"""Seconds without any worker ending after which a run whose depth is not known goes ahead beyond its share."""
_PREFIX = "asyncrlm-"
_BOOTSTRAP = """\
import importlib.util as u, sys
at = sys.argv[1]
s = u.spec_from_file_location("_asyncrlm_worker", at + "/__init__.py", submodule_search_locations=[at])
sys.modules[s.name] = m = u.module_from_spec(s)
s.loader.exec_module(m)
from _asyncrlm_worker import template
template.main(sys.argv[2])
"""


class Process:
    """One template process and its folder."""

    def __init__(self, python: str, mode: str, packages: list[str], package: Path) -> None:
        """Start it; blocks for milliseconds, so call it in a thread.

        Raises:
            ConfigurationError: if `python` can't be run.
        """
        sweep_homes()
        self.home = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = -1
        self.control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Locked before it has the name that a sweep looks for, or a sweep could take a home that is being made.
            lock = os.open(self.home / "making", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            (self.home / "making").rename(self.home / "lock")
            options = {
                "control": far.fileno(),
                "host": os.getpid(),
                "home": str(self.home),
                "lock": lock,
                "mode": mode,
                "packages": packages,
            }
            with (self.home / "log").open("wb") as log:
                self._popen = subprocess.Popen(  # noqa: S603 - the interpreter the caller named
                    [python, "-I", "-c", _BOOTSTRAP, str(package), json.dumps(options)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"},
                    cwd="/",
                    pass_fds=[far.fileno(), lock],
                    start_new_session=True,  # a signal to the host's group is the host's to handle
                )
            self._pidfd = os.pidfd_open(self._popen.pid)
        except OSError as e:
            self.control.close()
            shutil.rmtree(self.home, ignore_errors=True)
            if isinstance(e, (FileNotFoundError, PermissionError)) and e.filename == python:
                raise ConfigurationError(f"python={python!r} can't be run: {e.strerror}") from e
            raise
        finally:
            far.close()
            if lock >= 0:
                os.close(lock)
        self.control.setblocking(False)

    async def hello(self) -> Facts:
        """What the process found; the first and last thing it says.

        Raises:
            SandboxLost: if it ended instead, or took too long.
        """
        with anyio.move_on_after(START_LIMIT):
            await anyio.wait_readable(self.control)
            data = self.control.recv(1 << 16)
            if data:
                return msgspec.json.decode(data, type=Facts)
        log = await anyio.to_thread.run_sync(self._log)
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
        """Hang up and wait until the process, all workers and its folder are gone."""
        with anyio.CancelScope(shield=True):
            anyio.notify_closing(self.control)
            self.control.close()
            with anyio.move_on_after(STOP_LIMIT):
                while self._popen.poll() is None:
                    await anyio.wait_readable(self._pidfd)
            if self._popen.poll() is None:
                self._popen.kill()
                while self._popen.poll() is None:
                    await anyio.wait_readable(self._pidfd)
            os.close(self._pidfd)
            # It removes its home itself, unless it was killed; then its wardens, who hold the lock too, are ending.
            with anyio.move_on_after(STOP_LIMIT):
                await anyio.to_thread.run_sync(self._remove_home, abandon_on_cancel=True)

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
        shutil.rmtree(self.home, ignore_errors=True)


def sweep_homes() -> None:
    """Remove the homes of templates that were killed together with all their wardens: nobody holds their locks."""
    for entry in os.scandir(tempfile.gettempdir()):
        if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            lock = os.open(Path(entry.path) / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


class LocalTemplate:
    """What the runs of one scope share: a template process, started again if it dies, and a few workers ahead.

    It holds no task: it may be left by another task than entered it.
    """

    def __init__(self, python: str, mode: str, packages: list[str], package: Path | None = None) -> None:
        self._arguments = python, mode, packages, package or Path(repl.__path__[0]) / "worker"
        self._process: Process | None = None
        self._facts: Facts | None = None
        self.orders: dict[Hashable, Order] = {}
        """Environment → what its workers are asked for with, where the facts hold."""
        self._starting = anyio.Lock()
        self._turns = anyio.Lock(fast_acquire=True)
        self._in_a_row = 0
        self._sending = anyio.Lock()  # anyio lets one task wait for a descriptor, not two
        self._sandboxes: set[LocalSandbox] = set()  # all that are open, spares included
        self._spares: dict[tuple[bytes, int], deque[LocalSandbox]] = {}
        self._released = anyio.Event()  # replaced whenever a sandbox is closed
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Four descriptors a worker, and half of the limit is everybody else's.
        self._most = 1 << 20 if soft == resource.RLIM_INFINITY else max(8, soft // 8)

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            for sandbox in list(self._sandboxes):  # the spares, and what a user forgot
                await sandbox.aclose()
            if self._process is not None:
                process, self._process = self._process, None
                await process.stop()

    async def _start(self) -> Process:
        async with self._starting:
            if self._process is not None:
                return self._process
            process: Process | None = None
            # In a shield: a thread's result that nobody takes would be a process that nobody stops.
            with anyio.CancelScope(shield=True):
                process = await anyio.to_thread.run_sync(Process, *self._arguments)
            assert process is not None  # noqa: S101 - a shielded scope lets every exception through
            try:
                self._facts = await process.hello()
                self.orders.clear()
            except BaseException:
                await process.stop()
                raise
            self._process = process
            return process

    async def _replace(self, dead: Process) -> None:
        if self._process is dead:
            self._process = None
            await dead.stop()

    @property
    def facts(self) -> Facts:
        """What is in force here; known once entered."""
        assert self._facts is not None  # noqa: S101 - entering sets it
        return self._facts

    # ---- workers ----

    async def worker(self, order: Order, *, depth: int | None, long_lived: bool) -> LocalSandbox:
        """A worker for this order: one kept ahead, or a new one.

        Raises:
            SandboxLost: if none can be had.
        """
        sandbox = await self._spare(order.key)
        if sandbox is None:
            await self._take_turns()
            await self._wait_for_room(depth)
            sandbox = await self._spawn(order, depth)
        if long_lived and order.request.work is None:
            try:
                await self._refill(order)
            except BaseException:
                await sandbox.aclose()
                raise
        return sandbox

    async def _take_turns(self) -> None:
        """Runs that start in one pass of the loop would hold it up together: after a few, the others come one a pass.

        Whoever waits its pass out has the lock meanwhile, so those behind it queue.
        """
        async with self._turns:
            self._in_a_row += 1
            if self._in_a_row >= AT_ONCE:
                self._in_a_row = 0
                await anyio.lowlevel.checkpoint()

    async def _spare(self, key: tuple[bytes, int]) -> LocalSandbox | None:
        spares = self._spares.get(key)
        while spares:
            sandbox = spares.popleft()
            if sandbox.is_fresh():
                return sandbox
            await sandbox.aclose()
        return None

    async def _refill(self, order: Order) -> None:
        spares = self._spares.setdefault(order.key, deque())
        while len(spares) < SPARES and len(self._sandboxes) < self._most // 2:
            spares.append(await self._spawn(order, None))

    async def _drop_spares(self) -> None:
        for spares in self._spares.values():
            while spares:
                await spares.popleft().aclose()

    async def _wait_for_room(self, depth: int | None) -> None:
        """Wait until this depth may have one worker more.

        Runs wait for their children, so each depth leaves half of what the one above left it to those below: however
        many runs there are, one that waits for nobody goes on. So deep that nothing is left, none waits.
        """
        share = self._most >> ((depth or 0) + 1)
        if not share:
            return
        while len(self._sandboxes) >= self._most - share:
            if any(self._spares.values()):
                await self._drop_spares()
            elif not await self._one_released(bounded=depth is None):
                return

    async def _one_released(self, *, bounded: bool) -> bool:
        with anyio.move_on_after(PATIENCE if bounded else None):
            await self._released.wait()
            return True
        return False

    def _forget(self, sandbox: LocalSandbox) -> None:
        self._sandboxes.discard(sandbox)
        self._released.set()
        self._released = anyio.Event()

    async def _spawn(self, order: Order, depth: int | None) -> LocalSandbox:
        for _ in range(2):
            process = self._process or await self._start()
            token = secrets.token_hex(8)
            sandbox, far = await self._open_ends(f"{process.home}/{token}/files", order, depth)
            try:
                await self._ask(process, b'{"token":"%s",%s' % (token.encode(), order.body[1:]), far)
            except OSError:  # the template is gone; once more with a new one
                await sandbox.aclose()
                await self._replace(process)
            except BaseException:
                await sandbox.aclose()
                raise
            else:
                return sandbox
        raise SandboxLost("the local environment's template died twice while a worker was asked for")

    async def _ask(self, process: Process, request: bytes, far: list[int]) -> None:
        """Send the request, and close our copies of the worker's ends: only then can the channel end."""
        try:
            process.send(request, far)
        except BlockingIOError:
            async with self._sending:
                await self._send_when_writable(process, request, far)
        finally:
            for fd in far:
                os.close(fd)

    async def _send_when_writable(self, process: Process, request: bytes, far: list[int]) -> None:
        while True:
            try:
                # Before any wait: while this task queued, the template may have been found dead and its socket closed.
                return process.send(request, far)
            except BlockingIOError:
                pass
            try:
                await anyio.wait_writable(process.control)
            except anyio.ClosedResourceError as e:
                raise BrokenPipeError from e

    async def _open_ends(self, files: str, order: Order, depth: int | None) -> tuple[LocalSandbox, list[int]]:
        while True:
            try:
                return self._ends(files, order)
            except OSError as e:
                if e.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                if self._sandboxes and await self._one_released(bounded=depth != 0):
                    continue
                raise SandboxLost("no descriptor is left for a worker: raise the limit (ulimit -n)") from e

    def _ends(self, files: str, order: Order) -> tuple[LocalSandbox, list[int]]:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            outputs, far_ends = open_pipes(order.keep)
        except OSError:
            near.close()
            far.close()
            raise
        near.setblocking(False)
        copies = order.request.confine and "readonly" in self.facts.mounts
        sandbox = LocalSandbox(near, outputs, files, order.report, copies_passed=copies, on_closed=self._forget)
        self._sandboxes.add(sandbox)
        return sandbox, [far.detach(), *far_ends]
