"""A real HTTP server on loopback that plays a model's, with faults on demand."""

from __future__ import annotations

import inspect
import json
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import anyio
import anyio.abc
import anyio.from_thread
from msgspec import Struct

from ..repl.raised import innermost
from .http import HttpConnection, HttpRequest

if TYPE_CHECKING:
    from types import TracebackType


class FakeReply(Struct, frozen=True):
    """What the server answers to one request. A plain str stands for `FakeReply(text)`."""

    text: str | list[Any] | None = ""
    """The content: a str, a list of content parts, or None."""
    reasoning: str | None = None
    """What it thought before it spoke."""
    refusal: str | None = None
    finish_reason: str | None = "stop"
    """"stop" and "length" are said in the protocol's own words; all else is sent as it is."""
    usage: Mapping[str, Any] | Literal["counted"] | None = "counted"
    """The usage block, in the protocol's own words; "counted": a quarter of the characters; None: no usage block."""
    latency: float = 0.0
    """Seconds before the answer begins."""
    before_piece: Callable[[int], Awaitable[None]] | None = None
    """Awaited before each piece of a streamed answer, with its number from 0: holds the stream back."""
    status: int = 200
    headers: Mapping[str, str] = {}
    error: str | Mapping[str, Any] | None = None
    """The message, or the whole error object, of an answer whose status is no success."""
    body: bytes | None = None
    """Sent as it is instead of a completion: malformed JSON, empty choices, whatever."""
    cut: Literal["before", "within"] | None = None
    """Close the connection before the first byte of the answer, or in the middle of its body."""

    @classmethod
    def fault(
        cls, status: int, message: str = "injected fault", *, retry_after: float | str | None = None
    ) -> FakeReply:
        """An error answer, with a Retry-After header if one is given."""
        headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        return cls(status=status, error=message, headers=headers)


