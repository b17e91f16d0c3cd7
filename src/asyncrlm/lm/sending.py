"""One request on its way: gate, pacer, ledger, client, over all its attempts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.lowlevel
import msgspec

from ..errors import LMError
from ..money import likely_tokens
from .base import text_size
from .retrying import OnWait, may_pass, retried

if TYPE_CHECKING:
    from ..ledger import Ledger, Need, Reservation
    from .base import LMClient, LMReply, LMRequest
    from .fair import Flow
    from .gate import Gate
    from .pace import Pace, Permit


class Turns(Protocol):
    """Who gives an account's permits; `Pacer` does."""

    pace: Pace

    def enter_nowait(self, tokens: int) -> Permit | None: ...
    async def enter(self, flow: Flow, tokens: int, *, first: bool, deadline: float) -> Permit: ...
    def leave(self, permit: Permit) -> None: ...
    def answered(self, permit: Permit, reply: LMReply) -> None: ...
    def refused(self, permit: Permit, error: LMError) -> None: ...


class Sending:
    """One request on its way through gate, pacer and ledger, over all its attempts."""

    __slots__ = (
        "_attempts",
        "_client",
        "_deadline",
        "_flow",
        "_gate",
        "_ledger",
        "_need",
        "_pacer",
        "_request",
        "_reservation",
        "waited",
    )

    def __init__(
        self,
        pacer: Turns,
        client: LMClient,
        request: LMRequest,
        gate: Gate,
        ledger: Ledger,
        need: Need,
        flow: Flow,
        deadline: float,
    ) -> None:
        self._pacer = pacer
        self._client = client
        self._request = request
        self._gate = gate
        self._ledger = ledger
        self._need = need
        self._flow = flow
        self._deadline = deadline
        self._attempts = 0
        self._reservation: Reservation | None = None  # Open and idle; `_ask` settles the one that is in use.
        self.waited = 0.0
        """Seconds spent waiting so far."""

    async def send(self, attempts: int, on_wait: OnWait | None) -> LMReply:
        """Send the request, again after a failure that may pass.

        Raises:
            LMError: of the last attempt.
        """
        try:
            return await self._attempt()
        except LMError as error:
            if attempts <= 1 or not may_pass(error):
                raise
            failure = error

        def waiting(attempt: int, delay: float, error: LMError) -> None:
            self.waited += delay
            if on_wait is not None:
                on_wait(attempt, delay, error)

        try:
            return await retried(self._attempt, failure, attempts=attempts, deadline=self._due(), on_wait=waiting)
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

    async def _attempt(self) -> LMReply:
        """Send the request once, when there is room for it everywhere.

        Raises:
            LMError: as the client raised it. The reservation is kept for the next attempt unless it may be spent.
        """
        while True:
            permit, sent = await self._enter(), False
            try:
                if self._reservation is None:
                    self._reservation = self._ledger.try_reserve(self._need)
                if self._reservation is not None:
                    # A task that was cancelled when it was already on its way here must not send.
                    await anyio.lowlevel.checkpoint_if_cancelled()
                    sent = True
                    return await self._ask(permit, self._reservation)
            finally:
                if not sent:
                    self._pacer.pace.unsent(permit)
                self._pacer.leave(permit)
                self._gate.release()
            began = anyio.current_time()
            self._reservation = await self._ledger.reserve(self._need)
            self.waited += anyio.current_time() - began

    async def _enter(self) -> Permit:
        tokens = self._pacer.pace.tokens_of(self._need)
        if self._gate.acquire_nowait():
            permit = self._pacer.enter_nowait(tokens)
            if permit is not None:
                return permit
            began = anyio.current_time()
        else:
            began = anyio.current_time()
            await self._gate.acquire()
        try:
            return self._pacer.enter_nowait(tokens) or await self._pacer.enter(
                self._flow, tokens, first=self._attempts > 0, deadline=self._due()
            )
        except BaseException:
            self._gate.release()
            raise
        finally:
            self.waited += anyio.current_time() - began

    async def _ask(self, permit: Permit, reservation: Reservation) -> LMReply:
        self._reservation = None
        self._attempts += 1
        try:
            reply = await self._client.acomplete(_capped(self._request, self._ledger.output_cap(self._need)))
        except LMError as error:
            self._charge(error.charged_before)
            if error.charged:
                reservation.settle_estimated()
            else:
                self._reservation = reservation
            self._pacer.refused(permit, error)
            raise
        except BaseException:
            if self._ledger.mode == "hard":  # cut off with any of the models that may be asked, after all the others
                self._charge(self._need.models - 1)
            reservation.settle_estimated()
            raise
        self._charge(reply.charged_before)
        guess = None
        if reply.usage.output_tokens is None and self._ledger.mode == "soft":  # a function of the caller's, for one
            guess = likely_tokens(text_size(reply.text))
        reservation.settle(reply.usage, cost=reply.usage.cost, output_guess=guess)
        self._pacer.answered(permit, reply)
        return reply

    def _charge(self, tries: int) -> None:
        for _ in range(tries):
            self._ledger.charge(self._need)

    def _due(self) -> float:
        """When there is no more time. One who is cancelled has all the time to find out."""
        due = anyio.current_effective_deadline()
        return self._deadline if due == -math.inf else min(self._deadline, due)


def _capped(request: LMRequest, cap: int | None) -> LMRequest:
    if cap is None or (request.output_cap is not None and request.output_cap <= cap):
        return request
    return msgspec.structs.replace(request, output_cap=cap)
