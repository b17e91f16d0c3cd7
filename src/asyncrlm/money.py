"""What the ledger counts in, and the records of one call: price, need, settlement.

Money is counted in whole picodollars (1e-12 USD). Prices per token and reported costs are rounded up to one, budgets
down, and nothing is rounded after that. A price of up to six decimals per million tokens is exact.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from decimal import ROUND_CEILING, Decimal
from typing import Protocol

from msgspec import Struct

from .types import Used

PICO = 10**12
"""Picodollars in a dollar."""

REMEMBERED_CALLS = 512
"""Settled calls of each model that the percentile of their output is taken of; older ones are forgotten."""


class Price(Struct, frozen=True):
    """What a model costs, in USD per million tokens."""

    input: float
    cached: float | None = None
    """Input that the provider had cached; None: as other input."""
    output: float = 0.0
    cache_write: float | None = None
    """Input that the provider puts into its cache, where that has a price of its own; None: as other input."""
    cache_write_1h: float | None = None
    """Such input that is kept for an hour, where that has a price of its own; None: as `cache_write`."""


class Rates(Struct, frozen=True):
    """A price in picodollars per token."""

    input: int
    cached: int
    output: int
    cache_write: int
    cache_write_1h: int

    @classmethod
    def of(cls, price: Price) -> Rates:
        cached = price.input if price.cached is None else price.cached
        write = price.input if price.cache_write is None else price.cache_write
        hour = write if price.cache_write_1h is None else price.cache_write_1h
        return cls(*map(_per_token, (price.input, cached, price.output, write, hour)))

    def dearest_input(self) -> int:
        """What a token of input costs at most, whatever the provider does with it."""
        return max(self.input, self.cached, self.cache_write, self.cache_write_1h)

    def cost(self, input_tokens: int, output_tokens: int, usage: ReportedUsage) -> int:
        """Picodollars; `usage` says what parts of the input came from or went to a cache."""
        cached = min(input_tokens, _count(usage.cached_tokens) or 0)
        written = min(input_tokens - cached, _count(usage.cache_write_tokens) or 0)
        hour = min(written, _count(usage.cache_write_1h_tokens) or 0)
        other = (input_tokens - cached - written) * self.input
        kept = cached * self.cached + (written - hour) * self.cache_write + hour * self.cache_write_1h
        return other + kept + output_tokens * self.output


class Need(Struct, frozen=True):
    """What is known of a call before it is sent."""

    model: str
    input_bytes: int
    output_cap: int | None
    """Most output tokens the request itself allows, or None."""
    price: Price | None
    """None if unknown, which a ledger with a budget refuses. Free models have `Price(0.0)`."""
    models: int = 1
    """How many models may be asked, one after another, each of which may want to be paid: for what is held back."""
    closing: bool = False
    """The last call of a run that met a limit: it may use what `hold_back` kept."""


class Settlement(Struct, frozen=True):
    """What one call was booked as."""

    model: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    cost: float | None
    """USD; None if the price is unknown."""
    estimated: bool
    """Some figure is the reservation's, because the provider did not say or the call was cut off."""


class ReportedUsage(Used, Protocol):
    """With what a cache was given of it, too; `lm.base.LMUsage` is one."""

    @property
    def cache_write_tokens(self) -> int | None: ...
    @property
    def cache_write_1h_tokens(self) -> int | None: ...


class Size(Struct, frozen=True):
    """What a call takes out of the limits."""

    input_tokens: int = 0
    output_tokens: int = 0
    money: int = 0
    """Picodollars."""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def times(self, n: int) -> Size:
        return self if n == 1 else Size(self.input_tokens * n, self.output_tokens * n, self.money * n)


Book = Callable[[Size, Size | None, Settlement | None], None]
"""What was reserved, what was used and what to tell of it; the last two are None for a call that was never made."""


