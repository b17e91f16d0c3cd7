"""For machines whose SDKs run on asyncio: requests that outlive a cancellation, and a reader that `run` drives."""

from __future__ import annotations

import asyncio  # noqa: TID251 - the SDKs are asyncio's, and so is what outlives a cancellation in them
import contextlib
import secrets
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import anyio
import msgspec

from ..repl.sandbox import Report
from .machine import Machine
from .remote import Confinement, RemoteEnvironment, describe
from .settings import ROWS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine

    from ..repl.sandbox import Scope

T = TypeVar("T")

SETTLE_GRACE = 5.0
"""Seconds that a request which makes something may still take once nobody waits for it."""


class Request(Generic[T]):
    """A call of an SDK in a task of its own.

    Cancellation by our scopes comes again and again, which the SDKs' own clean-up does not survive: here it comes once.
    """

    def __init__(self, call: Coroutine[Any, Any, T]) -> None:
        self._task = asyncio.get_running_loop().create_task(call)
        # Some SDKs end in an error of their own when they are cancelled, and then nobody waits for it any more.
        self._task.add_done_callback(lambda task: None if task.cancelled() else task.exception())

    async def result(self) -> T:
        """What came of it. Who waits may be cancelled; the call goes on until `settle` or `end`."""
        return await asyncio.shield(self._task)

    async def settle(self, grace: float | None = None) -> T | None:
        """What it made; None if it made nothing, or can't tell in time: then it is cancelled."""
        if not self._task.done():
            await asyncio.wait({self._task}, timeout=SETTLE_GRACE if grace is None else grace)
        await self.end()
        return None if self.error else self._task.result()

    async def end(self) -> None:
        """Cancel it and wait until it has ended."""
        with anyio.CancelScope(shield=True):
            if not self._task.done():
                self._task.cancel()
                await asyncio.wait({self._task}, timeout=SETTLE_GRACE)

    @property
    def error(self) -> BaseException | None:
        """Why nothing came of it; None while that is open."""
        if not self._task.done():
            return None
        return asyncio.CancelledError() if self._task.cancelled() else self._task.exception()


async def asked(call: Coroutine[Any, Any, T]) -> T:
    """The result of a call that makes nothing: cancelled, it ends."""
    request = Request(call)
    try:
        return await request.result()
    finally:
        await request.end()


async def opened(
    call: Coroutine[Any, Any, T], close: Callable[[T], Awaitable[object]], grace: float | None = None
) -> T:
    """The result of a call that opens something; what it opens after all, when nobody waits any more, is closed."""
    request = Request(call)
    try:
        return await request.result()
    except asyncio.CancelledError:
        with anyio.CancelScope(shield=True):
            if (late := await request.settle(grace)) is not None:
                await close(late)
        raise


@contextlib.asynccontextmanager
async def closing(close: Callable[[], Awaitable[None]] | None) -> AsyncGenerator[None]:
    """Close a client at the end, whatever is cancelled meanwhile."""
    try:
        yield
    finally:
        if close is not None:
            with anyio.move_on_after(SETTLE_GRACE, shield=True):
                await close()


