"""Event loops of cells: one that lives as long as the worker for top-level await, and `asyncio.run` inside it."""

from __future__ import annotations

import contextvars
import threading
import types
from typing import TYPE_CHECKING, Any

from .lazily import when_imported

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

PATIENCE = 0.3
"""Seconds that the tasks of an interrupted cell have to end."""


class Loops:
    """The persistent loop and the replacement of `asyncio.run`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self.broken_off = False
        """The last cell was interrupted, perhaps inside the loop's own code."""

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of top-level await, set as the main thread's current one. No loop runs in the main thread now."""
        if self.broken_off and self._loop is not None and not self._loop.is_closed():
            self.broken_off = False
            if not _calm(self._loop):
                self._loop = None
        if self._loop is None or self._loop.is_closed():
            import asyncio  # noqa: PLC0415 - see `lazily.py`

            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop

    def install(self) -> None:
        when_imported("asyncio", lambda asyncio: setattr(asyncio, "run", self.run))

    def run(self, main: Any, **options: Any) -> Any:
        """Run a coroutine to its end, also where a loop runs already: then in a thread of its own.

        Otherwise as `asyncio.run`.
        """
        import asyncio  # noqa: PLC0415 - see `lazily.py`

        real_run = asyncio.runners.run
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            try:
                return real_run(main, **options)
            finally:
                if self._loop is not None and threading.current_thread() is threading.main_thread():
                    asyncio.set_event_loop(self._loop)  # asyncio.run leaves none; cells still say get_event_loop()
        return _in_thread(lambda: real_run(main, **options))

    def top_level(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the code of a cell that awaits. If it is interrupted, the tasks it left are cancelled."""
        import asyncio  # noqa: PLC0415 - see `lazily.py`

        loop = self.loop()
        asyncio.set_event_loop(loop)
        failure: list[BaseException] = []
        try:
            value = loop.run_until_complete(loop.create_task(_catching(coroutine, failure)))
            if failure:
                raise failure[0]
            return value
        except (KeyboardInterrupt, SystemExit) as error:
            self.broken_off = True
            where = _suspended_at(coroutine)
            _cancel(loop)
            if where is not None:  # it hit the loop while it waited: show what the cell was waiting for
                raise error.with_traceback(where) from None
            raise
        finally:
            failure.clear()

    def cancel(self) -> None:
        """Cancel the tasks that the code of an interrupted cell left."""
        if self._loop is not None and not self._loop.is_closed():
            _cancel(self._loop)


async def _catching(coroutine: Coroutine[Any, Any, Any], failure: list[BaseException]) -> Any:
    """Await it. What it raises goes into `failure`: a task would keep it, with all that its traceback holds."""
    try:
        return await coroutine
    except GeneratorExit:
        raise
    except BaseException as error:
        failure.append(error)


def _cancel(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all tasks and wait a while: one whose next step was lost, as the interrupt hit the loop just before it,
    never ends."""
    import asyncio  # noqa: PLC0415 - see `lazily.py`

    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if not tasks or not _calm(loop):
        return
    done, lost = loop.run_until_complete(asyncio.wait(tasks, timeout=PATIENCE))
    for task in done:
        if not task.cancelled():
            task.exception()  # taken note of, else asyncio writes about it to the cell's stderr
    for task in lost:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # as above


def _calm(loop: asyncio.AbstractEventLoop) -> bool:
    """Take back what a run of the loop that was broken off has left: an order to stop, which would end the next run, or
    that it runs, of which nothing takes it back. False if it can't be used any more."""
    import asyncio  # noqa: PLC0415 - see `lazily.py`

    asyncio._set_running_loop(None)
    if loop.is_running():
        return False
    loop.call_soon(loop.stop)
    loop.run_forever()
    return True


def interrupted(error: BaseException | None) -> BaseException | None:
    """What an interrupt made of a cell, without what asyncio's own code raised on its way out of a run."""
    while isinstance(error, RuntimeError) and error.__context__ is not None and (trace := error.__traceback__):
        while trace.tb_next is not None:
            trace = trace.tb_next
        if not trace.tb_frame.f_globals.get("__name__", "").startswith("asyncio."):
            break
        error = error.__context__
    return error


def _suspended_at(coroutine: Any) -> types.TracebackType | None:
    """A traceback through the coroutines that wait for one another, outermost first."""
    frames: list[types.FrameType] = []
    while getattr(coroutine, "cr_frame", None) is not None:
        frames.append(coroutine.cr_frame)
        coroutine = coroutine.cr_await
    trace: types.TracebackType | None = None
    for frame in reversed(frames):
        trace = types.TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
    return trace


def _in_thread(function: Callable[[], Any]) -> Any:
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(target,), name="asyncio.run")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
