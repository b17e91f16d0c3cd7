"""Pools of connections: what the models of one account share, and the http client that keeps them."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from msgspec import Struct

from ...backend import on_trio
from ...errors import ConfigurationError
from ..pacing.limits import open_files_share
from .endpoints import ApiKey, fingerprint
from .naming import named
from .secrecy import path_secrets, redacted, secret_texts, shown_url

SDK = TypeVar("SDK")

DEFAULT_TIMEOUT = 600.0
"""Seconds that one attempt may take."""

CONNECT_TIMEOUT = 30.0
"""Seconds that opening a connection may take."""

IDLE = 30.0
"""Seconds that a connection is kept open without a request."""

MAX_CONNECTIONS = 2000
"""Connections to one account at most; fewer where the process may have few open files."""


class ConnectionSettings(Struct, frozen=True, kw_only=True, eq=False):
    """Where to send and how to sign: all that the models of one account share."""

    vendor: str = "openai"
    base_url: str | None
    """None where the vendor's SDK knows it."""
    api_key: ApiKey | None
    """None for a server that wants no key: no header with one is sent."""
    withheld: str | None = None
    """The environment variable with a key that is not sent, since it is meant for another host."""
    timeout: Any = DEFAULT_TIMEOUT
    """Seconds for the whole of one attempt, an `httpx2.Timeout`, or None for no limit."""
    default_headers: Mapping[str, str] = {}
    default_query: Mapping[str, object] = {}
    http_client: Any = None
    """The caller's own `httpx2.AsyncClient` or `httpx.AsyncClient`; never closed here."""
    sdk_kwargs: Mapping[str, Any] = {}
    """Other arguments of the SDK's client, handed on."""

    @property
    def key(self) -> Hashable:
        """Equal for settings that may share connections. Holds no secret in clear."""
        more = (self.default_headers, self.default_query, self.sdk_kwargs)
        secret = (self.api_key, self.base_url, *(sorted(given.items(), key=str) for given in more))
        plain = (self.vendor, self.shown_url, str(self.timeout))
        return (*plain, id(self.http_client) if self.http_client else None, fingerprint(repr(secret)))

    def where(self, sampling: Mapping[str, Any], *more: object) -> str:
        """Names the server that answers and what it is told besides what is asked, for a cache; `more` in its URL.

        Raises:
            ConfigurationError: if the http client is none.
        """
        http = self.http_client
        told = {name: v for name, v in self.sdk_kwargs.items() if not _is_secret(name) and isinstance(v, str | bool)}
        given = [{"extra_headers": self.default_headers, "extra_query": self.default_query}, sampling]
        if http is not None:
            http_library(http)
            given.append({"extra_headers": dict(http.headers), "extra_query": dict(http.params)})
        return named(repr((self.vendor, self.base_url, sorted(told.items()), more)), *given)

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not show up in any message."""
        key = self.api_key if isinstance(self.api_key, str) else None
        kept = (v for name, v in self.sdk_kwargs.items() if _is_secret(name))
        texts = secret_texts((key, *self.default_headers.values(), *self.default_query.values(), *kept))
        return (*texts, *path_secrets(self.base_url or ""))

    @property
    def shown_url(self) -> str | None:
        """`base_url` without what may be a key in it."""
        return None if self.base_url is None else shown_url(self.base_url)

    def __repr__(self) -> str:
        return f"<ConnectionSettings {self.shown_url or self.vendor}>"


def _is_secret(name: str) -> bool:
    return name.endswith(("_key", "_token", "_secret"))


def http_library(http: Any) -> Any:
    """The library, httpx2 or httpx, that an http client is of.

    Raises:
        ConfigurationError: if it is of neither.
    """
    for base in type(http).__mro__:
        if base.__name__ == "AsyncClient" and base.__module__.partition(".")[0] in ("httpx2", "httpx"):
            return sys.modules[base.__module__.partition(".")[0]]
    raise ConfigurationError(
        f"http_client must be an httpx2.AsyncClient (or an httpx.AsyncClient), not {type(http).__name__}"
    )


def fault_types(library: Any) -> tuple[type[Exception], ...]:
    """What sending can raise when the request got no response."""
    faults = (library.HTTPError, library.InvalidURL, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)
    try:
        import aiohttp  # noqa: PLC0415 - loaded with the SDK, where it is installed
    except ImportError:
        return faults
    return (*faults, aiohttp.ClientError)


def _own_http_client(settings: ConnectionSettings, sdk: Any, trio: bool) -> Any:
    import httpx2  # noqa: PLC0415 - loaded with the SDK

    limit = open_files_share(MAX_CONNECTIONS)
    timeout = settings.timeout
    if timeout is None or isinstance(timeout, int | float):
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT)
    # Building a TLS context takes 20 ms that a server without TLS has no use for.
    plain = settings.base_url is not None and settings.base_url.startswith("http://")
    arguments: dict[str, Any] = {
        "timeout": timeout,
        "limits": httpx2.Limits(max_connections=limit, max_keepalive_connections=limit, keepalive_expiry=IDLE),
        "verify": not plain,
    }
    if trio:
        return sdk.DefaultAsyncHttpxClient(**arguments)
    return sdk.DefaultAioHttpClient(**arguments)


def idle_at_most(settings: ConnectionSettings) -> float:
    """Seconds after which the pool has surely closed a connection that had no request."""
    # aiohttp looks every IDLE seconds for those that are older; httpx2 when the next request comes.
    by_itself = settings.http_client is None and not on_trio()
    return 2 * IDLE + 5 if by_itself else math.inf


@asynccontextmanager
async def http_client(settings: ConnectionSettings, sdk: Any) -> AsyncGenerator[Any]:
    """The caller's http client, or one of our own that is closed at the end.

    Args:
        settings: Whose http client, timeout and base URL count.
        sdk: The vendor's module, which knows the fastest transport of each event loop.
    """
    if settings.http_client is not None:
        http_library(settings.http_client)
        yield settings.http_client
        return
    # In a thread: the first one loads more modules, and certificates are read from the disk.
    http = await anyio.to_thread.run_sync(_own_http_client, settings, sdk, on_trio(), limiter=anyio.CapacityLimiter(1))
    try:
        yield http
    finally:
        with anyio.move_on_after(5, shield=True):
            await http.aclose()


def sdk_of(
    make: Callable[..., SDK], refusal: type[Exception], settings: ConnectionSettings, http: Any, **own: Any
) -> SDK:
    """A vendor's SDK client, which says where requests go and with which headers.

    Args:
        make: Its class.
        refusal: What the SDK raises for arguments it does not take.
        settings: What all SDKs are told alike.
        http: The http client.
        own: What this one is told besides.

    Raises:
        ConfigurationError: if the SDK refuses. The message shows no secret.
    """
    # The SDKs take no client of httpx; they then make one of their own, which never opens a connection.
    client = {"http_client": http} if http_library(http).__name__ == "httpx2" else {}
    try:
        return make(
            default_headers=settings.default_headers or None,
            default_query=settings.default_query or None,
            max_retries=0,
            **client,
            **own,
        )
    except (refusal, ValueError, TypeError) as error:
        name = refusal.__name__.removesuffix("Error")
        raise ConfigurationError(redacted(f"the {name} SDK refuses this: {error}", settings.secrets)) from error
