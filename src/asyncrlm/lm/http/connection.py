"""A pool of connections to one account of one provider: requests go out, every failure comes back classified.

Each vendor's SDK says where to send and how to sign; a call itself is one request object through the pool and one
`msgspec` decode: the SDKs' own ways of sending cost four to five times as much, and some know only asyncio.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import anyio
import msgspec
from msgspec import Struct

from ...caught import described
from ...errors import LMError
from ..arguments import argument_problem
from ..base import LMClient, LMDelta, LMReply, LMRequest
from ..pacing.files import PoolFiles
from ..pacing.limits import rate_hints
from .bodies import body_of, check_encoding, exhausted
from .endpoints import fingerprint, header_problem
from .faults import classified
from .naming import SIGNATURES
from .pool import ConnectionSettings, fault_types, http_library, idle_at_most
from .replies import error_of_status
from .secrecy import given_secrets, redacted, secret_texts, unlogged_queries
from .sse import EventLines

if TYPE_CHECKING:
    import httpx2


class Endpoint(Struct, kw_only=True, eq=False):
    """What a vendor's SDK says of its requests."""

    url: httpx2.URL
    """Where a request goes that does not say otherwise."""
    headers: Mapping[str, str]
    """Of every request."""
    query: Mapping[str, Any] = {}
    sign: Callable[[], Awaitable[Mapping[str, str]]] | None = None
    """Gives the headers that can't be written once for all, such as a token that expires."""
    failure: Callable[[int, Mapping[str, str], bytes], LMError] = error_of_status
    """What a response that is no success says."""


class Call(Struct, kw_only=True, eq=False):
    """One request, ready to go."""

    body: bytes
    url: httpx2.URL | None = None
    headers: Mapping[str, str | None] | None = None
    query: Mapping[str, Any] | None = None
    keeps: bool = True
    """Whether the connection is kept open for the next one."""
    timeout: float | None = None
    """Seconds, instead of the connection's."""
    given: Sequence[Mapping[str, Any]] = ()
    """What the caller put into the body, whose secrets no message may repeat."""


class Assembler(Protocol):
    """Puts a reply together from the events of a stream."""

    done: bool
    """Whether the stream has said that it is complete."""

    def feed(self, data: bytes) -> LMDelta | None:
        """Take the data of one event; raises `LMError` for one that is none, or that reports a failure."""
        ...

    def reply(self) -> LMReply:
        """The whole reply; raises `LMError` if the stream has not given it."""
        ...


