"""The event loop that all `RLM` of a process share, in a thread of its own, and the tasks that threads begin there.

At any line of another thread Ctrl-C may come, or the garbage collector call for the end of an `RLM`. So other threads
only post functions to the loop, in order, and wait; what must not be half done is done in the loop's thread.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - what the portal's loop is, and needs to be told as such
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any, Generic, TypeVar

import anyio

from .engine.doors import Outcome
from .errors import CancellationError, ConfigurationError

T = TypeVar("T")


class Task(Generic[T]):
    """A coroutine function that is run once in the portal, if `Portal.begin` is told to."""

    def __init__(self, function: Callable[[], Awaitable[T]]) -> None:
        self._function = function
        self._outcome = Outcome[T]()
        self._over = threading.Event()
        self._process = os.getpid()
        self.thread: PortalThread | None = None
        # What follows is written in the portal's thread only.
        self._admitted = False
        self._stopped = False
        self._dropped = False
        self._refused: Exception | None = None
        self._scope: anyio.CancelScope | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether it is under way in the process that this one was forked from, and nowhere here."""
        return self._process != os.getpid()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def result(self) -> T:
        """What came of it, once.

        Raises:
            CancellationError: if another thread has stopped it.
        """
        self._over.wait()
        if self._dropped:
            threading.Event().wait()  # the process ends, and this daemon thread with it
        try:
            return self._outcome.result()
        except asyncio.CancelledError:
            raise CancellationError("stopped from outside; everything the run had started is gone") from None

    def wait(self) -> None:
        """Until it is over, if it was begun, and the thread too if nothing else runs there."""
        if self.thread is None:
            return
        self._over.wait()
        if self.thread.is_ending:
            self.thread.join()

    def stop(self) -> None:
        """Cancel it, if it was begun, and wait for its end."""
        if self.thread is not None and not self.is_foreign:
            self.post(self.cancel)
            self.wait()

    def post(self, function: Callable[[], object]) -> None:
        """Call a function in the portal's thread, after what was posted before; not if that has ended."""
        if self.thread is not None and not self.is_foreign:
            self.thread.post(function)

    # ---- in the portal's thread ----

    def cancel(self) -> None:
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()
        elif not self._admitted and self.thread is not None:  # who began it was interrupted before saying so
            self.thread.discard(self)

    def drop(self) -> None:
        """Cancel it at the end of the process: who waits for it is not told any more."""
        self._dropped = True
        self.cancel()

    def admit(self, *, refused: Exception | None = None) -> None:
        self._admitted, self._refused = True, refused

    async def run(self) -> None:
        if self._refused is not None:
            self._outcome.error = self._refused
            return
        with anyio.CancelScope() as self._scope:
            if self._stopped:
                self._scope.cancel()
            # One that nobody asked for would cancel all that runs here.
            with suppress(asyncio.CancelledError):
                await self._outcome.of(self._function)

    def end(self, error: Exception | None = None) -> None:
        if error is not None:
            self._outcome.error = error
        self._over.set()


