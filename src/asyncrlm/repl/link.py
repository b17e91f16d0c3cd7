"""One worker as the host sees it: its sandbox, its channel, and what its frames have said so far."""

from __future__ import annotations

import binascii
import signal
from collections.abc import Awaitable, Callable

import anyio

from ..clipping import clip
from ..errors import ConfigurationError, ProtocolError, RLMError, SandboxLost
from .broker import Broker
from .channel import Channel
from .context import LoadPlan, plan_load
from .files import HostFile, Tell
from .messages import (
    Answer,
    Call,
    Cancel,
    Done,
    Execute,
    Init,
    Load,
    Loaded,
    Output,
    Ready,
)
from .raised import innermost
from .resources import CLOSE_GRACE
from .room import Room
from .sandbox import Exit, Printed, Report, Sandbox
from .uploads import Uploads
from .worker.bounds import MAX_FRAME

MAX_CODE = MAX_FRAME // 12 - 1000
"""Characters of a cell: each takes at most 12 bytes of a frame."""
STILL = 120.0
"""Seconds for which nothing of a variable may move on its way to the worker; then that is given up."""
SLOWEST = 1e6
"""Bytes a second at which a worker reads a variable at the least, when it has all of it."""
MAX_ERROR = 65_536
"""Characters kept of a traceback, half of them its head and half its tail; `raise ValueError(context)` is possible."""


