"""A server that speaks OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .server import FakeReply, FakeRequest, FakeServer, counted, dumps, words


class FakeOpenAIServer(FakeServer):
    """A server for tests that speaks `/v1/chat/completions`, streaming included, and `/v1/models`.

    Azure's paths, with a deployment in them, are served too.

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

    @property
    def base_url(self) -> str:
        """What a client takes as `base_url`."""
        return self.url + "/v1"

    def _get(self, path: str) -> Any:
        if path != "/v1/models":
            return None
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": "test"} for name in self.models]
        return {"object": "list", "data": listed}

    def _takes(self, path: str) -> bool:
        azure = path.startswith("/openai/deployments/") and path.endswith("/chat/completions")
        return path == "/v1/chat/completions" or azure

    def _error(self, status: int, error: str | Mapping[str, Any]) -> Any:
        return {"error": error if not isinstance(error, str) else {"message": error, "type": "fault", "code": None}}

    def _completion(self, request: FakeRequest, reply: FakeReply) -> Any:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": reply.refusal}
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}
        return {
            "id": "chatcmpl-fake",
            "object": "chat.completion",
            "created": 0,
            "model": request.model,
            "choices": [choice],
            **_usage(request, reply),
        }

    def _events(self, request: FakeRequest, reply: FakeReply) -> list[bytes]:
        def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
            chunk = {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": 0, "model": request.model}
            return b"data: " + dumps(chunk | {"choices": choices} | more) + b"\n\n"

        def delta(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
            return event([{"index": 0, "delta": delta, "finish_reason": finish_reason}])

        events = [delta({"role": "assistant", "content": ""})]
        if reply.reasoning is not None:
            events.append(delta({"reasoning_content": reply.reasoning}))
        if isinstance(reply.text, str):
            events += [delta({"content": word}) for word in words(reply.text)]
        elif reply.text is not None:
            events.append(delta({"content": reply.text}))
        if reply.refusal is not None:
            events.append(delta({"refusal": reply.refusal}))
        events.append(delta({}, reply.finish_reason))
        options: Any = request.fields.get("stream_options") or {}
        if options.get("include_usage") and reply.usage is not None:
            events.append(event([], **_usage(request, reply)))
        return [*events, b"data: [DONE]\n\n"]


def _usage(request: FakeRequest, reply: FakeReply) -> dict[str, Any]:
    if reply.usage is None:
        return {}
    if reply.usage != "counted":
        return {"usage": dict(reply.usage)}
    asked, given = counted(request, reply)
    return {"usage": {"prompt_tokens": asked, "completion_tokens": given, "total_tokens": asked + given}}
