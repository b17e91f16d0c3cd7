"""`Repl`: a worker that people drive, without a model in charge."""

from __future__ import annotations

import copy
import inspect
import time
import uuid
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Never, Self

import anyio

from ..caught import described
from ..environments import Environment
from ..errors import ConfigurationError, LMError
from ..ledger import Ledger
from ..lm.base import LMClient, LMReply, LMRequest
from ..lm.clients import ClientSpec
from ..lm.pacing import Gate, Pacer
from ..lm.pacing.fair import flow_of
from ..lm.routing import Router
from ..mcp.connections import with_servers
from ..mcp.server import MCPServer, checked_servers
from ..observe.log import get_logger
from ..repl.approval import ApprovalRequest
from ..repl.broker import SubCall, describe_error
from ..repl.context import resolved
from ..repl.gather import check_given
from ..repl.resources import ResourceScope
from ..repl.sandbox import Report
from ..repl.session import CellOutcome, Session
from ..repl.tool_desk import ToolDesk
from ..repl.tools import HostTools, check_context_name
from ..repl.web import Web
from ..types import REPLResult, RLMChatCompletion, usage_of_one
from .approval import Approval
from .asking import Asking
from .checks import Checks
from .configure import (
    checked_environment,
    checked_function,
    checked_pacer,
    checked_prompts,
    checked_replies,
    checked_tenant,
    checked_web,
)
from .door import ModelDoor
from .doors import BehindDoor, behind_door
from .hints import unknown_argument
from .settings import (
    DEFAULT_CACHE_SIZE,
    DEFAULT_MAX_CONCURRENT_REQUESTS,
    DEFAULT_SUBCALL_TIMEOUT,
    DEFAULT_TOOL_TIMEOUT,
    Limits,
    checked_limits,
)
from .texts import Prompts, fill


