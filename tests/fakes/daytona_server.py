"""Daytona's API and the daemon of its sandboxes, over HTTP and WebSocket, as far as commands of sessions go.

The daemon's ways are kept: it labels whole lines of what a command says, sends its log from the start in pieces of a
KiB, and writes whole lines to a command's input, which it repeats in the log unless it is told not to.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from aiohttp import WSCloseCode, web

from .served import FakeVendor, Run

KEY = "known-key"
PIECE = 1024
_LABELS = (b"\x01\x01\x01", b"\x02\x02\x02")


class Command:
    """What runs in a session, and its log."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.log = bytearray()
        self.run: Run | None = None
        self._taken = [0, 0]
        self.changed = asyncio.Condition()

    def collect(self) -> None:
        """Label the lines that are complete."""
        assert self.run is not None
        for number, label in enumerate(_LABELS):
            output, taken = self.run.outputs[number], self._taken[number]
            end = len(output) if self.run.ended[number] else output.rfind(b"\n") + 1
            if end > taken:
                lines = bytes(output[taken:end]).removesuffix(b"\n").split(b"\n")
                self.log += b"".join(label + line + b"\n" for line in lines)
                self._taken[number] = end
        self._waking = asyncio.ensure_future(self.wake())

    async def wake(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    @property
    def over(self) -> bool:
        return self.run is not None and all(self.run.ended) and self.run.process.returncode is not None


class Box:
    """A sandbox."""

    def __init__(self, asked: dict[str, Any], minute: float) -> None:
        self.asked = asked
        self.minute = minute
        self.id = secrets.token_hex(16)
        self.state = "started"
        self.reason: str | None = None
        self.sessions: dict[str, dict[str, Command]] = {}
        self.streams: set[web.WebSocketResponse] = set()
        self.idle: asyncio.TimerHandle | None = None
        self.lives: asyncio.TimerHandle | None = None

    async def end(self, state: str, reason: str | None = None) -> None:
        for timer in (self.idle, self.lives):
            if timer is not None:
                timer.cancel()
        self.state, self.reason = state, reason
        for session in list(self.sessions):
            await self.end_session(session)
        for stream in list(self.streams):
            await stream.close(code=WSCloseCode.INTERNAL_ERROR, drain=False)

    async def end_session(self, name: str) -> None:
        for command in self.sessions.pop(name).values():
            if command.run is not None:
                await command.run.kill()
            await command.wake()


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"message": message, "statusCode": status}, status=status)


