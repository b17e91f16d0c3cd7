"""CPU per call of each client beside its vendor's own SDK, a fan-out over each of the SDK's transports, a cache's hits.

    python benchmarks/clients.py            # everything: about five minutes
    python benchmarks/clients.py --quick    # does it work at all?

The replies come from one plain server in a process of its own; CPU is that of the calling process alone. Each figure is
the median of some rounds, in which ours and the bare SDK take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

PROMPT = "word " * 400
TEXT = "reply " * 40

CLIENTS = ("openai", "azure_openai", "anthropic", "gemini")

Call = Callable[[], Awaitable[str]]

OPENAI = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 400, "completion_tokens": 40, "total_tokens": 440},
}
ANTHROPIC = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": TEXT}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 400, "output_tokens": 40},
}
GEMINI = {
    "candidates": [{"content": {"role": "model", "parts": [{"text": TEXT}]}, "finishReason": "STOP", "index": 0}],
    "usageMetadata": {"promptTokenCount": 400, "candidatesTokenCount": 40, "totalTokenCount": 440},
    "modelVersion": "m",
}


class Replies(asyncio.Protocol):
    """Answers every request by its path, after `latency` seconds."""

    latency = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            size = int(head.split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length:" in head else 0
            if len(self.buffer) < end + 4 + size:
                return
            self.buffer = self.buffer[end + 4 + size :]
            reply = ANTHROPIC if b"/messages" in head else GEMINI if b"generatecontent" in head else OPENAI
            body = json.dumps(reply).encode()
            wire = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            if self.latency:
                asyncio.get_running_loop().call_later(self.latency, self.send, wire)
            else:
                self.send(wire)

    def send(self, wire: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(wire)


async def serve(latency: float) -> None:
    Replies.latency = latency
    server = await asyncio.get_running_loop().create_server(Replies, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


@asynccontextmanager
async def server(latency: float = 0.0) -> AsyncGenerator[str]:
    command = [sys.executable, __file__, "--serve", str(latency)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


@asynccontextmanager
async def ours(backend: str, url: str, **kwargs: Any) -> AsyncGenerator[Call]:
    from asyncrlm.lm.base import LMRequest, Message
    from asyncrlm.lm.clients import client_spec

    address = {"azure_endpoint": url, "azure_deployment": "m"} if backend == "azure_openai" else {"base_url": url}
    given = {"api_key": "key-of-nobody", "model_name": "m", **address, **kwargs}
    async with client_spec(backend, given).open() as client:
        request = LMRequest(messages=(Message("user", PROMPT),))

        async def call() -> str:
            return (await client.acomplete(request)).text

        yield call


@asynccontextmanager
async def bare(backend: str, url: str, http: Any = None) -> AsyncGenerator[Call]:
    messages: Any = [{"role": "user", "content": PROMPT}]
    key: dict[str, Any] = {"api_key": "key-of-nobody"}
    if backend == "anthropic":
        import anthropic

        async with anthropic.AsyncAnthropic(base_url=url, max_retries=0, http_client=http, **key) as claude:

            async def ask_claude() -> str:
                reply: Any = await claude.messages.create(model="m", max_tokens=1000, messages=messages)
                return reply.content[0].text

            yield ask_claude
    elif backend == "gemini":
        from google import genai

        options = genai.types.HttpOptions(base_url=url, httpx_async_client=http)
        gemini: Any = genai.Client(http_options=options, **key)

        async def ask_gemini() -> str:
            return (await gemini.aio.models.generate_content(model="m", contents=PROMPT)).text

        try:
            yield ask_gemini
        finally:
            await gemini.aio.aclose()
    else:
        import openai

        if backend == "azure_openai":
            azure: dict[str, Any] = {"azure_endpoint": url, "api_version": "2024-10-21", **key}
            sdk: Any = openai.AsyncAzureOpenAI(max_retries=0, http_client=http, **azure)
        else:
            sdk = openai.AsyncOpenAI(base_url=url, max_retries=0, http_client=http, **key)
        async with sdk:

            async def ask_openai() -> str:
                reply: Any = await sdk.chat.completions.create(model="m", messages=messages)
                return reply.choices[0].message.content

            yield ask_openai


async def cpu_per_call(call: Call, count: int) -> float:
    """Milliseconds of CPU, 16 calls at once."""
    left = count

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            assert (await call()).strip() == TEXT.strip()

    began = time.process_time()
    await asyncio.gather(*(worker() for _ in range(16)))
    return (time.process_time() - began) / count * 1e3


async def each_client(backends: Sequence[str], count: int, rounds: int) -> None:
    print("| client | ours | bare SDK | |\n|---|---|---|---|")
    async with server() as url:
        for backend in backends:
            async with ours(backend, url) as mine, bare(backend, url) as theirs:
                for call in (mine, theirs):
                    await cpu_per_call(call, 32)
                figures = [(await cpu_per_call(mine, count), await cpu_per_call(theirs, count)) for _ in range(rounds)]
            own, sdk = median(own for own, _ in figures), median(sdk for _, sdk in figures)
            print(f"| `{backend}` | {own:.2f} ms | {sdk:.2f} ms | {own / sdk:.2f} x |", flush=True)


def transports(backend: str) -> dict[str, Callable[[], Any]]:
    """The ways of sending that the vendor's SDK offers, the one it takes by itself first; None is that one."""
    import httpx
    import httpx2

    if backend == "gemini":  # takes aiohttp where it is installed
        timeouts: dict[str, Any] = {"timeout": 600}
        httpx_limits = httpx.Limits(max_connections=1_000, max_keepalive_connections=1_000)
        httpx2_limits = httpx2.Limits(max_connections=1_000, max_keepalive_connections=1_000)
        return {
            "aiohttp": lambda: None,
            "httpx2": lambda: httpx2.AsyncClient(limits=httpx2_limits, **timeouts),
            "httpx": lambda: httpx.AsyncClient(limits=httpx_limits, **timeouts),
        }
    sdk: Any = importlib.import_module("anthropic" if backend == "anthropic" else "openai")
    limits = {"limits": sdk.DEFAULT_CONNECTION_LIMITS, "timeout": 600}
    return {
        "httpx2": lambda: sdk.DefaultAsyncHttpxClient(**limits),
        "aiohttp": lambda: sdk.DefaultAioHttpClient(**limits),
    }