class Reservation:
    """Room for one call. Ends by exactly one of `settle`, `settle_estimated` and `release`."""

    __slots__ = ("_book", "_open", "_rates", "_size", "need")

    def __init__(self, book: Book, need: Need, size: Size, rates: Rates | None) -> None:
        self.need = need
        self._book = book
        self._size = size
        """What is reserved, and what the call is booked as if it is not known what it used."""
        self._rates = rates
        self._open = True

    def settle(
        self, usage: ReportedUsage | None, *, cost: float | None = None, output_guess: int | None = None
    ) -> Settlement:
        """Book what the reply said it used. What it did not say is booked as reserved and marked estimated.

        Args:
            usage: None is the same as `settle_estimated`.
            cost: USD as the provider reports it; it wins over `usage.cost`, and both over the price.
            output_guess: Output tokens to book, instead of those reserved, if it did not say.
        """
        if usage is None and cost is None:
            return self.settle_estimated()
        said_input = _count(usage.input_tokens) if usage else None
        said_output = _count(usage.output_tokens) if usage else None
        input_tokens = self._size.input_tokens if said_input is None else said_input
        output_tokens = self._size.output_tokens if output_guess is None else output_guess
        output_tokens = output_tokens if said_output is None else said_output
        cached = min(input_tokens, (_count(usage.cached_tokens) if usage else None) or 0)
        reasoning = (_count(usage.reasoning_tokens) if usage else None) or 0
        money = _reported(cost)
        if money is None and usage is not None:
            money = _reported(usage.cost)
        if money is None and usage is not None and self._rates is not None:
            money = self._rates.cost(input_tokens, output_tokens, usage)
        estimated = said_input is None or said_output is None
        return self._end(Size(input_tokens, output_tokens, money or 0), cached, reasoning, money is not None, estimated)

    def settle_estimated(self) -> Settlement:
        """Book the reservation itself: the call was cut off, or failed after the model may have worked."""
        return self._end(self._size, 0, 0, self._rates is not None, estimated=True)

    def release(self) -> None:
        """Book nothing: the model surely never worked on the call."""
        self._close()
        self._book(self._size, None, None)

    def _end(self, used: Size, cached: int, reasoning: int, priced: bool, estimated: bool) -> Settlement:
        self._close()
        settlement = Settlement(
            model=self.need.model,
            input_tokens=used.input_tokens,
            output_tokens=used.output_tokens,
            cached_tokens=cached,
            reasoning_tokens=reasoning,
            cost=used.money / PICO if priced else None,
            estimated=estimated,
        )
        self._book(self._size, used, settlement)
        return settlement

    def _close(self) -> None:
        if not self._open:
            raise RuntimeError("this reservation has already been settled or released")
        self._open = False

    def __repr__(self) -> str:
        state = "open" if self._open else "ended"
        return f"<Reservation {state} {self.need.model} {self._size.tokens} tokens ${self._size.money / PICO:.6f}>"


class Percentile:
    """The 95th percentile of the last `REMEMBERED_CALLS` values, kept sorted: O(log n) to find, one memmove to add."""

    def __init__(self) -> None:
        self._in_order: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, value: int) -> None:
        if len(self._in_order) == REMEMBERED_CALLS:
            oldest = self._in_order.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._in_order.append(value)
        insort(self._sorted, value)

    def value(self) -> int:
        """Raises IndexError before the first `add`."""
        return self._sorted[math.ceil(0.95 * len(self._sorted)) - 1]


def likely_tokens(size: int) -> int:
    """Tokens of `size` bytes of text, as far as that can be said without the model's tokeniser: one for three bytes."""
    return -(-size // 3)


def picodollars(usd: float, rounding: str = ROUND_CEILING) -> int:
    """`usd` in picodollars, rounded up unless told otherwise."""
    # Through repr: 0.075 is then meant as written, not as the nearest binary fraction.
    return int((Decimal(repr(float(usd))) * PICO).to_integral_value(rounding))


def _per_token(usd_per_million: float) -> int:
    return int((Decimal(repr(float(usd_per_million))) * (PICO // 10**6)).to_integral_value(ROUND_CEILING))


def _reported(cost: float | None) -> int | None:
    """Picodollars of a cost that a provider reported; one that can't be true counts as not reported."""
    return None if cost is None or not 0 <= cost < math.inf else picodollars(cost)


def _count(tokens: int | None) -> int | None:
    return None if tokens is None or tokens < 0 else tokens
