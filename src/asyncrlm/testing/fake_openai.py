"""A real HTTP server on loopback that speaks OpenAI's chat completions, with faults on demand."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import anyio
import anyio.abc
import anyio.from_thread
from msgspec import Struct

from .http import HttpConnection, HttpRequest

if TYPE_CHECKING:
    from types import TracebackType


class FakeReply(Struct, frozen=True):
    """What the server answers to one request. A plain str stands for `FakeReply(text)`."""

    text: str | list[Any] | None = ""
    """The content: a str, a list of content parts, or None."""
    reasoning: str | None = None
    """Sent as `reasoning_content`."""
    refusal: str | None = None
    finish_reason: str | None = "stop"
    usage: Mapping[str, Any] | Literal["counted"] | None = "counted"
    """The usage block; "counted": a quarter of the characters; None: no usage block at all."""
    latency: float = 0.0
    """Seconds before the answer begins."""
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
    def text(self) -> str:
        """The content of the last message."""
        return str(self.body["messages"][-1]["content"])


Reply = str | FakeReply
Handler = Callable[[FakeRequest], Reply | Awaitable[Reply]]


class FakeOpenAIServer:
    """A server for tests that speaks `/v1/chat/completions`, streaming included, and `/v1/models`.

        async with FakeOpenAIServer(["first", FakeReply.fault(429, retry_after=1), "third"]) as server:
            rlm = AsyncRLM(backend="vllm", backend_kwargs={"base_url": server.base_url, "model_name": "any"})
            ...
        assert [request.body["model"] for request in server.requests] == ["any"] * 3

    In blocking code it runs in a thread of its own:

        with FakeOpenAIServer.serve_in_thread(lambda request: request.text.upper()) as server:
            rlm = RLM(backend="vllm", backend_kwargs={"base_url": server.base_url, "model_name": "any"})

    Args:
        replies: One reply for each request in order (a `FakeReply`, a str, or a function of the `FakeRequest`); or one
            function, plain or async, that answers them all. When a list has run out, the answer is HTTP 500.
        latency: Seconds before each answer, on top of a reply's own.
        models: What `/v1/models` lists.

    Attributes:
        requests: Every chat completion request, in the order they arrived.
        connections: Connections accepted so far; `open_connections` those open now.
        in_flight: Requests being answered now; `max_in_flight` the most there were at once.
        aborted: Requests whose client went away before the answer.
    """

    def __init__(
        self, replies: Iterable[Reply | Handler] | Handler, *, latency: float = 0.0, models: Sequence[str] = ("fake",)
    ) -> None:
        self._handler = replies if callable(replies) else None
        self._script: Sequence[Reply | Handler] = () if callable(replies) else tuple(replies)
        self._latency = latency
        self._models = tuple(models)
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
        return self.url + "/v1"

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
            raise _unwrapped(group) from None

    @classmethod
    @contextmanager
    def serve_in_thread(
        cls, replies: Iterable[Reply | Handler] | Handler, *, latency: float = 0.0, models: Sequence[str] = ("fake",)
    ) -> Generator[FakeOpenAIServer]:
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
        if request.method == "GET" and path == "/v1/models":
            listed = [{"id": name, "object": "model", "created": 0, "owned_by": "test"} for name in self._models]
            return await connection.send(200, _JSON, _dumps({"object": "list", "data": listed}))
        if request.method != "POST" or path != "/v1/chat/completions":
            return await connection.send(404, _JSON, _dumps({"error": {"message": f"no {request.method} {path} here"}}))
        seen = FakeRequest(request.method, request.path, request.headers, _loads(request.body))
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
        return await _send_reply(connection, seen, reply)

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
        return f"<FakeOpenAIServer {where}, {len(self.requests)} requests>"


def _unwrapped(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The only error in a group of groups of one, else the group."""
    error, *others = group.exceptions
    if others:
        return group
    return _unwrapped(cast("BaseExceptionGroup[Any]", error)) if isinstance(error, BaseExceptionGroup) else error


_JSON = {"content-type": "application/json"}


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def _loads(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


async def _send_reply(connection: HttpConnection, request: FakeRequest, reply: FakeReply) -> bool:
    if reply.cut == "before":
        return False
    if not 200 <= reply.status < 300 and reply.body is None:
        error = reply.error if reply.error is not None else "injected fault"
        shaped = error if not isinstance(error, str) else {"message": error, "type": "fault", "code": None}
        body = _dumps({"error": shaped})
        return await connection.send(reply.status, _JSON | dict(reply.headers), body, cut=reply.cut == "within")
    if reply.body is None and request.fields.get("stream"):
        headers = {"content-type": "text/event-stream"} | dict(reply.headers)
        return await connection.send_chunks(reply.status, headers, _events(request, reply), cut=reply.cut == "within")
    body = _dumps(_completion(request, reply)) if reply.body is None else reply.body
    return await connection.send(reply.status, _JSON | dict(reply.headers), body, cut=reply.cut == "within")


def _model(request: FakeRequest) -> str:
    return str(request.fields.get("model", "fake"))


def _usage(request: FakeRequest, reply: FakeReply) -> dict[str, Any]:
    if reply.usage is None:
        return {}
    if reply.usage != "counted":
        return {"usage": dict(reply.usage)}
    messages: list[Any] = request.fields.get("messages") or []
    asked = math.ceil(sum(len(str(message.get("content") or "")) for message in messages) / 4)
    given = math.ceil((len(reply.text or "") + len(reply.reasoning or "")) / 4)
    return {"usage": {"prompt_tokens": asked, "completion_tokens": given, "total_tokens": asked + given}}


def _completion(request: FakeRequest, reply: FakeReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": reply.refusal}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}
    return {
        "id": "chatcmpl-fake",
        "object": "chat.completion",
        "created": 0,
        "model": _model(request),
        "choices": [choice],
        **_usage(request, reply),
    }


def _events(request: FakeRequest, reply: FakeReply) -> list[bytes]:
    """The reply as server-sent events, the text word by word."""

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": 0, "model": _model(request)}
        return b"data: " + _dumps(chunk | {"choices": choices} | more) + b"\n\n"

    def delta(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        return event([{"index": 0, "delta": delta, "finish_reason": finish_reason}])

    events = [delta({"role": "assistant", "content": ""})]
    if reply.reasoning is not None:
        events.append(delta({"reasoning_content": reply.reasoning}))
    if isinstance(reply.text, str):
        events += [delta({"content": word}) for word in _words(reply.text)]
    elif reply.text is not None:
        events.append(delta({"content": reply.text}))
    events.append(delta({}, reply.finish_reason))
    options: Any = request.fields.get("stream_options") or {}
    if options.get("include_usage") and reply.usage is not None:
        events.append(event([], **_usage(request, reply)))
    return [*events, b"data: [DONE]\n\n"]


def _words(text: str) -> list[str]:
    words = text.split(" ")
    return [word + " " for word in words[:-1]] + words[-1:]
