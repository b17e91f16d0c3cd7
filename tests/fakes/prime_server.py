"""Prime's API and the gateway to its sandboxes, as far as sandboxes and commands in them go.

The gateway's commands are Connect RPCs in protobuf, framed here by hand. Its ways are kept: who starts a session that
is there attaches to it, who attaches hears only what is said from then on, input that is sent twice is taken once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import struct
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from aiohttp import web
from prime_sandboxes._proto.command_session import command_session_pb2 as wire

from .served import FakeVendor, Run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pb: Any = wire
KEY = "pit_known"
PIECE = 1 << 16
_ENDED = ("TERMINATED", "TIMEOUT", "ERROR")
_SERVICE = "/command_session.CommandSession/"


class Refusal(Exception):
    """A request that is not granted: its status, and what the answer holds."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.status, self.body = status, body


class Session:
    """A command, and who listens to it."""

    def __init__(self, asked: bytes) -> None:
        self.asked = asked
        self.run: Run | None = None
        self.inputs: set[str] = set()
        self.taking = asyncio.Lock()
        self._changed = asyncio.Event()

    def change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def more(self, at: list[int]) -> None:
        """Wait until it said or did more than what was heard."""
        assert self.run is not None
        changed = self._changed
        if [len(output) for output in self.run.outputs] == at and not self.over:
            await changed.wait()

    @property
    def over(self) -> bool:
        return self.run is not None and all(self.run.ended) and self.run.process.returncode is not None


class Box:
    """A sandbox."""

    def __init__(self, asked: dict[str, Any], minute: float, loop: asyncio.AbstractEventLoop) -> None:
        self.asked = asked
        self.id = f"sbx-{secrets.token_hex(8)}"
        self.status = "PENDING"
        self.reason: str | None = None
        self.token = secrets.token_hex(8)
        self.sessions: dict[str, Session] = {}
        self.streams: list[web.Request] = []
        self._minute, self._loop = minute, loop
        self._timers: dict[str, asyncio.TimerHandle] = {}
        if asked["timeout_minutes"] > 0:
            self._end_in("lifetime", asked["timeout_minutes"], "maximum lifetime exceeded")
        self.touch()

    def _end_in(self, what: str, minutes: float, reason: str) -> None:
        if what in self._timers:
            self._timers.pop(what).cancel()
        ending = lambda: self._loop.create_task(self.end("TIMEOUT", reason))  # noqa: E731
        self._timers[what] = self._loop.call_later(minutes * self._minute, ending)

    def touch(self) -> None:
        """It is used."""
        if self.status not in _ENDED and (minutes := self.asked.get("idle_timeout_minutes")):
            self._end_in("idle", minutes, "idle timeout exceeded")

    async def end(self, status: str, reason: str | None = None) -> None:
        if self.status in _ENDED:
            return
        for timer in self._timers.values():
            timer.cancel()
        self.status, self.reason = status, reason
        for stream in self.streams:
            if stream.transport is not None:
                stream.transport.abort()
        for session in self.sessions.values():
            if session.run is not None:
                await session.run.kill()

    def shown(self) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat()
        return {
            "id": self.id,
            "name": self.asked["name"],
            "dockerImage": self.asked.get("docker_image") or "",
            "cpuCores": self.asked["cpu_cores"],
            "memoryGB": self.asked["memory_gb"],
            "diskSizeGB": self.asked.get("disk_size_gb") or 5,
            "diskMountPath": "/",
            "gpuCount": self.asked["gpu_count"],
            "vm": True,
            "status": self.status,
            "timeoutMinutes": self.asked["timeout_minutes"],
            "terminationReason": self.reason,
            "labels": self.asked["labels"],
            "createdAt": now,
            "updatedAt": now,
        }


