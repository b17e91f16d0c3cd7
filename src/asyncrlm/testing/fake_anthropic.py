"""A server that speaks Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .server import FakeReply, FakeRequest, FakeServer, counted, dumps, words

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class FakeAnthropicServer(FakeServer):
    """A server for tests that speaks `/v1/messages`, streaming included. Arguments and counts: `FakeOpenAIServer`."""

    def _takes(self, path: str) -> bool:
        return path == "/v1/messages"

    def _error(self, status: int, error: str | Mapping[str, Any]) -> Any:
        shaped = error if not isinstance(error, str) else {"type": _ERRORS.get(status, "api_error"), "message": error}
        return {"type": "error", "error": shaped, "request_id": "req_fake"}

    def _completion(self, request: FakeRequest, reply: FakeReply) -> Any:
        return {**_message(request, _usage(request, reply)), **_ending(reply), "content": _blocks(reply)}

    def _events(self, request: FakeRequest, reply: FakeReply) -> list[bytes]:
        usage = _usage(request, reply)
        begun = usage | {"output_tokens": 1} if usage else usage
        message: dict[str, Any] = {
            **_message(request, begun),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        events = [_event("message_start", message=message), _event("ping")]
        for index, block in enumerate(_blocks(reply)):
            kind = block["type"]
            events.append(_event("content_block_start", index=index, content_block=block | {kind: ""}))
            for word in words(block[kind]):
                delta = {"type": f"{kind}_delta", kind: word}
                events.append(_event("content_block_delta", index=index, delta=delta))
            if kind == "thinking":
                signature = {"type": "signature_delta", "signature": "fake"}
                events.append(_event("content_block_delta", index=index, delta=signature))
            events.append(_event("content_block_stop", index=index))
        events.append(_event("message_delta", delta=_ending(reply), **({"usage": usage} if usage else {})))
        return [*events, _event("message_stop")]


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + b"data: " + dumps({"type": kind, **fields}) + b"\n\n"


def _message(request: FakeRequest, usage: dict[str, Any]) -> dict[str, Any]:
    message = {"id": "msg_fake", "type": "message", "role": "assistant", "model": request.model}
    return message | ({"usage": usage} if usage else {})


def _ending(reply: FakeReply) -> dict[str, Any]:
    if reply.refusal is not None:
        details = {"type": "refusal", "category": None, "explanation": reply.refusal}
        return {"stop_reason": "refusal", "stop_sequence": None, "stop_details": details}
    reason = {"stop": "end_turn", "length": "max_tokens"}.get(reply.finish_reason or "", reply.finish_reason)
    return {"stop_reason": reason, "stop_sequence": None}


def _blocks(reply: FakeReply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": "fake"})
    if isinstance(reply.text, str) and reply.text:
        blocks.append({"type": "text", "text": reply.text})
    return blocks + (reply.text if isinstance(reply.text, list) else [])


def _usage(request: FakeRequest, reply: FakeReply) -> dict[str, Any]:
    if reply.usage is None:
        return {}
    if reply.usage != "counted":
        return dict(reply.usage)
    asked, given = counted(request, reply)
    return {"input_tokens": asked, "output_tokens": given}
