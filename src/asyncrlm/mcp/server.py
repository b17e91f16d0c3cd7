"""What a caller says of a server of tools."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from msgspec import Struct, field

from ..errors import ConfigurationError

START_TIMEOUT = 30.0
"""Seconds a server has to start and to name its tools."""


class MCPServer(Struct, frozen=True, kw_only=True):
    """A server of tools: a program that is started (`command`), or one that is reached over HTTP (`url`).

    Each of its tools is a function in cells, named `{name}_{tool}`.

    Args:
        name: What its functions begin with, an identifier.
        command: A program that speaks the protocol on its standard input and output. It gets the environment variables
            in `env` and no others, not even PATH.
        args: Its arguments.
        env: Its environment variables.
        cwd: Its working folder; this process's if None.
        url: Where a server speaks streamable HTTP. Proxies of the environment are not used.
        headers: Sent with each request, such as an Authorization.
        tools: The tools that cells may call, by the server's own names; None for all.
        start_timeout: Seconds it has to start and to name its tools.

    Raises:
        ConfigurationError: for whatever is wrong, naming what is right.
    """

    name: str
    command: str | None = None
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    cwd: str | Path | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    tools: Sequence[str] | None = None
    start_timeout: float = START_TIMEOUT

    def __post_init__(self) -> None:
        if not isinstance(cast("object", self.name), str) or not self.name.isascii() or not self.name.isidentifier():
            raise _wrong("name", "an identifier of ASCII letters, such as 'files'", self.name)
        what = f"of the server {self.name!r}"
        if (self.command is None) == (self.url is None):
            raise ConfigurationError(f"mcp_servers: give command or url {what}, one of them")
        if self.command is not None and not _is_text(self.command):
            raise _wrong(f"command {what}", "the name or path of a program, its arguments are args", self.command)
        if self.url is not None and not _is_url(self.url):
            raise _wrong(f"url {what}", "an http or https URL such as 'https://example.com/mcp'", self.url)
        for name, value in (("args", self.args), ("tools", self.tools)):
            if value is not None and not _are_texts(value):
                raise _wrong(f"{name} {what}", "a list of str", value)
        for name, value in (("env", self.env), ("headers", self.headers)):
            if not isinstance(cast("object", value), Mapping) or not _are_texts([*value, *value.values()]):
                raise _wrong(f"{name} {what}", "a dict of str → str", value)
        if self.cwd is not None and not isinstance(cast("object", self.cwd), str | Path):
            raise _wrong(f"cwd {what}", "a folder, as a str or a Path", self.cwd)
        if self.url is not None and (self.args or self.env or self.cwd is not None):
            raise ConfigurationError(f"mcp_servers: args, env and cwd {what} belong to a command; it has a url")
        if self.command is not None and self.headers:
            raise ConfigurationError(f"mcp_servers: headers {what} belong to a url; it has a command")
        seconds: Any = self.start_timeout
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise _wrong(f"start_timeout {what}", "a number of seconds above 0", seconds)

    def __repr__(self) -> str:
        # Neither arguments nor variables, headers or the query of a URL: any of them may be a key.
        where = self.command if self.command is not None else (self.url or "").partition("?")[0]
        return f"<MCPServer {self.name!r}: {where}>"


def _wrong(what: str, form: str, value: object) -> ConfigurationError:
    return ConfigurationError(f"mcp_servers: the {what} must be {form}, not {_kind(value)}")


def _kind(value: object) -> str:
    return "an empty str" if value == "" else f"a value of type {type(value).__name__}"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and "\0" not in value


def _are_texts(values: object) -> bool:
    if not isinstance(values, list | tuple):
        return False
    return all(isinstance(value, str) and "\0" not in value for value in cast("Sequence[object]", values))


def _is_url(value: object) -> bool:
    try:
        parts = urlsplit(value) if isinstance(value, str) else None
    except ValueError:
        return False
    return parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)


def checked_servers(value: object) -> tuple[MCPServer, ...]:
    """`mcp_servers=`: a list of `MCPServer`, or of dicts with its fields.

    Raises:
        ConfigurationError: naming the wrong part and its right form.
    """
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ConfigurationError(
            'mcp_servers must be a list of MCPServer, or of dicts such as {"name": "files", "command": "mcp-files"}, '
            f"not {type(value).__name__}"
        )
    servers: dict[str, MCPServer] = {}
    for entry in cast("Sequence[object]", value):
        server = _server(entry)
        if server.name in servers:
            raise ConfigurationError(f"mcp_servers: two servers have the name {server.name!r}; give one another")
        servers[server.name] = server
    return tuple(servers.values())


def _server(entry: object) -> MCPServer:
    if isinstance(entry, MCPServer):
        return entry
    known = MCPServer.__struct_fields__
    if not isinstance(entry, Mapping):
        raise ConfigurationError(f"mcp_servers: a server is an MCPServer or a dict of it, not {type(entry).__name__}")
    given = cast("Mapping[Any, Any]", entry)
    for key in given:
        if key not in known:
            raise ConfigurationError(f"mcp_servers: unknown key {key!r} of a server; known are: {', '.join(known)}")
    if "name" not in given:
        raise ConfigurationError("mcp_servers: a server needs a name, with which its functions begin")
    return MCPServer(**given)