class Repl:
    """Runs cells in a worker, as a model would have them run.

        async with Repl(context="a long text", lm=ask) as repl:
            result = await repl.execute("print(llm_query('What is this? ' + context))")

    Args:
        environment: The name of a kind of place, or an `Environment`.
        environment_kwargs: Settings of the environment, if it is given by name.
        context: Bound to `context` in cells: what may be the prompt of a completion. It is never changed.
        lazy: Whether files stay files in cells, each a `Text`, whatever their size; over 256 MB they always do.
        web: How a context that is an `httpx.URL` is fetched.
        lm: What `llm_query` asks: a backend's name or "provider/model", an `LMClient`, or an
            `async def f(messages) -> str`. None: calls fail with a text that says so. `rlm_query` asks it too.
        backend_kwargs: For the client of `lm`, as of `AsyncRLM`: `model_name`, `api_key`, `base_url`, ….
        custom_tools: Name → value or host callable, or name → {"tool": …, "description": …}; an entry may have
            `timeout` and `max_calls` too.
        mcp_servers: Servers whose tools are functions in cells, each an `MCPServer` or a dict with its fields.
        prompts: What the engine itself says to the model, of replies that fit no schema and of those cut off, as data.
        approve: Is given an `ApprovalRequest` before each cell and tool call; returns None, or why it is refused.
        max_concurrent_requests: Requests to the model in flight at once.
        on_subcall_error: What a failed call is in a cell: "return" a `FailedReply`, or "raise" a `SubcallError`.
        subcall_timeout: Seconds one call may take, retries included; None for no limit.
        tool_timeout: Seconds one call of a tool may take; None for no limit.
        pacer, tenant, cache, cache_size, record, replay: As of `AsyncRLM`.

    Raises:
        ConfigurationError: for an argument that can't be; the message names the right ones.
    """

    def __init__(
        self,
        environment: str | Environment = "local",
        *,
        environment_kwargs: Mapping[str, Any] | None = None,
        context: Any = None,
        lazy: bool = False,
        web: Web | None = None,
        lm: str | LMClient | Callable[..., Awaitable[Any]] | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        custom_tools: Mapping[str, Any] | None = None,
        mcp_servers: Sequence[MCPServer | Mapping[str, Any]] | None = None,
        prompts: Prompts | None = None,
        approve: Callable[[ApprovalRequest], Any] | None = None,
        max_concurrent_requests: int = DEFAULT_MAX_CONCURRENT_REQUESTS,
        on_subcall_error: Literal["return", "raise"] = "return",
        subcall_timeout: float | None = DEFAULT_SUBCALL_TIMEOUT,
        tool_timeout: float | None = DEFAULT_TOOL_TIMEOUT,
        pacer: Pacer | Mapping[str, Pacer] | None = None,
        tenant: str | None = None,
        cache: str | Path | None = None,
        cache_size: int | str | None = DEFAULT_CACHE_SIZE,
        record: str | Path | None = None,
        replay: str | Path | None = None,
        **unknown: Never,
    ) -> None:
        for name in unknown:
            known = [each for each in inspect.signature(Repl).parameters if each != "unknown"]
            raise unknown_argument(name, known, of="constructor")
        self._state: Literal["new", "open", "closed"] = "new"
        self._environment = checked_environment(environment, environment_kwargs)
        if context is not None:
            check_given(context)
            if isinstance(context, Path):
                resolved(context, lazy=lazy)  # one that can't be read is told of here
        limits = checked_limits(
            Limits(),
            {
                "max_concurrent_requests": max_concurrent_requests,
                "on_subcall_error": on_subcall_error,
                "subcall_timeout": subcall_timeout,
                "tool_timeout": tool_timeout,
            },
        )
        self._context, self._lazy, self._web = context, lazy, checked_web(web)
        self._replies = checked_replies({"cache": cache, "cache_size": cache_size, "record": record, "replay": replay})
        if lm is None and backend_kwargs is not None:
            raise ConfigurationError("backend_kwargs are for the client of lm: give it too", argument="lm")
        self._model = None if lm is None else Router.of(lm, backend_kwargs, needs_keys=replay is None)
        self._pacer = None if self._model is None else checked_pacer(pacer, self._model)
        self._tenant = checked_tenant(tenant)
        self._prompts = checked_prompts(prompts)
        self._tools = HostTools(custom_tools)
        self._servers = checked_servers(mcp_servers)
        self._width = limits.max_concurrent_requests
        self._timeout = limits.subcall_timeout
        self._tool_timeout = limits.tool_timeout
        hook = checked_function("approve", approve)
        self._approval = None if hook is None else Approval(hook, on_failure=_log_failure)
        self._raise_errors = limits.on_subcall_error == "raise"
        self._held: BehindDoor[Session] | None = None
        self._session: Session | None = None
        self._services: _Asking | None = None
        self._executing = False

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise ConfigurationError("a Repl can be entered once")
        opening = copy.copy(self)  # whoever keeps it open must not keep this one from being collected
        held = BehindDoor(opening._ready())
        self._session = await held.__aenter__()
        self._services, self._tools = opening._services, opening._tools
        self._held = held
        self._state = "open"
        return self

    @asynccontextmanager
    async def _ready(self) -> AsyncGenerator[Session]:
        async with ResourceScope() as scope:
            self._services = _Asking(
                self._model, self._door(scope), self._timeout, Asking(self._prompts, Checks(scope.threads))
            )
            self._tools = await with_servers(self._tools, self._servers, scope)
            async with Session(
                self._environment,
                scope,
                self._services,
                tools=self._tools,
                desk=ToolDesk(
                    scope.tool_threads,
                    timeout=self._tool_timeout,
                    approve=None if self._approval is None else self._approval.tool,
                ),
                raise_errors=self._raise_errors,
                show_values=True,
            ) as session:
                if self._context is not None:
                    await session.load("context", self._context, lazy=self._lazy, web=self._web)
                await session.ready()
                yield session

    def _door(self, scope: ResourceScope) -> ModelDoor:
        run_id = uuid.uuid4().hex
        return ModelDoor(
            scope,
            run_id=run_id,
            gate=Gate(self._width),
            ledger=Ledger(),
            flow=flow_of(run_id, self._tenant),
            pacer=self._pacer,
            replies=self._replies,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._state = "closed"
        held, self._held = self._held, None
        return None if held is None else await held.__aexit__(kind, error, traceback)

    async def load(self, name: str, value: Any, *, lazy: bool = False, web: Web | None = None) -> None:
        """Bind another context, such as "context_1". The others are as of the constructor, whose `web` holds for None.

        Raises:
            ConfigurationError: if the value can't be loaded, or cells have that name for something else.
            SandboxLost: if no worker can be had, or it dies of it.
        """
        check_context_name(name, self._tools)
        session, web = self._opened(), checked_web(web) or self._web
        await behind_door(lambda: session.load(name, value, lazy=lazy, web=web))

    async def execute(self, code: str) -> REPLResult:
        """Run one cell. What it raises is in the result, what the host can't do is raised here.

        Cancelled, it kills the worker: the next cell runs in a fresh one.

        Raises:
            SandboxLost: if no worker can be had.
            ProtocolError: if the worker was tampered with.
            LMError: of kind "replay_miss", if it asked what was not recorded.
            ConfigurationError: if the Repl is not open, or another cell is under way.
        """
        session = self._opened()
        return await behind_door(lambda: self._execute(session, code))

    async def _execute(self, session: Session, code: str) -> REPLResult:
        services = self._services
        if services is None or self._executing:
            outcome = await session.execute(code)  # which refuses a second cell beside the first
            return _result(self._prompts, outcome, [])
        self._executing = True
        calls: list[RLMChatCompletion] = []
        services.calls = calls
        try:
            refused = None if self._approval is None else await self._approval.refused(code)
            outcome = refused or await services.door.unless_missed(session.execute(code, own_answer=True))
            return _result(self._prompts, outcome, calls)
        finally:
            self._executing = False

    def _opened(self) -> Session:
        if self._state != "open" or self._session is None:
            raise ConfigurationError(f"this Repl is {self._state}, not open: use `async with Repl(...) as repl`")
        return self._session

    @property
    def report(self) -> Report | None:
        """What isolation is in force where cells run; None until the worker was ready."""
        return self._session.report if self._session is not None else None

    def __repr__(self) -> str:
        report = self.report
        text = f"<Repl {self._environment.name}, {self._state}"
        if report is not None:
            held = {row: by for row, by in report.isolation.items() if by}
            text += f"; python {report.python}" if report.python else ""
            text += "; in force: " + (", ".join(f"{row}={by}" for row, by in held.items()) or "nothing")
            missing = [row for row in report.isolation if row not in held]
            text += f"; not in force: {', '.join(missing)}" if missing else ""
        return text + ">"

    def __del__(self) -> None:
        if getattr(self, "_state", "") == "open":
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)


