"""One call: the configuration with this call's overrides, and who watches its tree."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import anyio
import msgspec

from ..caught import described
from ..errors import ConfigurationError, LimitError, RLMError
from ..events import Listener
from ..observe.log import get_logger
from ..repl.tools import HostTools
from ..repl.web import Web
from ..types import UsageSummary
from .configure import checked_tenant, refuse_unknown_prices
from .settings import Configuration, checked_limits
from .shapes import shape_of

_CONTEXT = re.compile(r"\bcontext_\d+\b")


class Reached(Protocol):
    """What a run has come to so far."""

    @property
    def partial_answer(self) -> str | None: ...

    def usage(self) -> UsageSummary: ...


class Call:
    """What one completion runs under.

    Raises:
        ConfigurationError: for an override that is unknown or wrong.
    """

    def __init__(self, configuration: Configuration, overrides: Mapping[str, Any]) -> None:
        self.run_id = uuid.uuid4().hex
        self._run: Reached | None = None
        self._watching: Watching | None = None
        overrides = dict(overrides)
        self.shape = shape_of(overrides.pop("response_format", None))
        """What the answer must be; None for any text."""
        if self.shape is not None and configuration.router.root().backend == "offline":
            raise ConfigurationError(
                'response_format needs a model: backend="offline" is none, and can\'t give its answers a form',
                argument="response_format",
            )
        self.sampling_args: dict[str, Any] = dict(overrides.pop("sampling_args", None) or {})
        """Of this call's root model, on top of those of the configuration."""
        self.tenant: str | None = checked_tenant(overrides.pop("tenant", None)) or configuration.tenant
        self.lazy: bool = overrides.pop("lazy", False)
        """Whether the files of the prompt stay files in cells."""
        self.web: Web = overrides.pop("web", None) or Web()
        """How a prompt that is a URL is fetched."""
        tools = overrides.pop("custom_tools", None)
        if tools is not None:
            given = HostTools(tools)
            same = configuration.sub_tools is configuration.tools
            configuration = msgspec.structs.replace(
                configuration, tools=given, sub_tools=given if same else configuration.sub_tools
            )
        self.configuration = configuration
        self.limits = checked_limits(configuration.limits, overrides) if overrides else configuration.limits
        refuse_unknown_prices(configuration, self.limits)

    @asynccontextmanager
    async def watched(self, listener: Listener | None = None) -> AsyncGenerator[Watching]:
        """The listeners of this call's tree; what a log has not written yet is written when the block is left."""
        watching = Watching(self.configuration, listener)
        logger = self.configuration.logger
        if logger is None:
            yield watching
            return
        log = logger.for_tree(self.run_id)
        watching.listeners.append(log)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(log.run)
            try:
                yield watching
            finally:
                try:
                    await log.aclose()
                except Exception as error:  # noqa: BLE001 - it must not take the place of what the block came to
                    get_logger().warning("log not closed", error=described(error))
                tasks.cancel_scope.cancel()

    def begin(self, run: Reached, watching: Watching) -> None:
        """The run this call has come to, for `account`."""
        self._run = run
        self._watching = watching

    def account(self, error: RLMError) -> None:
        """Give an error what its caller needs to go on: the partial answer, the usage, the trajectory, the way out."""
        error.run_id = self.run_id
        if isinstance(error, LimitError) and error.argument:
            # Said to the caller alone: a model can do nothing about it.
            rather = ', or give on_limit="answer" for an answer from what there is by then'
            raise_it = f"raise {error.argument}{rather if self.limits.on_limit == 'raise' else ''}"
            error.args = (f"{error}; {raise_it}",)
        if isinstance(error, ConfigurationError):  # what cells have as a context is the caller's prompt
            error.args = (_CONTEXT.sub("prompt", str(error)),)
        if self._run is None or self._watching is None:
            return
        error.usage_summary = self._run.usage()
        error.metadata = self._watching.metadata()
        if error.partial_answer is None:
            error.partial_answer = self._run.partial_answer


class Watching:
    """The listeners of one tree, and its trajectory if anybody wants one."""

    def __init__(self, configuration: Configuration, listener: Listener | None) -> None:
        self.listeners: list[Listener] = [] if listener is None else [listener]
        self.keeps_trajectory = bool(listener or configuration.logger or configuration.verbose)
        self._trajectory: Any = None
        if configuration.verbose:
            from ..observe.progress import Progress  # noqa: PLC0415 - loaded where it is used

            self.listeners.append(Progress())
        if self.keeps_trajectory:
            from ..observe.trajectory import Trajectory  # noqa: PLC0415 - loaded where it is used

            self._trajectory = Trajectory()
            self.listeners.append(self._trajectory)

    def metadata(self) -> dict[str, Any] | None:
        """The trajectory so far in the reference's shape, or None if nobody asked for it."""
        return self._trajectory.metadata() if self._trajectory is not None else None
