"""The client for OpenAI and every server that speaks its chat completions.

The SDK gives what it is good at: base URLs, default headers, the pool of connections. A call itself is one request
object through that pool and one `msgspec` decode: the SDK's own way of sending costs three times as much.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import anyio
import msgspec
from msgspec import Struct

from ..errors import ConfigurationError, LMError
from .base import LMClient, LMReply, LMRequest
from .endpoints import checked_key, header_problem, is_ambient, origin_of
from .limits import open_files_share, rate_hints
from .replies import error_of_status, parse_completion, whole_text

if TYPE_CHECKING:
    import httpx2
    from openai import AsyncOpenAI

    from ..types import RateHints

ApiKey = str | Callable[[], Awaitable[str]]

DEFAULT_TIMEOUT = 600.0
"""Seconds that one attempt may take."""

CONNECT_TIMEOUT = 30.0
"""Seconds that opening a connection may take."""

MAX_CONNECTIONS = 2000
"""Connections to one account at most; fewer where the process may have few open files."""

CAP_NAMES = ("max_completion_tokens", "max_tokens")
"""The names under which servers know the cap on output tokens."""

_encode = msgspec.json.Encoder().encode


class ConnectionSettings(Struct, frozen=True, kw_only=True, eq=False):
    """Where to send and how to sign: all that the models of one account share."""

    base_url: str | None
    """None with `data_residency`, which names one of OpenAI's own."""
    api_key: ApiKey | None
    """None for a server that wants no key: no Authorization header is sent."""
    timeout: Any = DEFAULT_TIMEOUT
    """Seconds for the whole of one attempt, an `httpx2.Timeout`, or None for no limit."""
    default_headers: Mapping[str, str] = {}
    default_query: Mapping[str, object] = {}
    organization: str | None = None
    project: str | None = None
    http_client: Any = None
    """The caller's own `httpx2.AsyncClient`; never closed here."""
    sdk_kwargs: Mapping[str, Any] = {}
    """Other arguments of the SDK's client, handed on."""

    @property
    def key(self) -> Hashable:
        """Equal for settings that may share connections. Holds no secret in clear."""
        more = (self.default_headers, self.default_query, self.sdk_kwargs)
        secret = (self.api_key, *(sorted(given.items(), key=str) for given in more))
        plain = (
            self.base_url,
            str(self.timeout),
            self.organization,
            self.project,
        )
        return ("openai", *plain, id(self.http_client) if self.http_client else None, fingerprint(repr(secret)))

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not show up in any message."""
        values = (self.api_key, *self.default_headers.values(), *map(str, self.default_query.values()))
        return tuple(value for value in values if isinstance(value, str) and len(value) >= 8)

    def __repr__(self) -> str:
        return f"<ConnectionSettings {self.base_url or 'api.openai.com'}>"


def fingerprint(secret: str) -> str:
    """Tells secrets apart without giving them away."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()[:12]


