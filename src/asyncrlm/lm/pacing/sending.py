"""One request on its way: gate, pacer, ledger, client, over all its attempts and all the models that may answer it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.lowlevel
import msgspec

from ...errors import LMError
from ...money import likely_tokens
from ..base import one_reply, text_size
from .fallback import OWN_FAULT, Member, all_failed, next_of, priced, resting
from .retrying import OnWait, may_pass, retried

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...ledger import Ledger, Need, Reservation, Settlement
    from ..base import LMReply, LMRequest
    from .fair import Flow
    from .gate import Gate
    from .pace import Permit


class Way(NamedTuple):
    """One of the models that a request may go to, and what it may cost there."""

    member: Member
    need: Need


class _ElsewhereError(Exception):
    """The model that was waited for rests by now, or one that is to be preferred rests no longer."""


class Sending:
    """One request on its way through gate, pacer and ledger, over all its attempts.

    Each attempt asks the models that it has in their order, until one replies, each in the turns of its own account and
    with a reservation of its own.
    """

    __slots__ = (
        "_asked",
        "_attempts",
        "_bill",
        "_deadline",
        "_flow",
        "_gate",
        "_ledger",
        "_members",
        "_request",
        "_reservation",
        "_ways",
        "waited",
    )

    def __init__(
        self,
        ways: Sequence[Way],
        request: LMRequest,
        gate: Gate,
        ledger: Ledger,
        cap: int | None,
        flow: Flow,
        deadline: float,
        bill: list[Settlement],
    ) -> None:
        self._ways = ways
        self._members = [way.member for way in ways]
        self._request = _capped(request, cap)
        self._gate = gate
        self._ledger = ledger
        self._flow = flow
        self._deadline = deadline
        self._bill = bill
        self._asked = False
        self._attempts = 0
        self._reservation: Reservation | None = None  # Open and idle; `_ask` settles the one that is in use.
        self.waited = 0.0
        """Seconds spent waiting so far."""

    async def send(self, attempts: int, on_wait: OnWait | None) -> LMReply:
        """Send the request, again after a failure that may pass.

        Raises:
            LMError: of the last attempt.
        """
        again = attempts > 1

        async def attempt() -> LMReply:
            return await self._attempt(on_wait) if again else await self._round()

        try:
            return await attempt()
        except LMError as error:
            error.attempts = self._attempts  # a client may raise one object again and again
            if not again or not may_pass(error):
                raise
            failure = error

        def waiting(attempt: int, delay: float, error: LMError) -> None:
            self.waited += delay
            if on_wait is not None:
                on_wait(attempt, delay, error)

        try:
            return await retried(attempt, failure, attempts=attempts, deadline=self._due(), on_wait=waiting)
        except LMError as error:
            error.attempts = self._attempts
            raise
        finally:
            # An error's traceback holds this frame: without the circle the request is freed at once.
            del failure

    @property
    def retries(self) -> int:
        """How often the request was sent again so far."""
        return max(0, self._attempts - 1)

    def close(self) -> None:
        """Give back what was reserved and not used."""
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    async def _attempt(self, on_wait: OnWait | None) -> LMReply:
        """Ask each model once, until one replies; again while their accounts have more than they take.

        Raises:
            LMError: as the client raised it, or of all of them.
        """
        while True:
            try:
                return await self._round()
            except LMError as error:
                # One model's account sees to the wait, in its own order; of several, the first that is back is awaited.
                delay = 0.0 if len(self._ways) == 1 else max(0.0, min(member.rest() for member in self._members))
                if not error.excused or anyio.current_time() + max(delay, error.retry_after or 0.0) > self._due():
                    raise
                if on_wait is not None:
                    on_wait(self._attempts, delay, error)
            if delay:
                self.waited += delay
                await anyio.sleep(delay)

    async def _round(self) -> LMReply:
        """Ask each model once, until one replies.

        Raises:
            LMError: as the client raised it, or of all of them.
        """
        self._attempts += 1
        if len(self._ways) == 1:
            return await self._send(self._ways[0], [])
        failures: list[tuple[Member, LMError]] = []
        try:
            return await self._first_of(list(self._ways), failures)
        finally:
            # An error's traceback holds the frames it went through: without the circle the request is freed at once.
            failures.clear()

    async def _first_of(self, left: list[Way], failures: list[tuple[Member, LMError]]) -> LMReply:
        """The reply of the first of those `left` that gives one; what the others have said is added to `failures`."""
        while left:
            member = next_of([way.member for way in left])
            if member.rest() > 0 and any(error.retryable for _, error in failures):
                failures += [(way.member, resting(way.member.rest())) for way in left]
                break
            way = next(way for way in left if way.member is member)
            try:
                reply = await self._send(way, [each.member for each in left])
            except _ElsewhereError:
                self.close()
            except LMError as error:
                if error.kind in OWN_FAULT:
                    raise
                failures.append((member, error))
                left.remove(way)
                self.close()  # the next one's price is another
            else:
                return priced(msgspec.structs.replace(reply, model=member.answers_as(reply)), way.need.price)
        raise all_failed(failures)

    async def _send(self, way: Way, left: Sequence[Member]) -> LMReply:
        """Send the request once to one model, when there is room for it everywhere.

        Raises:
            LMError: as the client raised it. The reservation is kept for the next attempt unless it may be spent.
            _ElsewhereError: if another of those `left` is to be asked before it.
        """
        need, turns = way.need, way.member.turns
        while True:
            permit, sent = await self._enter(way, left), False
            try:
                if self._reservation is None:
                    self._reservation = self._ledger.try_reserve(need)
                if self._reservation is not None:
                    # A task that was cancelled when it was already on its way here must not send.
                    await anyio.lowlevel.checkpoint_if_cancelled()
                    sent = True
                    return await self._ask(way.member, permit, self._reservation)
            finally:
                if not sent:
                    turns.pace.unsent(permit)
                turns.leave(permit)
                self._gate.release()
            began = anyio.current_time()
            self._reservation = await self._ledger.reserve(need)
            self.waited += anyio.current_time() - began

    async def _enter(self, way: Way, left: Sequence[Member]) -> Permit:
        """Leave to send, of the gate and of the account. Whoever waits for an account's turn for more than a few passes
        of the loop does not hold the gate: requests to others would wait for that account, too."""
        gate, turns = self._gate, way.member.turns
        tokens = turns.pace.tokens_of(way.need)
        held = gate.acquire_nowait()
        if held and (permit := turns.enter_nowait(tokens)) is not None:
            return permit
        began = anyio.current_time()
        try:
            while True:
                if not held:
                    await gate.acquire()
                    held = True
                if (permit := await self._soon(way.member, tokens, left)) is not None:
                    return permit
                gate.release()
                held = False
                permit = await self._turn(way.member, tokens, left)
                held = gate.acquire_nowait()
                if held:
                    return permit
                turns.pace.unsent(permit)
                turns.leave(permit)
        except BaseException:
            if held:
                gate.release()
            raise
        finally:
            self.waited += anyio.current_time() - began

    async def _soon(self, member: Member, tokens: int, left: Sequence[Member]) -> Permit | None:
        """A permit of this model's account, if it is not to be waited for long."""
        turns = member.turns
        permit = turns.enter_nowait(tokens)
        if permit is not None or member.shares or not turns.soon(tokens):
            return permit
        if len(left) > 1:
            return await self._turn(member, tokens, left)
        return await turns.enter(self._flow, tokens, first=self._asked, deadline=self._due(), elsewhere=True)

    async def _turn(self, member: Member, tokens: int, left: Sequence[Member]) -> Permit:
        """A permit of this model's account, waited for unless another of those `left` is to be asked before it."""
        turns, due = member.turns, self._due()
        if len(left) < 2:
            permit = await turns.enter(self._flow, tokens, first=self._asked, deadline=due)
        else:
            permit = await self._turn_or_elsewhere(member, tokens, left, due)
        if permit is None:
            raise _ElsewhereError
        return permit

    async def _turn_or_elsewhere(
        self, member: Member, tokens: int, left: Sequence[Member], due: float
    ) -> Permit | None:
        turns, permit = member.turns, None
        before = left if member.rest() > 0 else left[: left.index(member)]
        rests = [rest for each in before if each is not member and (rest := each.rest()) > 0]
        with anyio.move_on_after(min(rests, default=math.inf)):  # then one of them may be asked again
            permit = await turns.enter(self._flow, tokens, first=self._asked, deadline=due, elsewhere=not member.shares)
        if permit is not None and member.rest() > 0 and any(each.rest() <= 0 for each in left):
            turns.pace.unsent(permit)
            turns.leave(permit)
            return None
        return permit

    async def _ask(self, member: Member, permit: Permit, reservation: Reservation) -> LMReply:
        self._reservation = None
        self._asked = True
        asked = member.failed
        try:
            reply = await one_reply(member.client, self._request)
        except LMError as error:
            if not error.charged:
                self._reservation = reservation
            elif error.usage is None:
                self._bill.append(reservation.settle_estimated())
            else:
                self._bill.append(reservation.settle(error.usage))
            error.excused = member.refused(permit, error, self._members, asked)
            raise
        except BaseException:
            self._bill.append(reservation.settle_estimated())
            raise
        guess = None
        if reply.usage.output_tokens is None and self._ledger.mode == "soft":  # a function of the caller's, for one
            guess = likely_tokens(text_size(reply.text))
        self._bill.append(reservation.settle(reply.usage, cost=reply.usage.cost, output_guess=guess))
        member.answered(permit, reply)
        return reply

    def _due(self) -> float:
        """When there is no more time. One who is cancelled has all the time to find out."""
        due = anyio.current_effective_deadline()
        return self._deadline if due == -math.inf else min(self._deadline, due)