def _log_failure(hook: Any, error: BaseException) -> None:
    get_logger().warning(
        "asyncrlm: your callback raised, the cell is refused",
        callback=repr(hook),
        error=described(error),
    )


class _Asking:
    """Services that ask one model, and keep a record of each call."""

    def __init__(self, model: Router | None, door: ModelDoor, timeout: float | None, asking: Asking) -> None:
        self.calls: list[RLMChatCompletion] = []
        """Where records go; another list for each cell."""
        self.door = door
        self._model = model
        self._timeout = timeout
        self._asking = asking

    async def llm(self, call: SubCall) -> str:
        record = RLMChatCompletion(root_model=call.model or "", prompt=call.prompt, response="")
        self.calls.append(record)
        began = time.monotonic()
        try:
            record.response = await self._ask(call, record)
        except Exception as error:
            record.error = describe_error(error)
            raise
        except anyio.get_cancelled_exc_class():
            record.error = "cancelled"
            raise
        finally:
            record.execution_time = time.monotonic() - began
        return record.response

    async def rlm(self, call: SubCall) -> str:
        return await self.llm(call)

    def limits(self) -> dict[str, Any]:
        return self.door.ledger.left()

    def width(self) -> int:
        return self.door.width

    async def _ask(self, call: SubCall, record: RLMChatCompletion) -> str:
        if self._model is None:
            raise LMError("this Repl has no model to ask: give it one as `lm=`", kind="not_found")
        spec: ClientSpec = self._model.sub(1, call.model)
        record.root_model = spec.model

        async def send(request: LMRequest, which: str) -> LMReply:
            reply = await self.door.ask(spec, request, place=f"{call.id}{which}", seconds=self._timeout)
            record.usage_summary = usage_of_one(spec.model, reply.usage)
            return reply

        return await self._asking.reply(spec, call, send)


def _result(prompts: Prompts, outcome: CellOutcome, calls: list[RLMChatCompletion]) -> REPLResult:
    error = None if outcome.error is None else outcome.error.text
    if outcome.lost is not None:
        error = outcome.lost if error is None else f"{error}\n{outcome.lost}"
    stderr = outcome.stderr
    if outcome.lost_before is not None:
        stderr = f"{fill(prompts.lost_before, reason=outcome.lost_before)}\n{stderr}"
    if error is not None:
        stderr = f"{stderr.rstrip()}\n{error}".lstrip("\n")
    return REPLResult(
        stdout=outcome.stdout,
        stderr=stderr,
        locals={name: outcome.values.get(name, kind) for name, kind in outcome.variables.items()},
        execution_time=outcome.seconds,
        llm_calls=calls,
        final_answer=None if outcome.answer is None else outcome.answer.content,
        error=error,
    )