class Connection:
    """An open pool of connections to one account. Belongs to one event loop."""

    def __init__(self, settings: ConnectionSettings, http: Any, endpoint: Endpoint) -> None:
        library = http_library(http)
        self._settings = settings
        self._http = http
        self._library = library
        self.files = PoolFiles(idle_at_most(settings))
        self._endpoint = endpoint
        own = {name: value for name, value in http.headers.items() if name.lower() not in _OF_THE_LIBRARY}
        self._query = {name: value for name, value in endpoint.query.items() if value is not None}
        self._query = {**dict(http.params), **self._query}
        self._url = _with_query(endpoint.url, self._query)
        self._headers = library.Headers({"accept-encoding": "identity"})
        # Replies are a few kB: unpacking them costs more than it saves.
        add_headers(self._headers, own)
        add_headers(self._headers, endpoint.headers)
        self._cookies = None if settings.http_client is None else http.cookies
        """Only of the caller's own: servers give some to balance their load, and all requests would go to one."""
        self._total = settings.timeout if isinstance(settings.timeout, int | float) else None
        self._faults = fault_types(library)
        self.host: str = endpoint.url.host
        self._where = str(settings.shown_url or endpoint.url.join("/")).rstrip("/")
        signed = (self._headers.get(name) for name in SIGNATURES)
        carried = (*own.values(), *dict(http.params).values())
        self._secrets = secret_texts((*settings.secrets, *carried, *signed))
        where = endpoint.url.netloc.decode("ascii")
        identity = (settings.api_key, settings.sdk_kwargs, *(self._headers.get(name) for name in SIGNATURES))
        self.account = f"{settings.vendor}:{where}:{fingerprint(repr(identity))}"

    async def complete(self, call: Call, parse: Callable[[bytes], LMReply]) -> LMReply:
        """Send one request and parse the body of a successful response.

        Raises:
            LMError: for every failure, classified; no secret in its text.
        """
        request, secrets, total = await self._prepared(call)
        began = anyio.current_time()
        try:
            with anyio.fail_after(total):
                response = await self._http.send(request, follow_redirects=False, stream=True)
                body = await body_of(response, self._faults)
        except LMError:
            raise
        except Exception as fault:  # a hook of the caller's can raise anything
            raise self._failed(fault, _with_signature(secrets, request)) from fault
        secrets = _with_signature(secrets, request)
        if response.status_code != 200:
            raise self._refused(response, body, secrets)
        reply = self._parsed(parse, body, secrets)
        return self._finished(reply, began, response)

    async def stream(
        self, call: Call, parse: Callable[[bytes], LMReply], assembler: Assembler
    ) -> AsyncGenerator[LMDelta]:
        """Send one request and give the reply piece by piece; the last piece has all of it.

        `parse` is for a server that answers with a whole reply though it was asked for a stream.

        Raises:
            LMError: as `complete`; once the reply has begun, `charged`.
        """
        request, secrets, total = await self._prepared(call)
        began = anyio.current_time()
        deadline = None if total is None else began + total
        try:
            with _until(deadline):
                response = await self._http.send(request, follow_redirects=False, stream=True)
        except LMError:
            raise
        except Exception as fault:  # a hook of the caller's can raise anything
            raise self._failed(fault, _with_signature(secrets, request)) from fault
        secrets = _with_signature(secrets, request)
        chunks: Any = None
        try:
            if response.status_code != 200 or "event-stream" not in response.headers.get("content-type", "").lower():
                try:
                    with _until(deadline):
                        body = await body_of(response, self._faults)
                except self._faults as fault:
                    raise self._classified(fault, secrets, begun=True) from fault
                if response.status_code != 200:
                    raise self._refused(response, body, secrets)
                reply = self._finished(self._parsed(parse, body, secrets), began, response)
                yield LMDelta(text=reply.text, reasoning=reply.reasoning or "", reply=reply)
                return
            check_encoding(response)
            lines, chunks, more = EventLines(), response.aiter_bytes(), True
            while more and not assembler.done:
                events, more = await self._next_events(lines, chunks, deadline, secrets)
                for data in events:
                    if (delta := self._parsed(assembler.feed, data, secrets)) is not None:
                        yield delta
            # Read to the end, which comes at once, or the connection could not be used again.
            with anyio.move_on_after(1):
                while more:
                    _, more = await self._next_events(lines, chunks, deadline, secrets)
            yield LMDelta(reply=self._finished(assembler.reply(), began, response))
        finally:
            with anyio.move_on_after(5, shield=True):
                await response.aclose()
                if chunks is not None:
                    await exhausted(chunks, self._faults)

    def _parsed(self, parse: Callable[[bytes], Any], data: bytes, secrets: tuple[str, ...]) -> Any:
        try:
            return parse(data)
        except Exception as error:  # noqa: BLE001 - a server can say anything
            failure = error if isinstance(error, LMError) else _unreadable(error)
            self._tell(failure, secrets)
            raise failure from (None if failure is error else error)

    def _tell(self, error: LMError, secrets: tuple[str, ...]) -> None:
        """Say where an error comes from, and no secret."""
        error.args = (redacted(error.message, secrets),)
        error.where = redacted(self._where, secrets)

    def _failed(self, fault: Exception, secrets: tuple[str, ...]) -> LMError:
        return self._classified(fault, secrets) if isinstance(fault, self._faults) else self.unknown(fault, secrets)

    def unknown(self, error: Exception, secrets: tuple[str, ...] | None = None) -> LMError:
        """The error for what nobody expects of an http client: one that was closed, a hook of the caller's."""
        if getattr(self._http, "is_closed", False):
            return LMError("the http client is closed", kind="connection")
        shown = redacted(described(error).rstrip(": "), secrets or self._secrets)
        return LMError(f"sending to {self.host} failed: {shown}", kind="other", charged=True)

    async def _next_events(
        self, lines: EventLines, chunks: Any, deadline: float | None, secrets: tuple[str, ...]
    ) -> tuple[list[bytes], bool]:
        """The data of the next events, maybe of none, and whether more may come."""
        try:
            with _until(deadline):
                return lines.feed(await anext(chunks)), True
        except StopAsyncIteration:
            return lines.end(), False
        except self._faults as fault:
            raise self._classified(fault, secrets, begun=True) from fault
        except ValueError as error:
            raise LMError(f"the server sends {error}", kind="bad_reply", charged=True) from error

    async def _prepared(self, call: Call) -> tuple[Any, tuple[str, ...], float | None]:
        sent = self._headers  # the request copies them
        if call.headers or self._endpoint.sign is not None:
            sent = self._headers.copy()
            if self._endpoint.sign is not None:
                add_headers(sent, await self._endpoint.sign())
            add_headers(sent, call.headers or {})
        url = self._url if call.url is None else _with_query(call.url, self._query)
        url = _with_query(url, call.query) if call.query else url
        request = self._library.Request("POST", str(url), headers=sent, content=call.body)
        if not call.keeps:
            request.headers["connection"] = "close"
        if self._cookies:
            self._cookies.set_cookie_header(request)
        secrets = self._secrets + secret_texts(text for given in call.given if given for text in given_secrets(given))
        if sent is not self._headers or call.query:
            signed = (sent.get(name) for name in SIGNATURES)
            secrets += secret_texts((*signed, *(call.headers or {}).values(), *(call.query or {}).values()))
        return request, secrets, call.timeout if call.timeout is not None else self._total

    @staticmethod
    def _finished(reply: LMReply, began: float, response: httpx2.Response) -> LMReply:
        latency, rate = anyio.current_time() - began, rate_hints(response.headers)
        return msgspec.structs.replace(reply, latency=latency, rate=rate)

    def _classified(self, fault: Exception, secrets: tuple[str, ...], *, begun: bool = False) -> LMError:
        return classified(fault, self._library, self.host, self._where, secrets, begun=begun)

    def _refused(self, response: httpx2.Response, body: bytes, secrets: tuple[str, ...]) -> LMError:
        if response.is_success:
            return LMError(f"the server answered HTTP {response.status_code} without a completion", kind="bad_reply")
        if response.has_redirect_location:
            try:
                target = self._url.join(response.headers["location"]).copy_with(query=None, fragment=None)
            except (self._library.InvalidURL, ValueError):
                target = "an address that is none"
            shown = redacted(str(target), secrets)
            return LMError(
                f"HTTP {response.status_code}: the server redirects to {shown}; if that is where the model is, "
                "give it as base_url (requests are not redirected: they carry a key)",
                kind="not_found",
                status=response.status_code,
            )
        try:
            error = self._endpoint.failure(response.status_code, response.headers, body)
        except Exception as fault:  # noqa: BLE001 - a server can say anything
            error = _unreadable(fault)
            error.status = response.status_code
        error.args = (error.message + self._advice(response.status_code),)
        self._tell(error, secrets)
        error.rate = rate_hints(response.headers)
        return error

    def _advice(self, status: int) -> str:
        settings = self._settings
        if status in (401, 403) and settings.withheld is not None:
            key = 'backend_kwargs={"api_key": …}'
            return f"; {settings.withheld} is not sent to {self.host}, for which it may not be meant: pass {key}"
        if status == 404 and settings.vendor == "openai" and not urlsplit(settings.base_url or "/v1").path:
            return "; base_url has no path: most servers have the API under /v1"
        return ""