def _envelope(message: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BI", flags, len(message)) + message


def _event(**which: Any) -> bytes:
    return _envelope(pb.StartResponse(event=pb.CommandSessionEvent(**which)).SerializeToString())


class PrimeServer(FakeVendor):
    """Both on one port, without TLS: there the SDK speaks HTTP/1.1."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes: dict[str, Box] = {}
        self.minute = 60.0
        """Seconds of a minute of a sandbox made from now on."""
        self.pending = 0
        """Times that sandboxes which are asked after are not there yet."""
        self.cut = 0
        """Streams that are cut off in the middle of what they say next."""
        self.deaf: list[bool] = []
        """Of the next inputs: whether it is lost (True), or taken (False), when its request fails."""

    async def start(self) -> None:
        app = web.Application(middlewares=[self._each], client_max_size=1 << 30)
        box, gateway = "/api/v1/sandbox/{box}", "/gateway/{ns}/{box}" + _SERVICE
        app.add_routes(
            [
                web.post("/api/v1/sandbox", self.create, name="create"),
                web.get("/api/v1/sandbox", self.list, name="list"),
                web.post("/api/v1/sandbox/status:batchGet", self.statuses, name="status"),
                web.get(box, self.get, name="get"),
                web.delete(box, self.delete, name="delete"),
                web.post(box + "/auth", self.auth, name="auth"),
                web.get(box + "/error-context", self.get, name="context"),
                web.post(gateway + "Start", self.begin, name="start"),
                web.post(gateway + "Connect", self.attach, name="attach"),
                web.post(gateway + "SendInput", self.input, name="input"),
                web.post(gateway + "SendSignal", self.signal, name="signal"),
                web.route("*", "/{rest:.*}", self.nothing, name="nothing"),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        for box in self.boxes.values():
            await box.end("TERMINATED")
        await self._runner.cleanup()

    def end(self, number: int, status: str, reason: str | None = None) -> None:
        """End a sandbox from outside; "gone" is not known afterwards."""
        box = self.boxes[self.made[number]]
        if status == "gone":
            del self.boxes[box.id]
        self.call(box.end("TERMINATED" if status == "gone" else status, reason))

    def expire(self) -> None:
        """Take only new tokens from now on."""
        for box in self.boxes.values():
            box.token = secrets.token_hex(8)

    @web.middleware
    async def _each(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
        name = request.match_info.route.name or ""
        self.requests[name] += 1
        try:
            if name not in ("start", "nothing"):  # who starts what is told apart there
                await self._pass(name)
            if request.path.startswith("/gateway"):
                self._admit(request)
            elif request.headers.get("Authorization") != f"Bearer {KEY}":
                raise Refusal(401, {"detail": "Invalid API key"})
            response = await handler(request)
            await self.gate(name, self.late)
        except Refusal as refusal:
            return web.json_response(refusal.body, status=refusal.status)
        return response

    async def _pass(self, name: str) -> None:
        await self.gate(name, self.held)
        if fault := self.fault(name):
            code = "unavailable" if fault[0] == 503 else "internal"
            raise Refusal(fault[0], {"detail": fault[1], "message": fault[1], "code": code})

    def _admit(self, request: web.Request) -> None:
        box = self.boxes.get(request.match_info["box"])
        if box is None or box.status in _ENDED:
            raise Refusal(404, {"code": "not_found", "message": "sandbox_not_found"})
        if request.headers.get("Authorization") != f"Bearer {box.token}":
            raise Refusal(401, {"code": "unauthenticated", "message": "no such token"})
        if box.status != "RUNNING":
            raise Refusal(503, {"code": "unavailable", "message": "it is not running yet"})

    async def nothing(self, request: web.Request) -> web.Response:
        self.unknown.append(f"{request.method} {request.path}")
        raise Refusal(501, {"detail": "unknown", "code": "unimplemented"})

    # ---- the API ----

    async def create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["vm"] is True
        box = next((b for b in self.boxes.values() if b.asked["idempotency_key"] == asked["idempotency_key"]), None)
        if box is None:
            box = Box(asked, self.minute, self.loop)
            self.boxes[box.id] = box
            self.made.append(box.id)
            self.seen.append(box)
        return web.json_response(box.shown(), status=201)

    def _box(self, request: web.Request) -> Box:
        box = self.boxes.get(request.match_info["box"])
        if box is None:
            raise Refusal(404, {"detail": "Sandbox not found"})
        return box

    async def list(self, request: web.Request) -> web.Response:
        wanted = set(request.query.getall("labels", []))
        found = [box for box in self.boxes.values() if wanted <= set(box.asked["labels"])]
        if request.query.get("is_active") == "true":
            found = [box for box in found if box.status not in _ENDED]
        shown = [box.shown() for box in found]
        return web.json_response({"sandboxes": shown, "total": len(shown), "page": 1, "perPage": 50, "hasNext": False})

    async def statuses(self, request: web.Request) -> web.Response:
        found, missing = [], []
        for name in (await request.json())["sandbox_ids"]:
            if (box := self.boxes.get(name)) is None:
                missing.append({"sandbox_id": name, "code": "NOT_FOUND", "message": "Sandbox not found"})
                continue
            if box.status == "PENDING":
                self.pending -= 1
                box.status = "PENDING" if self.pending >= 0 else "RUNNING"
            error = {"error_type": "IMAGE_PULL_FAILED", "error_message": box.reason} if box.status == "ERROR" else {}
            found.append({"sandbox_id": name, "status": box.status, **error})
        return web.json_response({"statuses": found, "errors": missing})

    async def get(self, request: web.Request) -> web.Response:
        return web.json_response(self._box(request).shown())

    async def delete(self, request: web.Request) -> web.Response:
        box = self._box(request)
        await box.end("TERMINATED", "deleted by user")
        if box.id not in self.destroyed:
            self.destroyed.append(box.id)
        return web.json_response({"message": "deleted"})

    async def auth(self, request: web.Request) -> web.Response:
        box = self._box(request)
        return web.json_response(
            {
                "token": box.token,
                "gateway_url": f"{self.url}/gateway",
                "user_ns": "ns",
                "job_id": box.id,
                "sandbox_id": box.id,
                "is_vm": True,
                "expires_at": (datetime.now(UTC) + timedelta(hours=1)).isoformat(),
            }
        )

    # ---- the gateway ----

    async def begin(self, request: web.Request) -> web.StreamResponse:
        body = (await request.read())[5:]
        asked = pb.StartRequest.FromString(body)
        name = "execute" if asked.stdin else "probe"
        self.requests[name] += 1
        await self._pass(name)
        self._admit(request)  # it may have waited
        box = self._box(request)
        box.touch()
        session = box.sessions.get(asked.session_uuid)
        heard = None
        if session is None:
            session = Session(body)
            box.sessions[asked.session_uuid or secrets.token_hex(8)] = session
            heard = [0, 0]
            env = {**(box.asked.get("environment_vars") or {}), **(box.asked.get("secrets") or {})}
            command = [asked.command.cmd, *asked.command.args]
            session.run = await Run.start(command, session.change, {**env, **asked.command.envs})
            if box.status != "RUNNING":  # it ended meanwhile
                await session.run.kill()
                self._admit(request)
        elif session.asked != body:
            raise Refusal(400, {"code": "failed_precondition", "message": "the session is another command's"})
        await self.gate(name, self.late)
        return await self._stream(request, box, session, heard)

    def _session(self, request: web.Request, selector: Any) -> Session:
        box = self._box(request)
        box.touch()
        session = box.sessions.get(selector.session_uuid)
        if session is None or session.run is None:
            raise Refusal(404, {"code": "not_found", "message": "no such session"})
        return session

    async def attach(self, request: web.Request) -> web.StreamResponse:
        asked = pb.ConnectRequest.FromString((await request.read())[5:])
        return await self._stream(request, self._box(request), self._session(request, asked.session), None)

    async def _stream(
        self, request: web.Request, box: Box, session: Session, heard: list[int] | None
    ) -> web.StreamResponse:
        run = session.run
        assert run is not None
        at = [len(output) for output in run.outputs] if heard is None else heard
        stream = web.StreamResponse(headers={"Content-Type": "application/connect+proto"})
        box.streams.append(request)
        try:
            await stream.prepare(request)
            await stream.write(_event(start=pb.CommandSessionEvent.StartEvent(pid=run.process.pid)))
            while not session.over or [len(output) for output in run.outputs] != at:
                for number, kind in enumerate(("stdout", "stderr")):
                    data = bytes(run.outputs[number][at[number] : at[number] + PIECE])
                    at[number] += len(data)
                    if not data:
                        continue
                    event = _event(data=pb.CommandSessionEvent.DataEvent(**{kind: data}))
                    if self.cut and kind == "stdout":
                        self.cut -= 1
                        await stream.write(event[: len(event) // 2])
                        request.transport.abort()  # type: ignore[union-attr]
                        return stream
                    await stream.write(event)
                await session.more(at)
            if box.status == "RUNNING":
                code = run.process.returncode or 0
                end = pb.CommandSessionEvent.EndEvent(exit_code=code if code >= 0 else 128 - code, exited=True)
                await stream.write(_event(end=end))
                await stream.write(_envelope(json.dumps({}).encode(), 2))
        except ConnectionError:
            pass  # whoever listened is gone
        finally:
            box.streams[:] = [other for other in box.streams if other is not request]
        return stream

    async def input(self, request: web.Request) -> web.Response:
        asked = pb.SendInputRequest.FromString(await request.read())
        session = self._session(request, asked.session)
        run = session.run
        assert run is not None
        lost = self.deaf.pop(0) if self.deaf else None
        if lost:
            raise Refusal(500, {"code": "internal", "message": "it was dropped"})
        async with session.taking:
            if asked.input_uuid not in session.inputs:
                session.inputs.add(asked.input_uuid)
                try:
                    await run.write(asked.input.stdin)
                except (BrokenPipeError, ConnectionResetError):
                    raise Refusal(400, {"code": "failed_precondition", "message": "the process has exited"}) from None
        if lost is not None:
            raise Refusal(500, {"code": "internal", "message": "it was dropped"})
        return web.Response(body=b"", content_type="application/proto")

    async def signal(self, request: web.Request) -> web.Response:
        asked = pb.SendSignalRequest.FromString(await request.read())
        run = self._session(request, asked.session).run
        assert run is not None
        with contextlib.suppress(ProcessLookupError):
            run.process.send_signal(asked.signal)
        return web.Response(body=b"", content_type="application/proto")
