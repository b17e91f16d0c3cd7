"""A sandbox in memory, whose worker is a coroutine of the test, and services that answer by function."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel

from asyncrlm.repl.resources import ResourceScope
from asyncrlm.repl.sandbox import Environment, Printed, Report, Sandbox, Scope
from asyncrlm.repl.session import Session, SubCall


class Pipe:
    """Bytes one way, at most `capacity` of them under way; `chunk` bounds what one receive gives."""

    def __init__(self, capacity: float = math.inf, chunk: int = 1 << 18) -> None:
        self.capacity, self.chunk = capacity, chunk
        self.data = bytearray()
        self.closed = False
        self._changed = anyio.Event()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def close(self) -> None:
        self.closed = True
        self._tell()

    def put(self, data: bytes) -> int:
        room = int(min(len(data), max(self.capacity - len(self.data), 0)))
        self.data += data[:room]
        self._tell()
        return room

    async def send(self, data: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        while data:
            if self.closed:
                raise anyio.BrokenResourceError
            data = data[self.put(data) :]
            if data:
                await self._changed.wait()

    async def receive(self) -> bytes:
        await anyio.lowlevel.checkpoint()
        while not self.data:
            if self.closed:
                raise anyio.EndOfStream
            await self._changed.wait()
        data = bytes(self.data[: self.chunk])
        del self.data[: self.chunk]
        self._tell()
        return data


class FakeSandbox(Sandbox):
    def __init__(self, capacity: float = math.inf, chunk: int = 1 << 18, *, direct: bool = True) -> None:
        self.report = Report(environment="fake")
        self.inward, self.outward = Pipe(capacity, chunk), Pipe(capacity, chunk)
        self.direct = direct
        self.interrupted = anyio.Event()
        self.killed = anyio.Event()
        self.closed = 0
        self.files: dict[str, bytes] = {}
        self.cpu: float | None = None
        self.printed = (Printed(), Printed())

    async def send(self, data: bytes) -> None:
        await self.inward.send(data)

    def send_nowait(self, data: bytes) -> int:
        return self.inward.put(data) if self.direct and not self.inward.closed else 0

    async def receive(self) -> bytes:
        return await self.outward.receive()

    def take_output(self) -> tuple[Printed, Printed]:
        taken, self.printed = self.printed, (Printed(), Printed())
        return taken

    async def put_file(self, name: str, chunks: Iterable[bytes]) -> str:
        await anyio.lowlevel.checkpoint()
        self.files[name] = b"".join(chunks)
        return name

    async def pass_file(self, open_file: Callable[[], int]) -> None:
        raise NotImplementedError

    def interrupt(self) -> None:
        self.interrupted.set()

    def kill(self) -> None:
        self.killed.set()
        self.inward.close()
        self.outward.close()

    def cpu_seconds(self) -> float | None:
        return self.cpu

    async def aclose(self) -> None:
        self.kill()
        self.closed += 1
        await anyio.lowlevel.checkpoint()


class Worker:
    """The worker's end of a `FakeSandbox`, with frames as dicts."""

    def __init__(self, sandbox: FakeSandbox) -> None:
        self.sandbox = sandbox
        self._buffer = b""
        self.loads: list[dict[str, Any]] = []
        self.init: dict[str, Any] = {}

    async def raw(self, data: bytes) -> None:
        await self.sandbox.outward.send(data)

    async def send(self, **frame: Any) -> None:
        await self.raw(json.dumps(frame).encode() + b"\n")

    async def take(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            self._buffer += await self.sandbox.inward.receive()
        line, self._buffer = self._buffer.split(b"\n", 1)
        assert line.isascii()
        return json.loads(line)

    async def hello(self, version: int = 1) -> None:
        self.init = await self.take()
        assert self.init["t"] == "init"
        await self.send(t="ready", version=version, python="3.x", in_force={"net": "fake"})

    async def cell(self) -> tuple[int, str]:
        """The next cell; loads before it are granted."""
        while True:
            frame = await self.take()
            if frame["t"] == "load":
                self.loads.append(frame)
                await self.send(t="loaded", id=frame["id"])
            elif frame["t"] == "execute":
                return frame.get("cell", 0), frame["code"]
            else:
                assert frame["t"] in ("reply", "dropped"), frame

    async def done(self, cell: int, **fields: Any) -> None:
        await self.send(t="done", cell=cell, **fields)

    def end(self) -> None:
        self.sandbox.outward.close()


Script = Callable[[Worker], Awaitable[None]]


class FakeEnvironment(Environment, frozen=True, kw_only=True, dict=True):
    """Runs `script` as the worker, in the task group of the test."""

    name = "fake"
    script: Script
    group: anyio.abc.TaskGroup
    capacity: float = math.inf
    chunk: int = 1 << 18
    direct: bool = True
    opened: list[FakeSandbox]

    async def open(self, scope: Scope) -> Sandbox:
        await anyio.lowlevel.checkpoint()
        sandbox = FakeSandbox(self.capacity, self.chunk, direct=self.direct)
        self.opened.append(sandbox)

        async def life() -> None:
            try:
                await self.script(Worker(sandbox))
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                pass
            else:
                sandbox.outward.close()

        self.group.start_soon(life)
        return sandbox


class FunctionServices:
    """Answers with `function(call)`; what it raises is raised."""

    def __init__(self, function: Callable[[SubCall], Awaitable[str]] | None = None) -> None:
        self.function = function
        self.calls: list[SubCall] = []

    async def llm(self, call: SubCall) -> str:
        self.calls.append(call)
        return await self.function(call) if self.function else f"re: {call.prompt}"

    async def rlm(self, call: SubCall) -> str:
        return await self.llm(call)

    def limits(self) -> dict[str, Any]:
        return {"calls": 5}

    def width(self) -> int:
        return 1


def fake_session(
    group: anyio.abc.TaskGroup,
    script: Script,
    *,
    services: FunctionServices | None = None,
    settings: Mapping[str, Any] | None = None,
    capacity: float = math.inf,
    chunk: int = 1 << 18,
    direct: bool = True,
    **options: Any,
) -> tuple[Session, list[FakeSandbox]]:
    opened: list[FakeSandbox] = []
    environment = FakeEnvironment(
        script=script,
        group=group,
        opened=opened,
        capacity=capacity,
        chunk=chunk,
        direct=direct,
        **(settings or {}),
    )
    return Session(environment, ResourceScope(), services or FunctionServices(), **options), opened