def heed_cancellation(error: Exception) -> None:
    """For whoever goes on after an error of an SDK: some make one of a cancellation, which this raises again."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError from error


async def first_of(*calls: Coroutine[Any, Any, None]) -> None:
    """Run calls beside each other until one of them ends; an error of that one is raised. For tasks of an SDK."""
    tasks = [asyncio.get_running_loop().create_task(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in done:
        task.result()


class PumpedMachine(Machine):
    """A vendor's sandbox whose stream can't be cancelled without loss: `run` reads, `receive` takes what was read."""

    most_chunks: ClassVar[float] = 16
    """Chunks that were read and not taken yet, at most."""

    def __init__(self, settings: VendorEnvironment, scope: Scope) -> None:
        self.settings: Any = settings
        self.scope = scope
        self.label = f"{settings.sandbox_name}-{secrets.token_hex(8)}"
        """Its name, which no other sandbox has."""
        self.vendors: Any = None
        """The SDK's object for the sandbox, once there is one."""
        self._making: Request[Any] | None = None
        self._read, self._taken = anyio.create_memory_object_stream[bytes](self.most_chunks)
        self._fate = self._unheard = ""
        self.refused = ""
        """Why the lease was not renewed since that last went well, to be put behind what else is known of its end."""

    async def make(self, request: Coroutine[Any, Any, Any]) -> None:
        """Make the vendor's sandbox by this request."""
        self._making = Request(request)
        self.vendors = await self._making.result()

    async def made(self) -> Any:
        """The vendor's sandbox for `destroy`, also one whose making was given up; None if there is none."""
        making, self._making = self._making, None
        made, self.vendors = self.vendors, None
        if made is not None or making is None:
            return made
        if (made := await making.settle()) is not None:
            return made
        return await self.find(cast("BaseException", making.error))

    @abstractmethod
    async def find(self, error: BaseException) -> Any:
        """The vendor's sandbox by its label, if there is one though its making ended in this error."""

    async def receive(self) -> bytes:
        return await self._taken.receive()

    @abstractmethod
    async def pump(self) -> None:
        """Call `pass_on` with all that the keeper says, until it ends; then tell `end` why, where that is known.

        It runs in a task of its own, which is cancelled once.
        """

    async def pass_on(self, data: bytes) -> None:
        """Hand what was read to `receive`; waits while that has enough."""
        if data:
            await self._read.send(data)

    def end(self, fate: str) -> None:
        """Say why the sandbox ended. The first to know is believed."""
        self._fate = self._fate or fate

    async def renew_each(self, seconds: float, renew: Callable[[], Awaitable[object]]) -> None:
        """Renew the sandbox's lease at this pace for ever; a refusal is tried again, and told if the sandbox ends."""
        while True:
            await anyio.sleep(seconds)
            try:
                await renew()
                self.refused = ""
            except Exception as error:  # noqa: BLE001 -- it is tried again, and told
                self.refused = self.refused or f"; its lease could not be renewed: {describe(error)}"
                heed_cancellation(error)

    async def run(self) -> None:
        try:
            await asked(self.pump())
        finally:
            self._read.close()

    async def destroy(self) -> None:
        self._read.close()
        self._taken.close()
        if (made := await self.made()) is not None:
            await (self.leave(made) if self.settings.sandbox_id is not None else self.delete(made))

    @abstractmethod
    async def delete(self, made: Any) -> None:
        """Destroy the vendor's sandbox."""

    @abstractmethod
    async def leave(self, made: Any) -> None:
        """End the keeper in a sandbox that is not ours."""

    def unheard(self, error: Exception) -> anyio.BrokenResourceError:
        """For `send`: what it raises. Why matters where nothing else is known of the end."""
        self._unheard = f"it took no more input: {describe(error)}"
        return anyio.BrokenResourceError()

    def fate(self) -> str:
        return self._fate or self._unheard


class VendorEnvironment(RemoteEnvironment, frozen=True, kw_only=True):
    """What the settings of such vendors have in common."""

    renamed: ClassVar[dict[str, str]] = {"name": "sandbox_name"}
    sandbox_name: str = "rlm-sandbox"
    """What the name of each sandbox begins with."""
    sandbox_id: str | None = None
    """A sandbox of yours that is running, for every run; it stays. Settings that make one have no effect then."""
    secrets: Any = ()
    """Secrets of the vendor's, which cells see as environment variables."""
    volumes: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Where in the sandbox → a volume of the vendor's. Cells may write there."""

    @property
    def open_network(self) -> bool:
        """Whether the sandbox has a network of any kind."""
        raise NotImplementedError

    def confinement(self) -> Confinement:
        theirs = self.sandbox_id is not None
        return Confinement(
            network=self.open_network or theirs,
            read=self.read_paths,
            write=(*self.write_paths, *map(str, self.volumes)),
            inherit=bool(self.secrets) or theirs,
        )

    def report(self) -> Report:
        """A sandbox of its own holds everything but the network; one that others use too holds nothing for them."""
        rows = () if self.sandbox_id is not None else ROWS
        held = {row: f"a sandbox of {self.name}" for row in rows if row != "network" or not self.open_network}
        return Report(environment=self.name, isolation=held)


def ended(what: str, status: int, words: str) -> str:
    """A fate: a program that ended with a status, and the last of what it said, if it failed."""
    if not status:
        return ""
    return f"its {what} ended with status {status}" + (f": {words.strip()[-500:]}" if words.strip() else "")
