"""Cells one after another in one worker, which is replaced when it dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc
import msgspec

from ..errors import ConfigurationError, RLMError, SandboxLost
from .broker import Broker, Services, SubCall, ToolRecord
from .clock import CellClock, Verdict
from .files import Tell
from .link import Link, check_code
from .outcome import CellOutcome, SubmittedAnswer, lost_between, outcome_of, submitted
from .resources import CLOSE_GRACE, threads_of
from .sandbox import Environment, Report, Scope
from .shelf import Shelf
from .tool_desk import ToolDesk
from .tool_loading import init_frame, load_tools
from .tools import HostTools
from .web import Web

GRACE = 2.0
"""Seconds between the first interrupt of a cell and the kill."""
SECOND_INTERRUPT = 0.6
"""Seconds after which a cell is interrupted again: Python loses an interrupt that hits a `__del__` or a callback."""

__all__ = ["CellOutcome", "Services", "Session", "SubCall", "SubmittedAnswer", "ToolRecord"]


class Session:
    """A worker, its contexts and its tools, as an async context manager that owns them and every task of them.

    The worker is started in the background as the session is entered. One that died is replaced at the next `execute`
    or `load`, with the contexts loaded again; its variables are gone. To be used by one task at a time.

    Args:
        environment: Where cells run.
        scope: What outlives the session.
        services: What answers the sub-calls of cells.
        tools, desk: The caller's own values and callables, and what holds for calls of them.
        raise_errors: Whether a failed sub-call raises in the cell.
        show_values: Whether outcomes have short reprs of the variables.
        on_tool: Called after each call of a host callable.
        on_sandbox: Called when a worker is ready, with what is in force and the seconds that took.
        on_upload: Called as files go into a sandbox that is somewhere else.
        outlives_calls: Whether `serve` may follow: a cell that is cancelled is then interrupted, and its worker is only
            killed where that does not help.
    """

    def __init__(
        self,
        environment: Environment,
        scope: Scope,
        services: Services,
        *,
        tools: HostTools | None = None,
        desk: ToolDesk | None = None,
        raise_errors: bool = False,
        show_values: bool = False,
        on_tool: Callable[[ToolRecord], None] | None = None,
        on_sandbox: Callable[[Report, float], None] | None = None,
        on_upload: Tell | None = None,
        outlives_calls: bool = False,
    ) -> None:
        self._environment = environment
        self._scope = scope
        self._services = services
        self._tools = tools or HostTools()
        self._desk = desk or ToolDesk()
        self._init = init_frame(self._tools, raise_errors=raise_errors, show_values=show_values)
        self._on_tool = on_tool
        self._on_sandbox = on_sandbox
        self._on_upload = on_upload
        self._link: Link | None = None
        self._starting = anyio.Lock()  # held by whoever replaces `_link`
        self._start_error: Exception | None = None  # of the start in the background, for the next who needs the worker
        self._obituary: str | None = None  # of a worker that died between two cells, for the next outcome
        self._retired: set[str] = set()  # callables of those served earlier, which cells may still hold
        self._loss: str | None = None
        self._outlives_calls = outlives_calls
        self._early = anyio.CancelScope()
        self._cells = 0
        self._busy: str | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._closed = False
        self._threads = threads_of(scope)
        self._shelf = Shelf(self._threads)

    @property
    def report(self) -> Report | None:
        """What is in force where cells run; None until a worker was ready."""
        return self._link.report if self._link is not None and self._link.ready.is_set() else None

    @property
    def answer(self) -> SubmittedAnswer | None:
        """The answer that is ready now; None if none is."""
        answer = self._link.answer if self._link is not None else None
        return None if answer is None else submitted(answer)

    @property
    def draft(self) -> str:
        """`answer["content"]` at the end of the last cell, where it is not ready."""
        return self._link.draft if self._link is not None else ""

    async def __aenter__(self) -> Self:
        if self._group is not None or self._closed:
            raise ConfigurationError("a session can be entered once")
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._start_early)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        group = self._entered()
        try:
            await self.aclose()
        finally:
            group.cancel_scope.cancel()
            # Its tasks raise nothing: what they meet is told through the link. And it would wrap what the block raised.
            wrapped = isinstance(error, Exception)
            caught = await (group.__aexit__(None, None, None) if wrapped else group.__aexit__(kind, error, traceback))
        return None if wrapped else caught

    async def aclose(self) -> None:
        """End the worker; nothing more can be run. Whoever entered the session still has to leave it."""
        self._closed = True
        self._early.cancel()
        link = self._link
        with anyio.move_on_after(CLOSE_GRACE, shield=True):
            if link is not None:
                link.kill("its session was closed")
                await link.ended.wait()

    async def ready(self) -> Report:
        """Wait for the worker, and say what is in force there.

        Raises:
            SandboxLost: if it can't be had.
            ConfigurationError: if `isolation="strict"` asks for what does not hold here.
        """
        return (await self._worker()).report

    # ---- whom it serves ----------------------------------------------------------------------------------------------

    async def serve(
        self,
        services: Services,
        *,
        tools: HostTools,
        desk: ToolDesk,
        raise_errors: bool = False,
        show_values: bool = False,
        on_tool: Callable[[ToolRecord], None] | None = None,
        on_sandbox: Callable[[Report, float], None] | None = None,
        on_upload: Tell | None = None,
    ) -> None:
        """Run the cells of somebody else from now on: variables and contexts stay, there is no answer yet.

        The arguments are as of the constructor. `on_sandbox` is called for the worker that is there, too.

        Raises:
            ConfigurationError: if a tool's value can't be loaded.
            SandboxLost: if no worker can be had, or it dies meanwhile.
        """
        if self._link is not None:
            self._link.forget_answer()
        with self._exclusively("serve"):
            began = time.monotonic()
            self._on_sandbox, self._on_upload = None, None
            link = await self._worker()
            before, self._tools = self._tools, tools
            self._services, self._on_tool, self._desk = services, on_tool, desk
            self._retired |= before.names.keys()
            self._init = init_frame(tools, raise_errors=raise_errors, show_values=show_values)
            gone = before.entries.keys() - tools.entries.keys()
            link.channel.send(msgspec.structs.replace(self._init, drop=sorted(gone)))
            if before is not tools:
                await load_tools(link, tools, self._init, self._threads)
            await link.reset_answer()
            if on_sandbox is not None:
                on_sandbox(link.report, time.monotonic() - began)
            self._on_sandbox, self._on_upload = on_sandbox, on_upload

    def take_loss(self) -> str | None:
        """How a worker was lost since this was last asked; None if none was. Who asks tells the model."""
        loss, self._loss = self._loss, None
        if loss is not None:
            self._obituary = None
        return loss

    # ---- contexts ----------------------------------------------------------------------------------------------------

    async def load(
        self, name: str, value: Any, *, also: str | None = None, lazy: bool = False, web: Web | None = None
    ) -> None:
        """Bind `name` in the worker, now and in each that replaces it. Before the session is entered: once it is.

        Args:
            name: Such as "context" or "history_1"; restored after each cell.
            also: Another name for it, that another value may have had.
            lazy: Whether files stay files, whatever their size.
            web: How a document of the web is fetched.
            value: What may be the prompt of a completion; nobody should change it while the session lives.

        Raises:
            ConfigurationError: if the value can't be loaded; the message names the offending item.
            SandboxLost: if no worker can be had, or it dies while loading.
        """
        with self._exclusively("load"):
            plan = await self._shelf.plan(name, value, also=also, lazy=lazy, web=web)
            if self._group is not None:
                link = await self._worker()
                plan = self._shelf.prepare(plan, self._group)
                try:
                    await link.load(plan)
                except SandboxLost:
                    if self._cells or not link.replaceable:
                        raise
                    link.told = True
                    await (await self._worker()).load(plan)
            self._shelf.keep(plan)

    # ---- cells -------------------------------------------------------------------------------------------------------

    async def execute(self, code: str, *, own_answer: bool = False) -> CellOutcome:
        """Run one cell to its end, and serve its calls meanwhile; `own_answer`: what others submitted is forgotten.

        Cancelled, it kills the worker and with it all that the cell started.

        Raises:
            SandboxLost: if no worker can be had.
            ProtocolError: if the worker sent what no honest worker sends.
            ConfigurationError: if another `execute` or `load` of this session is under way, or it isn't entered.
        """
        with self._exclusively("execute"):
            check_code(code)
            link = await self._worker()
            if own_answer and link.answer is not None:
                await link.reset_answer()
            setup = self._environment.setup_code
            if setup and not link.prepared:
                await self._prepare(link, setup)
            self._cells += 1
            return await self._run_cell(link, self._cells, code)

    async def _prepare(self, link: Link, setup: str) -> None:
        outcome = await self._run_cell(link, 0, setup)
        if link.done is None:
            raise SandboxLost(f"setup_code ended the worker: {outcome.lost}")
        self._obituary = outcome.lost_before  # for the cell that follows
        if outcome.error is not None:
            link.kill("its setup_code failed")
            link.told = True
            raise ConfigurationError(f"setup_code failed:\n{outcome.error.text}")
        if outcome.answer is not None:  # nobody asked yet
            await link.reset_answer()
        link.prepared = True

    async def _run_cell(self, link: Link, number: int, code: str) -> CellOutcome:
        began = time.monotonic()
        clock = CellClock(self._environment.cell_timeout, link.sandbox.cpu_seconds)
        group = anyio.create_task_group()
        broker = Broker(
            group,
            link.channel,
            self._services,
            self._tools,
            clock,
            desk=self._desk,
            room=link.room,
            threads=self._threads,
            files=lambda key, question: self._shelf.answer(key, question, link.hand_over),
            retired=self._retired,
            hidden=link.hidden,
            on_tool=self._on_tool,
        )
        verdict: Verdict | None = None
        try:
            async with group:
                try:
                    link.begin_cell(number, code, broker)
                    verdict = await clock.wait(link.changed)
                    if verdict is not None:
                        await self._stop(link)
                except BaseException:
                    await self._give_up(link, group)
                    raise
                finally:
                    group.cancel_scope.cancel()
        finally:
            await broker.finish()
            link.broker = None
        if isinstance(link.failure, RLMError) and link.done is None:
            link.told = True
            raise link.failure
        limit = self._environment.cell_timeout
        outcome = outcome_of(link, broker, verdict, limit=limit, seconds=time.monotonic() - began)
        outcome.lost_before, self._obituary = self._obituary, None
        if outcome.lost is not None:
            link.told = True
            self._loss = link.fate()
        return outcome

    async def _stop(self, link: Link) -> None:
        """Interrupt the cell; kill the worker if that does not help."""
        if not await link.interrupt(SECOND_INTERRUPT, GRACE - SECOND_INTERRUPT):
            link.stop()
            await link.ended.wait()

    async def _give_up(self, link: Link, group: anyio.abc.TaskGroup) -> None:
        """Stop a cell that nobody waits for any more. What others had in its worker before it is kept if it can be."""
        if self._outlives_calls and link.alive:
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                if link.changed.is_set() or await link.interrupt(SECOND_INTERRUPT, GRACE - SECOND_INTERRUPT):
                    link.take_output()
                    return
        link.kill("it was killed because its cell was cancelled")

    # ---- the worker --------------------------------------------------------------------------------------------------

    async def _start_early(self) -> None:
        try:
            with self._early:
                await self._worker()
        except Exception as error:  # noqa: BLE001 -- raised to the next who needs the worker
            self._start_error = error

    async def _worker(self) -> Link:
        """The living worker with everything loaded; a fresh one if there is none."""
        async with self._starting:
            if self._start_error is not None:
                error, self._start_error = self._start_error, None
                raise error
            if self._closed:
                raise ConfigurationError("the session is closed")
            if self._link is None or not self._link.alive:
                return await self._replace()
            return self._link

    def _entered(self) -> anyio.abc.TaskGroup:
        if self._group is None:
            raise ConfigurationError("the session is not entered: use `async with`")
        return self._group

    async def _replace(self) -> Link:
        last = self._link
        if last is not None:
            await last.ended.wait()
            self._loss = last.fate()
            if not last.told:
                last.told = True
                if isinstance(last.failure, RLMError):
                    raise last.failure
                self._obituary = lost_between(last)
        return await self._start()

    async def _start(self, *, again: bool = True) -> Link:
        group = self._entered()
        began = time.monotonic()
        link = self._link = Link(await self._environment.open(self._scope), self._told, self._threads)
        group.start_soon(link.run)
        try:
            await link.start(self._init)
            if self._on_sandbox is not None:
                self._on_sandbox(link.report, time.monotonic() - began)
            await load_tools(link, self._tools, self._init, self._threads)
            for plan in await self._shelf.plans(group):
                await link.load(plan)
        except BaseException as error:
            link.kill("it could not be made ready")
            link.told = True
            if again and isinstance(error, SandboxLost) and link.replaceable:
                return await self._start(again=False)
            raise
        return link

    def _told(self, what: str, sent: int, total: int | None) -> None:
        if self._on_upload is not None:
            self._on_upload(what, sent, total)

    @contextmanager
    def _exclusively(self, what: str) -> Generator[None]:
        if self._busy is not None:
            raise ConfigurationError(f"`{what}` while `{self._busy}` is under way in the same worker: one at a time")
        self._busy = what
        try:
            yield
        finally:
            self._busy = None