async def one_fan_out(call: Call, count: int, width: int) -> tuple[float, float]:
    """Seconds of all, and milliseconds of CPU of one."""
    left, began, used = count, time.perf_counter(), time.process_time()

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await call()

    await asyncio.gather(*(worker() for _ in range(width)))
    return time.perf_counter() - began, (time.process_time() - used) / count * 1e3


async def fan_out(backends: Sequence[str], count: int, width: int, rounds: int) -> None:
    print(f"\n| {count:,} calls at 50 ms, {width} at once | seconds | CPU per call |\n|---|---|---|")
    async with server(0.05) as url:
        for backend in backends:
            ways: dict[str, Callable[[], Any]] = {
                "ours, aiohttp (the default on asyncio)": lambda b=backend: ours(b, url)
            }
            for name, make in transports(backend).items():
                if name == "httpx2":
                    ways["ours, httpx2"] = lambda b=backend, m=make: ours(b, url, http_client=m())
                ways[f"bare SDK, {name}"] = lambda b=backend, m=make: bare(b, url, m())
            figures: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, open_ in ways.items():
                    async with open_() as call:
                        await cpu_per_call(call, 16)
                        figures[name].append(await one_fan_out(call, count, width))
            for name, each in figures.items():
                seconds, cpu = median(s for s, _ in each), median(c for _, c in each)
                print(f"| `{backend}`: {name} | {seconds:.2f} s | {cpu:.2f} ms |", flush=True)


async def cache_hits(count: int) -> None:
    """Milliseconds until a call is answered from the disk, one after another."""
    from asyncrlm.lm.base import LMReply, LMRequest, Message
    from asyncrlm.lm.cache.asked import Asked, CacheSettings, Seen
    from asyncrlm.lm.cache.replies import open_cache

    requests = [LMRequest(messages=(Message("user", f"{number} {PROMPT}"),)) for number in range(count)]

    async def ask() -> LMReply:
        return LMReply(text=TEXT)

    took: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            took.clear()
            async with open_cache(CacheSettings(Path(folder), "cache", max_bytes=10**9)) as cache:
                for request in requests:
                    began = time.perf_counter()
                    await cache.answer(Asked.of("b", "m", request, {}, None), request, ask, Seen())
                    took.append((time.perf_counter() - began) * 1e3)
    last = sorted(took)[int(0.99 * count)]
    print(f"\nA cache hit: median {median(took):.2f} ms, 99 % within {last:.2f} ms ({count:,} different calls).")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=1, help="of the fan-outs, whose medians are told")
    parser.add_argument("--only", choices=CLIENTS, action="append", help="one client; may be given again")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    backends = given.only or CLIENTS
    if given.serve is not None:
        asyncio.run(serve(given.serve))
    elif given.quick:
        asyncio.run(each_client(backends, 64, 1))
        asyncio.run(fan_out(backends, 200, 32, 1))
        asyncio.run(cache_hits(50))
    else:
        asyncio.run(each_client(backends, 1_000, 3))
        asyncio.run(fan_out(backends, 10_000, 256, given.rounds))
        asyncio.run(cache_hits(2_000))


if __name__ == "__main__":
    main()
