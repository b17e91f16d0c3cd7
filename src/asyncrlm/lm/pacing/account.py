"""Whose turn it is at one account: permits to send, given in turn and at the account's pace."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import anyio
import anyio.lowlevel

from ...errors import LMError
from .fair import FairQueue, Flow, Waiter
from .limits import DEFAULT_ACCOUNT_WIDTH, open_files_share
from .pace import Pace

if TYPE_CHECKING:
    from ..base import LMReply
    from .pace import Permit

SHORTEST_WAIT = 0.001
"""Seconds; a wait so short that it vanishes in the clock's figure would never end."""

BRIEF = 0.05
"""Seconds; a request that has to wait longer for its account lets others have its place at the gate meanwhile."""

BURST = 16
"""Requests of one account that start in one pass of the event loop. Many more hold the loop for long; fewer let calls
pile up behind it, and each garbage collection walks them all."""


class Limits(TypedDict):
    """What an account may do at most; None where nobody says."""

    max_concurrent: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None


class Account:
    """Gives the permits of one account on one event loop.

    Args:
        max_concurrent: Requests in flight at most; None as of `Pacer`.
        requests_per_minute: Requests started in any minute at most.
        tokens_per_minute: Tokens in any minute at most.
        name: For messages.
        burst: Requests that start in one pass of the event loop.
    """

    def __init__(
        self,
        *,
        max_concurrent: int | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        name: str = "",
        burst: int = BURST,
    ) -> None:
        self._name = name
        self._burst = burst
        self._queue = FairQueue()
        self._in_flight = 0
        self._started = 0
        """Permits given in this pass of the loop, or since whoever looks after the queue last had a turn."""
        # Invariant: while anyone waits and there is width, `_leader` is one of those who wait, awake or about to be.
        self._leader: Waiter | None = None
        self._restless: dict[Waiter, None] = {}
        """Those who wait and would rather go elsewhere than wait for a refusal to pass."""
        self.pace = Pace(
            max_concurrent or open_files_share(DEFAULT_ACCOUNT_WIDTH), requests_per_minute, tokens_per_minute
        )

    @property
    def in_flight(self) -> int:
        """Requests sent and not answered yet."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Requests waiting for their turn."""
        return self._queue.waiting

    def enter_nowait(self, tokens: int) -> Permit | None:
        """A permit, if one is free and nobody waits for one."""
        if self._queue.waiting or self._started >= self._burst or self._in_flight >= self.pace.width:
            return None
        if self.pace.delay(tokens, self._in_flight) > 0:
            return None
        return self._permit(tokens)

    def soon(self, tokens: int) -> bool:
        """Whether a permit is a matter of a few passes of the loop, as far as is known."""
        waiting = self._queue.waiting
        if self._in_flight + waiting >= self.pace.width or (waiting and self.pace.timed):
            return False
        return self.pace.delay(tokens, self._in_flight) <= BRIEF

    async def enter(
        self, flow: Flow, tokens: int, *, first: bool, deadline: float, elsewhere: bool = False
    ) -> Permit | None:
        """A permit in turn; `first` before the others of the same run.

        With `elsewhere`, None as soon as the account refuses: there is another one to go to.

        Raises:
            LMError: if the account can't send before `deadline`.
        """
        if (delay := self.pace.delay(tokens, self._in_flight)) > 0 and anyio.current_time() + delay > deadline:
            raise LMError(
                f"the rate limit of {self._name or 'this account'} leaves no room for another {delay:.0f} s, and there "
                "is less time than that",
                kind="rate_limit",
                retryable=True,
                retry_after=delay,
            )
        waiter = Waiter(tokens)
        self._queue.push(flow, waiter, first=first)
        if elsewhere:
            self._restless[waiter] = None
        try:
            while waiter.permit is None and not waiter.gone:
                await self._wait(waiter)
            if waiter.failure is not None:
                raise waiter.failure
            return waiter.permit
        except BaseException:
            if waiter.permit is not None:
                self.pace.unsent(waiter.permit)
                self.leave(waiter.permit)
            elif not waiter.gone:
                self._queue.forget(waiter)
            raise
        finally:
            self._restless.pop(waiter, None)
            if self._leader is waiter:
                self._leader = None
                self._appoint()

    async def _wait(self, waiter: Waiter) -> None:
        if self._leader is None and self._in_flight < self.pace.width:
            self._leader = waiter
        if self._leader is not waiter:
            await waiter.poked.wait()
        elif (delay := self.pace.delay(self._queue.head().tokens, self._in_flight)) > 0:
            with anyio.move_on_after(max(delay, SHORTEST_WAIT)):
                await waiter.poked.wait()
        else:
            await anyio.lowlevel.checkpoint()
        if waiter.permit is None and waiter.poked.is_set():
            waiter.poked = anyio.Event()
        if self._leader is waiter:  # in another pass of the loop than those who got their permits last
            self._started = 0
            self._grant()
            if waiter.permit is None and self._in_flight >= self.pace.width:
                self._leader = None  # whoever leaves will see to it

    def leave(self, permit: Permit) -> None:
        """Give a permit back."""
        self._in_flight -= 1
        self.pace.closed(permit)
        if not self._in_flight:
            self._started = 0
        if self._queue.waiting:
            self._grant()
            self._appoint()

    def _grant(self) -> None:
        queue = self._queue
        while queue.waiting and self._started < self._burst and self._in_flight < self.pace.width:
            if self.pace.delay(queue.head().tokens, self._in_flight) > 0:
                return
            waiter = queue.pop()
            waiter.permit = self._permit(waiter.tokens)
            waiter.poked.set()

    def _appoint(self) -> None:
        if self._leader is None and self._queue.waiting and self._in_flight < self.pace.width:
            self._leader = self._queue.head()
            self._leader.poked.set()

    def _permit(self, tokens: int) -> Permit:
        self._in_flight += 1
        self._started += 1
        return self.pace.permit(tokens)

    def answered(self, permit: Permit, reply: LMReply) -> None:
        """Learn from a reply; before `leave`."""
        self.pace.answered(permit, reply, in_flight=self._in_flight, waiting=self._queue.waiting)
        if self._restless and self.pace.spent() > 0:
            self._send_away()

    def refused(self, permit: Permit, error: LMError) -> bool:
        """Learn from a failure; before `leave`. Returns whether it is the account's matter, not the request's."""
        excused = self.pace.refused(permit, error, in_flight=self._in_flight)
        if error.kind == "rate_limit":
            self._send_away()
            if self.pace.hopeless:
                self._give_up(error)
        return excused

    def _give_up(self, error: LMError) -> None:
        for waiter in self._queue.clear():
            waiter.failure = LMError(
                f"not sent: {self._name or 'this account'} takes no request any more; it says: {error.message}",
                kind="rate_limit",
                status=error.status,
                retryable=True,
                retry_after=error.retry_after,
            )
            waiter.failure.enough = 1
            waiter.poked.set()

    def _send_away(self) -> None:
        for waiter in self._restless:
            if waiter.permit is None:
                self._queue.forget(waiter)
                waiter.poked.set()
        self._restless.clear()

    def __str__(self) -> str:
        name = f"{self._name} " if self._name else ""
        return f"{name}{self._in_flight}/{self.pace.width} in flight, {self.waiting} waiting"

    def __repr__(self) -> str:
        return f"<Account {self}>"