class Connection:
    """An open pool of connections to one account. Belongs to one event loop."""

    def __init__(self, settings: ConnectionSettings, sdk: AsyncOpenAI, http: httpx2.AsyncClient) -> None:
        import httpx2  # noqa: PLC0415 - loaded with the SDK

        self._settings = settings
        self._http = http
        self._request = httpx2.Request
        self._query = {name: value for name, value in sdk.default_query.items() if value is not None}
        self._url = self._with_query(sdk.base_url.join("chat/completions"), self._query)
        self._headers = _static_headers(settings, sdk)
        self._total = settings.timeout if isinstance(settings.timeout, int | float) else None
        self._faults = _fault_types()
        self.host = sdk.base_url.host
        self.account = f"openai:{sdk.base_url.netloc.decode('ascii')}:{fingerprint(repr(settings.api_key))}"

    @staticmethod
    def _with_query(url: httpx2.URL, query: Mapping[str, Any]) -> httpx2.URL:
        return url.copy_merge_params(dict(query)) if query else url

    async def post(
        self,
        body: bytes,
        *,
        headers: Mapping[str, str | None] | None = None,
        query: Mapping[str, Any] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - one request's own, told apart from the caller's deadline
    ) -> tuple[bytes, RateHints | None]:
        """Send one chat completion request; the body of a successful response, and what it says of rate limits.

        Raises:
            LMError: for every failure, classified; no secret in its text.
        """
        sent = self._headers  # the request copies them
        if headers or callable(self._settings.api_key):
            sent = await self._own_headers(headers or {})
        url = self._with_query(self._url, query) if query else self._url
        request = self._request("POST", url, headers=sent, content=body)
        total = timeout if timeout is not None else self._total
        try:
            if total is None:
                response = await self._http.send(request, follow_redirects=False)
            else:
                with anyio.fail_after(total):
                    response = await self._http.send(request, follow_redirects=False)
        except self._faults as fault:
            raise self._classified(fault, self._secrets(sent)) from fault
        if response.status_code == 200:
            return response.content, rate_hints(response.headers)
        raise self._refused(response, self._secrets(sent))

    async def _own_headers(self, more: Mapping[str, str | None]) -> httpx2.Headers:
        headers = self._headers.copy()
        if callable(self._settings.api_key):
            headers["authorization"] = f"Bearer {await _fresh_key(self._settings.api_key)}"
        _add_headers(headers, more)
        return headers

    def _secrets(self, sent: httpx2.Headers) -> tuple[str, ...]:
        return (*self._settings.secrets, sent.get("authorization", "").removeprefix("Bearer "))

    def _refused(self, response: httpx2.Response, secrets: tuple[str, ...]) -> LMError:
        if response.is_success:
            return LMError(f"the server answered HTTP {response.status_code} without a completion", kind="bad_reply")
        if response.has_redirect_location:
            target = self._url.join(response.headers["location"]).copy_with(query=None, fragment=None)
            return LMError(
                f"HTTP {response.status_code}: the server redirects to {target}; if that is where the model is, "
                "give it as base_url (requests are not redirected: they carry a key)",
                kind="not_found",
                status=response.status_code,
            )
        error = error_of_status(response.status_code, response.headers, response.content)
        error.args = (_redacted(error.args[0], secrets),)
        error.rate = rate_hints(response.headers)
        return error

    def _classified(self, fault: Exception, secrets: tuple[str, ...]) -> LMError:
        """The error for a request that got no response."""
        import httpx2  # noqa: PLC0415 - loaded with the SDK

        causes = _chain(fault)
        # The SDK's aiohttp transport reports all that happens to a connection as a ConnectTimeout: the cause tells.
        deepest = next((cause for cause in causes if type(cause).__module__.startswith("aiohttp")), fault)
        text = _redacted(f"{type(deepest).__name__}: {deepest}".rstrip(": "), secrets)
        connecting = type(deepest).__name__ in ("ConnectTimeout", "PoolTimeout", "ConnectionTimeoutError")
        if isinstance(deepest, TimeoutError | httpx2.TimeoutException):
            return LMError(
                f"no reply from {self.host} in time ({text})", kind="timeout", retryable=True, charged=not connecting
            )
        refused = isinstance(fault, httpx2.ConnectError | httpx2.ProxyError | httpx2.UnsupportedProtocol) or any(
            base.__name__ == "ClientConnectorError" for base in type(deepest).__mro__
        )
        permanent = isinstance(fault, httpx2.UnsupportedProtocol | httpx2.LocalProtocolError) or any(
            isinstance(cause, ssl.SSLCertVerificationError) for cause in causes
        )
        return LMError(
            f"no connection to {self.host} ({text})" if refused else f"lost the connection to {self.host} ({text})",
            kind="connection",
            retryable=not permanent,
            charged=not refused and not permanent,
        )


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    while error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__ or error
    return chain


def _redacted(text: str, secrets: tuple[str, ...]) -> str:
    for secret in secrets:
        if len(secret) >= 8:
            text = text.replace(secret, "[redacted]")
    return text


def _fault_types() -> tuple[type[Exception], ...]:
    """What sending can raise when the request got no response."""
    import httpx2  # noqa: PLC0415 - loaded with the SDK

    faults: tuple[type[Exception], ...] = (httpx2.HTTPError, httpx2.InvalidURL, OSError, anyio.BrokenResourceError)
    try:
        import aiohttp  # noqa: PLC0415 - loaded with the SDK, where it is installed
    except ImportError:
        return faults
    return (*faults, aiohttp.ClientError)


def _static_headers(settings: ConnectionSettings, sdk: AsyncOpenAI) -> httpx2.Headers:
    """The headers of every request: the SDK's, less what the environment says for OpenAI if this is another host."""
    import httpx2  # noqa: PLC0415 - loaded with the SDK

    own = {name.lower() for name in settings.default_headers}
    own |= {"accept", "content-type", "user-agent"}
    own |= {"openai-organization"} if settings.organization else set()
    own |= {"openai-project"} if settings.project else set()
    ambient = is_ambient(origin_of(str(sdk.base_url)))
    given = {name.lower(): value for name, value in sdk.default_headers.items() if isinstance(value, str)}
    # The SDK's own telemetry stays out: it is a dozen headers a request, and what it tells is the SDK's way of sending.
    kept = {name: v for name, v in given.items() if name in own or (ambient and not name.startswith("x-stainless-"))}
    # Replies are a few kB: unpacking them costs more than it saves, and nobody can send a bomb.
    headers = httpx2.Headers({"accept-encoding": "identity"})
    if isinstance(settings.api_key, str):
        headers["authorization"] = f"Bearer {settings.api_key}"
    _add_headers(headers, kept)
    return headers


def _add_headers(headers: httpx2.Headers, more: Mapping[str, str | None]) -> None:
    for name, value in more.items():
        if value is None:
            headers.pop(name, None)
        elif problem := header_problem(name, value):
            raise LMError(problem, kind="bad_request")
        else:
            headers[name] = value


