"""A fake OpenAI-compatible server for the benchmarks: scripted replies after a set latency, in a process of its own.

    POST /v1/chat/completions   the scripted reply
    POST /ctl/config            JSON, fields of `Config`; counters start again
    GET  /ctl/stats             the counters of `Stats`

It prints `PORT <n>` and ends with its parent. What a request is follows from its body alone, so that nothing has to be
kept between requests:

    holds `CID:<id>;`     root    the root loop of the completion with that id
    holds `ECHO:<id>;`    sub     a sub-call; the reply is `ECHO:<id>` for the last one in the body
    else                  child   the root loop of a child run

The turn is 1 + n of the last `#T=<n>;` in the body: every scripted reply carries that comment in its code. Scripts are
`{kind: {"turns": [...], "default": text, "final_at": n, "final": text}}`; `@@CID@@` and `@@TURN@@` are filled in.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import resource
import time
from dataclasses import asdict, dataclass, field
from typing import Any, cast

KINDS = ("root", "child", "sub")
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
MODEL = re.compile(rb'"model"\s*:\s*"([^"]+)"')
CID = re.compile(rb"CID:(\w+);")
ECHO = re.compile(rb"ECHO:([\w.]+);")
OUT = re.compile(rb"OUT:(\w+);")
TURN = re.compile(rb"#T=(\d+);")
REASONS = {200: "OK", 404: "Not Found", 429: "Too Many Requests", 500: "Internal Server Error"}


def per_kind() -> dict[str, int]:
    return dict.fromkeys(KINDS, 0)


@dataclass
class Config:
    """How to answer, until the next one."""

    latency: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds from request to reply, by kind; 0 where not named."""
    scripts: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    p429: float = 0.0
    """Chance that a sub-call is answered with 429, by a generator that starts at the same seed with every config."""
    p500: float = 0.0
    retry_after: float | None = None
    expect_output: bool = False
    """Count root requests after the first turn that lack the `OUT:<their own id>;` their cell printed."""


@dataclass
class Stats:
    """What was seen since the last config."""

    count: dict[str, int] = field(default_factory=per_kind)
    most_in_flight: dict[str, int] = field(default_factory=per_kind)
    root_times: list[float] = field(default_factory=list[float])
    """`time.monotonic()` of each root request, which every process of the machine can compare."""
    faults: int = 0
    foreign_output: int = 0
    """Root requests that carry what another completion's cell printed."""
    missing_output: int = 0
    connections: int = 0
    largest_body: int = 0