class DaytonaServer(FakeVendor):
    """Both on one port."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes: dict[str, Box] = {}
        self.minute = 60.0
        """Seconds of a minute of a sandbox made from now on."""
        self.first_state = "started"
        """Of a sandbox that was asked for; anything else becomes "started" when it is asked after."""
        self.cut = 0
        """Streams of a log that are cut off after some of it."""

    async def start(self) -> None:
        app = web.Application(middlewares=[self._each], client_max_size=1 << 30)
        box, toolbox = "/api/sandbox/{box}", "/toolbox/{box}"
        session = toolbox + "/process/session/{session}"
        command = session + "/command/{command}"
        app.add_routes(
            [
                web.post("/api/sandbox", self.create, name="create"),
                web.get(box, self.get, name="get"),
                web.delete(box, self.delete, name="delete"),
                web.post(box + "/last-activity", self.touch, name="touch"),
                web.post(toolbox + "/process/session", self.open_session, name="open_session"),
                web.delete(session, self.close_session, name="close_session"),
                web.post(session + "/exec", self.execute, name="execute"),
                web.get(command, self.command, name="command"),
                web.post(command + "/input", self.input, name="input"),
                web.get(command + "/logs", self.logs, name="logs"),
                web.post(toolbox + "/files/bulk-upload", self.upload, name="upload"),
                web.get("/api/socket.io/", self.no_events, name="events"),
                web.route("*", "/{rest:.*}", self.nothing, name="nothing"),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        for box in self.boxes.values():
            await box.end("destroyed")
        await self._runner.cleanup()

    def end(self, number: int, state: str, reason: str | None = None) -> None:
        """End a sandbox from outside; "gone" is not known afterwards."""
        box = self.boxes[self.made[number]]
        if state == "gone":
            del self.boxes[box.id]
        self.call(box.end("destroyed" if state == "gone" else state, reason))

    @web.middleware
    async def _each(self, request: web.Request, handler: Any) -> web.StreamResponse:
        name = request.match_info.route.name or ""
        self.requests[name] += 1
        if name not in ("events", "nothing") and request.headers.get("Authorization") != f"Bearer {KEY}":
            return _refusal(401, "Invalid credentials")
        await self.gate(name, self.held)
        if fault := self.fault(name):
            return _refusal(*fault)
        if request.path.startswith("/toolbox"):
            found = self.boxes.get(request.match_info["box"])
            if found is None or found.state != "started":
                return _refusal(404 if found is None else 400, "the sandbox is not running")
            if "session" in request.match_info and request.match_info["session"] not in found.sessions:
                return _refusal(404, "session not found")
            self._touch(found)
        response = await handler(request)
        await self.gate(name, self.late)
        return response

    async def no_events(self, _: web.Request) -> web.Response:
        return _refusal(501, "no events here")

    async def nothing(self, request: web.Request) -> web.Response:
        self.unknown.append(f"{request.method} {request.path}")
        return _refusal(501, "unknown")

    def _box(self, request: web.Request) -> Box:
        wanted = request.match_info["box"]
        for box in self.boxes.values():
            if wanted in (box.id, box.asked.get("name")):
                return box
        raise web.HTTPNotFound(text='{"message": "Sandbox not found"}', content_type="application/json")

    def _shown(self, box: Box) -> dict[str, Any]:
        wanted = box.asked
        return {
            "id": box.id,
            "organizationId": "o",
            "name": wanted.get("name") or box.id,
            "user": "daytona",
            "env": wanted.get("env") or {},
            "labels": wanted.get("labels") or {},
            "public": False,
            "networkBlockAll": bool(wanted.get("networkBlockAll")),
            "kvm": False,
            "target": wanted.get("target") or "us",
            "cpu": 1,
            "gpu": 0,
            "memory": 1,
            "disk": 3,
            "state": box.state,
            "desiredState": "started",
            "errorReason": box.reason,
            "toolboxProxyUrl": f"{self.url}/toolbox",
            "createdAt": "2026-01-01T00:00:00Z",
        }

    def _touch(self, box: Box) -> None:
        if box.idle is not None:
            box.idle.cancel()
        if minutes := box.asked.get("autoStopInterval"):
            box.idle = self.loop.call_later(
                minutes * box.minute, lambda: self.loop.create_task(box.end("stopped", "no activity"))
            )

    async def create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if any(box.asked.get("name") == asked.get("name") for box in self.boxes.values()):
            return _refusal(409, f"Sandbox {asked.get('name')} exists")
        box = Box(asked, self.minute)
        box.state = self.first_state
        self.boxes[box.id] = box
        self.made.append(box.id)
        self.seen.append(box)
        self._touch(box)
        if minutes := asked.get("ttlMinutes"):
            box.lives = self.loop.call_later(
                minutes * box.minute, lambda: self.loop.create_task(box.end("destroyed", "its time to live is over"))
            )
        return web.json_response(self._shown(box))

    async def get(self, request: web.Request) -> web.Response:
        box = self._box(request)
        if box.state in ("creating", "pending_build", "starting"):
            box.state = "started"
        return web.json_response(self._shown(box))

    async def delete(self, request: web.Request) -> web.Response:
        box = self._box(request)
        await box.end("destroyed")
        del self.boxes[box.id]
        self.destroyed.append(box.id)
        return web.json_response(self._shown(box))

    async def touch(self, request: web.Request) -> web.Response:
        self._touch(self._box(request))
        return web.Response(status=201)

    async def open_session(self, request: web.Request) -> web.Response:
        name = (await request.json())["sessionId"]
        sessions = self._box(request).sessions
        if name in sessions:
            return _refusal(409, "session exists")
        sessions[name] = {}
        return web.Response(status=201)

    async def close_session(self, request: web.Request) -> web.Response:
        await self._box(request).end_session(request.match_info["session"])
        return web.Response(status=204)

    async def execute(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["runAsync"], "this one would wait for its end"
        command, name = Command(bool(asked.get("suppressInputEcho"))), secrets.token_hex(8)
        script = f"{{ {asked['command']}\n}}"
        command.run = await Run.start(["/bin/sh", "-c", script], lambda: command.collect(), {})
        session = self._box(request).sessions.get(request.match_info["session"])
        if session is None:  # it was closed meanwhile
            await command.run.kill()
            return _refusal(404, "session not found")
        session[name] = command
        return web.json_response({"cmdId": name}, status=202)

    def _command(self, request: web.Request) -> Command:
        return self._box(request).sessions[request.match_info["session"]][request.match_info["command"]]

    async def command(self, request: web.Request) -> web.Response:
        command, name = self._command(request), request.match_info["command"]
        assert command.run is not None
        status = {"exitCode": command.run.process.returncode} if command.over else {}
        return web.json_response({"id": name, "command": "", **status})

    async def input(self, request: web.Request) -> web.Response:
        command = self._command(request)
        assert command.run is not None
        if command.over:
            return _refusal(410, "command has already completed")
        data = (await request.json())["data"].encode()
        data = data if data.endswith(b"\n") else data + b"\n"
        if not command.quiet:
            command.log += _LABELS[0] + data
        try:
            await command.run.write(data)
        except (BrokenPipeError, ConnectionResetError):
            return _refusal(500, "failed to write to input pipe")
        return web.Response(status=204)

    async def logs(self, request: web.Request) -> web.StreamResponse:
        box, command = self._box(request), self._command(request)
        if request.query.get("follow") != "true":
            assert command.run is not None
            out, err = (output.decode("utf-8", "replace") for output in command.run.outputs)
            return web.json_response({"output": out + err, "stdout": out, "stderr": err})
        stream = web.WebSocketResponse(max_msg_size=0)
        await stream.prepare(request)
        box.streams.add(stream)
        reader = asyncio.ensure_future(self._hear(stream, command))  # it answers to a close
        at, started = 0, len(command.log)
        try:
            while box.state == "started" and not stream.closed:
                if len(command.log) > at:
                    data = bytes(command.log[at : at + PIECE])
                    if self.cut and at >= started:
                        self.cut -= 1
                        await stream.send_bytes(data[: len(data) // 2])
                        await stream.close(code=WSCloseCode.TRY_AGAIN_LATER, drain=False)
                        break
                    at += len(data)
                    await stream.send_bytes(data)
                elif command.over:
                    break
                else:
                    async with command.changed:
                        await self._grown(command, box, stream, len(command.log))
        except ConnectionError:
            pass  # whoever followed is gone
        finally:
            reader.cancel()
            box.streams.discard(stream)
            await stream.close(
                code=WSCloseCode.OK if box.state == "started" else WSCloseCode.INTERNAL_ERROR, drain=False
            )
        return stream

    async def _hear(self, stream: web.WebSocketResponse, command: Command) -> None:
        async for _ in stream:
            pass
        await command.wake()

    async def _grown(self, command: Command, box: Box, stream: web.WebSocketResponse, size: int) -> None:
        await command.changed.wait_for(
            lambda: len(command.log) > size or command.over or box.state != "started" or stream.closed
        )

    async def upload(self, request: web.Request) -> web.Response:
        path = ""
        async for part in await request.multipart():
            if part.name.endswith(".path"):
                path = (await part.read()).decode()
            else:
                with open(path or part.filename, "xb") as file:
                    while data := await part.read_chunk(1 << 18):
                        file.write(data)
        return web.json_response({})
