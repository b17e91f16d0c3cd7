"""When a request may go: the pace of an account, and whose turn it is."""

from __future__ import annotations

import difflib
import math
from typing import TYPE_CHECKING, Never

import anyio
import anyio.lowlevel

from ...errors import ConfigurationError, LMError
from .fair import NO_FLOW, FairQueue, Flow, Waiter
from .fallback import Member
from .gate import Gate
from .limits import DEFAULT_ACCOUNT_WIDTH, open_files_share
from .pace import Pace
from .retrying import DEFAULT_ATTEMPTS, OnWait
from .sending import Way, sent

if TYPE_CHECKING:
    from ...ledger import Ledger, Need
    from ..base import LMClient, LMReply, LMRequest
    from .pace import Permit

__all__ = ["BURST", "Gate", "Pacer", "reply_text"]

SHORTEST_WAIT = 0.001
"""Seconds; a wait so short that it vanishes in the clock's figure would never end."""

BRIEF = 0.05
"""Seconds; a request that has to wait longer for its account lets others have its place at the gate meanwhile."""

BURST = 16
"""Requests of one account that start in one pass of the event loop. Many more hold the loop for long; fewer let calls
pile up behind it, and each garbage collection walks them all."""


_OTHER_NAMES = {
    **dict.fromkeys(("rpm", "max_rpm", "requests"), "requests_per_minute"),
    **dict.fromkeys(("tpm", "max_tpm", "tokens"), "tokens_per_minute"),
    **dict.fromkeys(("concurrency", "max_concurrency", "max_concurrent_requests", "limit"), "max_concurrent"),
}
"""What others call it → the argument that it is here."""


