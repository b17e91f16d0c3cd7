"""CPU per call of each client beside its vendor's own SDK, and a fan-out of OpenAI's over both its transports.

    python benchmarks/clients.py            # everything: about two minutes
    python benchmarks/clients.py --quick    # does it work at all?

The replies come from one plain server in a process of its own; CPU is that of the calling process alone. Each figure is
the median of some rounds, in which ours and the bare SDK take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

PROMPT = "word " * 400
TEXT = "reply " * 40

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

        async with anthropic.AsyncAnthropic(base_url=url, max_retries=0, **key) as claude:

            async def ask_claude() -> str:
                reply: Any = await claude.messages.create(model="m", max_tokens=1000, messages=messages)
                return reply.content[0].text

            yield ask_claude
    elif backend == "gemini":
        from google import genai

        gemini: Any = genai.Client(http_options=genai.types.HttpOptions(base_url=url), **key)

        async def ask_gemini() -> str:
            return (await gemini.aio.models.generate_content(model="m", contents=PROMPT)).text

        try:
            yield ask_gemini
        finally:
            await gemini.aio.aclose()
    else:
        import openai

        if backend == "azure_openai":
            sdk: Any = openai.AsyncAzureOpenAI(azure_endpoint=url, api_version="2024-10-21", max_retries=0, **key)
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


async def each_client(count: int, rounds: int) -> None:
    print("| client | ours | bare SDK | |\n|---|---|---|---|")
    async with server() as url:
        for backend in ("openai", "azure_openai", "anthropic", "gemini"):
            async with ours(backend, url) as mine, bare(backend, url) as theirs:
                for call in (mine, theirs):
                    await cpu_per_call(call, 32)
                figures = [(await cpu_per_call(mine, count), await cpu_per_call(theirs, count)) for _ in range(rounds)]
            own, sdk = median(own for own, _ in figures), median(sdk for _, sdk in figures)
            print(f"| `{backend}` | {own:.2f} ms | {sdk:.2f} ms | {own / sdk:.2f} x |", flush=True)


async def fan_out(count: int, width: int, rounds: int) -> None:
    import openai

    print(f"\n| {count:,} calls at 50 ms, {width} at once | seconds | CPU per call |\n|---|---|---|")
    limits: Any = {"limits": openai.DEFAULT_CONNECTION_LIMITS, "timeout": 600}
    ways: dict[str, Callable[[str], Any]] = {
        "ours, aiohttp transport (the default on asyncio)": lambda url: ours("openai", url),
        "ours, httpx2 transport": lambda url: ours("openai", url, http_client=openai.DefaultAsyncHttpxClient(**limits)),
        "bare SDK, aiohttp transport": lambda url: bare("openai", url, openai.DefaultAioHttpClient(**limits)),
        "bare SDK, httpx2 transport": lambda url: bare("openai", url, openai.DefaultAsyncHttpxClient(**limits)),
    }
    async with server(0.05) as url:
        for name, open_ in ways.items():
            figures: list[tuple[float, float]] = []
            for _ in range(rounds):
                async with open_(url) as call:
                    left, began, used = count, time.perf_counter(), time.process_time()

                    async def worker(call: Call = call) -> None:
                        nonlocal left
                        while left > 0:
                            left -= 1
                            await call()

                    await asyncio.gather(*(worker() for _ in range(width)))
                    figures.append((time.perf_counter() - began, (time.process_time() - used) / count * 1e3))
            seconds, cpu = median(s for s, _ in figures), median(c for _, c in figures)
            print(f"| {name} | {seconds:.2f} s | {cpu:.2f} ms |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        asyncio.run(serve(given.serve))
    elif given.quick:
        asyncio.run(each_client(64, 1))
        asyncio.run(fan_out(200, 32, 1))
    else:
        asyncio.run(each_client(1_000, 3))
        asyncio.run(fan_out(10_000, 256, 1))


if __name__ == "__main__":
    main()
