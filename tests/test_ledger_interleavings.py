"""The ledger's promise in each mode, whatever the order in which calls begin, end, fail and give up."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from asyncrlm.errors import LimitError
from asyncrlm.ledger import Ledger, Need, Price, Reservation, Settlement
from asyncrlm.lm.base import LMUsage

PRICES = [
    Price(1.0, cached=0.1, output=10.0),
    Price(0.075, output=0.3),
    Price(0.0),
    Price(3.0, cached=0.3, output=15.0, cache_write=3.75),
]


class Interleavings(RuleBasedStateMachine):
    """Calls in any order, each using at most its upper bound: the promises of both modes, and the sums."""

    open_calls: Bundle[tuple[Reservation, Need]] = Bundle("open_calls")

    @initialize(
        mode=st.sampled_from(["soft", "hard"]),
        budget=st.none() | st.floats(0, 0.05),
        tokens=st.none() | st.integers(0, 20_000),
    )
    def begin(self, mode: Any, budget: float | None, tokens: int | None) -> None:
        self.settled: list[Settlement] = []
        self.ledger = Ledger(max_budget=budget, max_tokens=tokens, mode=mode, on_settle=self.settled.append)
        self.open: dict[Reservation, Need] = {}
        self.closing_held = False
        # What those that were in flight at the last admission have used: all by which a soft ledger may be over.
        self.at_last_admission: set[Reservation] = set()
        self.used_since = (0.0, 0)

    @rule(
        target=open_calls,
        input_bytes=st.integers(0, 9_000),
        cap=st.none() | st.integers(1, 3_000),
        price=st.sampled_from(PRICES),
        model=st.sampled_from(["a", "b"]),
        closing=st.integers(0, 9).map(lambda n: n == 0),
    )
    def reserve(self, input_bytes: int, cap: int | None, price: Price, model: str, closing: bool) -> Any:
        what = Need(model=model, input_bytes=input_bytes, output_cap=cap, price=price, closing=closing)
        try:
            reservation = self.ledger.try_reserve(what)
        except LimitError:
            assert not self.open, "refused although something in flight may give room back"
            return multiple()
        if reservation is None:
            assert self.open, "told to wait although nothing is in flight"
            return multiple()
        self.open[reservation] = what
        self.at_last_admission = set(self.open)
        self.used_since = (0.0, 0)
        return reservation, what

    @rule(call=consumes(open_calls), shares=st.tuples(st.floats(0, 1), st.floats(0, 1)), cached=st.floats(0, 1))
    def settle(self, call: tuple[Reservation, Need], shares: tuple[float, float], cached: float) -> None:
        reservation, what = call
        input_tokens = int(what.input_bytes * shares[0])
        output_tokens = int((self.ledger.output_cap(what) or 5_000) * shares[1])
        usage = LMUsage(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cached_tokens=int(input_tokens * cached),
            cache_write_tokens=input_tokens - int(input_tokens * cached),
        )
        self._end(reservation, lambda: reservation.settle(usage))

    @rule(call=consumes(open_calls))
    def estimate(self, call: tuple[Reservation, Need]) -> None:
        self._end(call[0], call[0].settle_estimated)
        assert self.settled[-1].estimated

    @rule(call=consumes(open_calls))
    def release(self, call: tuple[Reservation, Need]) -> None:
        before = len(self.settled)
        self._end(call[0], call[0].release)
        assert len(self.settled) == before

    @rule(input_bytes=st.integers(0, 3_000))
    def hold_back(self, input_bytes: int) -> None:
        self.ledger.hold_back(Need(model="a", input_bytes=input_bytes, output_cap=500, price=PRICES[0]))

    def _end(self, reservation: Reservation, end: Any) -> None:
        before = len(self.settled)
        end()
        del self.open[reservation]
        for settlement in self.settled[before:]:
            money, tokens = self.used_since
            self.used_since = (
                money + (settlement.cost or 0.0),
                tokens + settlement.input_tokens + settlement.output_tokens,
            )

    @invariant()
    def sums_are_the_fold_of_settlements(self) -> None:
        tokens = sum(s.input_tokens + s.output_tokens for s in self.settled)
        money = sum(round((s.cost or 0.0) * 1e12) for s in self.settled)
        usage = self.ledger.usage()
        assert self.ledger.tokens == tokens == usage.total_input_tokens + usage.total_output_tokens
        assert round(self.ledger.spent * 1e12) == money
        assert usage.total_calls == len(self.settled)
        assert usage.complete is not any(s.estimated for s in self.settled)

    @invariant()
    def the_mode_keeps_its_promise(self) -> None:
        ledger = self.ledger
        over_money, over_tokens = self.used_since if ledger.mode == "soft" else (0.0, 0)
        if ledger.max_budget is not None:
            assert ledger.spent <= ledger.max_budget + over_money * (1 + 1e-12)
        if ledger.max_tokens is not None:
            assert ledger.tokens <= ledger.max_tokens + over_tokens

    @precondition(lambda self: not self.open)
    @invariant()
    def nothing_stays_reserved(self) -> None:
        assert "0 in flight" in repr(self.ledger)
        self.ledger.hold_back(Need(model="a", input_bytes=0, output_cap=0, price=Price(0.0)))
        if self.ledger.max_tokens is not None:
            assert self.ledger.left()["tokens"] == max(0, self.ledger.max_tokens - self.ledger.tokens)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    mode=st.sampled_from(["soft", "hard"]),
    tokens=st.integers(0, 5_000),
    calls=st.lists(
        st.tuples(
            st.integers(0, 1_500),  # input bytes
            st.integers(1, 1_500),  # output cap
            st.floats(0, 1),  # share of the cap used
            st.integers(0, 4),  # scheduler rounds in flight
            st.sampled_from(["settle", "settle", "estimate", "release", "give up"]),
        ),
        max_size=25,
    ),
)
def test_nobody_waits_for_ever(backend: str, mode: Any, tokens: int, calls: list[Any]) -> None:
    """Tasks that queue for room, some of which give up meanwhile, all end; and the promise holds."""
    in_flight: dict[Reservation, int] = {}
    most_over = 0

    async def call(ledger: Ledger, input_bytes: int, cap: int, share: float, rounds: int, end: str) -> None:
        nonlocal most_over
        with anyio.CancelScope() as scope:
            if end == "give up" and rounds % 2:
                scope.cancel()
            try:
                reservation = await ledger.reserve(
                    Need(model="m", input_bytes=input_bytes, output_cap=cap, price=PRICES[0])
                )
            except LimitError:
                return
            output = int(cap * share)
            in_flight[reservation] = input_bytes + cap
            most_over = max(most_over, sum(in_flight.values()))
            try:
                for _ in range(rounds):
                    await anyio.lowlevel.checkpoint()
            finally:
                del in_flight[reservation]
                if end == "settle":
                    reservation.settle(LMUsage(input_tokens=input_bytes, output_tokens=output))
                elif end == "release":
                    reservation.release()
                else:
                    reservation.settle_estimated()

    async def main() -> None:
        ledger = Ledger(max_tokens=tokens, mode=mode)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for each in calls:
                    tasks.start_soon(call, ledger, *each)
        assert "0 in flight" in repr(ledger)
        assert ledger.tokens <= tokens + (most_over if mode == "soft" else 0)

    anyio.run(main, backend=backend)