async def _fresh_key(give: Callable[[], Awaitable[str]]) -> str:
    try:
        return checked_key(await give())
    except Exception as error:
        said = (
            str(error) if isinstance(error, ConfigurationError) else f"{type(error).__name__} in the api_key function"
        )
        raise LMError(said, kind="authentication") from error


def _own_http_client(settings: ConnectionSettings) -> httpx2.AsyncClient:
    import httpx2  # noqa: PLC0415 - loaded with the SDK
    import openai  # noqa: PLC0415 - costs most of a second, paid by those who open a connection
    import sniffio  # noqa: PLC0415 - comes with the SDK

    limit = open_files_share(MAX_CONNECTIONS)
    timeout = settings.timeout
    if timeout is None or isinstance(timeout, int | float):
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT)
    # Building a TLS context takes 20 ms that a server without TLS has no use for.
    plain = settings.base_url is not None and settings.base_url.startswith("http://")
    arguments: dict[str, Any] = {
        "timeout": timeout,
        "limits": httpx2.Limits(max_connections=limit, max_keepalive_connections=limit, keepalive_expiry=30.0),
        "verify": not plain,
    }
    if sniffio.current_async_library() == "asyncio":
        return openai.DefaultAioHttpClient(**arguments)
    return openai.DefaultAsyncHttpxClient(**arguments)


@asynccontextmanager
async def open_connection(settings: ConnectionSettings) -> AsyncGenerator[Connection]:
    """A pool of connections, closed at the end unless the http client is the caller's own."""
    import openai  # noqa: PLC0415 - costs most of a second, paid by those who open a connection

    http: httpx2.AsyncClient = settings.http_client or _own_http_client(settings)
    try:
        try:
            sdk = openai.AsyncOpenAI(
                # Never None: the SDK would take OPENAI_API_KEY, whatever the host. The header is ours to add.
                api_key="-",
                organization=settings.organization,
                project=settings.project,
                default_headers=settings.default_headers or None,
                default_query=settings.default_query or None,
                http_client=http,
                max_retries=0,
                **({} if settings.base_url is None else {"base_url": settings.base_url}),
                **settings.sdk_kwargs,
            )
        except (openai.OpenAIError, ValueError, TypeError) as error:
            raise ConfigurationError(_redacted(f"the OpenAI SDK refuses this: {error}", settings.secrets)) from error
        if settings.base_url is not None and origin_of(str(sdk.base_url)) != origin_of(settings.base_url):
            raise ConfigurationError(f"base_url is ambiguous: it could also be read as {sdk.base_url}")
        yield Connection(settings, sdk, http)
    finally:
        if settings.http_client is None:
            with anyio.move_on_after(5, shield=True):
                await http.aclose()


class OpenAIClient(LMClient):
    """One model behind an open `Connection`."""

    def __init__(
        self,
        connection: Connection,
        model: str,
        *,
        sampling_args: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        cap_name: str = "max_tokens",
    ) -> None:
        self.model = model
        self._connection = connection
        self._arguments = {**(body or {}), **(sampling_args or {})}
        self._cap_name = cap_name

    @property
    def account(self) -> str:
        return self._connection.account

    async def acomplete(self, request: LMRequest) -> LMReply:
        arguments = {**self._arguments, **request.sampling_args}
        extra_body = cast("Mapping[str, Any]", arguments.pop("extra_body", None) or {})
        headers = arguments.pop("extra_headers", None)
        query = arguments.pop("extra_query", None)
        timeout = arguments.pop("timeout", None)
        body: dict[str, Any] = {"model": self.model, "messages": request.messages}
        body.update((name, value) for name, value in arguments.items() if value is not None)
        body.update(extra_body)
        if request.output_cap is not None:
            self._cap(body, request.output_cap)
        content, rate = await self._connection.post(_encoded(body), headers=headers, query=query, timeout=timeout)
        reply = parse_completion(content)
        return reply if rate is None else msgspec.structs.replace(reply, rate=rate)

    def _cap(self, body: dict[str, Any], cap: int) -> None:
        set_names = [name for name in CAP_NAMES if isinstance(body.get(name), int)]
        for name in set_names or [self._cap_name]:
            body[name] = min(cap, body.get(name, cap))

    def __repr__(self) -> str:
        return f"<OpenAIClient {self.model} at {self._connection.host}>"


def _encoded(body: dict[str, Any]) -> bytes:
    try:
        return _encode(body)
    except UnicodeEncodeError:
        return _encode(_with_whole_text(msgspec.to_builtins(body)))
    except (TypeError, ValueError) as error:
        raise LMError(f"the request can't be sent as JSON: {error}", kind="bad_request") from error


def _with_whole_text(value: Any) -> Any:
    match value:
        case str():
            return whole_text(value)
        case dict():
            return {
                _with_whole_text(name): _with_whole_text(item) for name, item in cast("dict[Any, Any]", value).items()
            }
        case list() | tuple():
            return [_with_whole_text(item) for item in cast("list[Any]", value)]
        case _:
            return value
