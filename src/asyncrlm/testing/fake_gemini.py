"""A server that speaks the Gemini API's `generateContent`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .server import FakeReply, FakeRequest, FakeServer, counted, dumps, words

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_PATH = re.compile(r"/v1\w*/(projects/[^/]+/locations/[^/]+/)?(publishers/google/)?models/[^/:]+:(.*)")


class FakeGeminiServer(FakeServer):
    """A server for tests that speaks `generateContent` and `streamGenerateContent`, as the Gemini API and Vertex do.

    Arguments and counts: `FakeOpenAIServer`.
    """

    def _takes(self, path: str) -> bool:
        found = _PATH.fullmatch(path)
        return found is not None and found[3] in ("generateContent", "streamGenerateContent")

    def _streams(self, request: FakeRequest) -> bool:
        return ":streamGenerateContent" in request.path

    def _error(self, status: int, error: str | Mapping[str, Any]) -> Any:
        words = error if not isinstance(error, str) else {"message": error}
        return {"error": {"code": status, "status": _STATUSES.get(status, "UNKNOWN"), **words}}

    def _completion(self, request: FakeRequest, reply: FakeReply) -> Any:
        if reply.refusal is not None:
            feedback = {"blockReason": "OTHER", "blockReasonMessage": reply.refusal}
            return {"promptFeedback": feedback, **_ending(request, reply)}
        return {"candidates": [_candidate(_parts(reply), reply.finish_reason)], **_ending(request, reply)}

    def _events(self, request: FakeRequest, reply: FakeReply) -> list[bytes]:
        if reply.refusal is not None:
            return [_event(self._completion(request, reply))]
        parts = [part | {"text": word} for part in _parts(reply) for word in words(part["text"])]
        events = [_event({"candidates": [_candidate([part])], "modelVersion": request.model}) for part in parts]
        last = {"candidates": [_candidate([], reply.finish_reason)], **_ending(request, reply)}
        return [*events, _event(last)]


def _event(response: dict[str, Any]) -> bytes:
    return b"data: " + dumps(response) + b"\r\n\r\n"


def _parts(reply: FakeReply) -> list[dict[str, Any]]:
    thoughts = [{"text": reply.reasoning, "thought": True}] if reply.reasoning is not None else []
    text = [{"text": reply.text}] if isinstance(reply.text, str) and reply.text else []
    return thoughts + text + (reply.text if isinstance(reply.text, list) else [])


def _candidate(parts: list[dict[str, Any]], finish_reason: str | None = None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"index": 0}
    if parts:
        candidate["content"] = {"role": "model", "parts": parts}
    if finish_reason is not None:
        candidate["finishReason"] = {"stop": "STOP", "length": "MAX_TOKENS"}.get(finish_reason, finish_reason)
    return candidate


def _ending(request: FakeRequest, reply: FakeReply) -> dict[str, Any]:
    ending: dict[str, Any] = {"modelVersion": request.model, "responseId": "fake"}
    if reply.usage is None:
        return ending
    if reply.usage != "counted":
        return ending | {"usageMetadata": dict(reply.usage)}
    asked, given = counted(request, reply)
    usage = {"promptTokenCount": asked, "candidatesTokenCount": given, "totalTokenCount": asked + given}
    return ending | {"usageMetadata": usage}
