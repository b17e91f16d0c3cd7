"""What a tree of runs has spent and reserved: one `Ledger`, handed down from the root run.

Each LM call goes through *reserve, send, settle*. `Ledger.try_reserve` sets aside what the call may cost, so that any
number of calls at once can't spend the same money; `Reservation.settle` replaces that by what it did cost.

`mode="hard"` reserves upper bounds: one input token per byte, and an output cap which the request must carry
(`output_cap`). Then neither limit is ever crossed, as long as the provider keeps to the cap and to the price given.
`mode="soft"` reserves what a call will likely use: one input token per 3 bytes and, as output, the 95th percentile of
what this tree's last calls of the same model used. It then goes over by at most what was in flight.

Money is counted in whole picodollars, as `money.py` says, so a million small sums add up exactly. Not thread-safe: a
ledger belongs to one event loop.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN
from typing import TYPE_CHECKING, Any, Literal

import anyio
import anyio.lowlevel
from msgspec import structs

from .errors import (
    BudgetExceededError,
    ConfigurationError,
    LimitError,
    SubcallLimitExceededError,
    TokenLimitExceededError,
)
from .money import (
    PICO,
    Need,
    Percentile,
    Price,
    Rates,
    ReportedUsage,
    Reservation,
    Settlement,
    Size,
    likely_tokens,
    picodollars,
)
from .types import ModelUsageSummary, UsageSummary

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Ledger", "LimitsMode", "Need", "Price", "ReportedUsage", "Reservation", "Settlement"]

LimitsMode = Literal["soft", "hard"]

FIRST_OUTPUT_GUESS = 1_000
"""Output tokens a soft ledger reserves for a model that no call of the tree has used yet. Only a guess: it can make a
call wait for others, but alone it never refuses one."""

HARD_OUTPUT_CAP = 4_096
"""Output tokens a hard ledger allows a reply whose request sets no cap of its own; less if a limit is so small that it
is under sixteen such replies (see `Ledger.output_cap`)."""

_SMALLEST_CAP = 256
_REPLIES_PER_LIMIT = 16


class _Waiter:
    """A call in the queue. `served` is set once it has a reservation or a refusal."""

    __slots__ = ("need", "refusal", "reservation", "served")

    def __init__(self, need: Need) -> None:
        self.need = need
        self.served = anyio.Event()
        self.reservation: Reservation | None = None
        self.refusal: LimitError | None = None


class Ledger:
    """What one tree of runs may use, has used, and has promised to calls in flight.

    Args:
        max_budget: USD. Every call then needs a price.
        max_tokens: Input and output together.
        max_subcalls: LM calls made by cells.
        mode: See the module.
        on_settle: Called with each `Settlement`, in order, once the sums hold it.

    Raises:
        ConfigurationError: if a limit is negative or not a number, or `mode` is unknown.
    """

    def __init__(
        self,
        *,
        max_budget: float | None = None,
        max_tokens: int | None = None,
        max_subcalls: int | None = None,
        mode: LimitsMode = "soft",
        on_settle: Callable[[Settlement], None] | None = None,
    ) -> None:
        for name, limit in (("max_budget", max_budget), ("max_tokens", max_tokens), ("max_subcalls", max_subcalls)):
            if limit is not None and not (0 <= limit < math.inf):
                raise ConfigurationError(f"{name} must be a number of at least 0, or None for no limit, not {limit!r}")
        if mode not in ("soft", "hard"):
            raise ConfigurationError(f'limits must be "soft" or "hard", not {mode!r}')
        self.max_budget = max_budget
        self.max_tokens = max_tokens
        self.max_subcalls = max_subcalls
        self.mode: LimitsMode = mode
        self._on_settle = on_settle
        self._budget = None if max_budget is None else picodollars(max_budget, ROUND_FLOOR)

        # Sums of all settlements. Only `_book` writes them.
        self._spent = 0
        self._tokens = 0
        self._models: dict[str, ModelUsageSummary] = {}
        self._money_by_model: dict[str, int] = {}
        self._unpriced: set[str] = set()
        """Models of which some call's cost is not known."""
        self._outputs: dict[str, Percentile] = {}
        self._subcalls = 0

        # Sums of the sizes of all open reservations, and how many there are: `try_reserve` adds, `_book` takes away.
        self._open = 0
        self._reserved_money = 0
        self._reserved_tokens = 0
        self._held = Size()
        """Kept from every call that is not closing. Zero once a closing call has been let through."""

        self._queue: OrderedDict[_Waiter, None] = OrderedDict()
        """Calls inside `reserve`, first come first. While any waits, a reservation is open."""

    # ---- reserving ---------------------------------------------------------------------------------------------------

    def try_reserve(self, need: Need) -> Reservation | None:
        """Room for a call, or None if there is none now but calls in flight may give some back.

        Then give up what others may need, such as a permit of the gate, and await `reserve`.

        Raises:
            BudgetExceededError, TokenLimitExceededError: if there is no room and nothing in flight.
            ConfigurationError: if the ledger has a budget and the call no price.
        """
        if need.price is None and self._budget is not None:
            raise ConfigurationError(
                f"max_budget needs the price of {need.model!r}: pass price={{'input': USD, 'output': USD}} "
                "(per million tokens) in backend_kwargs, or leave max_budget out"
            )
        if self._queue and not need.closing:
            return None  # they came first
        return self._admit(need)

    async def reserve(self, need: Need) -> Reservation:
        """Room for a call, waiting for it while anything is in flight, first come first served.

        Raises:
            BudgetExceededError, TokenLimitExceededError: if there is no room and nothing in flight.
            ConfigurationError: if the ledger has a budget and the call no price.
        """
        await anyio.lowlevel.checkpoint()
        if (reservation := self.try_reserve(need)) is not None:
            return reservation
        waiter = _Waiter(need)
        self._queue[waiter] = None
        try:
            await waiter.served.wait()
        except BaseException:
            self._queue.pop(waiter, None)
            if waiter.reservation is not None:
                waiter.reservation.release()
            else:
                self._serve()  # the next in line may need less
            raise
        if waiter.reservation is None:
            raise waiter.refusal or AssertionError("served with nothing")
        return waiter.reservation

    def book(self, settlement: Settlement) -> None:
        """Book what a call came to when it was made, in a run that is now replayed."""
        money = 0 if settlement.cost is None else picodollars(settlement.cost, ROUND_HALF_EVEN)
        self._open += 1  # which `_book` takes away
        self._book(Size(), Size(settlement.input_tokens, settlement.output_tokens, money), settlement)

    def hold_back(self, need: Need) -> None:
        """Keep room for the last call of the run, which says `closing=True`. A new allowance replaces the old one.

        Never more than half of a limit is kept, so that a small limit leaves something to work with.
        """
        size = self._size(need, None if need.price is None else Rates.of(need.price))
        size = size.times(need.models) if self.mode == "hard" else size
        money = size.money if self._budget is None else min(size.money, self._budget // 2)
        tokens = size.tokens if self.max_tokens is None else min(size.tokens, self.max_tokens // 2)
        self._held = Size(input_tokens=tokens, money=money)

    def output_cap(self, need: Need) -> int | None:
        """Most output tokens the request of this call must allow: None in soft mode, where the caller's own cap stands.

        In hard mode the caller's cap or, without one, `HARD_OUTPUT_CAP`; where a limit is small, a sixteenth of it, but
        at least 256 tokens.
        """
        if self.mode == "soft" or need.output_cap is not None or (self._budget is None and self.max_tokens is None):
            return need.output_cap
        cap = HARD_OUTPUT_CAP
        if self.max_tokens is not None:
            cap = min(cap, self.max_tokens // _REPLIES_PER_LIMIT)
        if self._budget is not None and need.price is not None and (rate := Rates.of(need.price).output):
            cap = min(cap, self._budget // rate // _REPLIES_PER_LIMIT)
        return max(cap, _SMALLEST_CAP)

    def count_subcall(self) -> None:
        """Count one LM call made by a cell.

        Raises:
            SubcallLimitExceededError: if all that are allowed have been made.
        """
        if self.max_subcalls is not None and self._subcalls >= self.max_subcalls:
            raise SubcallLimitExceededError(self._subcalls, self.max_subcalls)
        self._subcalls += 1

    # ---- reading -----------------------------------------------------------------------------------------------------

    @property
    def spent(self) -> float:
        """USD of all settled calls with a known cost."""
        return self._spent / PICO

    @property
    def tokens(self) -> int:
        """Input and output tokens of all settled calls."""
        return self._tokens

    @property
    def subcalls(self) -> int:
        """LM calls made by cells so far."""
        return self._subcalls

    def left(self) -> dict[str, Any]:
        """What may still be reserved: `money` (USD), `tokens` and `calls`; None where there is no limit."""
        money, tokens = self._room(closing=False)
        calls = None if self.max_subcalls is None else self.max_subcalls - self._subcalls
        return {
            "money": None if money is None else max(0, money) / PICO,
            "tokens": None if tokens is None else max(0, tokens),
            "calls": calls,
        }

    def usage(self) -> UsageSummary:
        """A copy of the sums by model."""
        return UsageSummary(
            model_usage_summaries={name: structs.replace(summary) for name, summary in self._models.items()}
        )

    def __repr__(self) -> str:
        of = "" if self.max_budget is None else f" of ${self.max_budget:.6f}"
        tokens_of = "" if self.max_tokens is None else f" of {self.max_tokens:,}"
        return f"<Ledger {self.mode} ${self.spent:.6f}{of}, {self._tokens:,}{tokens_of} tokens, {self._open} in flight>"

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _admit(self, need: Need) -> Reservation | None:
        rates = None if need.price is None else Rates.of(need.price)
        size = self._size(need, rates)
        if not self._fits(size, need.closing):
            if self._open:
                return None
            if not self._goes_alone(need, size, rates):
                raise self._refusal(size, need.closing)
        if need.closing:
            self._held = Size()
        self._open += 1
        self._reserved_money += size.money
        self._reserved_tokens += size.tokens
        return Reservation(self._book, need, size, rates)

    def _serve(self) -> None:
        """Serve the queue from its head, as far as there is room; with nothing in flight each is let in or refused."""
        while self._queue:
            waiter = next(iter(self._queue))
            try:
                waiter.reservation = self._admit(waiter.need)
                if waiter.reservation is None:
                    return
            except LimitError as refusal:
                waiter.refusal = refusal
            self._queue.popitem(last=False)
            waiter.served.set()

    def _size(self, need: Need, rates: Rates | None) -> Size:
        if self.mode == "hard":
            input_tokens = need.input_bytes
            output_tokens = self.output_cap(need) or 0
            input_rate = 0 if rates is None else rates.dearest_input()
        else:
            input_tokens = likely_tokens(need.input_bytes)
            known = self._outputs.get(need.model)
            output_tokens = FIRST_OUTPUT_GUESS if known is None else known.value()
            if need.output_cap is not None:
                output_tokens = min(output_tokens, need.output_cap)
            input_rate = 0 if rates is None else rates.input
        money = 0 if rates is None else input_tokens * input_rate + output_tokens * rates.output
        return Size(input_tokens, output_tokens, money)

    def _room(self, *, closing: bool) -> tuple[int | None, int | None]:
        """Picodollars and tokens that are neither spent, nor reserved, nor held back; may be negative."""
        held = Size() if closing else self._held
        money = None if self._budget is None else self._budget - self._spent - self._reserved_money - held.money
        tokens = (
            None if self.max_tokens is None else self.max_tokens - self._tokens - self._reserved_tokens - held.tokens
        )
        return money, tokens

    def _fits(self, size: Size, closing: bool) -> bool:
        money, tokens = self._room(closing=closing)
        return (money is None or size.money <= money) and (tokens is None or size.tokens <= tokens)

    def _goes_alone(self, need: Need, size: Size, rates: Rates | None) -> bool:
        """Whether a call that does not fit may go because nothing else is in flight. It is then all that can go over.

        A soft ledger refuses no call because of a mere guess, and lets the closing call use the last room there is.
        """
        if self.mode == "hard":
            return False
        money, tokens = self._room(closing=need.closing)
        if not ((money is None or money > 0) and (tokens is None or tokens > 0)):
            return False
        if need.closing:
            return True
        input_only = Size(size.input_tokens, 0, 0 if rates is None else size.input_tokens * rates.input)
        return need.model not in self._outputs and self._fits(input_only, closing=False)

    def _refusal(self, size: Size, closing: bool) -> BudgetExceededError | TokenLimitExceededError:
        money = self._room(closing=closing)[0]
        held = Size() if closing else self._held
        if self.max_budget is not None and money is not None and size.money > money:
            asked = (
                f"${self.spent:.6f} of ${self.max_budget:.6f} spent, the next call may cost ${size.money / PICO:.6f}"
            )
            kept = f", ${held.money / PICO:.6f} is kept for the closing answer" if held.money else ""
            return BudgetExceededError(self.spent, self.max_budget, f"budget exceeded: {asked}{kept}")
        limit = self.max_tokens or 0
        asked = f"{self._tokens:,} of {limit:,} used, the next call may use {size.tokens:,}"
        kept = f", {held.tokens:,} are kept for the closing answer" if held.tokens else ""
        return TokenLimitExceededError(self._tokens, limit, f"token limit exceeded: {asked}{kept}")

    def _book(self, reserved: Size, used: Size | None, settlement: Settlement | None) -> None:
        self._open -= 1
        self._reserved_money -= reserved.money
        self._reserved_tokens -= reserved.tokens
        if used is not None and settlement is not None:
            self._spent += used.money
            self._tokens += used.tokens
            self._add(used, settlement)
        self._serve()
        if settlement is not None and self._on_settle is not None:
            self._on_settle(settlement)

    def _add(self, used: Size, settlement: Settlement) -> None:
        name = settlement.model
        model = self._models.setdefault(name, ModelUsageSummary())
        model.total_calls += 1
        model.total_input_tokens += settlement.input_tokens
        model.total_output_tokens += settlement.output_tokens
        model.cached_tokens += settlement.cached_tokens
        model.reasoning_tokens += settlement.reasoning_tokens
        if settlement.cost is not None:
            self._money_by_model[name] = self._money_by_model.get(name, 0) + used.money
            model.total_cost = self._money_by_model[name] / PICO
        else:
            self._unpriced.add(name)
        partly_priced = name in self._unpriced and name in self._money_by_model
        model.complete = model.complete and not settlement.estimated and not partly_priced
        if not settlement.estimated:
            self._outputs.setdefault(name, Percentile()).add(settlement.output_tokens)
