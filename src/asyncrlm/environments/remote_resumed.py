"""For machines whose streams don't say again what was missed when they broke: the keeper does; see `resumed.py`."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeVar

import anyio

from ..repl.worker.resumed import WINDOW, Link
from .remote import describe
from .remote_pumped import PumpedMachine, first_of, heed_cancellation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from ..repl.sandbox import Scope
    from .remote_pumped import VendorEnvironment

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds for a stream that broke to go on where it was, after which the sandbox is lost."""
SHORTEST_REST, LONGEST_REST = 0.1, 5.0
"""Seconds between two attempts, which double while nothing comes of them."""
TICK = 1.0
"""Seconds after which the keeper is asked what it has of what was sent: some SDKs say only then that it did not go."""
_FINAL = ("not_found", "failed_precondition")  # Connect's refusals of a process that is not there
_AHEAD = (
    2 * WINDOW
)  # bytes that the keeper may have said and nobody took; one that keeps to its window never gets there
_MOST_USELESS = 1000  # pieces of the keeper's at once
_SMALL = 4096  # bytes that are sent however much is on its way: an interrupt, the end


class ResumedMachine(PumpedMachine):
    """Its stream may break: `pump` attaches to the keeper anew, and both go on from what the other has."""

    resumed: ClassVar[bool] = True
    most_chunks: ClassVar[float] = math.inf  # the keeper sends a window ahead of what was taken, and no more

    def __init__(self, settings: VendorEnvironment, scope: Scope) -> None:
        super().__init__(settings, scope)
        self._link = Link(_MOST_USELESS)
        self._begun = self._over = self._asking = False
        self._wire = anyio.Lock()
        self._room, self._due, self._heard = anyio.Event(), anyio.Event(), anyio.Event()
        self._rest = SHORTEST_REST
        self._broken_since: float | None = None
        self._why = ""

    @abstractmethod
    async def transmit(self, data: bytes) -> None:
        """Send all of it or none of it; any error says that it, or what was sent before, may not have come through."""

    def begin(self) -> None:
        self._begun = True
        self._due.set()  # the stream may be broken already

    async def send(self, data: bytes) -> None:
        if self._begun:
            while self._link.full and len(data) > _SMALL and not self._over:
                self._room = anyio.Event()
                await self._room.wait()
        async with self._wire:
            if self._over:
                raise anyio.BrokenResourceError
            frame = self._link.wrap(data) if self._begun else data
            if self._begun and self._link.broken:
                return  # it is kept, and sent when the keeper goes on
            try:
                await self.transmit(frame)
            except Exception as error:
                if not self._begun:
                    raise self.unheard(error) from error
                heed_cancellation(error)
                self.broke(error)
                self._due.set()

    async def receive(self) -> bytes:
        data = await super().receive()
        self._link.taken += len(data)
        self._heard.set()
        if self._link.owes:
            self._due.set()
        return data

    async def pass_on(self, data: bytes) -> None:
        link = self._link
        new = link.feed(data)
        self._room.set()
        if link.resumed:
            self._broken_since, self._rest = None, SHORTEST_REST
        if link.unclear:
            self.broke(ValueError("it says what no keeper would"))
        elif link.missed:
            self.broke(EOFError("a part of it did not come"))
        if link.resumed or link.broken or link.owes:
            self._due.set()
        if new:
            self._read.send_nowait(new)
        while link.got - link.taken > _AHEAD and not self._over:
            self._heard = anyio.Event()
            await self._heard.wait()

    # ---- when it broke -----------------------------------------------------------------------------------------------

    def broke(self, error: BaseException) -> None:
        """What comes from now on may lack something."""
        self._why = describe(error)
        self._expect()

    def attached(self) -> None:
        """The stream is there anew; what the keeper was asked before, it may have answered to nobody."""
        self._expect()
        self._due.set()

    def _expect(self) -> None:
        self._link.expect()
        if self._broken_since is None:
            self._broken_since = anyio.current_time()

    async def rest(self) -> None:
        """Between two attempts."""
        seconds, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        await anyio.sleep(seconds)

    async def again(
        self, attach: Callable[[], AsyncGenerator[T]], ask_why: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[T]:
        """What a stream says that broke, attached to whenever it does, until its sandbox is known to have ended."""
        self._expect()
        while True:
            try:
                await self.rest()
                if not self._over:
                    await ask_why()
                if self._over or self._fate:
                    return
                async with contextlib.aclosing(attach()) as messages:
                    fresh = True
                    async for message in messages:
                        if fresh:
                            fresh = False
                            self.attached()
                        yield message
                self.broke(EOFError("it ended too soon"))
            except Exception as error:
                heed_cancellation(error)
                if getattr(getattr(error, "code", None), "value", "") in _FINAL:
                    raise
                self.broke(error)

    # ---- beside the reading ------------------------------------------------------------------------------------------

    async def answer(self) -> None:
        """Say what is due, until the stream is broken for too long."""
        await first_of(self._say_all_that_is_due(), self._watch())

    async def _watch(self) -> None:
        while self._broken_since is None or anyio.current_time() < self._broken_since + PATIENCE:
            await anyio.sleep(TICK)
            if self._link.kept or self._link.broken:
                self._asking = True
                self._due.set()
        self.end(f"its stream broke, and did not go on within {PATIENCE:g} s: {self._why}{self.refused}")

    async def _say_all_that_is_due(self) -> None:
        while True:
            await self._due.wait()
            self._due = anyio.Event()
            try:
                async with self._wire:
                    await self._say_what_is_due()
            except Exception as error:  # noqa: BLE001 -- it is said again, and told if that does not help
                heed_cancellation(error)
                self.broke(error)
                self._due.set()
                await self.rest()

    async def _say_what_is_due(self) -> None:
        link, asking = self._link, self._asking
        self._asking = False
        if not self._begun:
            return
        if link.broken:
            await self.transmit(link.request())
        elif link.resumed:
            link.resumed = False
            for piece in link.again():
                if link.broken:
                    return
                await self.transmit(piece)
        elif link.owes or asking:
            await self.transmit(link.wrap(b""))

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self._give_up()

    async def destroy(self) -> None:
        self._give_up()
        await super().destroy()

    def _give_up(self) -> None:
        self._over = True
        self._room.set()
        self._heard.set()
