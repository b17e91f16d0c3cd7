"""A fake server and a client on it, for the tests of the OpenAI-compatible client."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrlm.lm.base import LMClient, LMReply, LMRequest, Message
from asyncrlm.lm.clients import ClientSpec, client_spec
from asyncrlm.testing import FakeOpenAIServer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

KEY = "sk-this-key-must-not-leak-0123456789"


def ask(text: str = "hello", **arguments: Any) -> LMRequest:
    return LMRequest(messages=(Message("user", text),), **arguments)


def timeless(reply: LMReply) -> LMReply:
    """A reply without the seconds it took, for comparing."""
    assert reply.latency is not None
    assert 0 <= reply.latency < 60
    return msgspec.structs.replace(reply, latency=None)


def spec_for(server: FakeOpenAIServer, sampling_args: dict[str, Any] | None = None, **kwargs: Any) -> ClientSpec:
    return client_spec("vllm", {"base_url": server.base_url, "model_name": "m", "api_key": KEY} | kwargs, sampling_args)


@asynccontextmanager
async def serving(*replies: Any, **kwargs: Any) -> AsyncGenerator[tuple[FakeOpenAIServer, LMClient]]:
    async with (
        FakeOpenAIServer(replies[0] if len(replies) == 1 and callable(replies[0]) else replies) as server,
        spec_for(server, **kwargs).open() as client,
    ):
        yield server, client
