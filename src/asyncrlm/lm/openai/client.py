"""The client for OpenAI and every server that speaks its chat completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from ...errors import ConfigurationError, LMError
from ..http.connection import Call, Connection, Endpoint, HttpClient, connected
from ..http.encoding import encoded
from ..http.endpoints import checked_key, is_ambient, origin_of
from ..http.pool import ConnectionSettings, http_client, sdk_of
from ..http.replies import parse_completion
from ..http.secrecy import shown_url
from ..spec import loaded_sdk
from .stream import CompletionStream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from openai import AsyncOpenAI

    from ..base import LMRequest

CAP_NAMES = ("max_completion_tokens", "max_tokens")
"""The names under which servers know the cap on output tokens."""


def _headers(settings: ConnectionSettings, sdk: AsyncOpenAI) -> dict[str, str]:
    """The headers of every request: the SDK's, less what the environment says for OpenAI if this is another host."""
    own = {name.lower() for name in settings.default_headers}
    own |= {"accept", "content-type", "user-agent"}
    own |= {f"openai-{name}" for name in ("organization", "project") if settings.sdk_kwargs.get(name)}
    ambient = is_ambient(origin_of(str(sdk.base_url)))
    given = {name.lower(): value for name, value in sdk.default_headers.items() if isinstance(value, str)}
    # The SDK's own telemetry stays out: it is a dozen headers a request, and what it tells is the SDK's way of sending.
    kept = {name: v for name, v in given.items() if name in own or (ambient and not name.startswith("x-stainless-"))}
    headers = {"authorization": f"Bearer {settings.api_key}"} if isinstance(settings.api_key, str) else {}
    return headers | kept


async def fresh_key(give: Callable[[], Awaitable[str]], name: str = "api_key") -> str:
    """What an async function of the caller's gives as a key.

    Raises:
        LMError: of kind "authentication", if it gives none.
    """
    try:
        return checked_key(await give())
    except Exception as error:
        said = str(error) if isinstance(error, ConfigurationError) else f"{type(error).__name__} in the {name} function"
        raise LMError(said, kind="authentication") from error


def endpoint_of(settings: ConnectionSettings, sdk: AsyncOpenAI) -> Endpoint:
    """What the SDK's client says of chat completions."""

    async def sign() -> dict[str, str]:
        return {"authorization": f"Bearer {await fresh_key(cast('Any', settings.api_key))}"}

    return Endpoint(
        url=sdk.base_url.join("chat/completions"),
        headers=_headers(settings, sdk),
        query=sdk.default_query,
        sign=sign if callable(settings.api_key) else None,
    )


@asynccontextmanager
async def open_connection(settings: ConnectionSettings) -> AsyncGenerator[Connection]:
    """A pool of connections, closed at the end unless the http client is the caller's own."""
    openai = await loaded_sdk("openai", "openai")
    async with http_client(settings, openai) as http:
        own = {} if settings.base_url is None else {"base_url": settings.base_url}
        # The key is never None: the SDK would take OPENAI_API_KEY, whatever the host. The header is ours to add.
        sdk = sdk_of(openai.AsyncOpenAI, openai.OpenAIError, settings, http, api_key="-", **own, **settings.sdk_kwargs)
        if settings.base_url is not None and origin_of(str(sdk.base_url)) != origin_of(settings.base_url):
            raise ConfigurationError(f"base_url is ambiguous: it could also be read as {shown_url(str(sdk.base_url))}")
        with connected(settings, http, endpoint_of(settings, sdk)) as connection:
            yield connection


class OpenAIClient(HttpClient):
    """One model behind an open `Connection`."""

    _parse = staticmethod(parse_completion)
    _assembler = CompletionStream

    def __init__(
        self,
        connection: Connection,
        model: str,
        *,
        sampling_args: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        cap_name: str = "max_tokens",
        stream_usage: bool = True,
    ) -> None:
        super().__init__(connection, model)
        self._arguments = {**(body or {}), **(sampling_args or {})}
        self._cap_name = cap_name
        self._stream = {"stream": True, **({"stream_options": {"include_usage": True}} if stream_usage else {})}

    def _call(self, request: LMRequest, *, stream: bool) -> Call:
        arguments = {**self._arguments, **request.sampling_args}
        extra_body = cast("Mapping[str, Any]", arguments.pop("extra_body", None) or {})
        headers = arguments.pop("extra_headers", None)
        query = arguments.pop("extra_query", None)
        timeout = arguments.pop("timeout", None)
        body: dict[str, Any] = {"model": self.model, "messages": request.messages}
        body.update((name, value) for name, value in arguments.items() if value is not None)
        if stream:
            body.update(self._stream)
        body.update(extra_body)
        if request.output_cap is not None:
            self._cap(body, request.output_cap)
        return Call(body=encoded(body), headers=headers, query=query, timeout=timeout)

    def _cap(self, body: dict[str, Any], cap: int) -> None:
        set_names = [name for name in CAP_NAMES if isinstance(body.get(name), int)]
        for name in set_names or [self._cap_name]:
            body[name] = min(cap, body.get(name, cap))