@contextmanager
def connected(settings: ConnectionSettings, http: Any, endpoint: Endpoint) -> Generator[Connection]:
    """A connection through an open http client. While it is there, no query of its requests is logged."""
    with unlogged_queries(http_library(http).__name__, endpoint.url.host, settings.secrets):
        connection = Connection(settings, http, endpoint)
        try:
            yield connection
        finally:
            connection.files.close()


class HttpClient(LMClient):
    """One model behind an open `Connection`. A vendor says what to send and how to read what comes back."""

    _parse: Callable[[bytes], LMReply]
    _assembler: Callable[[], Assembler]
    _arguments: dict[str, Any]
    """Sent with each request."""

    def __init__(self, connection: Connection, model: str) -> None:
        self.model = model
        self._connection = connection

    @property
    def account(self) -> str:
        return self._connection.account

    def _call(self, request: LMRequest, *, stream: bool) -> Call:
        """The request as this vendor wants it."""
        raise NotImplementedError

    def _complete_call(self, request: LMRequest, *, stream: bool) -> Call:
        if request.sampling_args and (problem := argument_problem(request.sampling_args)):
            raise LMError(problem, kind="bad_request")
        call = self._call(request, stream=stream)
        call.given = (self._arguments, request.sampling_args)
        call.keeps = not self._connection.files.crowded
        return call

    async def acomplete(self, request: LMRequest) -> LMReply:
        waited, keeps = await self._connection.files.acquire(), False
        try:
            call = self._complete_call(request, stream=False)
            keeps = call.keeps
            reply = await self._connection.complete(call, self._parse)
            return msgspec.structs.replace(reply, waited=waited) if waited else reply
        except Exception as error:  # noqa: BLE001 - a hook of the caller's http client can raise anything
            raise self._told(error) from error.__cause__ if isinstance(error, LMError) else error
        finally:
            self._connection.files.release(keeps=keeps)

    async def astream(self, request: LMRequest) -> AsyncGenerator[LMDelta]:
        keeps = False
        await self._connection.files.acquire()
        try:
            call = self._complete_call(request, stream=True)
            pieces = self._connection.stream(call, self._parse, self._assembler())
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece
            keeps = call.keeps
        except Exception as error:  # noqa: BLE001 - as above
            raise self._told(error) from error.__cause__ if isinstance(error, LMError) else error
        finally:
            self._connection.files.release(keeps=keeps)

    def _told(self, error: Exception) -> LMError:
        """An error of this model, whatever it was: no other leaves a client."""
        failure = error if isinstance(error, LMError) else self._connection.unknown(error)
        failure.model = self.model
        return failure

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.model} at {self._connection.host}>"


