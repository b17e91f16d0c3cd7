"""How a server is reached, with nothing of the host's environment."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

import anyio
import anyio.to_thread

from ..errors import ConfigurationError
from .server import MCPServer

KEPT = 4_096
"""Bytes kept of what a server wrote to its standard error last."""


def sdk(module: str = "mcp") -> Any:
    """A module of the protocol's SDK. Takes long the first time: call it in a thread.

    Raises:
        ConfigurationError: if it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"mcp_servers needs {error.name}, which is not installed: pip install 'asyncrlm[mcp]'"
        ) from error


class Said:
    """What a server wrote to its standard error, the end of it."""

    def __init__(self) -> None:
        self._tail = b""

    def add(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-KEPT:]

    def text(self) -> str:
        return self._tail.decode("utf-8", "replace").strip()


@asynccontextmanager
async def streams(server: MCPServer, said: Said) -> AsyncGenerator[Any]:
    """A transport of the SDK's, and what goes with it.

    Raises:
        ConfigurationError: if there is no such program.
    """
    if server.url is not None:
        http: Any = sdk("mcp.client.streamable_http")
        httpx: Any = sdk("httpx2")
        timeout = httpx.Timeout(30.0, read=300.0)
        async with httpx.AsyncClient(headers=dict(server.headers), timeout=timeout, trust_env=False) as client:
            yield http.streamable_http_client(server.url, http_client=client)
        return
    command = await anyio.to_thread.run_sync(_command, server)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_listen, reading, said)
            with os.fdopen(writing, "w") as errors:
                stdio: Any = sdk("mcp.client.stdio")
                parameters = stdio.StdioServerParameters(
                    command=command[0], args=command[1:], env=dict(server.env), cwd=server.cwd
                )
                yield stdio.stdio_client(parameters, errlog=errors)
            tasks.cancel_scope.cancel()
    finally:
        _read(reading, said)
        os.close(reading)


async def _listen(reading: int, said: Said) -> None:
    while True:
        await anyio.wait_readable(reading)
        if not _read(reading, said):
            return


def _read(reading: int, said: Said) -> bool:
    """Take what is there; False at its end."""
    try:
        while data := os.read(reading, 65_536):
            said.add(data)
    except BlockingIOError:
        return True
    return False


def _command(server: MCPServer) -> list[str]:
    """The program and its arguments, started so that it has the variables of `env` alone.

    The SDK adds some of this process's: HOME, PATH and others. `env` takes them away again; values are not among its
    arguments, which any process could read.
    """
    name = server.command or ""
    found = shutil.which(name, path=server.env.get("PATH", os.environ.get("PATH")))
    if found is None:
        raise ConfigurationError(f"mcp_servers: the program {name!r} of the server {server.name!r} was not found")
    stdio: Any = sdk("mcp.client.stdio")
    added = {*stdio.get_default_environment(), *getattr(stdio, "DEFAULT_INHERITED_ENV_VARS", ())}
    unwanted = sorted(added - server.env.keys())
    cleaner = shutil.which("env")
    if not unwanted:
        return [found, *server.args]
    if cleaner is None or "=" in found:
        raise ConfigurationError(
            f"mcp_servers: {found!r} can't be started without this process's variables; give {', '.join(unwanted)} as "
            "env to start it with them"
        )
    options = [part for variable in unwanted for part in ("-u", variable)]
    return [cleaner, *options, os.path.abspath(found), *server.args]  # noqa: PTH100 - a link is not to be followed
