"""The host's end of the template: the process that local workers are cloned from, shared by the runs of a scope."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import secrets
import socket
import warnings
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio
import anyio.lowlevel
import anyio.to_thread

from .. import repl
from ..errors import SandboxLost
from .local_order import SPARES
from .local_output import open_pipes
from .local_process import STOP_LIMIT, KilledError, Process, Start
from .local_sandbox import LocalSandbox

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import TracebackType

    from .local_order import Facts, Order


FEW = 4
"""Running workers up to which those that end start spare ones: more need the processors themselves."""
AT_ONCE = 8
"""Workers asked for before others get their turn at the loop; each takes a fraction of a millisecond."""
PATIENCE = 5.0
"""Seconds without any worker ending after which a run whose depth is not known goes ahead beyond its share."""
TOLD = 30.0
"""Seconds without any worker ending after which it is said that runs wait for one to end."""
GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)
"""What sending to a template that is no more fails with."""


class Place:
    """Where a worker is, and what others are started like when it ends, if any."""

    __slots__ = ("doubted", "process", "successors", "token")

    def __init__(self, process: Process, token: str) -> None:
        self.process = process
        self.token = token
        self.successors: Order | None = None
        self.doubted = False


class LocalTemplate:
    """What the runs of one scope share: a template process, started again if it dies, and a few workers ahead.

    It holds no task: it may be left by another task than entered it.
    """

    def __init__(
        self,
        python: str,
        mode: str,
        packages: list[str],
        package: Path | None = None,
        *,
        threads: anyio.CapacityLimiter,
        shell: bool = False,
    ) -> None:
        """`shell`: cells run in IPython's shell, which is made with the template."""
        self._arguments = python, mode, packages, package or Path(repl.__path__[0]) / "worker", threads, shell
        self._threads = threads
        self._process: Process | None = None
        self._facts: Facts | None = None
        self.orders: dict[Hashable, Order] = {}
        """Environment → what its workers are asked for with, where the facts hold."""
        self._starting = anyio.Lock()
        self._turns = anyio.Lock(fast_acquire=True)
        self._in_a_row = 0
        self._sending = anyio.Lock()  # anyio lets one task wait for a descriptor, not two
        self._sandboxes: dict[LocalSandbox, Place] = {}  # all that are open, spares included
        self._spares: dict[tuple[bytes, int], deque[LocalSandbox]] = {}
        self._filling = anyio.Lock()
        self._filled: set[tuple[bytes, int]] = set()  # whose spares have once been started, all of them
        self._released = anyio.Event()  # replaced whenever a sandbox is closed
        self._told = False  # that some wait
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Four descriptors a worker, and half of the limit is everybody else's.
        self._most = 1 << 20 if soft == resource.RLIM_INFINITY else max(8, soft // 8)

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not shielded: whoever leaves it has a grace of its own, and what that cuts off is killed.
        process, self._process = self._process, None
        try:
            async with anyio.create_task_group() as group:
                for sandbox in list(self._sandboxes):  # the spares, and what a user forgot
                    group.start_soon(sandbox.aclose)
        finally:
            if process is not None:
                await process.stop()

    async def _start(self) -> Process:
        async with self._starting:
            if self._process is None:
                try:
                    self._process = await self._started()
                except KilledError:  # nothing has run: once more is free
                    self._process = await self._started()
            return self._process

    async def _started(self) -> Process:
        start = Start(partial(Process, *self._arguments))
        try:
            with anyio.CancelScope(shield=True):  # or the thread would have to end what it starts
                await anyio.to_thread.run_sync(start.run, limiter=self._threads)
            self._facts = await start.process.hello()
            self.orders.clear()
        except BaseException:
            process = start.abandon()
            if process is not None:
                await _stop(process)
            raise
        return start.process

    async def _replace(self, dead: Process) -> None:
        if self._process is dead:
            self._process = None
            await _stop(dead)

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
        keep = long_lived and order.request.work is None
        if keep and order.filled and order.key not in self._filled:
            async with self._filling:
                if order.key not in self._filled:
                    await self._fill(order, depth)
        await self._take_turns()
        sandbox = await self._spare(order.key)
        if sandbox is None:
            await self._wait_for_room(depth)
            sandbox = await self._spawn(order, depth)
            if keep:
                self._refill(order, SPARES)
        if keep:
            self._sandboxes[sandbox].successors = order
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
            if sandbox.is_fresh() and not self._sandboxes[sandbox].doubted:
                return sandbox
            await sandbox.aclose()
        return None

    async def _fill(self, order: Order, depth: int | None) -> None:
        """Start all the workers that were asked for, once, and wait until they are there: so do the first runs."""
        started: list[LocalSandbox] = []
        try:
            while len(started) < order.ahead and len(self._sandboxes) < self._most // 2:
                started.append(await self._spawn(order, depth))
            for sandbox in started:
                await sandbox.started()
        finally:
            # Only now: nobody may wait for a worker's first word while another task reads it.
            self._spares.setdefault(order.key, deque()).extend(started)
            self._filled.add(order.key)

    def _refill(self, order: Order, busy: int) -> None:
        """Start workers ahead, as far as that needs no wait, unless more than `busy` are running. In a burst nobody has
        time for it: then those do it who end when the burst is nearly over."""
        spares = self._spares.setdefault(order.key, deque())
        running = len(self._sandboxes) - sum(map(len, self._spares.values()))
        if self._process is None or running > busy:
            return
        for _ in range(min(AT_ONCE, order.ahead - len(spares), self._most // 2 - len(self._sandboxes))):
            try:
                spares.append(self._spawn_nowait(self._process, order))
            except OSError:
                return

    def _spawn_nowait(self, process: Process, order: Order) -> LocalSandbox:
        """Raises OSError if that would take a wait, or can't be."""
        sandbox, request, far = self._ends(process, order)
        try:
            process.send(request, far)
        except OSError:
            sandbox.release()
            raise
        finally:
            _close_all(far)
        return sandbox

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
        with anyio.move_on_after(PATIENCE if bounded else TOLD):
            await self._released.wait()
            return True
        if bounded:
            return False
        if not self._told:
            self._told = True
            warnings.warn(
                f"{len(self._sandboxes)} workers are open, which is what there is room for, and none has ended for "
                f"{TOLD:g} s; others wait: raise the limit of open files (ulimit -n), or close sessions",
                RuntimeWarning,
                stacklevel=2,
            )
        await self._released.wait()
        return True

    def _forget(self, sandbox: LocalSandbox) -> None:
        place = self._sandboxes.pop(sandbox)
        if sandbox.over:
            place.process.tokens.append(place.token)
        if sandbox.ended_alone:
            # Whatever ended it, such as the template's death, may just be ending those that were started ahead with it.
            for spare in self._sandboxes.keys() & itertools.chain.from_iterable(self._spares.values()):
                self._sandboxes[spare].doubted = True
        self._released.set()
        self._released = anyio.Event()
        if place.successors is not None:
            self._refill(place.successors, FEW)

    async def _spawn(self, order: Order, depth: int | None) -> LocalSandbox:
        for _ in range(2):
            process = self._process or await self._start()
            sandbox, request, far = await self._open_ends(process, order, depth)
            try:
                await self._ask(process, request, far)
            except OSError as e:  # the template is gone; once more with a new one
                await sandbox.aclose()
                if e.errno not in GONE:
                    raise
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
            _close_all(far)

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
                raise BrokenPipeError(errno.EPIPE, "the template is gone") from e

    async def _open_ends(
        self, process: Process, order: Order, depth: int | None
    ) -> tuple[LocalSandbox, bytes, list[int]]:
        while True:
            try:
                return self._ends(process, order)
            except OSError as e:
                if e.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                if self._sandboxes and await self._one_released(bounded=depth != 0):
                    continue
                raise SandboxLost("no descriptor is left for a worker: raise the limit (ulimit -n)") from e

    def _ends(self, process: Process, order: Order) -> tuple[LocalSandbox, bytes, list[int]]:
        """Our end of a new worker, the request for it and the worker's ends."""
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            outputs, far_ends = open_pipes(order.keep)
        except OSError:
            near.close()
            far.close()
            raise
        near.setblocking(False)
        token = process.tokens.pop() if process.tokens else secrets.token_hex(8)
        copies = order.request.confine and "readonly" in self.facts.mounts
        files = f"{process.home}/{token}"
        sandbox = LocalSandbox(
            near,
            outputs,
            files,
            order.report,
            copies_passed=copies,
            threads=self._threads,
            on_closed=self._forget,
        )
        self._sandboxes[sandbox] = Place(process, token)
        request = b'{"token":"%s",%s' % (token.encode(), order.body[1:])
        return sandbox, request, [far.detach(), *far_ends]


async def _stop(process: Process) -> None:
    with anyio.move_on_after(STOP_LIMIT, shield=True):
        await process.stop()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
