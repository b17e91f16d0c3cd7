"""The client for Google's Gemini models, on the Gemini API or on Vertex AI."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from msgspec import Struct

from ...errors import ConfigurationError, LMError
from ..http.connection import Call, Connection, Endpoint, HttpClient, connected
from ..http.encoding import encoded
from ..http.endpoints import origin_of
from ..http.pool import ConnectionSettings, http_client
from ..http.secrecy import redacted, shown_url, unlogged_queries
from ..openai.client import fresh_key
from ..spec import loaded_sdk
from .dialect import PLACEHOLDER, Dialect
from .replies import ResponseStream, failure, parse_response

if TYPE_CHECKING:
    from ..base import LMRequest, Message

BASE_URL = "https://generativelanguage.googleapis.com"

SCOPE = "https://www.googleapis.com/auth/cloud-platform"


class GeminiConnection(Struct, frozen=True, eq=False):
    """A pool of connections, and how Google's SDK would use it."""

    connection: Connection
    dialect: Dialect


class GeminiClient(HttpClient):
    """One Gemini model behind an open connection."""

    _parse = staticmethod(parse_response)
    _assembler = ResponseStream

    def __init__(
        self, connection: GeminiConnection, model: str, *, sampling_args: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(connection.connection, model)
        self._dialect = connection.dialect
        self._arguments = dict(sampling_args or {})
        self._dialect.pattern(model, self._arguments)  # what is wrong with them is said when the client opens

    def _call(self, request: LMRequest, *, stream: bool) -> Call:
        arguments = {name: v for name, v in (self._arguments | request.sampling_args).items() if v is not None}
        extra_body = cast("Mapping[str, Any]", arguments.pop("extra_body", None) or {})
        headers, query = arguments.pop("extra_headers", None), arguments.pop("extra_query", None)
        timeout = arguments.pop("timeout", None)
        try:
            pattern = self._dialect.pattern(self.model, arguments)
        except ConfigurationError as error:
            raise LMError(str(error), kind="bad_request") from error
        body: dict[str, Any] = {**_conversation(request.messages), **pattern.body}
        for name, value in extra_body.items():
            old = body.get(name)
            merge = isinstance(old, dict) and isinstance(value, dict)
            body[name] = cast("dict[str, Any]", old) | cast("dict[str, Any]", value) if merge else value
        if request.output_cap is not None:
            config = body.get("generationConfig", {})
            most = min(request.output_cap, config.get("maxOutputTokens", request.output_cap))
            body["generationConfig"] = {**config, "maxOutputTokens": most}
        url = pattern.stream_url if stream else pattern.url
        return Call(body=encoded(body), url=url, headers=headers, query=query, timeout=timeout)


def _conversation(messages: tuple[Message, ...]) -> dict[str, Any]:
    """The messages as the API wants them: what the system says apart, and no empty ones."""
    count = next((i for i, m in enumerate(messages) if m.role not in ("system", "developer")), len(messages))
    system = [{"text": message.content} for message in messages[:count] if message.content.strip()]
    contents = [
        {"role": "model" if message.role == "assistant" else "user", "parts": [{"text": message.content}]}
        for message in messages[count:]
        if message.content.strip()
    ]
    return {"systemInstruction": {"parts": system}, "contents": contents} if system else {"contents": contents}


@asynccontextmanager
async def open_connection(settings: ConnectionSettings) -> AsyncGenerator[GeminiConnection]:
    """A pool of connections, closed at the end unless the http client is the caller's own."""
    openai = await loaded_sdk("openai", "openai")  # always installed, and its transport for httpx2 is the fastest
    tokens: _Tokens | None = None
    if settings.sdk_kwargs.get("vertexai") and settings.api_key is None and settings.sdk_kwargs.get("signed", True):
        tokens = await _Tokens.open(settings.sdk_kwargs.get("credentials"))
    project = settings.sdk_kwargs.get("project") or (tokens and tokens.project)
    if settings.sdk_kwargs.get("vertexai") and settings.api_key is None and not project:
        raise ConfigurationError("vertexai=True needs project= in backend_kwargs, or GOOGLE_CLOUD_PROJECT")
    signed = settings.api_key is not None or tokens is not None

    host = urlsplit(settings.base_url or "").hostname or ""

    def make() -> Dialect:
        return Dialect(settings, project=project, signed=signed)

    async with http_client(settings, openai) as http:
        try:
            # It reads certificates from the disk, and its own http client logs the URL.
            with unlogged_queries("httpx2", host, settings.secrets), unlogged_queries("httpx", host, settings.secrets):
                dialect = await anyio.to_thread.run_sync(make, limiter=anyio.CapacityLimiter(1))
                pattern = dialect.pattern("-", {})
        except (ValueError, TypeError) as error:
            if isinstance(error, ConfigurationError):
                raise
            said = redacted(f"the google-genai SDK refuses this: {error}", settings.secrets)
            raise ConfigurationError(said) from error
        if settings.base_url is not None and origin_of(str(pattern.url.copy_with(query=None))) != origin_of(
            settings.base_url
        ):
            raise ConfigurationError(f"base_url is ambiguous: it could also be read as {shown_url(str(pattern.url))}")
        signature = {name: value for name, value in pattern.headers.items() if PLACEHOLDER in value}
        headers = {name: value for name, value in pattern.headers.items() if name not in signature}
        key = settings.api_key
        if isinstance(key, str):
            headers |= _signed(signature, key)

        async def sign() -> Mapping[str, str]:
            return _signed(signature, await tokens.fresh() if tokens is not None else await fresh_key(cast("Any", key)))

        endpoint = Endpoint(
            url=pattern.url,
            headers=headers,
            query=settings.default_query,
            sign=sign if tokens is not None or callable(key) else None,
            failure=failure,
        )
        with connected(settings, http, endpoint) as connection:
            yield GeminiConnection(connection, dialect)


def _signed(signature: Mapping[str, str], secret: str) -> dict[str, str]:
    return {name: value.replace(PLACEHOLDER, secret) for name, value in signature.items()}


class _Tokens:
    """The access tokens of Google's credentials, renewed when they run out. Belongs to one event loop."""

    def __init__(self, credentials: Any, project: str | None) -> None:
        self._credentials = credentials
        self._renewing = anyio.Lock()
        self.project = project

    @classmethod
    async def open(cls, credentials: Any) -> _Tokens:
        if credentials is not None:
            return cls(credentials, getattr(credentials, "project_id", None))
        auth = await loaded_sdk("google.auth", "gemini")
        try:
            found, project = await anyio.to_thread.run_sync(
                lambda: auth.default(scopes=[SCOPE]), abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
            )
        except auth.exceptions.GoogleAuthError as error:
            raise ConfigurationError(
                f"vertexai=True needs Google credentials: `gcloud auth application-default login`, or credentials= "
                f"in backend_kwargs ({error})"
            ) from error
        return cls(found, project)

    async def fresh(self) -> str:
        if not self._credentials.valid:
            async with self._renewing:
                if not self._credentials.valid:
                    await self._renew()
        return str(self._credentials.token)

    async def _renew(self) -> None:
        transport = await loaded_sdk("google.auth.transport.requests", "gemini")
        exceptions = await loaded_sdk("google.auth.exceptions", "gemini")
        try:
            await anyio.to_thread.run_sync(
                lambda: self._credentials.refresh(transport.Request()),
                abandon_on_cancel=True,
                limiter=anyio.CapacityLimiter(1),
            )
        except exceptions.GoogleAuthError as error:
            raise LMError(
                f"no access token from Google's credentials ({type(error).__name__})",
                kind="authentication",
                retryable=bool(getattr(error, "retryable", False)),
            ) from error