class Tasks:
    """Tasks that are told to end together. Used in the portal's thread only."""

    def __init__(self) -> None:
        self.closed = False
        self._tasks: set[Task[Any]] = set()
        self._one_less: anyio.Event | None = None

    def admit(self, task: Task[Any]) -> None:
        task.admit(refused=ConfigurationError("this RLM is being closed") if self.closed else None)
        self._tasks.add(task)

    def discard(self, task: Task[Any]) -> None:
        self._tasks.discard(task)
        if self._one_less is not None:
            self._one_less.set()

    def cancel(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    def drop(self) -> None:
        for task in tuple(self._tasks):
            task.drop()

    async def over(self) -> None:
        """Until none is left."""
        while self._tasks:
            self._one_less = anyio.Event()
            await self._one_less.wait()


class Portal:
    """Where tasks are begun. The first one starts the thread, which ends with the last.

    Not anyio's own: there, what a task raises may end the loop and all other tasks, and in a forked process it waits,
    while it is collected, for a thread that is not there.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.thread: PortalThread | None = None

    def begin(self, task: Task[Any], among: Tasks | None = None) -> None:
        """Begin a task, and count it among others of its kind.

        Raises:
            ConfigurationError: in the portal's thread, which would wait for what it has to do.
        """
        self.refuse_own_thread()
        with self.lock:
            thread = self.thread
            if thread is None or not thread.is_alive():
                thread = PortalThread(self)
            try:
                if thread is not self.thread:
                    thread.start()
                    self.thread = thread
                thread.begin(task, among)
            except BaseException:  # Ctrl-C, before or after it was begun
                if task in thread.tasks:  # until it is over, or stopped
                    task.thread = thread
                else:
                    thread.ready.add_done_callback(thread.look)
                raise

    def refuse_own_thread(self) -> None:
        if self.thread is threading.current_thread():
            raise ConfigurationError(
                "RLM can't be used in a callback, listener or model function of an RLM: make that a coroutine function "
                "and await AsyncRLM there"
            )


class PortalThread(threading.Thread):
    """A thread with an event loop, as long as there are tasks in it."""

    def __init__(self, portal: Portal) -> None:
        super().__init__(name="asyncrlm-portal", daemon=True)
        self.is_ending = False
        self._portal = portal
        self.tasks: set[Task[Any]] = set()  # begun and not over; added to under the portal's lock
        self.ready: Future[asyncio.AbstractEventLoop] = Future()
        self._served = False

    def begin(self, task: Task[Any], among: Tasks | None) -> None:
        """Under the portal's lock, so that it does not end meanwhile."""
        loop = self.ready.result()
        context = copy_context()
        sniffio: Any = sys.modules.get("sniffio")
        if sniffio is not None:
            context.run(sniffio.current_async_library_cvar.set, "asyncio")
        self.tasks.add(task)
        task.thread = self
        loop.call_soon_threadsafe(self._admit, task, among, context=context)

    def post(self, function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and all its tasks are over
            self.ready.result().call_soon_threadsafe(function)

    def run(self) -> None:
        try:
            Context().run(anyio.run, self._serve, backend_options={"loop_factory": self._loop})
        except asyncio.CancelledError:
            return  # by something that cancelled all tasks; those of ours have told it
        except BaseException as error:
            if self.ready.done():
                raise
            self.ready.set_exception(error)
        finally:
            for task in self.tasks:
                task.end(RuntimeError("the event loop that RLM runs in was ended by something that ran there"))

    def _loop(self) -> asyncio.AbstractEventLoop:
        """A loop that goes on where a task raises SystemExit or KeyboardInterrupt, which ends other loops."""
        loop = asyncio.new_event_loop()
        run_forever = loop.run_forever

        def go_on() -> None:
            while True:
                try:
                    run_forever()
                    break
                except (SystemExit, KeyboardInterrupt):  # it is that task's outcome, too
                    if self._served:
                        raise

        loop.run_forever = go_on
        return loop

    async def _serve(self) -> None:
        self._leave = anyio.Event()
        try:
            async with anyio.create_task_group() as self._group:
                self.ready.set_result(asyncio.get_running_loop())
                await self._leave.wait()
        finally:
            self._served = True

    def _admit(self, task: Task[Any], among: Tasks | None) -> None:
        if among is None:
            task.admit()
        else:
            among.admit(task)
        self._group.start_soon(self._work, task, among)

    async def _work(self, task: Task[Any], among: Tasks | None) -> None:
        try:
            await task.run()
        finally:
            if among is not None:
                among.discard(task)
            self.discard(task)

    def look(self, ready: Future[asyncio.AbstractEventLoop]) -> None:
        """End, unless there is something to do."""
        if ready.exception() is None:
            self.post(self._end_without_tasks)

    def discard(self, task: Task[Any]) -> None:
        """In this thread: a task is over, or was never begun."""
        self.tasks.discard(task)
        self._end_without_tasks()
        task.end()

    def _end_without_tasks(self) -> None:
        with self._portal.lock:
            if not self.tasks:
                self.is_ending = True
                if self._portal.thread is self:
                    self._portal.thread = None
        if self.is_ending:
            self._leave.set()