_OF_THE_LIBRARY = frozenset({"accept", "accept-encoding", "connection", "user-agent"})
"""Headers that an http client has without its owner's doing."""


def _with_signature(secrets: tuple[str, ...], request: Any) -> tuple[str, ...]:
    """All that a failure must not repeat: what the caller's own http client signed the request with, too."""
    return secrets + secret_texts(request.headers.get(name) for name in (*SIGNATURES, "cookie"))


def _unreadable(error: Exception) -> LMError:
    return LMError(
        f"the server's reply can't be read ({type(error).__name__})", kind="bad_reply", retryable=True, charged=True
    )


def _until(deadline: float | None) -> Any:
    return anyio.fail_after(None if deadline is None else max(0.0, deadline - anyio.current_time()))


def _with_query(url: httpx2.URL, query: Mapping[str, Any]) -> httpx2.URL:
    return url.copy_merge_params(dict(query)) if query else url


def add_headers(headers: Any, more: Mapping[str, str | None]) -> None:
    """Put `more` into the `Headers`; None takes one out.

    Raises:
        LMError: of kind "bad_request", if one can't be sent.
    """
    for name, value in more.items():
        if value is None:
            headers.pop(name, None)
        elif problem := header_problem(name, value):
            raise LMError(problem, kind="bad_request")
        else:
            headers[name] = value