class FakeRequest(Struct, frozen=True):
    """One request that the server got."""

    method: str
    path: str
    """With its query."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Any
    """The JSON, decoded; None if there was none."""

    @property
    def fields(self) -> dict[str, Any]:
        """The body if it is an object, else an empty one."""
        return cast("dict[str, Any]", self.body) if isinstance(cast("object", self.body), dict) else {}

    @property
    def model(self) -> str:
        """The model asked for: by the body, or as Gemini has it, by the path."""
        in_path = self.path.partition("/models/")[2].partition(":")[0]
        return str(self.fields.get("model") or in_path or "fake")

    @property
    def text(self) -> str:
        """The text of the last message, whatever the protocol."""
        turns: Any = self.fields.get("messages") or self.fields.get("contents")
        content: Any = turns[-1].get("content", turns[-1].get("parts"))
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)

    @property
    def characters(self) -> int:
        """How much text the request holds."""
        held = [self.fields.get(name) or () for name in ("system", "systemInstruction", "messages", "contents")]
        return _characters(held)


Reply = str | FakeReply
Handler = Callable[[FakeRequest], Reply | Awaitable[Reply]]


class FakeServer(ABC):
    """What all fake servers have: a listener, a script, and counts of what happened."""

    def __init__(
        self, replies: Iterable[Reply | Handler] | Handler, *, latency: float = 0.0, models: Sequence[str] = ("fake",)
    ) -> None:
        self._handler = replies if callable(replies) else None
        self._script: Sequence[Reply | Handler] = () if callable(replies) else tuple(replies)
        self._latency = latency
        self.models = tuple(models)
        self._stack: AsyncExitStack | None = None
        self._port: int | None = None
        self.requests: list[FakeRequest] = []
        self.connections = 0
        self.open_connections = 0
        self.in_flight = 0
        self.max_in_flight = 0
        self.aborted = 0

    @property
    def url(self) -> str:
        """The address without a path: `http://127.0.0.1:PORT`."""
        if self._port is None:
            raise RuntimeError("the server is not running: enter it with `async with` first")
        return f"http://127.0.0.1:{self._port}"

    @property
    def base_url(self) -> str:
        """What a client takes as `base_url`."""
        return self.url

    async def __aenter__(self) -> Self:
        if self._stack is not None:
            raise RuntimeError("the server is running already")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._running())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        stack, self._stack = self._stack, None
        if stack is None:
            return False
        try:
            if isinstance(error, Exception):
                # The block's own error is not the server's: it must not come out wrapped in an exception group.
                await stack.aclose()
                return False
            return await stack.__aexit__(kind, error, trace) or False
        except BaseExceptionGroup as group:
            raise innermost(group) from None

    @classmethod
    @contextmanager
    def serve_in_thread(
        cls, replies: Iterable[Reply | Handler] | Handler, *, latency: float = 0.0, models: Sequence[str] = ("fake",)
    ) -> Generator[Self]:
        """The server, run by an event loop in a thread of its own until the block ends."""
        server = cls(replies, latency=latency, models=models)
        with anyio.from_thread.start_blocking_portal() as portal, portal.wrap_async_context_manager(server):
            yield server

    @asynccontextmanager
    async def _running(self) -> AsyncGenerator[None]:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", backlog=4096)
        async with listener, anyio.create_task_group() as tasks:
            self._port = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 - not Django's
            tasks.start_soon(listener.serve, self._serve)
            try:
                yield
            finally:
                self._port = None
                tasks.cancel_scope.cancel()

    async def _serve(self, stream: anyio.abc.SocketStream) -> None:
        self.connections += 1
        self.open_connections += 1
        connection = HttpConnection(stream)
        try:
            while (request := await connection.next_request()) is not None:
                self.in_flight += 1
                self.max_in_flight = max(self.max_in_flight, self.in_flight)
                try:
                    stays = await self._respond(connection, request)
                finally:
                    self.in_flight -= 1
                if not stays:
                    break
        finally:
            self.open_connections -= 1
            # Shielded: a cancellation here would take the place of the handler's own error.
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(stream)

    async def _respond(self, connection: HttpConnection, request: HttpRequest) -> bool:
        """Answer one request; whether the connection can take another."""
        path = request.path.partition("?")[0]
        if request.method == "GET" and (listed := self._get(path)) is not None:
            return await connection.send(200, JSON, dumps(listed))
        if request.method != "POST" or not self._takes(path):
            return await connection.send(404, JSON, dumps({"error": {"message": f"no {request.method} {path} here"}}))
        seen = FakeRequest(request.method, request.path, request.headers, loads(request.body))
        turn = len(self.requests)
        self.requests.append(seen)
        reply: FakeReply | None = None

        async def prepare() -> None:
            nonlocal reply
            reply = await self._answer(turn, seen)
            await anyio.sleep(self._latency + reply.latency)

        if not await connection.while_connected(prepare) or reply is None:
            self.aborted += 1
            return False
        return await self._send(connection, seen, reply)

    async def _send(self, connection: HttpConnection, request: FakeRequest, reply: FakeReply) -> bool:
        if reply.cut == "before":
            return False
        cut = reply.cut == "within"
        if not 200 <= reply.status < 300 and reply.body is None:
            error = reply.error if reply.error is not None else "injected fault"
            body = dumps(self._error(reply.status, error))
            return await connection.send(reply.status, JSON | dict(reply.headers), body, cut=cut)
        if reply.body is None and self._streams(request):
            headers = {"content-type": "text/event-stream"} | dict(reply.headers)
            events = self._events(request, reply)
            return await connection.send_chunks(reply.status, headers, events, cut=cut, before=reply.before_piece)
        body = dumps(self._completion(request, reply)) if reply.body is None else reply.body
        return await connection.send(reply.status, JSON | dict(reply.headers), body, cut=cut)

    def _get(self, path: str) -> Any:
        """What a GET of this path answers, or None if there is nothing."""
        return None

    def _streams(self, request: FakeRequest) -> bool:
        """Whether the request asks for a stream."""
        return bool(request.fields.get("stream"))

    @abstractmethod
    def _takes(self, path: str) -> bool:
        """Whether completions are asked for at this path."""

    @abstractmethod
    def _error(self, status: int, error: str | Mapping[str, Any]) -> Any:
        """The body of an error answer."""

    @abstractmethod
    def _completion(self, request: FakeRequest, reply: FakeReply) -> Any:
        """The body of a reply."""

    @abstractmethod
    def _events(self, request: FakeRequest, reply: FakeReply) -> list[bytes]:
        """The reply as server-sent events, the text word by word."""

    async def _answer(self, turn: int, request: FakeRequest) -> FakeReply:
        if self._handler is not None:
            answer: Any = self._handler
        elif turn < len(self._script):
            answer = self._script[turn]
        else:
            answer = FakeReply.fault(500, f"the script has {len(self._script)} replies and this is request {turn + 1}")
        if callable(answer):
            answer = answer(request)
        if inspect.isawaitable(answer):
            answer = await answer
        return answer if isinstance(answer, FakeReply) else FakeReply(answer)

    def __repr__(self) -> str:
        where = "not running" if self._port is None else f"at {self.base_url}"
        return f"<{type(self).__name__} {where}, {len(self.requests)} requests>"


JSON = {"content-type": "application/json"}


def dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def loads(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def counted(request: FakeRequest, reply: FakeReply) -> tuple[int, int]:
    """A quarter of the characters asked, and of those given."""
    given = len(reply.text if isinstance(reply.text, str) else str(reply.text or "")) + len(reply.reasoning or "")
    return math.ceil(request.characters / 4), math.ceil(given / 4)


def words(text: str) -> list[str]:
    """`text` in pieces that together are it again."""
    pieces = text.split(" ")
    return [word + " " for word in pieces[:-1]] + pieces[-1:]


def _characters(held: Any) -> int:
    match held:
        case str():
            return len(held)
        case dict():
            fields = cast("dict[str, Any]", held)
            return sum(_characters(fields.get(name)) for name in ("content", "parts", "text"))
        case list() | tuple():
            return sum(map(_characters, cast("list[Any]", held)))
        case _:
            return 0
