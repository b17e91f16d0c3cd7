"""The sessions with servers, one each, for as long as an engine scope lives."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import anyio
import anyio.to_thread

from ..errors import ConfigurationError, RLMError
from ..observe.log import get_logger
from ..repl.resources import ResourceScope
from ..repl.tools import HostTools, Tool, check_name
from .held import Held
from .results import error_text, value_of
from .schema import ToolSchema, identifier
from .server import MCPServer
from .transport import Said, sdk, streams

MOST_TOOLS = 500
"""Tools of one server that cells may call; a server may name more."""
MOST_PAGES = 100
FRESH = 5.0
"""Seconds for which the tools that a server named are taken to be those it has."""


class Connection:
    """A session with one server, begun when its tools are asked for, and anew after its end."""

    def __init__(self, server: MCPServer) -> None:
        self._server = server
        self._held: Held[Any] | None = None
        self._starting = anyio.Lock()
        self._listing: list[Any] = []  # what the session named last
        self._tools: list[Tool] = []  # made of it
        self._listed_at = -math.inf

    async def tools(self) -> list[Tool]:
        """Its tools, as functions.

        Raises:
            ConfigurationError: if it can't be started, or lacks a tool that the allow-list has.
            RLMError: if it did not answer as it must.
        """
        held = await self._session()
        if anyio.current_time() - self._listed_at < FRESH:
            return self._tools
        try:
            with anyio.fail_after(self._server.start_timeout):
                listing = await _listed(held.value)
        except Exception as error:
            reason = "not in time" if isinstance(error, TimeoutError) else error_text(str(error))
            raise RLMError(f"the MCP server {self._server.name!r} did not name its tools: {reason}") from error
        if listing != self._listing:
            self._tools = self._made(listing)
            self._listing = listing
        self._listed_at = anyio.current_time()
        return self._tools

    async def call(self, tool: str, schema: ToolSchema, *args: Any, **kwargs: Any) -> Any:
        """Call one of its tools with a function's arguments; what the function then returns.

        Raises:
            RuntimeError: if the tool failed, or the server is gone.
        """
        arguments = schema.arguments(args, kwargs)
        held = await self._session()
        try:
            result = await held.value.call_tool(tool, arguments)
        except Exception as error:
            if _is_end(error):
                await self._end(held)
                raise RuntimeError(f"the server {self._server.name!r} ended; the next call starts it again") from error
            raise RuntimeError(error_text(str(getattr(error, "message", error)))) from error
        return value_of(result, wrapped=schema.wraps)

    async def aclose(self) -> None:
        """End the session. A later call begins another."""
        if self._held is not None:
            await self._end(self._held)

    async def _end(self, held: Held[Any]) -> None:
        if self._held is held:
            self._held = None
        await held.aclose()

    # ---- the session -------------------------------------------------------------------------------------------------

    async def _session(self) -> Held[Any]:
        async with self._starting:
            if self._held is not None and not self._held.ended:
                return self._held
            self._listed_at = -math.inf
            said = Said()
            held = Held(partial(self._opened, said))
            try:
                with anyio.fail_after(self._server.start_timeout):
                    await held.start()
            except RLMError:
                raise
            except Exception as error:
                reason = "it was not ready in time" if isinstance(error, TimeoutError) else error_text(str(error))
                wrote = f"\nit wrote: {error_text(said.text())}" if said.text() else ""
                raise RLMError(f"the MCP server {self._server.name!r} could not be started: {reason}{wrote}") from error
            self._held = held
            return held

    @asynccontextmanager
    async def _opened(self, said: Said) -> AsyncGenerator[Any]:
        module = await anyio.to_thread.run_sync(sdk, abandon_on_cancel=True)
        async with (
            streams(self._server, said) as transport,
            module.Client(transport) as client,
        ):
            yield client

    # ---- its tools ---------------------------------------------------------------------------------------------------

    def _made(self, listed: Sequence[Any]) -> list[Tool]:
        server, wanted = self._server, self._server.tools
        if wanted is not None:
            known = {tool.name for tool in listed}
            if missing := [name for name in wanted if name not in known]:
                has = ", ".join(repr(str(name))[:60] for name in sorted(known)[:50])
                raise ConfigurationError(
                    f"mcp_servers: the server {server.name!r} has no tool {', '.join(map(repr, missing))}; it has {has}"
                )
        picked = [tool for tool in listed if wanted is None or tool.name in wanted]
        if len(picked) > MOST_TOOLS:
            get_logger().warning("a server has too many tools", server=server.name, tools=len(picked), kept=MOST_TOOLS)
        made: dict[str, Tool] = {}
        for tool in picked[:MOST_TOOLS]:
            name = f"{server.name}_{identifier(tool.name)}"
            while name in made:
                name += "_"
            check_name(name)
            schema = ToolSchema(tool.description or "", tool.input_schema, tool.output_schema)
            function = _function(partial(self.call, tool.name, schema))
            made[name] = Tool(
                name=name,
                kind="function",
                value=function,
                text=schema.describe(name),
                functions={name: function},
                docs={name: schema.docstring(name)},
                untrusted=True,
            )
        return list(made.values())


async def _listed(client: Any) -> list[Any]:
    listed: list[Any] = []
    cursor = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        listed += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return listed


def _function(call: Callable[..., Any]) -> Callable[..., Any]:
    async def tool(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    return tool


def _is_end(error: Exception) -> bool:
    """Whether the session can't be used any more."""
    if isinstance(error, anyio.ClosedResourceError | anyio.BrokenResourceError | anyio.EndOfStream):
        return True
    types: Any = sdk("mcp_types")
    return getattr(error, "code", None) == types.CONNECTION_CLOSED


class Connections:
    """The servers of one configuration, in one engine scope."""

    def __init__(self, servers: Sequence[MCPServer]) -> None:
        self._connections = [Connection(server) for server in servers]
        self._last: tuple[HostTools, list[list[Tool]], HostTools] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        async with anyio.create_task_group() as tasks:
            for connection in self._connections:
                tasks.start_soon(connection.aclose)

    async def joined(self, tools: HostTools) -> HostTools:
        """`tools` and those of all servers.

        Raises:
            ConfigurationError: if two have the same name, or a server can't be had.
            RLMError: if one did not answer as it must.
        """
        found: list[list[Tool]] = [[] for _ in self._connections]

        failed: list[Exception] = []

        async def ask(number: int, connection: Connection) -> None:
            try:
                found[number] = await connection.tools()
            except Exception as error:  # noqa: BLE001 - raised below, as it is and not in a group
                failed.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for number, connection in enumerate(self._connections):
                tasks.start_soon(ask, number, connection)
        if failed:
            raise failed[0]
        last = self._last
        if last is None or last[0] is not tools or any(a is not b for a, b in zip(last[1], found, strict=True)):
            joined = tools.joined(tool for each in found for tool in each)
            last = self._last = (tools, found, joined)
        return last[2]


async def with_servers(tools: HostTools, servers: Sequence[MCPServer], scope: ResourceScope) -> HostTools:
    """`tools` and those of the servers, whose sessions live as long as the scope. Errors as of `Connections.joined`."""
    if not servers:
        return tools
    connections = await scope.shared("mcp", lambda: Connections(servers))
    return await connections.joined(tools)
