"""Threads for tools that are plain functions, and an account of those that nobody waits for any more."""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
from anyio.lowlevel import EventLoopToken, current_token

from ..backend import on_trio
from ..observe.log import get_logger

MOST_LEFT = 32
"""Threads left behind at which no more plain tools are called: each may hold what it works on for ever."""


class TooManyLeftError(Exception):
    """So many tools went on after their calls that no more are begun. The text names them."""


class ToolThreads:
    """Runs plain functions in threads of their own, for all runs of one engine.

    A thread can't be stopped. Where its caller is cancelled it is left behind: counted until it ends, named in a
    warning, and at `most_left` of them no more are started. The threads are daemons, so that one which never ends does
    not keep the process from ending. `anyio.from_thread` works in them.
    """

    def __init__(self, most_left: int = MOST_LEFT) -> None:
        self._most_left = most_left
        self._left: Counter[str] = Counter()  # name → threads left behind; under the lock, as `_Job.left` and `over`
        self._lock = threading.Lock()
        self._unlimited = anyio.CapacityLimiter(math.inf)

    @property
    def left(self) -> int:
        """Threads left behind that still run."""
        with self._lock:
            return self._left.total()

    async def run(self, name: str, function: Callable[[], Any]) -> Any:
        """What `function` returns; it must not raise. `name` is its tool's, for warnings.

        Raises:
            TooManyLeftError: if no more threads may be started now.
        """
        with self._lock:
            if self._left.total() >= self._most_left:
                each = ", ".join(f"{tool} {count}" for tool, count in self._left.most_common(5))
                raise TooManyLeftError(
                    f"{self._left.total()} calls of tools go on though nobody waits for them any more ({each}); "
                    "no plain function is called before one of them ends"
                )
        job = _Job(self, name, function)
        try:
            if on_trio():  # whose threads are daemons
                await anyio.to_thread.run_sync(job.run, abandon_on_cancel=True, limiter=self._unlimited)
            else:
                await job.run_as_daemon()
        except BaseException:
            self._leave(job)
            raise
        return job.result

    def _leave(self, job: _Job) -> None:
        with self._lock:
            if job.over:
                return
            job.left = True
            self._left[job.name] += 1
            total = self._left.total()
        get_logger().warning("a tool goes on in a thread that can't be stopped", tool=job.name, threads_left=total)

    def end(self, job: _Job) -> bool:
        """In its thread: the job is over. Returns whether anybody waits for it."""
        with self._lock:
            job.over = True
            if job.left:
                self._left[job.name] -= 1
                self._left += Counter()  # drops the names with none
            return not job.left


class _Job:
    def __init__(self, threads: ToolThreads, name: str, function: Callable[[], Any]) -> None:
        self.name = name
        self.result: Any = None
        self.over = False
        self.left = False
        self._threads = threads
        self._function = function

    def run(self) -> bool:
        """In the thread; returns whether anybody waits for the end."""
        self.result = self._function()
        return self._threads.end(self)

    async def run_as_daemon(self) -> None:
        """As `anyio.to_thread.run_sync` does on asyncio, whose threads there are none that a process may leave."""
        finished, token, context = anyio.Event(), current_token(), copy_context()

        def run() -> None:
            if not context.run(self.run):
                return
            try:
                anyio.from_thread.run_sync(finished.set, token=token)
            except RuntimeError:  # its event loop is over
                return

        with anyio.CancelScope() as scope:
            threading.Thread(target=_with_loop, args=(run, context, token, scope), daemon=True).start()
            await finished.wait()


def _with_loop(run: Callable[[], None], context: Context, token: EventLoopToken, scope: anyio.CancelScope) -> None:
    """Run it where no event loop seems to run in this thread, and `anyio.from_thread` knows which one waits."""
    sniffio: Any = sys.modules.get("sniffio")
    if sniffio is not None:
        context.run(sniffio.current_async_library_cvar.set, None)
    known: Any = getattr(anyio.from_thread, "threadlocals", None)
    if known is not None:
        known.current_token, known.current_cancel_scope = token, scope
    run()
