"""Several models for one request: the later ones stand in when the first fails, each paced by its own account."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio
import msgspec

from ...errors import LMError, LMErrorKind
from ...money import PICO, Rates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...ledger import Price
    from ..base import LMClient, LMReply, LMUsage
    from .account import Account
    from .pace import Permit

OWN_FAULT: frozenset[LMErrorKind] = frozenset({"bad_request"})
"""Failures that are the request's fault: another model would refuse it too."""


OF_ONE_REPLY: frozenset[LMErrorKind] = frozenset({"too_long", "bad_reply", "empty", "refusal"})
"""Failures that say nothing of whether the model is there."""

FIRST_REST = 1.0
"""Seconds that a model is left alone after its second failure in a row; doubled with each that follows."""

LONGEST_REST = 60.0
"""Seconds of the longest of these rests."""

UNSAID_RESTS: Mapping[LMErrorKind, float] = {"rate_limit": 1.0, "quota": 60.0}
"""Why a model may refuse for a while → seconds that it is left alone if it does not say for how long."""


class Member:
    """One model of those that may answer, and whose turns its requests take.

    After it refused for its rate limit or its quota it rests: the others stand in for as long as it said. So it does
    when it fails again and again, whatever the reason: one that is down is not asked by every request.
    One for all runs of a scope, which learn from one another's refusals.

    Args:
        client: Sends its requests.
        turns: Its account.
        shares: Whether that is another member's, too: by a pacer of the caller's, for all of them.
        place: Which one it is, where its name is another member's, too.
    """

    __slots__ = ("_rests_until", "client", "failed", "place", "shares", "turns")

    def __init__(self, client: LMClient, turns: Account, *, shares: bool = False, place: str = "") -> None:
        self.client = client
        self.place = place
        self.turns = turns
        self.shares = shares
        self.failed = 0
        """Failures in a row; those of requests that were in flight together count as one."""
        self._rests_until = -math.inf

    def rest(self) -> float:
        """Seconds for which it is known to refuse; 0 or less where it may be asked."""
        rest = self._rests_until - anyio.current_time()
        return rest if self.shares else max(rest, self.turns.pace.spent())

    def answers_as(self, reply: LMReply) -> str:
        """The name under which this reply is told."""
        name = reply.model or self.client.model
        return f"{name} ({self.place})" if self.place else name

    def refused(self, permit: Permit, error: LMError, members: Sequence[Member], asked: int) -> bool:
        """It failed. A rate limit concerns its own account alone; a pacer of several hears of it when all refuse.

        `asked` is what `failed` was when the request was sent. Returns whether that is the account's matter
        rather than the request's.
        """
        if error.kind in UNSAID_RESTS:
            wait = UNSAID_RESTS[error.kind] if error.retry_after is None else error.retry_after
            self._rests_until = max(self._rests_until, anyio.current_time() + wait)
            if self.shares and error.kind == "rate_limit":
                rest = min(each.rest() for each in members if each.turns is self.turns)
                if rest <= 0:
                    return False
                error = resting(rest)
        elif asked == self.failed and error.kind not in OF_ONE_REPLY | OWN_FAULT:
            self.failed += 1
            if self.failed > 1:
                wait = min(LONGEST_REST, FIRST_REST * 2.0 ** min(self.failed - 2, 10))
                self._rests_until = max(self._rests_until, anyio.current_time() + wait)
        return self.turns.refused(permit, error)

    def answered(self, permit: Permit, reply: LMReply) -> None:
        """It replied."""
        self.failed = 0
        if self.shares:  # what is left of one account says nothing of the others
            reply = msgspec.structs.replace(reply, rate=None)
        self.turns.answered(permit, reply)


def next_of(members: Sequence[Member]) -> Member:
    """The first that may be asked now; where all rest, the one that will be back soonest."""
    return next((each for each in members if each.rest() <= 0), None) or min(members, key=Member.rest)


def resting(seconds: float) -> LMError:
    """The error of a model that was not asked because it rests."""
    said = f"not asked: it has refused and is left alone for another {seconds:.1f} s"
    error = LMError(said, kind="rate_limit", retryable=True, retry_after=seconds)
    error.excused = True
    return error


def all_failed(failures: Sequence[tuple[Member, LMError]]) -> LMError:
    """The error when none has answered: it says what each said, and is retryable if one of theirs is."""
    first = failures[0][1]
    waits = [error.retry_after for _, error in failures if error.retryable and error.retry_after is not None]
    retryable = any(error.retryable for _, error in failures)
    all_wait = retryable and len(waits) == sum(error.retryable for _, error in failures)
    kinds: list[LMErrorKind] = [error.kind for _, error in failures if error.retryable]
    error = LMError(
        "all models failed: " + "; ".join(_said(member.client.model, error) for member, error in failures),
        kind=kinds[0] if kinds else first.kind,
        status=first.status,
        retryable=retryable,
        retry_after=min(waits) if all_wait else None,
        charged=any(error.charged for _, error in failures),
    )
    error.excused = all(error.excused for _, error in failures)
    return error


def _said(model: str, error: LMError) -> str:
    return f"{model}{f' at {error.where}' if error.where else ''}: {error.message}"


def priced(reply: LMReply, price: Price | None) -> LMReply:
    """The reply with what it cost by its price, where the provider did not say and the price is known."""
    usage = reply.usage
    if usage.cost is not None or price is None or usage.input_tokens is None or usage.output_tokens is None:
        return reply
    return msgspec.structs.replace(reply, usage=msgspec.structs.replace(usage, cost=cost_of(price, usage)))


def cost_of(price: Price, usage: LMUsage) -> float:
    """USD of a reply that says what it used."""
    return Rates.of(price).cost(usage.input_tokens or 0, usage.output_tokens or 0, usage) / PICO
