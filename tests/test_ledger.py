"""The ledger's promise in each mode, over any interleaving of calls."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncrlm.errors import (
    BudgetExceededError,
    ConfigurationError,
    SubcallLimitExceededError,
    TokenLimitExceededError,
)
from asyncrlm.ledger import FIRST_OUTPUT_GUESS, HARD_OUTPUT_CAP, Ledger, Need, Price, Reservation, Settlement
from asyncrlm.lm.base import LMUsage

if TYPE_CHECKING:
    from collections.abc import Iterator

PRICE = Price(1.0, cached=0.1, output=10.0, cache_write=1.25)


def need(input_bytes: int = 300, *, model: str = "m", **kwargs: Any) -> Need:
    return Need(model=model, input_bytes=input_bytes, **({"output_cap": None, "price": PRICE} | kwargs))


def used(input_tokens: int | None, output_tokens: int | None, **kwargs: Any) -> LMUsage:
    return LMUsage(input_tokens=input_tokens, output_tokens=output_tokens, **kwargs)


def reserved(ledger: Ledger, what: Need) -> Reservation:
    reservation = ledger.try_reserve(what)
    assert reservation is not None
    return reservation


# ---- what a settlement says ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usage", "cost", "expected"),
    [
        (used(100, 10), None, Settlement("m", 100, 10, 0, 0, 0.0002, False)),
        (used(100, 10, cached_tokens=80, reasoning_tokens=4), None, Settlement("m", 100, 10, 80, 4, 0.000128, False)),
        (used(100, 10, cache_write_tokens=50), None, Settlement("m", 100, 10, 0, 0, 0.0002125, False)),
        (
            used(100, 10, cached_tokens=80, cache_write_tokens=90),
            None,
            Settlement("m", 100, 10, 80, 0, 0.000133, False),
        ),
        (used(100, 10, cached_tokens=900), None, Settlement("m", 100, 10, 100, 0, 0.00011, False)),
        (used(100, 10, cost=0.5), None, Settlement("m", 100, 10, 0, 0, 0.5, False)),
        (used(100, 10, cost=0.5), 0.25, Settlement("m", 100, 10, 0, 0, 0.25, False)),
        (used(100, 10, cost=-1.0), None, Settlement("m", 100, 10, 0, 0, 0.0002, False)),
        (used(100, 10, cost=math.inf), math.nan, Settlement("m", 100, 10, 0, 0, 0.0002, False)),
        (used(-5, 10), None, Settlement("m", 100, 10, 0, 0, 0.0002, True)),
        (used(50, None), None, Settlement("m", 50, 20, 0, 0, 0.00025, True)),
        (None, None, Settlement("m", 100, 20, 0, 0, 0.0003, True)),
        (None, 0.125, Settlement("m", 100, 20, 0, 0, 0.125, True)),
    ],
)
def test_settlement(usage: LMUsage | None, cost: float | None, expected: Settlement) -> None:
    heard: list[Settlement] = []
    ledger = Ledger(on_settle=heard.append)
    reserved(ledger, need(output_cap=20)).settle(usage, cost=cost)
    assert heard == [expected]
    summary = ledger.usage().model_usage_summaries["m"]
    assert (summary.total_calls, summary.total_input_tokens, summary.total_output_tokens) == (
        1,
        expected.input_tokens,
        expected.output_tokens,
    )
    assert summary.total_cost == expected.cost == ledger.spent
    assert summary.complete is not expected.estimated


def test_unknown_cost_is_not_zero() -> None:
    ledger = Ledger()
    reserved(ledger, need(price=None)).settle(used(1, 1))
    assert ledger.usage().total_cost is None
    assert ledger.usage().complete
    reserved(ledger, need(price=None)).settle(used(1, 1, cost=0.0))
    assert ledger.usage().total_cost == 0.0
    assert not ledger.usage().complete
    reserved(ledger, need(price=None)).settle(used(1, 1, cost=0.0))
    assert not ledger.usage().complete


def test_what_was_settled_elsewhere_is_booked_as_it_was() -> None:
    heard: list[Settlement] = []
    first, second = Ledger(), Ledger(max_tokens=100, on_settle=heard.append)
    settled = [reserved(first, need(600, output_cap=20)).settle_estimated(), reserved(first, need()).settle(used(7, 3))]
    for settlement in settled:
        second.book(settlement)
    assert heard == settled
    assert (second.tokens, second.spent, second.usage()) == (first.tokens, first.spent, first.usage())
    assert "0 in flight" in repr(second)


def test_small_sums_add_up_exactly() -> None:
    ledger = Ledger(max_budget=1000.0)
    price = Price(0.075, output=0.3)
    for _ in range(10_000):
        reserved(ledger, need(3, price=price)).settle(used(1, 1))
    assert ledger.spent == 0.00375
    assert ledger.usage().total_cost == 0.00375


def test_usage_is_a_copy() -> None:
    ledger = Ledger()
    reserved(ledger, need()).settle(used(1, 1))
    ledger.usage().model_usage_summaries["m"].total_calls = 99
    assert ledger.usage().total_calls == 1


@pytest.mark.parametrize("first", ["settle", "settle_estimated", "release"])
@pytest.mark.parametrize("second", ["settle", "settle_estimated", "release"])
def test_a_reservation_ends_once(first: str, second: str) -> None:
    ledger = Ledger()
    reservation = reserved(ledger, need())
    assert "open" in repr(reservation)
    ends = {
        "settle": lambda: reservation.settle(used(1, 1)),
        "settle_estimated": reservation.settle_estimated,
        "release": reservation.release,
    }
    ends[first]()
    before = ledger.usage()
    with pytest.raises(RuntimeError, match="already"):
        ends[second]()
    assert ledger.usage() == before
    assert "ended" in repr(reservation)
    assert "0 in flight" in repr(ledger)


# ---- refusing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"max_budget": -1.0}, {"max_budget": math.nan}, {"max_tokens": -1}, {"max_subcalls": -1}, {"mode": "firm"}],
)
def test_wrong_limits(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong)).replace("mode", "limits")):
        Ledger(**wrong)


def test_a_budget_needs_a_price() -> None:
    with pytest.raises(ConfigurationError, match="price of 'm'"):
        Ledger(max_budget=1.0).try_reserve(need(price=None))
    assert Ledger(max_budget=0.0).try_reserve(need(price=Price(0.0))) is not None


def test_subcalls() -> None:
    ledger = Ledger(max_subcalls=2)
    ledger.count_subcall()
    assert ledger.left() == {"money": None, "tokens": None, "calls": 1}
    ledger.count_subcall()
    with pytest.raises(SubcallLimitExceededError) as caught:
        ledger.count_subcall()
    assert (caught.value.subcalls, caught.value.limit, ledger.subcalls) == (2, 2, 2)
    unlimited = Ledger()
    unlimited.count_subcall()
    assert unlimited.subcalls == 1


@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_no_room_waits_while_something_is_open_and_raises_after(mode: Any) -> None:
    ledger = Ledger(max_tokens=1_000, mode=mode)
    first = reserved(ledger, need(600, output_cap=300))
    assert ledger.try_reserve(need(600, output_cap=600)) is None
    first.settle(used(600, 300))
    with pytest.raises(TokenLimitExceededError, match="900 of 1,000 used") as caught:
        ledger.try_reserve(need(600, output_cap=600))
    assert (caught.value.tokens_used, caught.value.token_limit) == (900, 1_000)


def test_budget_refusal_names_the_money() -> None:
    ledger = Ledger(max_budget=0.001, mode="hard")
    with pytest.raises(BudgetExceededError, match=r"\$0.000000 of \$0.001000 spent, the next call may cost") as caught:
        ledger.try_reserve(need(3_000))
    assert (caught.value.spent, caught.value.budget) == (0.0, 0.001)


def test_released_room_is_had_again() -> None:
    ledger = Ledger(max_tokens=1_000, mode="hard")
    reserved(ledger, need(500, output_cap=500)).release()
    assert ledger.left()["tokens"] == 1_000
    assert ledger.usage().total_calls == 0
    reserved(ledger, need(500, output_cap=500))


def test_soft_learns_what_a_model_writes() -> None:
    ledger = Ledger(max_tokens=10**9)
    for output in range(1, 101):
        reserved(ledger, need(0)).settle(used(0, output))
    before = ledger.left()["tokens"]
    reserved(ledger, need(300))
    assert before - ledger.left()["tokens"] == 100 + 95
    before = ledger.left()["tokens"]
    reserved(ledger, need(0, model="other"))
    assert before - ledger.left()["tokens"] == FIRST_OUTPUT_GUESS


def test_soft_forgets_old_calls() -> None:
    ledger = Ledger(max_tokens=10**9)
    for output in [5_000] * 600 + [10] * 600:
        reserved(ledger, need(0)).settle(used(0, output))
    before = ledger.left()["tokens"]
    reserved(ledger, need(0))
    assert before - ledger.left()["tokens"] == 10


def test_soft_learns_nothing_from_an_estimate() -> None:
    ledger = Ledger(max_tokens=10**9)
    reserved(ledger, need(0, output_cap=7)).settle_estimated()
    before = ledger.left()["tokens"]
    reserved(ledger, need(0))
    assert before - ledger.left()["tokens"] == FIRST_OUTPUT_GUESS


def test_a_guess_alone_refuses_no_call() -> None:
    ledger = Ledger(max_tokens=500)
    reserved(ledger, need(300)).settle(used(100, 50))
    ledger = Ledger(max_tokens=50)
    with pytest.raises(TokenLimitExceededError):
        ledger.try_reserve(need(300))


@pytest.mark.parametrize(
    ("limits", "what", "cap"),
    [
        ({"mode": "soft", "max_tokens": 1_000}, need(), None),
        ({"mode": "soft", "max_tokens": 1_000}, need(output_cap=7), 7),
        ({"mode": "hard"}, need(), None),
        ({"mode": "hard", "max_tokens": 10**9}, need(), HARD_OUTPUT_CAP),
        ({"mode": "hard", "max_tokens": 10**9}, need(output_cap=9_999), 9_999),
        ({"mode": "hard", "max_tokens": 16_000}, need(), 1_000),
        ({"mode": "hard", "max_budget": 0.16}, need(), 1_000),
        ({"mode": "hard", "max_budget": 0.16}, need(price=Price(1.0)), HARD_OUTPUT_CAP),
        ({"mode": "hard", "max_tokens": 10}, need(), 256),
    ],
)
def test_output_cap(limits: dict[str, Any], what: Need, cap: int | None) -> None:
    assert Ledger(**limits).output_cap(what) == cap


# ---- the closing allowance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_only_the_closing_call_uses_the_allowance(mode: Any) -> None:
    ledger = Ledger(max_tokens=2_000, max_budget=1.0, mode=mode)
    ledger.hold_back(need(300, output_cap=300))
    kept = 400 if mode == "soft" else 600
    assert ledger.left()["tokens"] == 2_000 - kept
    reserved(ledger, need(0, output_cap=1_400)).settle(used(0, 1_400))
    with pytest.raises(TokenLimitExceededError, match="kept for the closing answer"):
        ledger.try_reserve(need(300, output_cap=300))
    closing = reserved(ledger, need(300, output_cap=300, closing=True))
    closing.settle(used(100, 300))
    assert ledger.tokens == 1_800
    assert ledger.left()["tokens"] == 200


def test_an_allowance_is_replaced_and_never_over_half() -> None:
    ledger = Ledger(max_tokens=1_000, max_budget=0.004, mode="hard")
    ledger.hold_back(need(100, output_cap=100))
    ledger.hold_back(need(200, output_cap=100))
    assert ledger.left() == {"money": 0.00275, "tokens": 700, "calls": None}
    ledger.hold_back(need(5_000, output_cap=100))
    assert ledger.left() == {"money": 0.002, "tokens": 500, "calls": None}
    with pytest.raises(BudgetExceededError, match="kept for the closing answer"):
        ledger.try_reserve(need(300, output_cap=300))


@pytest.mark.parametrize(("mode", "kept"), [("hard", 600), ("soft", 134)])
def test_an_allowance_is_for_each_model_that_may_be_asked(mode: Any, kept: int) -> None:
    ledger = Ledger(max_tokens=10_000, mode=mode)
    ledger.hold_back(need(100, output_cap=100, models=3))
    assert ledger.left()["tokens"] == 10_000 - kept


def test_soft_closing_takes_the_last_room() -> None:
    ledger = Ledger(max_tokens=1_000)
    ledger.hold_back(need(900, output_cap=100))
    reserved(ledger, need(0, output_cap=600)).settle(used(0, 900))
    reserved(ledger, need(900, output_cap=100, closing=True)).settle(used(300, 100))
    with pytest.raises(TokenLimitExceededError):
        ledger.try_reserve(need(900, output_cap=100, closing=True))


# ---- waiting ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hard() -> Iterator[Ledger]:
    ledger = Ledger(max_tokens=1_000, mode="hard")
    yield ledger
    assert ledger.tokens <= 1_000


@pytest.mark.anyio
async def test_everybody_gets_room_or_the_error(hard: Ledger) -> None:
    """40 calls of at most 100 tokens that use 50: 19 fit, the others get the error, nobody waits for ever."""
    ended: list[str] = []

    async def call() -> None:
        try:
            reservation = await hard.reserve(need(50, output_cap=50))
        except TokenLimitExceededError:
            ended.append("refused")
            return
        await anyio.lowlevel.checkpoint()
        reservation.settle(used(25, 25))
        ended.append("done")

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for _ in range(40):
                tasks.start_soon(call)
    assert len(ended) == 40
    assert ended.count("done") == 19
    assert hard.tokens == 950


@pytest.mark.anyio
async def test_first_come_first_served(hard: Ledger) -> None:
    """A big call is not overtaken by small ones that came later."""
    order: list[int] = []
    first = reserved(hard, need(500, output_cap=400))

    async def call(number: int, size: int) -> None:
        reservation = await hard.reserve(need(size, output_cap=0))
        order.append(number)
        reservation.release()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for number, size in enumerate([1_000, 10, 995]):
                tasks.start_soon(call, number, size)
                await anyio.wait_all_tasks_blocked()
            assert hard.try_reserve(need(10, output_cap=0)) is None
            first.release()
    assert order == [0, 1, 2]


@pytest.mark.anyio
async def test_a_cancelled_waiter_leaves_its_turn_to_the_next(hard: Ledger) -> None:
    """Cancelled in the same moment as room comes, the first must not keep the second from it."""
    first = reserved(hard, need(500, output_cap=400))
    served = 0
    scope = anyio.CancelScope()

    async def call() -> None:
        nonlocal served
        reservation = await hard.reserve(need(400, output_cap=400))
        reservation.release()
        served += 1

    async def doomed() -> None:
        with scope:
            await call()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(doomed)
            await anyio.wait_all_tasks_blocked()
            for _ in range(8):
                tasks.start_soon(call)
            await anyio.wait_all_tasks_blocked()
            first.release()
            scope.cancel()
    assert served >= 8
    assert hard.left()["tokens"] == 1_000


@pytest.mark.anyio
async def test_a_waiter_can_be_cancelled(hard: Ledger) -> None:
    """A big one that gives up lets a small one behind it in, though nothing was settled meanwhile."""
    open_ = reserved(hard, need(300, output_cap=300))
    scope = anyio.CancelScope()
    got: list[Reservation] = []

    async def big() -> None:
        with scope:
            await hard.reserve(need(500, output_cap=400))

    async def small() -> None:
        got.append(await hard.reserve(need(100, output_cap=100)))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(big)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(small)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    assert len(got) == 1
    for reservation in (open_, *got):
        reservation.release()
    assert hard.left()["tokens"] == 1_000


def test_a_task_cancelled_with_room_in_hand_gives_it_back(hard: Ledger) -> None:
    async def main() -> None:
        first = reserved(hard, need(500, output_cap=400))
        waiting = asyncio.create_task(hard.reserve(need(400, output_cap=400)))
        await anyio.wait_all_tasks_blocked()
        first.release()
        waiting.cancel()  # which reaches the task though it has been served
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    assert hard.left()["tokens"] == 1_000


@pytest.mark.anyio
async def test_waiting_costs_the_same_for_each_call() -> None:
    """5,000 calls through room for ten: only who is served is woken, so this takes well under the cap."""
    ledger = Ledger(max_tokens=1_000_000, mode="hard")
    done = 0

    async def call() -> None:
        nonlocal done
        reservation = await ledger.reserve(need(50_000, output_cap=50_000))
        await anyio.lowlevel.checkpoint()
        reservation.settle(used(10, 10))
        done += 1

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for _ in range(5_000):
                tasks.start_soon(call)
    assert done == 5_000
