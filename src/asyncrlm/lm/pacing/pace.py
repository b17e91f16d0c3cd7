"""What one account's requests may do now: what the caller allows, and what the server's replies have taught."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

from .limits import LONGEST_PAUSE, Charge, Meter, Quota, Window
from .refusals import UNEXPLAINED, Refusals

if TYPE_CHECKING:
    from ...errors import LMError
    from ...ledger import Need
    from ...types import RateHints
    from ..base import LMReply

UNPROVEN_WIDTH = 128
"""Requests in flight that a server is trusted to take. Beyond, it is given time to refuse before more follow."""

RAMP = 1_000.0
"""How many more requests in flight a second, until the server refuses or the pacer is as wide as it may be."""

RAMP_STEP = 0.008
"""Seconds from one step of the ramp to the next."""

SHORT_WAIT = 1.0
"""Seconds; nobody goes elsewhere for less."""

_RECENT = 32
_FEW = 0.2
"""Share of the last requests up to which refusals are taken to be one server of many that is busy: they neither narrow
the account nor, with a short Retry-After, stop it."""

_MOST = 0.5
"""Share from which on the next refusal is not waited for to see what becomes of those in flight."""

NARROWER = 0.9
"""What is left of the width when the server refuses."""


class Permit:
    """Leave to send one request, and what it was counted as."""

    __slots__ = ("epoch", "mark", "number", "request_charge", "time", "token_charge", "tokens")

    def __init__(self, epoch: int, mark: int, number: int, tokens: int) -> None:
        self.epoch = epoch
        self.mark = mark
        self.number = number
        self.tokens = tokens
        self.time = 0.0
        """When it was given, where the clock was asked."""
        self.request_charge: Charge | None = None
        self.token_charge: Charge | None = None


class Pace:
    """How many requests of an account may be in flight, and when the next may start: as told, and as learnt.

    It counts and remembers; the waiting is the pacer's.
    """

    def __init__(self, widest: int, requests_per_minute: int | None, tokens_per_minute: int | None) -> None:
        self.widest = widest
        self._width = float(widest)
        self._refused_at = 0.0
        """The width at which the server last refused."""
        self._share_refused = 0.0
        """Of about the last `_RECENT` requests."""
        self._epoch = 0
        """Counts narrowings: what was sent before one and is refused after it does not narrow again."""
        self._refusals = Refusals()
        self._tokens_in_flight = 0
        self._paused_until = -math.inf
        self._request_window = Window(requests_per_minute) if requests_per_minute else None
        self._token_window = Window(tokens_per_minute) if tokens_per_minute else None
        self._requests: Meter | None = None
        self._tokens: Meter | None = None
        self._quota = Quota()
        self._learnt: list[Meter | Quota] = [self._quota]
        self._output = 200.0
        """Output tokens of a typical reply."""
        self._unproven: float = UNPROVEN_WIDTH
        """Up to this many in flight the ramp does not matter: infinite once it was climbed, or ended by a refusal."""
        self._ramp_began: float | None = None
        self.timed = bool(requests_per_minute or tokens_per_minute)
        """Whether there is more to look at than the width."""

    @property
    def width(self) -> int:
        """Requests in flight at most, now."""
        if self.timed and any(learnt.exhausted for learnt in self._learnt):
            return 1  # what comes of it will tell how to go on
        return int(self._width)

    def delay(self, tokens: int, in_flight: int) -> float:
        """Seconds until the next request may start, as far as that depends on time; 0 or less for now."""
        if not self.timed and in_flight < self._unproven:
            return 0.0
        now = anyio.current_time()
        delay = self._paused_until - now
        if in_flight >= self._unproven and in_flight >= self._ramp(now):
            delay = max(delay, RAMP_STEP)
        self._quota.turn(now)
        if self._request_window is not None:
            delay = max(delay, self._request_window.delay(1, now))
        if self._token_window is not None:
            delay = max(delay, self._token_window.delay(tokens, now))
        if self._requests is not None:
            delay = max(delay, self._requests.delay(1, now))
        if self._tokens is not None:
            delay = max(delay, self._tokens.delay(tokens, now))
        return delay

    def spent(self) -> float:
        """Seconds until the server takes requests again, as far as it has said; 0 for a wait not worth a word."""
        if not self.timed:
            return 0.0
        now = anyio.current_time()
        waits = [meter.delay(1, now) for meter in (self._requests, self._tokens) if meter is not None]
        delay = max(self._paused_until - now, *waits) if waits else self._paused_until - now
        return delay if delay > SHORT_WAIT else 0.0

    def _ramp(self, now: float) -> float:
        if self._ramp_began is None:
            self._ramp_began = now
        proven = UNPROVEN_WIDTH + (now - self._ramp_began) * RAMP
        if proven >= self.widest:
            self._unproven = math.inf
        return proven

    def permit(self, tokens: int) -> Permit:
        """Count a request that is about to be sent."""
        self._tokens_in_flight += tokens
        permit = Permit(self._epoch, self._refusals.sent(), self._quota.take(), tokens)
        if self.timed:
            permit.time = now = anyio.current_time()
            if self._request_window is not None:
                permit.request_charge = self._request_window.take(1, now)
            if self._token_window is not None:
                permit.token_charge = self._token_window.take(tokens, now)
            if self._requests is not None:
                self._requests.take(1)
            if self._tokens is not None:
                self._tokens.take(tokens)
        return permit

    def closed(self, permit: Permit) -> None:
        """The request is no longer in flight."""
        self._tokens_in_flight -= permit.tokens
        self._refusals.closed(permit.mark)

    def unsent(self, permit: Permit) -> None:
        """What this permit was for was never sent."""
        if self._request_window is not None and permit.request_charge is not None:
            self._request_window.correct(permit.request_charge, 0)
        self._used(permit, 0)
        self._quota.unsent()
        if permit.time:
            if self._requests is not None:
                self._requests.take(-1)
            if self._tokens is not None:
                self._tokens.take(-permit.tokens)

    def tokens_of(self, need: Need) -> int:
        """What a request will likely use; 0 where nobody counts."""
        if self._token_window is None and self._tokens is None:
            return 0
        output = self._output if need.output_cap is None else min(self._output, need.output_cap)
        return need.input_bytes // 3 + int(output)

    def answered(self, permit: Permit, reply: LMReply, *, in_flight: int, waiting: int) -> None:
        """The server took the request."""
        usage = reply.usage
        if usage.output_tokens is not None:
            self._output += (usage.output_tokens - self._output) / 8
            if permit.token_charge is not None:
                self._used(permit, (usage.input_tokens or 0) + usage.output_tokens)
        if reply.rate is not None:
            self._told(reply.rate, permit, in_flight)
        if self._width < self.widest and (waiting or in_flight > 0.8 * self._width):
            # Slowly where it was refused, faster away from there: the server may have changed its mind.
            near = abs(self._width - self._refused_at) <= 0.1 * self._refused_at
            self._width = min(self.widest, self._width + (1 / self._width if near else 0.25))
        self._share_refused -= self._share_refused / _RECENT
        self._refusals.taken(permit.mark)
        self._quota.accepted(permit.number)

    def refused(self, permit: Permit, error: LMError, *, in_flight: int) -> bool:
        """The request failed. Only a rate limit concerns the others.

        Returns whether it was refused for no reason of its own: the account had more than its server takes, and is held
        back from now on.
        """
        rate, wait = error.rate, error.retry_after and min(error.retry_after, LONGEST_PAUSE)
        limited = error.kind == "rate_limit"
        if limited and permit.token_charge is not None:
            self._used(permit, 0)
        if rate is not None:
            self._told(rate, permit, in_flight)
        if not limited:
            return False
        self._quota.refused()
        self._share_refused += (1 - self._share_refused) / _RECENT
        if wait is not None and wait < SHORT_WAIT and self._share_refused < _FEW:
            wait = None  # the refused request's own matter: what is refused now and then is no full server
        now = anyio.current_time()
        pause = self._refusals.refused(permit.mark, now, most=self._share_refused >= _MOST)
        if wait or pause:
            self._paused_until = max(self._paused_until, now + max(wait or 0.0, pause))
            self.timed = True
        spent = False
        if rate is None and (wait or pause):
            self._quota.used_up(wait or 0.0, now, pause, first=self._refusals.row == UNEXPLAINED + 1)
        if rate is not None:
            spent = rate.requests_left == 0 or rate.tokens_left == 0
            for meter, left, reset in (
                (self._requests, rate.requests_left, rate.requests_reset),
                (self._tokens, rate.tokens_left, rate.tokens_reset),
            ):
                if meter is not None and left == 0 and (wait is None or wait > (reset or 0.0) / 2):
                    meter.refused()
        if not spent and self._share_refused >= _FEW:
            self._narrow(permit, in_flight)
        held_back = bool(pause) or self._share_refused >= _FEW or self._refusals.row > UNEXPLAINED
        return held_back and self._refusals.patient(now)

    @property
    def hopeless(self) -> bool:
        """Whether the server has refused everything for so long that nobody need wait for it."""
        return self._refusals.hopeless(anyio.current_time())

    def _narrow(self, permit: Permit, in_flight: int) -> None:
        """To what the server holds without this one. The first to be refused of those sent since takes more off."""
        width = min(self._width, in_flight - 1.0)
        if permit.epoch == self._epoch:
            self._epoch += 1
            width = min(width, NARROWER * in_flight)
        self._width = max(1.0, width)
        self._unproven = math.inf
        self._refused_at = max(2.0, in_flight)

    def _told(self, rate: RateHints, permit: Permit, in_flight: int) -> None:
        now = anyio.current_time()
        if rate.requests_left is not None:
            if self._requests is None:
                self._requests = Meter()
                self._learnt.append(self._requests)
            self._requests.told(
                rate.requests_left,
                rate.request_limit,
                rate.requests_reset,
                in_flight=in_flight - 1,
                sent=permit.time,
                now=now,
            )
            self.timed = True
        if rate.tokens_left is not None:
            if self._tokens is None:
                self._tokens = Meter()
                self._learnt.append(self._tokens)
            self._tokens.told(
                rate.tokens_left,
                rate.token_limit,
                rate.tokens_reset,
                in_flight=self._tokens_in_flight - permit.tokens,
                sent=permit.time,
                now=now,
            )
            self.timed = True

    def _used(self, permit: Permit, tokens: int) -> None:
        if self._token_window is not None and permit.token_charge is not None:
            self._token_window.correct(permit.token_charge, tokens)
