"""Servers and http clients that do what nobody expects: an `LMError` all the same, in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import time
from contextlib import aclosing
from typing import Any

import httpx
import httpx2
import pytest
from lm_backends import FAMILIES, Backend
from lm_serving import ask, spec_for

from asyncrlm.errors import LMError
from asyncrlm.lm.http import bodies, sse
from asyncrlm.lm.http.replies import parse_completion
from asyncrlm.lm.http.sse import EventLines
from asyncrlm.testing import FakeOpenAIServer, FakeReply

pytestmark = pytest.mark.anyio

DIALECTS = [backend for backend in FAMILIES if backend.name in ("openai", "anthropic", "gemini")]

DEEP = "[" * 5_000 + "]" * 5_000

YEAR = "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"

HOSTILE = {
    "deep": FakeReply(body=f'{{"choices": {DEEP}, "content": {DEEP}, "usageMetadata": {DEEP}}}'.encode()),
    "deep error": FakeReply(status=500, body=f'{{"error": {DEEP}}}'.encode()),
    "no details": FakeReply(status=429, body=b'{"error": {"code": 429, "message": "m", "details": 1}}'),
    "a late year": FakeReply.fault(429, retry_after=YEAR),
    "nowhere": FakeReply(status=302, headers={"location": "http://[bad"}, body=b"x"),
    "packed": FakeReply(headers={"content-encoding": "zstd"}, body=b"x"),
    "packed badly": FakeReply(headers={"content-encoding": "gzip"}, body=b"x"),
    "large": FakeReply(headers={"content-encoding": "gzip"}, body=gzip.compress(b" " * 2_000_000)),
}


async def _asked(client: Any, way: str) -> None:
    if way == "whole":
        await client.acomplete(ask())
        return
    async with aclosing(client.astream(ask())) as deltas:
        async for _ in deltas:
            pass


async def _failure(client: Any, way: str) -> LMError:
    with pytest.raises(LMError) as caught:
        await _asked(client, way)
    assert caught.value.model == "m"
    return caught.value


@pytest.mark.parametrize("backend", DIALECTS, ids=lambda backend: backend.name)
async def test_whatever_a_server_says_an_lm_error_comes_of_it(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY", 1_000_000)
    for way in ("whole", "stream"):
        for name, reply in HOSTILE.items():
            async with backend.serving(reply) as (_, client):
                error = await _failure(client, way)
            if name == "large":
                assert "more than 1,000,000 bytes" in str(error)
                assert error.charged


@pytest.mark.parametrize("library", [httpx2, httpx])
async def test_what_goes_wrong_in_the_callers_http_client_is_an_lm_error(library: Any) -> None:
    async def hook(request: Any) -> None:
        raise KeyError("of the caller's")

    async with FakeOpenAIServer(lambda _: "hi") as server:
        for hooks in ([hook], []):
            http = library.AsyncClient(event_hooks={"request": hooks})
            async with spec_for(server, http_client=http).open() as client:
                if not hooks:
                    await http.aclose()
                for way in ("whole", "stream"):
                    error = await _failure(client, way)
                    assert ("KeyError" if hooks else "the http client is closed") in str(error)
                    assert not error.retryable
            await http.aclose()


def test_what_nobody_can_have_used_is_not_known() -> None:
    for used in ({"prompt_tokens": 10**30}, {"prompt_tokens": 2**64}, {"cost": 1e308}, {"cost": -1}):
        body = {"choices": [{"message": {"content": "hi"}}], "usage": {"completion_tokens": 5, **used}}
        usage = parse_completion(json.dumps(body).encode()).usage
        assert (usage.input_tokens, usage.cost) == (None, None)


def test_an_event_in_small_pieces_takes_no_square_of_its_size() -> None:
    def seconds(pieces: int) -> float:
        lines, began = EventLines(), time.process_time()
        lines.feed(b"data: ")
        for _ in range(pieces):
            lines.feed(b"x" * 1_000)
        assert lines.feed(b"\n\n") == [b"x" * 1_000 * pieces]
        return time.process_time() - began

    # As a square it would take 256 times as long, and half a minute.
    assert seconds(8_000) < 64 * max(seconds(500), 0.002)


def test_a_stream_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_STREAM", 1_000)
    lines = EventLines()
    for _ in range(111):
        lines.feed(b"data: x\n\n")
    with pytest.raises(ValueError, match="a stream of more than 1,000 bytes"):
        lines.feed(b"data: x\n\n")
