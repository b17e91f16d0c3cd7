"""Machines that are processes here, each with a weakness that some vendor's stream has."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import msgspec

from asyncrlm import Repl
from asyncrlm.environments.local_machine import LocalMachine
from asyncrlm.environments.remote import Confinement, RemoteEnvironment
from asyncrlm.repl.resources import threads_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asyncrlm.environments.machine import Machine
    from asyncrlm.repl.sandbox import Scope


class Plain(LocalMachine):
    """Counts what is asked of it."""

    made: ClassVar[list[Plain]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.destroyed = 0
        self.created = self.running = False
        self.stage = anyio.Event()
        self.made.append(self)

    async def create(self) -> None:
        self.created = True

    async def run(self) -> None:
        self.running = True
        await anyio.sleep_forever()

    async def destroy(self) -> None:
        self.destroyed += 1
        await super().destroy()


class Text(Plain):
    """Lines of text only, in tiny chunks, short ones of which are held back until more comes."""

    binary = False
    padding = 3
    piece = 1000

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held = b""

    def send_nowait(self, data: bytes | memoryview) -> int:
        assert bytes(data).isascii()
        return super().send_nowait(data[:333])

    async def receive(self) -> bytes:
        while len(self.held) < 4:
            self.held += await super().receive()
        assert self.held.isascii()
        size = min(len(self.held) - 2, 4096)
        data, self.held = self.held[:size], self.held[size:]
        return data


class Slow(Plain):
    """Never made, or never started."""

    slow: ClassVar[str] = "create"

    async def create(self) -> None:
        await super().create()
        await self._wait("create")

    async def start(self, command: Sequence[str]) -> None:
        await super().start(command)
        await self._wait("start")

    async def _wait(self, stage: str) -> None:
        if stage == self.slow:
            self.stage.set()
            await anyio.sleep_forever()


class SlowStart(Slow):
    slow = "start"


class Dropping(Plain):
    """Its stream drops once told to."""

    async def receive(self) -> bytes:
        data = await super().receive()
        if b"drop now" in data:
            raise anyio.EndOfStream
        return data

    def fate(self) -> str:
        return "the vendor took it away"


class Refused(Plain):
    """The vendor makes none, and what there is of one stays."""

    async def create(self) -> None:
        raise RuntimeError("quota exceeded")

    async def destroy(self) -> None:
        await super().destroy()
        raise ExceptionGroup("several", [OSError("no way"), ValueError()])


class Endless(Plain):
    """Its stream does not end when the keeper does."""

    async def receive(self) -> bytes:
        try:
            return await super().receive()
        except anyio.EndOfStream:
            return await anyio.sleep_forever()


class Lease(Plain):
    """Its lease can't be renewed."""

    async def run(self) -> None:
        await self.stage.wait()
        raise RuntimeError("no credit left")


class Quick(Plain):
    """It has a way of its own to write files."""

    async def put_file(self, path: str, chunks: Iterable[bytes]) -> bool:
        self.stage.set()
        await anyio.Path(path).write_bytes(b"".join(chunks))
        return True


class MachineEnvironment(RemoteEnvironment, frozen=True, kw_only=True):
    name = "here"
    python: str = sys.executable
    kind: type[Plain] = Plain
    scratch: str = "/tmp"
    network: bool = False

    def confinement(self) -> Confinement:
        return msgspec.structs.replace(super().confinement(), network=self.network)

    def machine(self, scope: Scope) -> Machine:
        return self.kind(self.scratch, threads=threads_of(scope))


def remote(
    kind: type[Plain] = Plain, *, scratch: str = "/tmp", isolation: Any = "auto", network: bool = False, **settings: Any
) -> Any:
    del Plain.made[:]
    return MachineEnvironment(kind=kind, scratch=scratch, isolation=isolation, network=network, **settings)


async def echo(messages: list[dict[str, str]]) -> str:
    return "re: " + messages[-1]["content"]


def repl(environment: Any, lm: Callable[..., Any] = echo, **options: Any) -> Repl:
    return Repl(environment=environment, lm=lm, **options)
