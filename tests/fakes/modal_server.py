"""Modal's control plane and command router, over gRPC, as far as sandboxes and commands in them go."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import secrets
import time
from typing import TYPE_CHECKING, Any

import grpclib.server
from google.protobuf.message import Message
from grpclib import GRPCError, Status
from modal_proto import api_pb2 as api
from modal_proto import task_command_router_pb2 as tcr
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from .served import FakeVendor, Run

if TYPE_CHECKING:
    from collections.abc import Callable

ARGV_LIMIT = 1 << 16
WRITE_LIMIT = 16 << 20
LONGEST_LIFE = 86_400
TOKEN = ("ak-known", "as-known")
_DONE = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS)
_STATUS = {
    "terminated": (api.GenericResult.GENERIC_STATUS_TERMINATED, 137),
    "timeout": (api.GenericResult.GENERIC_STATUS_TIMEOUT, 124),
    "failure": (api.GenericResult.GENERIC_STATUS_FAILURE, 1),
}


def _token(seconds: float = 3600) -> str:
    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none'})}.{part({'exp': time.time() + seconds, 'jti': secrets.token_hex(4)})}.x"


class Box:
    """A sandbox."""

    def __init__(self, definition: Any, version: str) -> None:
        self.definition = definition
        self.id = f"sb-{secrets.token_hex(11)}"
        self.task = f"ta-{secrets.token_hex(11).upper()}{version}"
        self.runs: dict[str, Run] = {}
        self.over = asyncio.Event()
        self.result = api.GenericResult()
        self.tags: dict[str, str] = {}
        self.changed = asyncio.Condition()

    async def end(self, how: str) -> None:
        if not self.over.is_set():
            status, code = _STATUS[how]
            self.result = api.GenericResult(status=status, exitcode=code)
            self.over.set()
            for run in self.runs.values():
                await run.kill()


class ModalServer(FakeVendor):
    """Both services on one port, as the SDK allows on this machine only."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes: dict[str, Box] = {}
        self.router_token = _token(20)  # which the SDK takes for one that may have expired, if it is refused
        self.lifetime_of_a_second = 1.0
        self.cut = 0
        """Streams of output that are cut off before their next chunk."""

    async def start(self) -> None:
        services = [_service(ModalClientBase, _Control)(self), _service(TaskCommandRouterBase, _Router)(self)]
        self._server = grpclib.server.Server(services)
        await self._server.start("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        for box in self.boxes.values():
            await box.end("terminated")
        self._server.close()
        await asyncio.wait_for(self._server.wait_closed(), 5)

    def end(self, number: int, how: str) -> None:
        """End a sandbox from outside."""
        self.call(self.boxes[self.made[number]].end(how))

    def expire(self) -> None:
        """Take only new tokens from now on."""
        self.router_token = _token()

    def box(self, request: Any) -> Box:
        box = self.boxes.get(request.sandbox_id)
        if box is None:
            raise GRPCError(Status.NOT_FOUND, f"no sandbox {request.sandbox_id}")
        return box

    def run(self, request: Any) -> Run:
        for box in self.boxes.values():
            if box.task == request.task_id:
                if box.over.is_set():
                    raise GRPCError(Status.UNAVAILABLE, "the task's worker is gone")
                return box.runs[request.exec_id]
        raise GRPCError(Status.NOT_FOUND, "no such task")

    def make(self, request: Any, version: str) -> Box:
        wanted = request.definition
        if not 1 <= wanted.timeout_secs <= LONGEST_LIFE:
            raise GRPCError(Status.INVALID_ARGUMENT, "timeout_secs must be 1 to 86400")
        if any(b.definition.name == wanted.name and not b.over.is_set() for b in self.boxes.values() if wanted.name):
            raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox {wanted.name} exists")
        box = Box(wanted, version)
        box.tags = {tag.tag_name: tag.tag_value for tag in getattr(request, "tags", ())}
        self.boxes[box.id] = box
        self.made.append(box.id)
        self.seen.append(box)
        self.loop.call_later(
            wanted.timeout_secs * self.lifetime_of_a_second, lambda: self.loop.create_task(box.end("timeout"))
        )
        return box


def _service(base: type, implementation: type) -> Callable[[ModalServer], Any]:
    """A class with every request of `base`: those there are, and refusals that are remembered."""

    def wrapped(name: str, method: Any) -> Any:
        async def answer(self: Any, stream: Any) -> None:
            server: ModalServer = self.server
            server.requests[name] += 1
            if method is None:
                server.unknown.append(name)
                raise GRPCError(Status.UNIMPLEMENTED, name)
            self.check(stream.metadata)
            await server.gate(name, server.held)
            if fault := server.fault(name):
                raise GRPCError(*fault)
            if inspect.iscoroutinefunction(method) and len(inspect.signature(method).parameters) == 2:
                reply = await method(self, await stream.recv_message())
            elif inspect.isasyncgenfunction(method):
                async for part in method(self, await stream.recv_message()):
                    await stream.send_message(part)
                return
            else:
                reply = method(self, await stream.recv_message())
            await server.gate(name, server.late)
            assert isinstance(reply, Message)
            await stream.send_message(reply)

        return answer

    names = base.__abstractmethods__  # type: ignore[attr-defined]
    body = {name: wrapped(name, getattr(implementation, name, None)) for name in names}
    return type(implementation.__name__, (implementation, base), body)


class _Service:
    def __init__(self, server: ModalServer) -> None:
        self.server = server


class _Control(_Service):
    def check(self, metadata: Any) -> None:
        if (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret")) != TOKEN:
            raise GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed")

    def ClientHello(self, _: Any) -> Any:
        return api.ClientHelloResponse()

    def AuthTokenGet(self, _: Any) -> Any:
        return api.AuthTokenGetResponse(token=_token())

    def AppGetOrCreate(self, request: Any) -> Any:
        return api.AppGetOrCreateResponse(app_id=f"ap-{request.app_name}")

    def EnvironmentGetOrCreate(self, _: Any) -> Any:
        settings = api.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api.EnvironmentMetadata(name="main", settings=settings)
        return api.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    def SecretGetOrCreate(self, request: Any) -> Any:
        return api.SecretGetOrCreateResponse(secret_id=f"st-{request.deployment_name or 'x'}")

    def VolumeGetOrCreate(self, request: Any) -> Any:
        return api.VolumeGetOrCreateResponse(volume_id=f"vo-{request.deployment_name or 'x'}")

    def ImageGetOrCreate(self, request: Any) -> Any:
        lines = "\n".join(request.image.dockerfile_commands)
        metadata = api.ImageMetadata(image_builder_version="2025.06")
        return api.ImageGetOrCreateResponse(image_id=f"im-{abs(hash(lines))}", result=_DONE, metadata=metadata)

    def ImageFromId(self, request: Any) -> Any:
        return api.ImageFromIdResponse(image_id=request.image_id)

    def SandboxCreateV2(self, request: Any) -> Any:
        box = self.server.make(request, "V")
        return api.SandboxCreateV2Response(
            sandbox_id=box.id,
            task_id=box.task,
            metadata=api.SandboxHandleMetadata(app_id=request.app_id),
            sandbox_token="sandbox-token",
            command_router_access=api.CommandRouterAccess(jwt=self.server.router_token, url=self.server.url),
        )

    def SandboxCreate(self, request: Any) -> Any:
        box = self.server.make(request, "")
        return api.SandboxCreateResponse(sandbox_id=box.id, metadata=api.SandboxHandleMetadata(app_id=request.app_id))

    def SandboxGetTaskId(self, request: Any) -> Any:
        return api.SandboxGetTaskIdResponse(task_id=self.server.box(request).task)

    SandboxGetTaskIdV2 = SandboxGetTaskId

    def TaskGetCommandRouterAccess(self, _: Any) -> Any:
        return api.TaskGetCommandRouterAccessResponse(jwt=self.server.router_token, url=self.server.url)

    def SandboxGetCommandRouterAccess(self, _: Any) -> Any:
        return api.SandboxGetCommandRouterAccessResponse(jwt=self.server.router_token, url=self.server.url)

    def SandboxGetFromName(self, request: Any) -> Any:
        for box in self.server.boxes.values():
            if box.definition.name == request.sandbox_name and not box.over.is_set():
                return api.SandboxGetFromNameResponse(sandbox_id=box.id)
        raise GRPCError(Status.NOT_FOUND, f"no sandbox named {request.sandbox_name}")

    SandboxGetFromNameV2 = SandboxGetFromName

    async def SandboxTerminate(self, request: Any) -> Any:
        box = self.server.box(request)
        if not box.over.is_set():
            await box.end("terminated")
        if box.id not in self.server.destroyed:
            self.server.destroyed.append(box.id)
        return api.SandboxTerminateResponse()

    SandboxTerminateV2 = SandboxTerminate

    async def SandboxWait(self, request: Any) -> Any:
        box = self.server.box(request)
        try:
            await asyncio.wait_for(box.over.wait(), request.timeout or 0.001)
        except TimeoutError:
            return api.SandboxWaitResponse()
        return api.SandboxWaitResponse(result=box.result)

    SandboxWaitV2 = SandboxWait


class _Router(_Service):
    def check(self, metadata: Any) -> None:
        if metadata.get("authorization") != f"Bearer {self.server.router_token}":
            raise GRPCError(Status.UNAUTHENTICATED, "the token has expired")

    async def TaskExecStart(self, request: Any) -> Any:
        box = next(b for b in self.server.boxes.values() if b.task == request.task_id)
        if box.over.is_set():
            raise GRPCError(Status.FAILED_PRECONDITION, "the sandbox has ended")
        if sum(map(len, request.command_args)) > ARGV_LIMIT:
            raise GRPCError(Status.INVALID_ARGUMENT, "arguments are too long")
        if request.exec_id not in box.runs:
            try:
                box.runs[request.exec_id] = await Run.start(
                    request.command_args, lambda: self.server.loop.create_task(_wake(box)), {}
                )
            except FileNotFoundError as error:
                raise GRPCError(Status.NOT_FOUND, f"{request.command_args[0]}: no such file") from error
            if box.over.is_set():  # meanwhile
                await box.runs[request.exec_id].kill()
                raise GRPCError(Status.FAILED_PRECONDITION, "the sandbox has ended")
        return tcr.TaskExecStartResponse()

    async def TaskExecStdioRead(self, request: Any) -> Any:
        run = self.server.run(request)
        box = next(b for b in self.server.boxes.values() if b.task == request.task_id)
        number = int(request.file_descriptor == tcr.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR)
        output, at = run.outputs[number], request.offset
        while True:
            if len(output) > at:
                data = bytes(output[at : at + WRITE_LIMIT // 16])
                if self.server.cut and number == 0:
                    self.server.cut -= 1
                    yield tcr.TaskExecStdioReadResponse(data=data[: len(data) // 2 + 1])
                    raise GRPCError(Status.UNAVAILABLE, "the stream was cut off")
                at += len(data)
                yield tcr.TaskExecStdioReadResponse(data=data)
            elif box.over.is_set():
                raise GRPCError(Status.UNAVAILABLE, "the task's worker is gone")
            elif run.ended[number]:
                return
            else:
                async with box.changed:
                    await box.changed.wait_for(lambda at=at: len(output) > at or run.ended[number] or box.over.is_set())

    async def TaskExecStdinWrite(self, request: Any) -> Any:
        run = self.server.run(request)
        if len(request.data) > WRITE_LIMIT or request.offset > run.written:
            raise GRPCError(Status.INVALID_ARGUMENT, "too much, or a gap")
        try:
            await run.write(request.data[run.written - request.offset :])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise GRPCError(Status.FAILED_PRECONDITION, "the process has exited") from error
        if request.eof:
            run.process.stdin.close()
        return tcr.TaskExecStdinWriteResponse()

    async def TaskExecWait(self, request: Any) -> Any:
        code = await self.server.run(request).process.wait()
        return tcr.TaskExecWaitResponse(code=code) if code >= 0 else tcr.TaskExecWaitResponse(signal=-code)


async def _wake(box: Box) -> None:
    async with box.changed:
        box.changed.notify_all()
