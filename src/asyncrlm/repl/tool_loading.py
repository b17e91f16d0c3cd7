"""Tools on their way into a worker: data as data, source as source, objects by pickle or left on the host."""

from __future__ import annotations

import functools

import anyio
import anyio.to_thread
import msgspec

from ..errors import ConfigurationError
from .context import LoadPlan, plan_tool
from .link import Link
from .messages import Init
from .tools import HostTools, Tool
from .worker import codec


def init_frame(tools: HostTools, *, raise_errors: bool, show_values: bool) -> Init:
    """What a worker is told first."""
    functions, awaitable = tools.functions, tools.awaitable
    return Init(raise_errors=raise_errors, show_values=show_values, tools=functions, awaitable=awaitable)


async def load_tools(link: Link, tools: HostTools, init: Init, threads: anyio.CapacityLimiter) -> None:
    """Bind all tools in a worker that has `init`, and with it the callables, already.

    An object that is no plain data is pickled; where it can't be, or the worker can't unpickle it, cells get what
    calls its functions on the host; what has none goes as data, if its fields are.

    Raises:
        ConfigurationError: if a value can't be loaded.
        SandboxLost: if the worker ends meanwhile.
    """
    link.hidden.clear()
    for tool in tools.of_kind("source"):
        await link.load(LoadPlan(name=tool.name, form="code", value=codec.encode(tool.value)))
    for tool in tools.of_kind("value"):
        try:
            await link.load(await _planned(tool, threads))
        except ConfigurationError as error:
            link.check()
            await link.load(await _as_data(tool, error, threads))
    for tool in tools.of_kind("object"):
        link.hidden.update(tool.functions)
        try:
            await link.load(await _planned(tool, threads))
        except ConfigurationError:
            link.check()
            link.hidden.difference_update(tool.functions)
            link.channel.send(msgspec.structs.replace(init, tools=dict(tool.docs)))


async def _planned(tool: Tool, threads: anyio.CapacityLimiter) -> LoadPlan:
    return await anyio.to_thread.run_sync(plan_tool, tool.name, tool.value, abandon_on_cancel=True, limiter=threads)


async def _as_data(tool: Tool, refused: ConfigurationError, threads: anyio.CapacityLimiter) -> LoadPlan:
    """A value that could not go by pickle, such as an object of a class that cells lack."""
    plan = functools.partial(plan_tool, tool.name, tool.value, records=True)
    try:
        return await anyio.to_thread.run_sync(plan, abandon_on_cancel=True, limiter=threads)
    except ConfigurationError:
        raise refused from None