class Server:
    """The state every connection shares."""

    def __init__(self) -> None:
        self.connections: set[Connection] = set()
        self.configure(Config())

    def configure(self, config: Config) -> None:
        self.config = config
        self.stats = Stats()
        self.in_flight = per_kind()
        self.random = random.Random(7)

    def reply(self, body: bytes) -> tuple[str, int, bytes, str]:
        """Kind, status, body and extra headers of the reply to a chat completion request."""
        kind, text = self.text_for(body)
        self.stats.count[kind] += 1
        self.stats.largest_body = max(self.stats.largest_body, len(body))
        if kind == "sub" and (status := self.fault()) is not None:
            after = self.config.retry_after
            error = {"error": {"message": "injected fault", "type": "fault", "code": str(status)}}
            return kind, status, json.dumps(error).encode(), "" if after is None else f"retry-after: {after}\r\n"
        found = MODEL.search(body)
        model = found.group(1).decode() if found else "unknown"
        return kind, 200, completion(model, text, len(body) // 4), ""

    def fault(self) -> int | None:
        if not (self.config.p429 or self.config.p500):
            return None
        drawn = self.random.random()
        status = 429 if drawn < self.config.p429 else 500 if drawn < self.config.p429 + self.config.p500 else None
        self.stats.faults += status is not None
        return status

    def text_for(self, body: bytes) -> tuple[str, str]:
        found = CID.search(body)
        if not found and (at := body.rfind(b"ECHO:")) >= 0:
            echo = ECHO.match(body, at)
            return "sub", f"ECHO:{echo.group(1).decode()}" if echo else "unreadable ECHO"
        kind, cid = ("root", found.group(1)) if found else ("child", b"")
        at = body.rfind(b"#T=")
        marker = TURN.match(body, at) if at >= 0 else None
        turn = int(marker.group(1)) + 1 if marker else 0
        if kind == "root":
            self.stats.root_times.append(time.monotonic())
            self.check_output(body, cid, turn)
        script = self.config.scripts.get(kind, {})
        turns = script.get("turns", [])
        if turn >= script.get("final_at", float("inf")):
            text = script["final"]
        elif turn < len(turns):
            text = turns[turn]
        else:
            text = script.get("default") or (turns[-1] if turns else "no script")
        return kind, text.replace("@@CID@@", cid.decode()).replace("@@TURN@@", str(turn))

    def check_output(self, body: bytes, cid: bytes, turn: int) -> None:
        if turn and self.config.expect_output:
            seen = OUT.findall(body)
            self.stats.foreign_output += any(one != cid for one in seen)
            self.stats.missing_output += cid not in seen

    def control(self, line: bytes, body: bytes) -> bytes:
        if b"/ctl/config" in line:
            self.configure(Config(**json.loads(body)))
            return http(200, b"{}")
        if b"/ctl/stats" in line:
            return http(200, json.dumps(asdict(self.stats)).encode())
        return http(404, b"{}")


def http(status: int, body: bytes, extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}{extra}connection: keep-alive\r\n\r\n".encode() + body


def completion(model: str, text: str, input_tokens: int) -> bytes:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": input_tokens, "completion_tokens": 10, "total_tokens": input_tokens + 10}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    whole = {"id": "chatcmpl-x", "object": "chat.completion", "created": 1, "model": model}
    return json.dumps({**whole, "choices": [choice], "usage": usage}).encode()


class Connection(asyncio.Protocol):
    """One keep-alive connection; the next request waits until the last one was answered."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.buffer = bytearray()
        self.in_flight: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass
        self.server.stats.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.settle()

    def settle(self) -> bool:
        """True when a request was still waiting for its reply."""
        kind, self.in_flight = self.in_flight, None
        if kind is not None:
            self.server.in_flight[kind] -= 1
        return kind is not None

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while self.in_flight is None and (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            length = CONTENT_LENGTH.search(self.buffer, 0, end + 2)
            size = end + 4 + (int(length.group(1)) if length else 0)
            if len(self.buffer) < size:
                return
            line, body = bytes(self.buffer[: self.buffer.find(b"\r\n")]), bytes(self.buffer[end + 4 : size])
            del self.buffer[:size]
            if b"/chat/completions" in line:
                self.complete(body)
            else:
                self.transport.write(self.server.control(line, body))

    def complete(self, body: bytes) -> None:
        kind, status, reply, extra = self.server.reply(body)
        flying, most = self.server.in_flight, self.server.stats.most_in_flight
        flying[kind] += 1
        most[kind] = max(most[kind], flying[kind])
        self.in_flight = kind
        wire = http(status, reply, extra)
        if (latency := self.server.config.latency.get(kind, 0.0)) > 0:
            asyncio.get_running_loop().call_later(latency, self.send, wire)
        elif self.settle():
            self.transport.write(wire)

    def send(self, wire: bytes) -> None:
        if self.settle():
            self.transport.write(wire)
            self.data_received(b"")


async def serve(port: int) -> None:
    server = Server()
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: Connection(server), "127.0.0.1", port, backlog=8192)
    print("PORT", listener.sockets[0].getsockname()[1], flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        await asyncio.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    port = parser.parse_args().port
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(port))
    else:
        uvloop.run(serve(port))


if __name__ == "__main__":
    main()
