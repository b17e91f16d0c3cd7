"""E2B's control plane and its envd, with the stubs that ship in the SDK; commands are processes here."""

from __future__ import annotations

import asyncio
import contextvars
import json
import urllib.parse
import uuid
from typing import TYPE_CHECKING, Any

import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_pb as pb
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from protobuf import Oneof

from .served import FakeVendor, Run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEY = "e2b_" + "0" * 40
TOKEN = "envd-token"
PIECE = 1 << 16
_asked_of: contextvars.ContextVar[str] = contextvars.ContextVar("_asked_of")


class Refusal(Exception):
    """A request to the control plane that is not granted."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Box:
    """A sandbox."""

    def __init__(self, asked: dict[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        self.asked = asked
        self.id = "i" + uuid.uuid4().hex[:19]
        self.runs: dict[int, Run] = {}
        self.changed = asyncio.Event()
        self.over = False
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self.live(asked["timeout"])

    def change(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def live(self, seconds: float) -> None:
        """This long from now."""
        if self._timer is not None:
            self._timer.cancel()
        self.until = self._loop.time() + seconds
        self._timer = self._loop.call_later(seconds, lambda: self._loop.create_task(self.end()))

    async def end(self) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self.over = True
        self.change()
        for run in self.runs.values():
            await run.kill()


class Envd(Process):
    def __init__(self, server: E2BServer) -> None:
        self.server = server

    async def _box(self, name: str) -> Box:
        """The one that is asked, for this request."""
        self.server.requests[name] += 1
        await self.server.gate(name, self.server.held)
        if fault := self.server.fault(name):
            raise ConnectError(*fault)
        box = self.server.boxes.get(_asked_of.get())
        if box is None or box.over:
            raise ConnectError(Code.UNAVAILABLE, f"The sandbox {_asked_of.get()} was not found")
        return box

    def _run(self, box: Box, selector: Any) -> Run:
        run = box.runs.get(selector.selector.value)
        if run is None:
            raise ConnectError(Code.NOT_FOUND, f"process with pid {selector.selector.value} not found")
        return run

    async def start(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
        box = await self._box("execute")
        config = request.process
        run = await Run.start(
            ["/bin/sh", "-c", config.args[-1]], lambda: box.change(), {**box.asked.get("envVars", {}), **config.envs}
        )
        box.runs[run.process.pid] = run
        if box.over:  # meanwhile
            await run.kill()
        await self.server.gate("execute", self.server.late)
        async for event in self._follow(box, run, [0, 0]):
            yield pb.StartResponse(event=event)

    async def connect(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
        """What is said from now on."""
        box = await self._box("attach")
        run = self._run(box, request.process)
        async for event in self._follow(box, run, [len(output) for output in run.outputs]):
            yield pb.ConnectResponse(event=event)

    async def _follow(self, box: Box, run: Run, at: list[int]) -> AsyncIterator[Any]:
        yield _event("start", pb.ProcessEvent.StartEvent(pid=run.process.pid))
        while True:
            changed = box.changed
            for number, kind in enumerate(("stdout", "stderr")):
                if data := bytes(run.outputs[number][at[number] : at[number] + PIECE]):
                    at[number] += len(data)
                    if self.server.cut and kind == "stdout":
                        self.server.cut -= 1
                        yield _event("data", pb.ProcessEvent.DataEvent(output=Oneof(kind, data[: len(data) // 2])))
                        raise ConnectError(Code.UNAVAILABLE, "the stream was dropped")
                    yield _event("data", pb.ProcessEvent.DataEvent(output=Oneof(kind, data)))
            if box.over:
                raise ConnectError(Code.UNAVAILABLE, "the connection ended before the stream completed")
            if [len(output) for output in run.outputs] != at:
                continue
            if all(run.ended) and run.process.returncode is not None:
                code = run.process.returncode
                yield _event("end", pb.ProcessEvent.EndEvent(exit_code=code, exited=True, status=f"exit status {code}"))
                return
            await changed.wait()

    async def stream_input(self, requests: Any, ctx: Any) -> Any:
        box, run = await self._box("input"), None
        async for request in requests:
            event = request.event
            if event.field == "start":
                run = self._run(box, event.value.process)
            elif event.field == "data" and run is not None:
                lost = self.server.deaf.pop(0) if self.server.deaf else None
                if lost:
                    raise ConnectError(Code.UNAVAILABLE, "the stream was dropped")
                try:
                    await run.write(event.value.input.input.value)
                except (BrokenPipeError, ConnectionResetError):
                    raise ConnectError(Code.NOT_FOUND, "the process has exited") from None
                if lost is not None:
                    raise ConnectError(Code.UNAVAILABLE, "the stream was dropped")
        return pb.StreamInputResponse()

    async def send_signal(self, request: Any, ctx: Any) -> Any:
        await self._run(await self._box("signal"), request.process).kill()
        return pb.SendSignalResponse()


def _event(kind: str, value: Any) -> Any:
    return pb.ProcessEvent(event=Oneof(kind, value))


class E2BServer(FakeVendor):
    """Both on one port."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes: dict[str, Box] = {}
        self.cut = 0
        """Streams that end in what they say next."""
        self.deaf: list[bool] = []
        """Of the next inputs: whether it is lost (True), or taken (False), when its stream ends."""
        self._connect = ProcessASGIApplication(Envd(self))

    async def start(self) -> None:
        config = uvicorn.Config(
            self.app, host="127.0.0.1", port=0, log_level="error", lifespan="off", interface="asgi3", ws="none"
        )
        self._server = uvicorn.Server(config)
        self._serving = self.loop.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.005)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        for box in self.boxes.values():
            await box.end()
        self._server.should_exit = self._server.force_exit = True
        await self._serving

    def end(self, number: int, how: str) -> None:
        """End a sandbox from outside; "died": only what runs in it."""
        box = self.boxes[self.made[number]]
        if how == "died":
            for run in box.runs.values():
                self.call(run.kill())
            return
        self.call(box.end())

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        path, method = scope["path"], scope["method"]
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        if path.startswith("/process.Process/"):
            if path.rpartition("/")[2] not in ("Start", "Connect", "StreamInput", "SendSignal"):
                self.unknown.append(path)
            _asked_of.set(headers.get("e2b-sandbox-id", ""))
            if headers.get("x-access-token") != TOKEN:
                self.unknown.append(f"{path} without its token")
            return await self._connect(scope, receive, send)
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        query = urllib.parse.parse_qs(scope["query_string"].decode())
        try:
            status, answer = await self.control(method, path, headers, json.loads(body) if body else {}, query)
        except Refusal as refusal:
            status, answer = refusal.status, {"code": refusal.status, "message": str(refusal)}
        data = json.dumps(answer).encode() if answer is not None else b""
        kind = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": kind})
        return await send({"type": "http.response.body", "body": data})

    async def control(
        self, method: str, path: str, headers: dict[str, str], body: dict[str, Any], query: dict[str, list[str]]
    ) -> tuple[int, Any]:
        if path == "/health":
            box = self.boxes.get(headers.get("e2b-sandbox-id", ""))
            if box is None or box.over:
                raise Refusal(502, "The sandbox was not found")
            return 204, None
        _, _, rest = path.partition("/sandboxes")
        box, _, action = rest.strip("/").partition("/")
        name = {"POST": action or "create", "DELETE": "delete", "GET": "list"}.get(method, "")
        self.requests[name] += 1
        if headers.get("x-api-key") != KEY:
            raise Refusal(401, "no such key")
        await self.gate(name, self.held)
        if fault := self.fault(name):
            raise Refusal(*fault)
        answer = {"create": self.create, "delete": self.delete, "timeout": self.renew, "connect": self.extend}.get(name)
        if name == "list" and not box:
            found = self.list(query)
        elif answer is not None:
            found = await answer(box, body)
        else:
            self.unknown.append(f"{method} {path}")
            raise Refusal(501, "unknown")
        await self.gate(name, self.late)
        return found

    async def create(self, _: str, body: dict[str, Any]) -> tuple[int, Any]:
        box = Box(body, self.loop)
        self.boxes[box.id] = box
        self.made.append(box.id)
        self.seen.append(box)
        return 201, self.told(box)

    def _box(self, name: str) -> Box:
        box = self.boxes.get(name)
        if box is None or box.over:
            raise Refusal(404, f"sandbox {name} not found")
        return box

    async def delete(self, name: str, _: dict[str, Any]) -> tuple[int, Any]:
        if name in self.made and name not in self.destroyed:
            self.destroyed.append(name)
        await self._box(name).end()
        return 204, None

    async def renew(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        box = self._box(name)
        box.live(body["timeout"])
        return 200, self.told(box)

    async def extend(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        box = self._box(name)
        if self.loop.time() + body["timeout"] > box.until:
            box.live(body["timeout"])
        return 200, self.told(box)

    def list(self, query: dict[str, list[str]]) -> tuple[int, Any]:
        wanted = {
            urllib.parse.unquote(key): urllib.parse.unquote(value)
            for key, value in urllib.parse.parse_qsl(query.get("metadata", [""])[0])
        }
        found = [box for box in self.boxes.values() if not box.over and wanted.items() <= box.asked["metadata"].items()]
        times = {"startedAt": "2026-01-01T00:00:00Z", "endAt": "2026-01-01T01:00:00Z"}
        sizes = {"cpuCount": 1, "memoryMB": 512, "diskSizeMB": 512, "state": "running"}
        return 200, [{**self.told(box), **times, **sizes, "metadata": box.asked["metadata"]} for box in found]

    def told(self, box: Box) -> dict[str, Any]:
        return {
            "templateID": "base",
            "sandboxID": box.id,
            "clientID": "c",
            "envdVersion": "0.6.4",
            "envdAccessToken": TOKEN,
            "domain": None,
        }