def _capped(request: LMRequest, cap: int | None) -> LMRequest:
    if cap is None or (request.output_cap is not None and request.output_cap <= cap):
        return request
    return msgspec.structs.replace(request, output_cap=cap)


async def sent(
    ways: Sequence[Way],
    request: LMRequest,
    *,
    gate: Gate,
    ledger: Ledger,
    cap: int | None,
    flow: Flow,
    deadline: float,
    on_wait: OnWait | None,
    attempts: int,
    bill: list[Settlement] | None = None,
) -> LMReply:
    """The reply to `request`, of the first model that gives one; again after failures that may pass.

    Args:
        ways: The models that may be asked, the preferred one first.
        request: What to ask.
        gate: The tree's gate. Held, like an account's permit, only while a request is in flight or about to be.
        ledger: The tree's ledger. Every try that may have cost something is settled in it, cancelled ones too.
        cap: Most output tokens of the reply.
        flow: Whose request it is, where runs take turns at an account.
        deadline: When the caller's time is up, on the event loop's clock, if that is before the cancel scope's.
        on_wait: Called before each back-off.
        attempts: How often to ask them all at most.
        bill: Gets what each try is booked as.

    Raises:
        LMError: of the last attempt; without waiting for another that could only come after the deadline.
        LimitError: if the ledger has no room and none can come back.
    """
    sending = Sending(ways, request, gate, ledger, cap, flow, deadline, [] if bill is None else bill)
    try:
        reply = await sending.send(attempts, on_wait)
    finally:
        sending.close()
    if sending.waited or sending.retries:
        return msgspec.structs.replace(reply, waited=sending.waited + reply.waited, retries=sending.retries)
    return reply