class Link:
    """A worker's life, from an open sandbox to a closed one. `run` is that life, in a task of its own."""

    def __init__(
        self, sandbox: Sandbox, tell: Tell | None = None, threads: anyio.CapacityLimiter | None = None
    ) -> None:
        self.sandbox = sandbox
        self._uploads = Uploads(sandbox, tell, self._moved)
        self.channel = Channel(sandbox, self, threads=threads)
        self.room = Room(lambda: self.channel.unsent)
        """Of tools' results on their way to the worker."""
        self.channel.on_sent = self.room.look
        self.hidden: set[str] = set()
        """Functions of objects that are in the worker themselves: none of its cells calls these on the host."""
        self.report: Report = sandbox.report
        self.ready = anyio.Event()
        self.ended = anyio.Event()
        self.exit: Exit | None = None
        self.failure: Exception | None = None
        """Why the host gave the worker up, if it did: a `ProtocolError`, or an error of the driver."""
        self.broker: Broker | None = None  # of the running cell; set and unset by the session
        self.answer: Answer | None = None
        """The last ready `answer`, until it is no longer ready."""
        self.draft = ""
        """The content of one that is not ready."""
        self.done: Done | None = None
        self.changed = anyio.Event()
        """Set when what the session waits for has come (`loaded` or `done`), or never will."""
        self.told = False
        """Whether its end has been told to who uses the session."""
        self._why: str | None = None  # it was killed
        self.prepared = False
        """Whether the environment's `setup_code` has run."""
        self._load_error: str | None = None
        self._loads = 0
        self._loading: anyio.CancelScope | None = None
        self._last_output: tuple[Printed, Printed] | None = None

    @property
    def alive(self) -> bool:
        return not self.ended.is_set() and self.channel.phase != "closed"

    # ---- the life ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read, write and pump until the worker is gone; then close the sandbox. Raises nothing but cancellation."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._guard, self.channel.write)
                group.start_soon(self._guard, self.sandbox.pump)
                group.start_soon(self._uploads.run)
                await self._guard(self._read)
                group.cancel_scope.cancel()
        finally:
            self.channel.close()
            with anyio.move_on_after(CLOSE_GRACE, shield=True):
                try:
                    self._last_output = self.sandbox.take_output()
                except OSError as error:
                    self._fail(error)
                self.ended.set()
                self.ready.set()
                self.changed.set()
                if self._loading is not None:  # not every stream tells who is sending that it is over
                    self._loading.cancel()
                await self._guard(self.sandbox.aclose)

    async def _read(self) -> None:
        try:
            self.exit = await self.channel.read()
        except ProtocolError as error:
            self._fail(error)
            self.channel.abandon()

    async def _guard(self, step: Callable[[], Awaitable[object]]) -> None:
        try:
            await step()
        except Exception as error:  # noqa: BLE001 -- a driver's failure ends this worker and is told to its session
            self._fail(error)
            self.channel.abandon()

    def _fail(self, error: Exception) -> None:
        if self.failure is None and self.channel.phase != "closed":
            self.failure = error

    async def interrupt(self, *seconds: float) -> bool:
        """Interrupt the cell, again after each of `seconds`; returns whether it has ended by the last."""
        for each in seconds:
            self.sandbox.interrupt()
            with anyio.move_on_after(each):
                await self.changed.wait()
                return True
        return False

    async def reset_answer(self) -> None:
        """Have no answer from now on, here and in the worker.

        Raises:
            SandboxLost: if the worker ends meanwhile.
        """
        await self.load(plan_load("answer", {"content": "", "ready": False}))
        self.forget_answer()

    def forget_answer(self) -> None:
        """What was submitted so far is no answer to what comes."""
        self.answer, self.draft = None, ""

    def stop(self) -> None:
        """Kill the worker and hear it out: what it had sent by then still counts. `ended` follows."""
        self.sandbox.kill()

    def kill(self, why: str) -> None:
        """Kill the worker and hear nothing more of it. `ended` follows."""
        if self.alive:
            self._why = why
        self.channel.abandon()

    def take_output(self) -> tuple[Printed, Printed]:
        """What was written to standard output and error since the last call."""
        taken = self._last_output if self.ended.is_set() else self.sandbox.take_output()
        self._last_output = None
        return taken or (Printed(), Printed())

    def fate(self) -> str:
        """How the worker ended, for people and models to read."""
        if self.failure is not None:
            return str(innermost(self.failure))
        if self._why is not None:
            return self._why
        status = self.exit.status if self.exit else None
        reason = (self.exit.reason if self.exit else "") or self.sandbox.fate()
        if status is None:
            text = "it ended"
        elif status < 0:
            text = f"it was killed by signal {-status} ({_signal_name(-status)})"
            if -status == signal.SIGKILL and not reason:
                text += ", perhaps for using too much memory"
        else:
            text = f"it exited with code {status}"
        return f"{text}: {reason}" if reason else text

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def start(self, init: Init) -> None:
        """Greet the worker and wait until it is ready.

        Raises:
            SandboxLost: if it ended, or said nothing in time.
            ProtocolError: if it said something else.
            ConfigurationError: if less is in force there than was asked for.
        """
        self.channel.send(init)
        patience = self.sandbox.start_timeout
        with anyio.move_on_after(patience):
            await self.ready.wait()
        if not self.ready.is_set():
            self.kill("it was not ready in time")
            raise SandboxLost(f"the worker was not ready within {patience:g} s")
        self.check()
        self.sandbox.check_report(self.report)

    @property
    def replaceable(self) -> bool:
        """Whether it ended without having cost anything: before its first cell, another one may take its place."""
        return self.sandbox.another_is_free and self.ended.is_set()

    def check(self) -> None:
        """Raise what ended the worker, if it has ended."""
        if isinstance(self.failure, RLMError):
            raise self.failure
        if self.ended.is_set():
            printed = self.take_output()[1].text().strip()
            raise SandboxLost(f"the worker is gone: {self.fate()}" + (f"\n{printed[-2000:]}" if printed else ""))

    async def load(self, plan: LoadPlan) -> None:
        """Bind a variable.

        Raises:
            ConfigurationError: if the value can't be had or the worker refuses it.
            SandboxLost: if the worker ends meanwhile.
        """
        self._loads += 1
        number = self._loads
        frame = Load(id=number, name=plan.name, form=plan.form, also=plan.also)
        self.changed = anyio.Event()
        self._load_error = None
        if plan.inline or plan.form in ("lazy", "table", "folder"):
            frame.value = plan.value
        try:
            with anyio.CancelScope() as scope:
                self._loading = scope
                await self._bring(plan, frame)
            if scope.cancelled_caught and not self.changed.is_set():
                fate = self.sandbox.fate()
                self.kill(f"{plan.name} was not loaded, as nothing moved for too long" + (f": {fate}" if fate else ""))
                await self.ended.wait()
        except (OSError, ConfigurationError) as error:
            self.kill(f"{plan.name} could not be loaded")
            raise ConfigurationError(f"{plan.name}: {error}") from error
        except anyio.BrokenResourceError:
            await self.ended.wait()
        except BaseException:
            # Cut off halfway, the worker waits for what nobody sends.
            self.kill(f"it was killed because the loading of {plan.name} was cancelled")
            raise
        if self._load_error is not None:
            raise ConfigurationError(f"{plan.name} could not be loaded: {self._load_error}")
        self.check()

    async def _bring(self, plan: LoadPlan, frame: Load) -> None:
        """Send it, and wait until the worker has it or is gone, or nothing moved for too long."""
        self._moved(plan.most_bytes if self.sandbox.passes_files else 0)
        if plan.file is not None and self.sandbox.passes_files and not plan.file.odd:
            frame.descriptor = True
            await self.channel.pass_file(plan.file.open)
        elif not plan.inline:
            frame.path = await self._uploads.put(f"load-{frame.id}", plan.name, plan.chunks(), plan.nbytes)
        if self.alive:
            self.channel.begin_load(frame.id)
            self.channel.send(frame)
        self._moved(plan.most_bytes)
        await self.changed.wait()

    def _moved(self, nbytes: int) -> None:
        """Something of a variable did; what comes next may take as long as these bytes do."""
        if self._loading is not None:
            self._loading.deadline = anyio.current_time() + STILL + nbytes / SLOWEST

    async def hand_over(self, key: str, file: HostFile) -> str | None:
        """Give a cell a file of the host: its path in the sandbox, or None if its descriptor was passed, which the next
        reply must say.

        Raises:
            ConfigurationError, OSError: if it can't be had.
            anyio.BrokenResourceError: if the worker is gone.
        """
        if not self.sandbox.passes_files:
            return await self._uploads.path_of(key, file)
        await self.channel.pass_file(file.open)
        return None

    def begin_cell(self, number: int, code: str, broker: Broker) -> None:
        """Send a cell, whose calls go to `broker`. `changed` is set once it is done or the worker has ended."""
        self.changed = anyio.Event()
        self.done = None
        if not self.alive:
            self.changed.set()
            return
        self.broker = broker
        self.channel.begin_cell(number)
        self.channel.send(Execute(cell=number, code=code))

    # ---- frames ------------------------------------------------------------------------------------------------------

    def on_ready(self, frame: Ready) -> None:
        report = self.sandbox.report
        self.report = Report(
            environment=report.environment,
            python=report.python or frame.python[:200],
            isolation={**frame.in_force, **report.isolation},
        )
        self.ready.set()

    def on_loaded(self, frame: Loaded) -> None:
        self._load_error = frame.error
        self.changed.set()

    def on_call(self, frame: Call) -> None:
        if self.broker is not None:
            self.broker.take(frame)

    def on_cancel(self, frame: Cancel) -> None:
        if self.broker is not None:
            self.broker.cancel(frame)

    def on_answer(self, frame: Answer) -> None:
        self.answer = frame if frame.ready else None
        self.draft = "" if frame.ready else frame.text

    def on_done(self, frame: Done) -> None:
        if frame.error is not None:
            frame.error.type = clip(frame.error.type, MAX_ERROR)
            frame.error.message = clip(frame.error.message, MAX_ERROR)
            frame.error.traceback = clip(frame.error.traceback, MAX_ERROR)
        self.done = frame
        self.changed.set()

    def on_output(self, frame: Output) -> None:
        try:
            data = binascii.a2b_base64(frame.data, strict_mode=True)
        except ValueError as error:
            raise ProtocolError(f"the worker sent output that is no base64: {error}") from None
        if frame.omitted < 0:
            raise ProtocolError("the worker left out less than nothing of its output")
        self.sandbox.add_output(frame.stream, data, frame.omitted)


def check_code(code: str) -> None:
    """Whether `code` can be sent as a cell.

    Raises:
        ConfigurationError: if it is no str, or too long for a frame.
    """
    if not isinstance(code, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers need not be typed
        raise ConfigurationError(f"a cell must be a str, not {type(code).__name__}")
    if len(code) > MAX_CODE:
        raise ConfigurationError(f"a cell of {len(code):,} characters is too long; at most {MAX_CODE:,} are possible")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
