"""E2B's control plane and its envd, with the stubs that ship in the SDK; commands are processes here."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import os
import signal
import sys
import threading
import time
import uuid
from typing import Any, Self

import psutil
import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_pb as pb
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from protobuf import Oneof

KEY = "e2b_" + "0" * 40
_box: contextvars.ContextVar[str] = contextvars.ContextVar("_box")


def kill_tree(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


class Envd(Process):
    def __init__(self) -> None:
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.owners: dict[int, str] = {}
        self.boxes: dict[str, dict[str, Any]] = {}
        self.drops: set[asyncio.Event] = set()

    def find(self, selector: Any) -> asyncio.subprocess.Process:
        process = self.processes.get(selector.selector.value)
        if process is None:
            raise ConnectError(Code.NOT_FOUND, f"process with pid {selector.selector.value} not found")
        return process

    async def start(self, request: Any, ctx: Any) -> Any:
        config = request.process
        envs = self.boxes[_box.get()].get("envVars", {})
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", config.args[-1], stdin=-1, stdout=-1, stderr=-1, cwd="/", start_new_session=True,
            env={"PATH": f"{os.path.dirname(sys.executable)}:/usr/bin:/bin", **envs, **config.envs},
        )  # fmt: skip
        self.processes[process.pid] = process
        self.owners[process.pid] = _box.get()
        events: asyncio.Queue[Any] = asyncio.Queue(16)
        drop = asyncio.Event()
        self.drops.add(drop)

        async def pump(stream: Any, name: str) -> None:
            while data := await stream.read(1 << 16):
                await events.put(Oneof("data", pb.ProcessEvent.DataEvent(output=Oneof(name, data))))

        async def work() -> None:
            await asyncio.gather(pump(process.stdout, "stdout"), pump(process.stderr, "stderr"))
            code = await process.wait()
            await events.put(
                Oneof("end", pb.ProcessEvent.EndEvent(exit_code=code, exited=True, status=f"exit status {code}"))
            )

        async def dropped() -> None:
            await drop.wait()
            await events.put(None)

        tasks = [asyncio.ensure_future(work()), asyncio.ensure_future(dropped())]
        event = Oneof("start", pb.ProcessEvent.StartEvent(pid=process.pid))
        try:
            while event is not None:
                yield pb.StartResponse(event=pb.ProcessEvent(event=event))
                if event.field == "end":
                    return
                event = await events.get()
            raise ConnectError(Code.UNAVAILABLE, "the stream was dropped")
        finally:
            for task in tasks:
                task.cancel()
            self.drops.discard(drop)

    async def stream_input(self, requests: Any, ctx: Any) -> Any:
        process = None
        async for request in requests:
            event = request.event
            if event.field == "start":
                process = self.find(event.value.process)
            elif event.field == "data" and process is not None:
                with contextlib.suppress(OSError):
                    process.stdin.write(event.value.input.input.value)
                    await process.stdin.drain()
        return pb.StreamInputResponse()

    async def send_signal(self, request: Any, ctx: Any) -> Any:
        kill_tree(self.find(request.process).pid)
        return pb.SendSignalResponse()


class E2BServer:
    """What a test sets (`refusal`, `slow`) holds for the requests that come after."""

    def __init__(self) -> None:
        self.envd = Envd()
        self.connect = ProcessASGIApplication(self.envd)
        self.boxes = self.envd.boxes
        self.made: list[dict[str, Any]] = []
        self.destroyed: list[str] = []
        self.renewed = 0
        self.unknown: list[str] = []
        self.refusal: tuple[int, str] | None = None
        self.slow = 0.0
        self.creating = threading.Event()
        config = uvicorn.Config(
            self.app, host="127.0.0.1", port=0, log_level="error", lifespan="off", interface="asgi3", ws="none"
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self.end_processes()
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(10)

    def end_processes(self, box: str | None = None) -> None:
        for pid, owner in list(self.envd.owners.items()):
            if box in (None, owner):
                kill_tree(pid)

    def drop_streams(self) -> None:
        for drop in list(self.envd.drops):
            self.loop.call_soon_threadsafe(drop.set)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.loop = asyncio.get_running_loop()
        path, method = scope["path"], scope["method"]
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        if path.startswith("/process.Process/"):
            if path.rpartition("/")[2] not in ("Start", "StreamInput", "SendSignal"):
                self.unknown.append(path)
            _box.set(headers.get("e2b-sandbox-id", ""))
            if headers.get("x-access-token") != "envd-token":
                self.unknown.append(f"{path} without its token")
            return await self.connect(scope, receive, send)
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        status, answer = await self.control(method, path, headers, json.loads(body) if body else {})
        data = json.dumps(answer).encode() if answer is not None else b""
        kind = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": kind})
        return await send({"type": "http.response.body", "body": data})

    async def control(self, method: str, path: str, headers: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/health":
            return (204, None) if self.boxes else (502, {"message": "sandbox not found"})
        if headers.get("x-api-key") != KEY:
            return 401, {"code": 401, "message": "no such key"}
        if (method, path) in (("POST", "/v2/sandboxes"), ("POST", "/sandboxes")):
            if self.refusal is not None:
                return self.refusal[0], {"code": self.refusal[0], "message": self.refusal[1]}
            name = "i" + uuid.uuid4().hex[:19]
            self.boxes[name] = body
            self.made.append(body)
            self.creating.set()
            await asyncio.sleep(self.slow)
            return 201, self.told(name)
        _, _, rest = path.partition("/sandboxes/")
        name, _, action = rest.partition("/")
        if name not in self.boxes:
            return 404, {"code": 404, "message": f"sandbox {name} not found"}
        if method == "DELETE":
            del self.boxes[name]
            self.destroyed.append(name)
            self.end_processes(name)
            return 204, None
        if action == "timeout":
            self.renewed += 1
            return 204, None
        if action == "connect":
            return 200, self.told(name)
        self.unknown.append(f"{method} {path}")
        return 501, {"code": 501, "message": "unknown"}

    def told(self, name: str) -> dict[str, Any]:
        return {
            "templateID": "base", "sandboxID": name, "clientID": "c", "envdVersion": "0.6.4",
            "envdAccessToken": "envd-token", "domain": None,
        }  # fmt: skip
