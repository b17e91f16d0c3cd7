"""Every backend on a fake server that speaks its protocol, for the tests that all of them must pass."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from lm_serving import KEY
from msgspec import Struct, field

from asyncrlm.lm.base import LMClient, LMDelta, LMReply, LMRequest
from asyncrlm.lm.clients import ClientSpec, client_spec
from asyncrlm.lm.http.endpoints import PRESETS
from asyncrlm.testing import FakeAnthropicServer, FakeGeminiServer, FakeOpenAIServer
from asyncrlm.testing.server import FakeServer

NO_CHOICES = b'{"choices": []}'

OPENAI_USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 20,
    "prompt_tokens_details": {"cached_tokens": 60},
    "completion_tokens_details": {"reasoning_tokens": 5},
}


class Backend(Struct, frozen=True, kw_only=True):
    """One backend and the server that plays its provider's."""

    name: str
    server: type[FakeServer] = FakeOpenAIServer
    url_name: str = "base_url"
    url_of: str = "base_url"
    kwargs: Mapping[str, Any] = {}
    usage: Mapping[str, Any] = field(default_factory=lambda: OPENAI_USAGE)
    """What stands for 100 tokens in, 60 of them cached, and 20 out, 5 of them thoughts."""
    empty: bytes = NO_CHOICES
    """A body without any reply."""
    whole: bytes = b'{"choices": [{"message": {"content": "hi"}}]}'
    broken: bytes = b'{"choices": [{"mess'
    signature: tuple[str, str] = ("authorization", f"Bearer {KEY}")
    key_name: str = "api_key"
    error_event: bytes = b'{"error": {"message": "overloaded", "code": 503}}'
    cap: tuple[str, ...] = ("max_tokens",)
    """Where in the body the cap on output tokens stands."""
    usage_name: str = "usage"

    def spec(self, server: FakeServer, sampling_args: Mapping[str, Any] | None = None, **kwargs: Any) -> ClientSpec:
        given = {self.url_name: getattr(server, self.url_of), "model_name": "m", self.key_name: KEY, **self.kwargs}
        return client_spec(self.name, given | kwargs, sampling_args)

    @asynccontextmanager
    async def serving(self, *replies: Any, **kwargs: Any) -> AsyncGenerator[tuple[FakeServer, LMClient]]:
        script: Any = replies[0] if len(replies) == 1 and callable(replies[0]) else replies
        async with self.server(script) as server, self.spec(server, **kwargs).open() as client:
            yield server, client


FAMILIES = [
    Backend(name="openai"),
    Backend(name="ollama"),
    Backend(name="portkey", signature=("x-portkey-api-key", KEY)),
    Backend(
        name="azure_openai",
        url_name="azure_endpoint",
        url_of="url",
        kwargs={"azure_deployment": "dep", "api_version": "2024-10-21"},
        signature=("api-key", KEY),
    ),
    Backend(
        name="anthropic",
        server=FakeAnthropicServer,
        usage={
            "input_tokens": 30,
            "cache_read_input_tokens": 60,
            "cache_creation_input_tokens": 10,
            "output_tokens": 20,
            "output_tokens_details": {"thinking_tokens": 5},
        },
        empty=b'{"type": "message", "role": "assistant"}',
        broken=b'{"content": [{"type',
        whole=b'{"content": [{"type": "text", "text": "hi"}]}',
        error_event=b'{"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}',
    ),
    Backend(
        name="gemini",
        server=FakeGeminiServer,
        usage={
            "promptTokenCount": 100,
            "candidatesTokenCount": 15,
            "thoughtsTokenCount": 5,
            "cachedContentTokenCount": 60,
        },
        empty=b'{"candidates": []}',
        broken=b'{"candidates": [{"cont',
        whole=b'{"candidates": [{"content": {"parts": [{"text": "hi"}]}}]}',
        signature=("x-goog-api-key", KEY),
        error_event=b'{"error": {"code": 503, "message": "overloaded", "status": "UNAVAILABLE"}}',
        cap=("generationConfig", "maxOutputTokens"),
        usage_name="usageMetadata",
    ),
]
"""One backend of each client."""

BACKENDS = [*FAMILIES, *(Backend(name=name) for name in PRESETS if name not in ("openai", "ollama"))]


async def streamed(client: LMClient, request: LMRequest) -> tuple[list[LMDelta], LMReply]:
    """All deltas of a stream, and the reply that the last one carries."""
    deltas = [delta async for delta in client.astream(request)]
    assert [delta.reply is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    reply = deltas[-1].reply
    assert reply is not None
    assert "".join(delta.text for delta in deltas) == reply.text
    return deltas, reply


async def whole(client: LMClient, request: LMRequest, way: str) -> LMReply:
    """The reply, asked for in one of the two ways."""
    return (await streamed(client, request))[1] if way == "streamed" else await client.acomplete(request)
