"""Cells in a container of a Docker Engine, or of Podman's compatible service: one container for each worker."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import msgspec

from ..errors import ConfigurationError, SandboxLost
from ..observe.log import get_logger
from ..repl.sandbox import Report
from .local import ROWS
from .remote import Confinement, Machine, RemoteEnvironment, asyncio_only, imported
from .remote_boot import command
from .units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from ..repl.sandbox import Scope
    from .remote_sandbox import RemoteSandbox

DEFAULT_IMAGE = "python:3.11-slim"
NOBODY = "65534:65534"
LABEL = "asyncrlm"
"""Its value says which process made the container: host name, process id and that process's start in clock ticks."""
CREATE_GRACE = 60.0
"""Seconds to make a container in, whatever is cancelled meanwhile; it takes a fraction of one."""
PULL_NEWS = 5.0
"""Seconds between two lines about a pull under way."""


class DockerEnvironment(RemoteEnvironment, frozen=True, kw_only=True):
    """Cells run in a container: no network, a read-only root, nobody's rights, and limits on memory, CPU and processes.

    The engine is the one that `docker` itself would use: DOCKER_HOST, the current context, or the usual sockets, those
    of Podman among them. Any image with a Python (3.9 or later) will do; one that is missing is pulled.

    Raises:
        ConfigurationError: for a value that can't be.
    """

    name: ClassVar[str] = "docker"

    image: str = DEFAULT_IMAGE
    network: str = "none"
    """A network of the engine's, such as "bridge"; "none" for none."""
    user: str = NOBODY
    read_only: bool = True
    """The root file system can't be written; there is a /tmp in memory."""
    tmp_size: int | str = "1GB"
    """Of /tmp, where cells work and contexts arrive."""
    memory: int | str | None = "4GB"
    """Of all processes of the container; None for no limit."""
    cpus: float | None = 2.0
    volumes: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Path or volume of the engine's host → path in the container, with ":rw" behind it where cells may write."""
    pull: str = "missing"
    """"missing": pull the image if it is not there. "never": do not."""
    pool_size: int = 0
    """Containers kept started ahead while the `AsyncRLM` is entered (`async with`)."""
    host_config: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Fields of the Engine API's HostConfig, over those made from the settings above."""
    docker_host: str | None = None
    """The engine's address, such as "unix:///run/user/1000/podman/podman.sock"; None: as `docker` finds it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("tmp_size", "memory"):
            parse_bytes(field, getattr(self, field))
        if self.pull not in ("missing", "never"):
            raise ConfigurationError(f'pull={self.pull!r}: use "missing" or "never"')
        if self.cpus is not None and not self.cpus > 0:
            raise ConfigurationError(f"cpus={self.cpus!r}: use a number above 0, or None for no limit")
        if self.pool_size < 0:
            raise ConfigurationError(f"pool_size={self.pool_size!r}: use a whole number, 0 for none")

    async def open(self, scope: Scope) -> RemoteSandbox:
        asyncio_only(self.name)
        imported("aiodocker", "docker")
        if not (self.pool_size and getattr(scope, "long_lived", False)):
            return await super().open(scope)
        await engine_of(scope, self.docker_host)  # before the pool, so that it is left after it
        pool = await scope.shared(("docker pool", id(self)), lambda: _pool(self))
        return await pool.take(scope)

    async def open_new(self, scope: Scope) -> RemoteSandbox:
        """One that was not started ahead."""
        return await super().open(scope)

    def machine(self, scope: Scope) -> DockerMachine:
        return DockerMachine(self, scope)

    def confinement(self) -> Confinement:
        allowed = super().confinement()
        places = [(path.removesuffix(":rw"), path.endswith(":rw")) for path in self.volumes.values()]
        return Confinement(
            network=self.network != "none",
            read=(*allowed.read, *(path for path, writable in places if not writable)),
            write=(*allowed.write, *(path for path, writable in places if writable)),
        )

    def report(self) -> Report:
        limited = "a container's limit"
        held = {
            "read_outside": "a container",
            "write_outside": "a read-only root" if self.read_only else "a container",
            "network": None if self.network != "none" else "no network",
            "other_processes": "a container",
            "kernel": "no capabilities, the engine's seccomp profile",
            "environment": "a container",
            "memory": limited if self.memory is not None else None,
            "fork_bomb": limited if self.settings.max_processes is not None else None,
            "disk": "a read-only root, a sized /tmp" if self.read_only else None,
            "outliving": "pid 1 of a container",
        }
        return Report(environment=self.name, isolation={row: held[row] for row in ROWS if held[row]})

    def configuration(self, keeper: Sequence[str]) -> dict[str, Any]:
        """The body of the request that makes the container."""
        settings = self.settings
        host: dict[str, Any] = {
            "NetworkMode": self.network,
            "ReadonlyRootfs": self.read_only,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "AutoRemove": True,
            "Tmpfs": {"/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={parse_bytes('tmp_size', self.tmp_size)}"},  # noqa: S108
            "Binds": [
                f"{source}:{path}" if path.endswith(":rw") else f"{source}:{path}:ro"
                for source, path in self.volumes.items()
            ],
        }
        if (memory := parse_bytes("memory", self.memory)) is not None:
            host |= {"Memory": memory, "MemorySwap": memory}
        if self.cpus is not None:
            host["NanoCpus"] = int(self.cpus * 1e9)
        if settings.max_processes is not None:
            host["PidsLimit"] = settings.max_processes + 2  # the keeper, and the worker
        return {
            "Image": self.image,
            "Cmd": list(keeper),
            "Entrypoint": [],
            "User": self.user,
            "WorkingDir": "/tmp",  # noqa: S108 - of the container
            "Env": ["LANG=C.UTF-8"],
            "Labels": {LABEL: _this_process()},
            "OpenStdin": True,
            "StdinOnce": True,
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "HostConfig": host | self.host_config,
        }


class DockerMachine(Machine):
    """One container, whose main process is the keeper."""

    binary = True

    def __init__(self, environment: DockerEnvironment, scope: Scope) -> None:
        self._environment = environment
        self._scope = scope
        self._name = f"asyncrlm-{secrets.token_hex(8)}"
        self._asked = False
        self._engine: Any = None
        self._container: Any = None
        self._stream: Any = None
        self._said = bytearray()  # the last of what came on standard error
        self._fate = ""

    async def create(self) -> None:
        environment = self._environment
        self._engine = await engine_of(self._scope, environment.docker_host)
        try:
            await self._create()
        except _errors() as error:
            if error.status != 404 or environment.pull == "never":
                raise SandboxLost(f"docker makes no container of {environment.image!r}: {error.message}") from error
            await _pull(self._engine, environment.image)
            await self._create()

    async def _create(self) -> None:
        environment = self._environment
        configuration = environment.configuration(command(environment.python))
        self._asked = True
        # Cut off, the engine would make it all the same, and perhaps only after it was asked to remove it.
        with anyio.move_on_after(CREATE_GRACE, shield=True):
            self._container = await self._engine.containers.create(configuration, name=self._name)
            return
        raise SandboxLost(f"docker has not made a container within {CREATE_GRACE:g} s")

    async def start(self, command: Sequence[str]) -> None:
        self._stream = self._container.attach(stdin=True, stdout=True, stderr=True)
        await self._stream.__aenter__()  # opens it; only then may the container begin to speak
        try:
            await self._container.start()
        except _errors() as error:
            raise SandboxLost(f"docker can't start the container: {error.message}") from error

    async def send(self, data: bytes) -> None:
        try:
            await self._stream.write_in(data)
        except (RuntimeError, OSError, AssertionError) as error:
            raise anyio.BrokenResourceError from error

    async def receive(self) -> bytes:
        while True:
            try:
                message = await self._stream.read_out()
            except (OSError, *_http_errors()):
                message = None
            if message is None:
                with anyio.move_on_after(2):
                    await self._ask_fate()
                raise anyio.EndOfStream
            if message.stream == 1 and message.data:
                return message.data
            self._said = bytearray((self._said + message.data)[-2000:])

    async def _ask_fate(self) -> None:
        state: dict[str, Any] = {}
        with contextlib.suppress(*_http_errors(), OSError):  # removed already, as it is once it has ended
            state = (await self._container.show())["State"]
        if state.get("OOMKilled"):
            self._fate = f"its container used more than its memory ({self._environment.memory})"
        elif state.get("Status") in ("exited", "dead", "removing") and state.get("ExitCode"):
            self._fate = f"its container ended with status {state.get('ExitCode')}"
        if said := self._said.decode("utf-8", "replace").strip():
            self._fate = f"{self._fate or 'its container said'}: {said}"

    def fate(self) -> str:
        return self._fate

    async def destroy(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(AssertionError):  # its connection is gone already
                await stream.close()
        if not self._asked:
            return
        with contextlib.suppress(*_http_errors()):  # by name: a request to make it may have been cut off
            await self._engine.containers.container(self._name).delete(force=True, v=True)
        self._asked = False


def _errors() -> Any:
    return imported("aiodocker", "docker").DockerError


def _http_errors() -> tuple[type[Exception], ...]:
    return (_errors(), imported("aiohttp", "docker").ClientError)


async def engine_of(scope: Scope, host: str | None) -> Any:
    """The connection to the engine that all runs of a scope share."""
    return await scope.shared(("docker", host), lambda: connected(host))


@asynccontextmanager
async def connected(host: str | None) -> AsyncGenerator[Any]:
    """A connection to the engine.

    Raises:
        ConfigurationError: if none answers.
    """
    aiodocker = imported("aiodocker", "docker")
    try:
        engine = aiodocker.Docker(url=host)
    except (ValueError, AssertionError) as error:
        raise ConfigurationError(
            "no Docker Engine was found: start one, or name it with DOCKER_HOST or docker_host="
        ) from error
    try:
        try:
            await engine.version()
        except (OSError, *_http_errors()) as error:
            raise ConfigurationError(
                f"no Docker Engine answers at {engine.docker_host}: {error}; start it, or name another one with "
                "DOCKER_HOST or docker_host="
            ) from error
        yield engine
    finally:
        with anyio.CancelScope(shield=True):
            await engine.close()


async def _pull(engine: Any, image: str) -> None:
    log, said = get_logger(), 0.0
    named = image if ":" in image.rpartition("/")[2] or "@" in image else f"{image}:latest"
    log.info("pulling an image", image=named)
    try:
        async for news in engine.images.pull(named, stream=True):
            if "error" in news:
                raise SandboxLost(f"docker can't pull {named!r}: {news['error']}")
            if time.monotonic() - said > PULL_NEWS:
                said = time.monotonic()
                log.info("pulling an image", image=named, layer=news.get("id"), status=news.get("status"))
    except _errors() as error:
        raise SandboxLost(f"docker can't pull {named!r}: {error.message}") from error


# ---- containers ahead ------------------------------------------------------------------------------------------------


class _Pool:
    """Containers of one environment, started before they are needed; replaced by those who take one."""

    def __init__(self, environment: DockerEnvironment) -> None:
        self._environment = environment
        self._ready: deque[RemoteSandbox] = deque()
        self._filling = anyio.Lock()

    async def take(self, scope: Scope) -> RemoteSandbox:
        """One that is there, or a new one."""
        if not self._ready:
            async with self._filling:
                if not self._ready:
                    await self._fill(scope)
        return self._ready.popleft() if self._ready else await self._environment.open_new(scope)

    async def _fill(self, scope: Scope) -> None:
        async def one() -> None:
            sandbox = await self._environment.open_new(scope)
            self._ready.append(sandbox)
            await sandbox.boot()

        async with anyio.create_task_group() as group:
            for _ in range(self._environment.pool_size):
                group.start_soon(one)

    async def aclose(self) -> None:
        async with anyio.create_task_group() as group:
            for sandbox in self._ready:
                group.start_soon(sandbox.aclose)


@asynccontextmanager
async def _pool(environment: DockerEnvironment) -> AsyncGenerator[_Pool]:
    pool = _Pool(environment)
    try:
        yield pool
    finally:
        await pool.aclose()


# ---- strays ----------------------------------------------------------------------------------------------------------


def _this_process() -> str:
    return f"{socket.gethostname()} {os.getpid()} {_started(os.getpid())}"


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" if it is gone or can't be told."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - no disk
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


async def prune(docker_host: str | None = None) -> list[str]:
    """Remove the containers that processes of this machine left behind when they were killed.

    Returns:
        Their names.

    Raises:
        ConfigurationError: if no engine answers.
    """
    removed: list[str] = []
    async with connected(docker_host) as engine:
        for container in await engine.containers.list(all=True, filters=f'{{"label": ["{LABEL}"]}}'):
            described = await container.show()
            host, _, process = described["Config"]["Labels"][LABEL].partition(" ")
            pid, _, started = process.partition(" ")
            if host == socket.gethostname() and pid.isdecimal() and _started(int(pid)) != started:
                with contextlib.suppress(*_http_errors()):
                    await container.delete(force=True, v=True)
                    removed.append(described["Name"].lstrip("/"))
    return removed
