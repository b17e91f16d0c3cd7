"""One container: made, spoken with over its main process's standard input and output, watched, removed."""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import anyio
import anyio.lowlevel

from ..errors import ConfigurationError, SandboxLost
from .docker_engine import CONFLICT, INVALID, NOT_FOUND, status, words
from .machine import Machine
from .remote import imported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..repl.sandbox import Scope
    from .docker_engine import Engine

CREATE_GRACE = 10.0
"""Seconds in which a container is made, whatever is cancelled meanwhile: its end could not be ordered before."""
FATE_GRACE = 1.0
"""Seconds for the engine to say why a container ended once its stream has, and for the stream to say its next once the
container has ended: some engines don't end it while it is full of what the container did not take."""
_KEPT_ERRORS = 2000
_ENDED = ("die", "died")  # Docker's word, Podman's


class Origin(Protocol):
    """What a container asks of its environment."""

    @property
    def image(self) -> str: ...
    @property
    def pull(self) -> Literal["missing", "always", "never"]: ...
    @property
    def memory(self) -> int | str | None: ...
    async def engine(self, scope: Scope) -> Engine: ...
    def config(self, keeper: Sequence[str], declared: Sequence[str], labels: dict[str, str]) -> dict[str, Any]: ...


class Container(Machine):
    """A container whose main process is the keeper. It goes when the keeper ends, which it does when the host does."""

    binary: ClassVar[bool] = True
    with_library: ClassVar[bool] = True

    def __init__(self, environment: Origin, scope: Scope) -> None:
        self._environment = environment
        self._scope = scope
        self._name = f"asyncrlm-{secrets.token_hex(8)}"
        self._engine: Engine | None = None
        self._folders: Sequence[str] = ()
        self._container: Any = None
        self._stream: Any = None
        self._made = False
        self._errors = b""
        self._out_of_memory = self._paused = False
        self._signal = self._status = self._unheard = ""
        self._died = anyio.Event()
        self._reading: anyio.CancelScope | None = None
        self._watching = False

    # ---- the beginning ----

    async def create(self) -> None:
        """Its image is there; the engine wants to know the command before it makes a container."""
        self._engine = await self._environment.engine(self._scope)
        self._folders = await self._engine.image(self._environment.image, self._environment.pull)

    async def start(self, command: Sequence[str]) -> None:
        engine = self._engine
        assert engine is not None  # noqa: S101 - `create` was called
        config = self._environment.config(list(command), self._folders, engine.labels)
        try:
            with anyio.move_on_after(CREATE_GRACE, shield=True):
                self._made = True
                self._container = await engine.docker.containers.create(config, name=self._name)
            await anyio.lowlevel.checkpoint()
            if self._container is None:
                raise SandboxLost(f"the Docker engine made no container within {CREATE_GRACE:g} s")
            self._stream = self._container.attach(stdin=True, stdout=True, stderr=True)
            await self._stream.__aenter__()
            await self._container.start()
        except engine.error as e:
            message = f"the container could not be started: {words(e)}"
            # Else the program that was to run is missing in the image.
            if status(e) == INVALID or any(said in words(e) for said in ("executable file not found", "no such file")):
                raise ConfigurationError(f"{message} (image {self._environment.image!r})") from e
            raise SandboxLost(message) from e

    # ---- the stream ----

    async def send(self, data: bytes) -> None:
        stream = self._stream
        if stream is None:
            raise anyio.ClosedResourceError
        try:
            await stream.write_in(data)
        except (OSError, RuntimeError, AssertionError, imported("aiohttp", "docker").ClientError) as e:
            raise anyio.BrokenResourceError from e  # aiodocker asserts that the connection is there

    async def receive(self) -> bytes:
        while True:
            stream = self._stream
            if stream is None:
                raise anyio.ClosedResourceError
            message, broken = None, (OSError, imported("aiohttp", "docker").ClientError)
            with contextlib.suppress(*broken), anyio.CancelScope() as self._reading:
                self._end_reading()
                message = await stream.read_out()
            if message is None:
                if self._watching:
                    with anyio.move_on_after(FATE_GRACE):
                        await self._died.wait()
                raise anyio.EndOfStream
            if message.stream == 2:
                self._errors = (self._errors + message.data)[-_KEPT_ERRORS:]
            elif message.data:
                return message.data

    # ---- the life ----

    async def run(self) -> None:
        """Listen to what the engine says of this container, from its beginning on, until it ends."""
        engine = self._engine
        assert engine is not None  # noqa: S101 - `create` was called
        events = imported("aiodocker.events", "docker").DockerEvents(engine.docker)
        heard = events.subscribe(create_task=False)
        since = datetime.datetime.fromisoformat(self._container["Created"]).timestamp()
        self._watching = True
        try:
            async with anyio.create_task_group() as group:

                async def listen() -> None:
                    filters = json.dumps({"type": ["container"], "container": [self._container.id]})
                    try:
                        await events.run(filters=filters, since=f"{since:.0f}")
                    except (engine.error, OSError, imported("aiohttp", "docker").ClientError) as e:
                        self._unheard = words(e) or type(e).__name__  # without it there is less to be told
                    group.cancel_scope.cancel()

                group.start_soon(listen)
                while (event := await heard.get()) is not None:
                    self._hear(event["Action"], event["Actor"]["Attributes"])
                    if self._died.is_set():
                        break
                group.cancel_scope.cancel()
        finally:
            self._watching = False
            self._died.set()

    def _end_reading(self) -> None:
        if self._status and self._reading is not None:
            self._reading.deadline = anyio.current_time() + FATE_GRACE

    def _hear(self, action: str, attributes: dict[str, str]) -> None:
        if action == "oom":
            self._out_of_memory = True
        elif action in ("pause", "unpause"):
            self._paused = action == "pause"
        elif action == "kill":
            self._signal = attributes.get("signal", "")
        elif action in _ENDED:
            self._status = attributes.get("exitCode") or attributes.get("containerExitCode") or "?"
            self._died.set()
            self._end_reading()

    def fate(self) -> str:
        if self._out_of_memory:
            return f"its container ran out of memory (memory={self._environment.memory!r})"
        if self._paused:
            return "its container is paused"
        if self._signal in ("9", "15") and self._status in ("137", "143"):
            return f"its container was killed from outside (signal {self._signal})"
        said = self._errors.decode("utf-8", "replace").strip()
        ended = f"its container ended with status {self._status}" if self._status not in ("", "0") else ""
        unheard = f"its engine is not heard any more: {self._unheard}" if self._unheard else ""
        return f"{ended}: {said}" if ended and said else ended or said or unheard

    async def is_running(self) -> bool:
        """Whether it can still be used."""
        engine = self._engine
        if engine is None or self._container is None:
            return False
        try:
            state = (await self._container.show())["State"]
        except engine.error:
            return False
        return bool(state["Running"] and not state["Paused"])

    # ---- the end ----

    async def destroy(self) -> None:
        engine, stream, self._stream = self._engine, self._stream, None
        if stream is not None:
            connection = getattr(getattr(stream, "_resp", None), "connection", None)
            transport = getattr(connection, "transport", None)
            with contextlib.suppress(AssertionError):  # aiodocker's, if the engine hung up first
                await stream.close()
            if transport is not None:
                transport.abort()  # else it would wait until what was not taken is
        if engine is None or not self._made:
            return
        container = engine.docker.containers.container(self._name)
        try:
            await container.delete(force=True, v=True)
        except engine.error as e:
            if status(e) == CONFLICT:  # it is being removed
                with contextlib.suppress(engine.error):
                    await container.wait(condition="removed")
            elif status(e) != NOT_FOUND:
                raise
        self._made = False
