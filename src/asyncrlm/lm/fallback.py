"""Several clients as one: the later ones stand in when the first fails."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio
import msgspec

from ..errors import LMError, LMErrorKind
from ..money import PICO, Rates
from .base import LMClient, LMReply, LMRequest, LMUsage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..ledger import Price

OWN_FAULT: frozenset[LMErrorKind] = frozenset({"bad_request"})
"""Failures that are the request's fault: another model would refuse it too."""


UNSAID_REST = 1.0
"""Seconds that a model is left alone after it refused for a rate limit without saying for how long."""


class FallbackClient(LMClient):
    """Asks `clients` in order until one replies.

    One that refuses for its rate limit is left alone for as long as it says, and only that one: the others stand in.
    When all have failed, the error says what each said; it is retryable if one of theirs is.
    A try that failed and may have been paid for is counted in `charged_before` of what comes back.
    `prices` are the clients' own: a reply without a cost is priced by the client that gave it.
    """

    def __init__(self, clients: Sequence[LMClient], *, prices: Sequence[Price | None] | None = None) -> None:
        if not clients:
            raise ValueError("a fallback needs at least one client")
        self.model = clients[0].model
        self._clients = tuple(clients)
        self._prices = tuple(prices) if prices is not None else (None,) * len(clients)
        self._rests = [-math.inf] * len(clients)
        """Until when each of them is left alone, on the event loop's clock."""

    @property
    def account(self) -> str:
        return "+".join(client.account for client in self._clients)

    @property
    def needs_price(self) -> bool:
        return any(client.needs_price for client in self._clients)

    async def acomplete(self, request: LMRequest) -> LMReply:
        failures: list[tuple[LMClient, LMError]] = []
        for index, (client, price) in enumerate(zip(self._clients, self._prices, strict=True)):
            if (rest := self._rests[index] - anyio.current_time()) > 0:
                failures.append((client, _resting(rest)))
                continue
            try:
                reply = await client.acomplete(request)
            except LMError as error:
                if error.kind == "rate_limit":
                    wait = UNSAID_REST if error.retry_after is None else error.retry_after
                    self._rests[index] = max(self._rests[index], anyio.current_time() + wait)
                if error.kind in OWN_FAULT:
                    error.charged_before += _charged(failures)
                    raise
                failures.append((client, error))
            else:
                reply = priced(reply, price)
                return msgspec.structs.replace(
                    reply,
                    model=reply.model or client.model,
                    charged_before=reply.charged_before + _charged(failures),
                    rate=None,  # what is left of one account says nothing of the others
                )
        raise _all_failed(failures)

    async def aclose(self) -> None:
        for client in self._clients:
            await client.aclose()

    def __repr__(self) -> str:
        return f"<FallbackClient {', '.join(client.model for client in self._clients)}>"


def _resting(seconds: float) -> LMError:
    said = f"not asked: its rate limit leaves no room for another {seconds:.1f} s"
    return LMError(said, kind="rate_limit", retryable=True, retry_after=seconds)


def _charged(failures: Sequence[tuple[LMClient, LMError]]) -> int:
    return sum(error.charged + error.charged_before for _, error in failures)


def priced(reply: LMReply, price: Price | None) -> LMReply:
    """The reply with what it cost by its price, where the provider did not say and the price is known."""
    usage = reply.usage
    if usage.cost is not None or price is None or usage.input_tokens is None or usage.output_tokens is None:
        return reply
    return msgspec.structs.replace(reply, usage=msgspec.structs.replace(usage, cost=cost_of(price, usage)))


def cost_of(price: Price, usage: LMUsage) -> float:
    """USD of a reply that says what it used."""
    entered = usage.input_tokens or 0
    cached = min(usage.cached_tokens or 0, entered)
    written = min(usage.cache_write_tokens or 0, entered - cached)
    return Rates.of(price).cost(entered, cached, written, usage.output_tokens or 0) / PICO


def _all_failed(failures: Sequence[tuple[LMClient, LMError]]) -> LMError:
    first = failures[0][1]
    waits = [error.retry_after for _, error in failures if error.retryable and error.retry_after is not None]
    retryable = any(error.retryable for _, error in failures)
    all_wait = retryable and len(waits) == sum(error.retryable for _, error in failures)
    charged = _charged(failures)
    kinds: list[LMErrorKind] = [error.kind for _, error in failures if error.retryable]
    return LMError(
        "all models failed: " + "; ".join(f"{client.model}: {error}" for client, error in failures),
        kind=kinds[0] if kinds else first.kind,
        status=first.status,
        retryable=retryable,
        retry_after=min(waits) if all_wait else None,
        charged=charged > 0,
        charged_before=max(0, charged - 1),
    )