class Pacer:
    """Paces the requests of one account: how many at once, how many a minute, how many tokens a minute.

    Without limits of yours it learns the server's: it reads the rate limits in its replies, stops while a Retry-After
    says so, narrows when a request is refused for a rate limit and widens again with success. Runs take turns.

    All that is sent to one account (provider, address and key) and model from one event loop goes through one of them,
    whichever `AsyncRLM` sends it. Pass `pacer=` to split an account's limits among several, to share one among several
    accounts, or to set limits: the one passed is used as it is, on one event loop at a time.

    Args:
        max_concurrent: Requests in flight at most. None: as many as the process has files for, at most 2,000.
        requests_per_minute: Requests started in any minute at most.
        tokens_per_minute: Tokens in any minute at most, input and output; estimated before a request, then corrected by
            its reply.
        name: For messages and `repr`.

    Raises:
        ConfigurationError: if a limit is not a positive number, or for an argument that there is not.
    """

    def __init__(
        self,
        *,
        max_concurrent: int | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        name: str = "",
        **unknown: Never,
    ) -> None:
        for wrong in unknown:
            known = ("max_concurrent", "requests_per_minute", "tokens_per_minute", "name")
            right = _OTHER_NAMES.get(wrong) or next(iter(difflib.get_close_matches(wrong, known, 1)), None)
            meant = f" (did you mean {right!r}?)" if right else ""
            raise ConfigurationError(f"Pacer takes no {wrong!r}{meant}; known: {', '.join(known)}", argument=wrong)
        given = {
            "max_concurrent": max_concurrent,
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
        }
        for limit, value in given.items():
            if value is not None and not (isinstance(value, int) and value > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigurationError(f"{limit} must be a positive whole number or None, not {value!r}")
        self._given = given
        self.name = name
        self.burst = BURST
        """Requests that start in one pass of the event loop."""
        self._loop: object = None
        self._begin()

    def _begin(self) -> None:
        """As new: nothing sent, nothing learnt."""
        self._queue = FairQueue()
        self._in_flight = 0
        self._started = 0
        """Permits given in this pass of the loop, or since whoever looks after the queue last had a turn."""
        # Invariant: while anyone waits and there is width, `_leader` is one of those who wait, awake or about to be.
        self._leader: Waiter | None = None
        self._restless: dict[Waiter, None] = {}
        """Those who wait and would rather go elsewhere than wait for a refusal to pass."""
        self.pace = Pace(
            self._given["max_concurrent"] or open_files_share(DEFAULT_ACCOUNT_WIDTH),
            self._given["requests_per_minute"],
            self._given["tokens_per_minute"],
        )

    def bind(self) -> None:
        """Belong to the running event loop; what was learnt on another one is forgotten.

        Raises:
            ConfigurationError: if it is in use on another one.
        """
        loop = anyio.lowlevel.current_token()
        if self._loop == loop:
            return
        if self._loop is not None:
            if self._in_flight or self._queue.waiting:
                raise ConfigurationError("this pacer is in use on another event loop: make one for each")
            self._begin()
        self._loop = loop

    @property
    def in_flight(self) -> int:
        """Requests sent and not answered yet."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Requests waiting for their turn."""
        return self._queue.waiting

    @property
    def width(self) -> int:
        """How many requests may be in flight now."""
        return self.pace.width

    async def send(
        self,
        client: LMClient,
        request: LMRequest,
        *,
        gate: Gate,
        ledger: Ledger,
        need: Need,
        flow: Flow = NO_FLOW,
        deadline: float = math.inf,
        on_wait: OnWait | None = None,
        attempts: int = DEFAULT_ATTEMPTS,
    ) -> LMReply:
        """Send `request` when there is a permit and money for it; again after a failure that may pass.

        Args:
            client: Asked once per attempt.
            request: What to ask. In hard mode its `output_cap` is lowered to what the ledger allows.
            gate: The tree's gate. Held, like the account's permit, only while a request is in flight.
            ledger: The tree's ledger. Every attempt that may have cost something is settled in it, cancelled ones too.
            need: What the request may cost.
            flow: Whose request it is: runs, and their tenants, take turns.
            deadline: When the caller's time is up, on the event loop's clock, if that is before the cancel scope's.
            on_wait: Called before each back-off.
            attempts: How often to send at most.

        Raises:
            LMError: of the last attempt; without waiting for another that could only come after the deadline.
            LimitError: if the ledger has no room and none can come back.
        """
        way = Way(Member(client, self), need)
        return await sent(
            [way],
            request,
            gate=gate,
            ledger=ledger,
            cap=ledger.output_cap(need),
            flow=flow,
            deadline=deadline,
            on_wait=on_wait,
            attempts=attempts,
        )

    # ---- permits ----

    def enter_nowait(self, tokens: int) -> Permit | None:
        """A permit, if one is free and nobody waits for one."""
        if self._queue.waiting or self._started >= self.burst or self._in_flight >= self.pace.width:
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
                f"the rate limit of {self.name or 'this account'} leaves no room for another {delay:.0f} s, and there "
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
        while queue.waiting and self._started < self.burst and self._in_flight < self.pace.width:
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
                f"not sent: {self.name or 'this account'} takes no request any more; it says: {error.message}",
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

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self._given, self.name)

    def __repr__(self) -> str:
        name = f" {self.name}" if self.name else ""
        return f"<Pacer{name} {self._in_flight}/{self.width} in flight, {self.waiting} waiting>"


def reply_text(reply: LMReply) -> str:
    """The text of a reply that must have one.

    Raises:
        LMError: of kind "refusal" or "empty". The reply was paid for and settled already.
    """
    if reply.text.strip():
        return reply.text
    if reply.finish_reason == "refusal":
        raise LMError(f"the model refused: {reply.reasoning or 'it gave no reason'}", kind="refusal")
    if reply.finish_reason == "length":
        why = "it ran into its output limit" + (" while still thinking" if reply.reasoning else "")
    elif reply.reasoning:
        why = "it has thoughts but no text"
    else:
        why = f"finish reason: {reply.finish_reason or 'not given'}"
    raise LMError(f"the model's reply is empty ({why})", kind="empty")


def _unpickled(given: dict[str, int | None], name: str) -> Pacer:
    return Pacer(
        max_concurrent=given["max_concurrent"],
        requests_per_minute=given["requests_per_minute"],
        tokens_per_minute=given["tokens_per_minute"],
        name=name,
    )
