"""When a request may go: gates, retries with back-off, and the ledger's reserve and settle around each attempt."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import msgspec

from ..errors import LMError

if TYPE_CHECKING:
    from ..ledger import Ledger, Need, Reservation
    from .base import LMClient, LMReply, LMRequest

DEFAULT_ATTEMPTS = 6
"""How often one request is sent at most, the first time included."""

DEFAULT_ACCOUNT_WIDTH = 2000
"""Requests of one account in flight at most, over all trees of an engine scope."""

MAX_BACKOFF = 30.0
"""Seconds of the longest wait of our own choosing. A server's Retry-After may be longer and is honoured."""

OnWait = Callable[[int, float, LMError], None]
"""Hears of a request that will be sent again: the attempt that failed (from 1), seconds until the next, the error."""


class Gate:
    """At most `limit` holders at once, first come, first served.

    A free permit is had without giving way to other tasks. A permit handed to a task that is cancelled at that very
    moment goes on to the next one.
    """

    __slots__ = ("_free", "_waiting", "limit")

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a gate needs room for at least one, not {limit}")
        self.limit = limit
        self._free = limit
        # Invariant: nobody waits while a permit is free. An event leaves the queue before it is set.
        self._waiting: OrderedDict[anyio.Event, None] = OrderedDict()

    @property
    def in_flight(self) -> int:
        """Permits held now."""
        return self.limit - self._free

    @property
    def waiting(self) -> int:
        """Tasks waiting for a permit."""
        return len(self._waiting)

    def acquire_nowait(self) -> bool:
        """Take a permit if one is free."""
        if self._free:
            self._free -= 1
            return True
        return False

    async def acquire(self) -> None:
        """Take a permit, waiting for one if none is free."""
        if self.acquire_nowait():
            return
        granted = anyio.Event()
        self._waiting[granted] = None
        try:
            await granted.wait()
        except BaseException:
            if granted.is_set():
                self.release()
            else:
                del self._waiting[granted]
            raise

    def release(self) -> None:
        """Give a permit back: to whoever has waited longest, if anyone."""
        if self._waiting:
            granted, _ = self._waiting.popitem(last=False)
            granted.set()
        else:
            self._free += 1

    def __repr__(self) -> str:
        return f"<Gate {self.in_flight}/{self.limit} in flight, {self.waiting} waiting>"


class Pacer:
    """Sends the requests of one account on one event loop."""

    __slots__ = ("account", "gate")

    def __init__(self, account: str, *, width: int = DEFAULT_ACCOUNT_WIDTH) -> None:
        self.account = account
        self.gate = Gate(width)

    async def send(
        self,
        client: LMClient,
        request: LMRequest,
        *,
        gate: Gate,
        ledger: Ledger,
        need: Need,
        on_wait: OnWait | None = None,
        attempts: int = DEFAULT_ATTEMPTS,
    ) -> LMReply:
        """Send `request` when there is a permit and money for it; again after a failure that may pass.

        Args:
            client: Asked once per attempt.
            request: What to ask. In hard mode its `output_cap` is lowered to what the ledger allows.
            gate: The tree's gate. Held, like the account's, only while a request is in flight.
            ledger: The tree's ledger. Every attempt that may have cost something is settled in it, cancelled ones too.
            need: What the request may cost.
            on_wait: Called before each back-off.
            attempts: How often to send at most.

        Raises:
            LMError: of the last attempt.
            LimitError: if the ledger has no room and none can come back.
        """
        reservation: Reservation | None = None  # Open and idle; `_attempt` settles the one that is in use.
        attempt = 0
        outcome: LMReply | LMError | None = None
        failure: LMError | None = None
        try:
            while True:
                failure = None
                await self._enter(gate)
                try:
                    if reservation is None:
                        reservation = ledger.try_reserve(need)
                    if reservation is not None:
                        # A task that was cancelled when it was already on its way here must not send.
                        await anyio.lowlevel.checkpoint_if_cancelled()
                        attempt += 1
                        used, reservation = reservation, None
                        outcome = await _attempt(client, _capped(request, ledger.output_cap(need)), used)
                        for _ in range(outcome.charged_before):
                            ledger.charge(need)
                        if not isinstance(outcome, LMError):
                            return outcome
                        failure = outcome
                        if failure.charged:
                            used.settle_estimated()
                        else:
                            reservation = used
                finally:
                    self.gate.release()
                    gate.release()
                if failure is None:
                    reservation = await ledger.reserve(need)
                elif not failure.retryable or attempt >= attempts:
                    raise failure
                else:
                    delay = backoff(attempt, failure)
                    if on_wait is not None:
                        on_wait(attempt, delay, failure)
                    await anyio.sleep(delay)
        finally:
            if reservation is not None:
                reservation.release()
            # An error's traceback holds this frame: without the circle the request is freed at once.
            del outcome, failure

    async def _enter(self, gate: Gate) -> None:
        if not gate.acquire_nowait():
            await gate.acquire()
        if not self.gate.acquire_nowait():
            try:
                await self.gate.acquire()
            except BaseException:
                gate.release()
                raise

    def __repr__(self) -> str:
        return f"<Pacer {self.account} {self.gate!r}>"


class Pacers:
    """The pacers of one engine scope, one per account. Belongs to one event loop."""

    __slots__ = ("_pacers",)

    def __init__(self) -> None:
        self._pacers: dict[str, Pacer] = {}

    def of(self, client: LMClient) -> Pacer:
        """The pacer that every client of this client's account shares."""
        account = client.account
        pacer = self._pacers.get(account)
        if pacer is None:
            pacer = self._pacers[account] = Pacer(account)
        return pacer


async def _attempt(client: LMClient, request: LMRequest, reservation: Reservation) -> LMReply | LMError:
    """One attempt. `reservation` is settled unless an error comes back: then it is still open."""
    try:
        reply = await client.acomplete(request)
    except LMError as error:
        return error
    except BaseException:
        reservation.settle_estimated()
        raise
    reservation.settle(reply.usage, cost=reply.usage.cost)
    return reply


def _capped(request: LMRequest, cap: int | None) -> LMRequest:
    if cap is None or (request.output_cap is not None and request.output_cap <= cap):
        return request
    return msgspec.structs.replace(request, output_cap=cap)


def backoff(attempt: int, error: LMError) -> float:
    """Seconds to wait after the attempt of this number (from 1) failed.

    A Retry-After is a lower bound, with a little jitter on top so that those who were refused together don't come back
    together; without one, a random part of an exponentially growing span.
    """
    if error.retry_after is not None:
        return error.retry_after + random.uniform(0.0, min(0.25 * error.retry_after, 5.0))  # noqa: S311 - not a secret
    from tenacity import AsyncRetrying, RetryCallState, wait_random_exponential  # noqa: PLC0415 - only failures need it

    state = RetryCallState(AsyncRetrying(), None, (), {})
    state.attempt_number = attempt
    return wait_random_exponential(multiplier=0.5, min=0.1, max=MAX_BACKOFF)(state)


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
