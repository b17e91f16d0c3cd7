"""Gates, retries, and the ledger around each attempt."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pacing_support import send as paced

from asyncrlm.errors import BudgetExceededError, LMError
from asyncrlm.ledger import Ledger, Need, Price
from asyncrlm.lm.base import LMClient, LMReply, LMRequest, LMUsage, Message
from asyncrlm.lm.pacing import Pacer
from asyncrlm.lm.pacing.gate import Gate
from asyncrlm.lm.pacing.pacer import account_of
from asyncrlm.testing import ScriptedLM

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio

REQUEST = LMRequest(messages=(Message("user", "hello"),))
PRICE = Price(input=1.0, output=1.0)
USED = LMUsage(input_tokens=100, output_tokens=100)


def need(**changes: Any) -> Need:
    return Need(**({"model": "m", "input_bytes": 300, "output_cap": 100, "price": PRICE} | changes))


def fault(kind: Any = "server", **changes: Any) -> LMError:
    return LMError("fault", **({"kind": kind, "retryable": True, "retry_after": 0.0} | changes))


def good(text: str = "good") -> LMReply:
    return LMReply(text=text, usage=USED)


async def settled(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.lowlevel.checkpoint()


# --- the gate -----------------------------------------------------------------------------------------------------


async def test_a_free_permit_is_had_without_giving_way() -> None:
    gate = Gate(2)
    entered = gate.acquire()
    with pytest.raises(StopIteration):
        entered.send(None)
    assert (gate.in_flight, gate.waiting) == (1, 0)
    assert "1/2 in flight" in repr(gate)


def test_a_gate_has_room_for_one_at_least() -> None:
    with pytest.raises(ValueError, match="not 0"):
        Gate(0)


async def test_permits_go_first_come_first_served() -> None:
    gate = Gate(1)
    assert gate.acquire_nowait()
    order: list[int] = []

    async def one(number: int) -> None:
        await gate.acquire()
        order.append(number)
        gate.release()

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(one, number)
            await settled(lambda number=number: gate.waiting == number + 1)
        assert not gate.acquire_nowait()
        gate.release()
    assert order == list(range(5))
    assert gate.in_flight == 0


async def test_a_permit_handed_to_a_cancelled_task_goes_on() -> None:
    gate = Gate(1)
    assert gate.acquire_nowait()
    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def doomed() -> None:
            with scope:
                await gate.acquire()
                gate.release()

        async def next_one() -> None:
            await gate.acquire()
            gate.release()

        tasks.start_soon(doomed)
        await settled(lambda: gate.waiting == 1)
        tasks.start_soon(next_one)
        await settled(lambda: gate.waiting == 2)
        gate.release()
        scope.cancel()
    assert (gate.in_flight, gate.waiting) == (0, 0)


@settings(max_examples=40, deadline=None)
@given(
    limit=st.integers(1, 4),
    holders=st.integers(1, 12),
    cancelled=st.sets(st.integers(0, 11)),
    seed=st.integers(0, 2**16),
    backend=st.sampled_from(["asyncio", "trio"]),
)
def test_no_interleaving_of_cancellations_loses_a_permit_or_grants_one_too_many(
    limit: int, holders: int, cancelled: set[int], seed: int, backend: str
) -> None:
    rng = random.Random(seed)
    gate = Gate(limit)
    inside = most = served = 0

    async def one(scope: anyio.CancelScope, rests: int) -> None:
        nonlocal inside, most, served
        with scope:
            await gate.acquire()
            inside += 1
            most = max(most, inside)
            try:
                for _ in range(rests):
                    await anyio.lowlevel.checkpoint()
                served += 1
            finally:
                inside -= 1
                gate.release()

    async def main() -> None:
        scopes = [anyio.CancelScope() for _ in range(holders)]
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for scope in scopes:
                    tasks.start_soon(one, scope, rng.randrange(4))
                for number in sorted(cancelled, key=lambda _: rng.random()):
                    for _ in range(rng.randrange(6)):
                        await anyio.lowlevel.checkpoint()
                    if number < holders:
                        scopes[number].cancel()

    anyio.run(main, backend=backend)
    assert (gate.in_flight, gate.waiting, inside) == (0, 0, 0)
    assert most <= limit
    assert served >= holders - len(cancelled)


# --- sending ------------------------------------------------------------------------------------------------------


async def send(lm: ScriptedLM, ledger: Ledger, *, gate: Gate | None = None, **changes: Any) -> LMReply:
    arguments = {"gate": gate or Gate(4), "ledger": ledger, "need": need()} | changes
    return await paced(Pacer(), lm, REQUEST, **arguments)


async def test_one_attempt_is_settled_with_what_the_reply_said() -> None:
    ledger = Ledger(max_budget=1.0)
    assert (await send(ScriptedLM([good()]), ledger)).text == "good"
    assert (ledger.spent, ledger.tokens) == (pytest.approx(200e-6), 200)
    assert ledger.usage().complete


async def test_what_may_pass_is_tried_again_and_costs_once() -> None:
    ledger = Ledger(max_budget=1.0)
    waits: list[tuple[int, float, LMError]] = []
    lm = ScriptedLM([fault("rate_limit"), fault("server"), fault("connection"), good()])
    gate = Gate(1)
    reply = await send(lm, ledger, gate=gate, on_wait=lambda *heard: waits.append(heard))
    assert (reply.text, reply.retries) == ("good", 3)
    assert [(attempt, error.kind) for attempt, _, error in waits] == [
        (1, "rate_limit"),
        (2, "server"),
        (3, "connection"),
    ]
    assert ledger.tokens == 200
    assert ledger.usage().total_calls == 1
    assert gate.in_flight == 0


async def test_back_off_holds_the_reservation_but_no_permit() -> None:
    ledger, gate, pacer = Ledger(max_budget=1.0), Gate(1), Pacer()
    lm = ScriptedLM([fault(retry_after=60.0)])
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            def look(*_: Any) -> None:
                tasks.start_soon(look_around)

            async def look_around() -> None:
                await settled(lambda: gate.in_flight == 0)
                assert pacer.in_flight == 0
                assert ledger.left()["money"] < 1.0
                scope.cancel()

            await paced(pacer, lm, REQUEST, gate=gate, ledger=ledger, need=need(), on_wait=look)
    assert ledger.left()["money"] == 1.0
    assert ledger.tokens == 0


@pytest.mark.parametrize("kind", ["authentication", "not_found", "too_long", "quota", "bad_request"])
async def test_what_will_not_pass_is_sent_once_and_costs_nothing(kind: Any) -> None:
    ledger, lm = Ledger(max_budget=1.0), ScriptedLM([fault(kind, retryable=False), good()])
    with pytest.raises(LMError) as caught:
        await send(lm, ledger)
    assert (caught.value.kind, len(lm.calls)) == (kind, 1)
    assert ledger.left()["money"] == 1.0


async def test_attempts_run_out() -> None:
    ledger, lm = Ledger(), ScriptedLM([fault() for _ in range(9)])
    with pytest.raises(LMError):
        await send(lm, ledger, attempts=3)
    assert len(lm.calls) == 3
    assert ledger.usage().total_calls == 0


async def test_an_attempt_that_may_have_cost_is_booked_and_the_next_reserves_anew() -> None:
    ledger = Ledger(max_budget=1.0, mode="hard")
    lm = ScriptedLM([fault("timeout", charged=True), fault("timeout", charged=True), good()])
    await send(lm, ledger)
    usage = ledger.usage()
    assert (usage.total_calls, usage.complete) == (3, False)
    assert ledger.tokens == 2 * (300 + 100) + 200


async def test_a_retry_that_no_money_is_left_for_is_not_sent() -> None:
    ledger = Ledger(max_budget=500e-6, mode="hard")
    lm = ScriptedLM([fault("timeout", charged=True), good()])
    with pytest.raises(BudgetExceededError):
        await send(lm, ledger)
    assert len(lm.calls) == 1


async def test_who_is_cancelled_as_its_turn_comes_sends_nothing() -> None:
    asked: list[LMRequest] = []

    class Quick(LMClient):
        model = "quick"

        async def acomplete(self, request: LMRequest) -> LMReply:
            asked.append(request)
            return good()

    gate, lm, pacer = Gate(1), Quick(), Pacer()
    await gate.acquire()
    scope = anyio.CancelScope()

    async def one() -> None:
        with scope:
            await paced(pacer, lm, REQUEST, gate=gate, ledger=Ledger(), need=need())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await settled(lambda: gate.waiting == 1)
        gate.release()  # the permit is its own from here on
        scope.cancel()
    assert not asked
    assert (gate.in_flight, pacer.in_flight) == (0, 0)


@pytest.mark.parametrize("error", [RuntimeError("a client's bug"), KeyboardInterrupt()])
async def test_whatever_a_client_raises_settles_and_frees(error: BaseException) -> None:
    async def buggy(request: LMRequest) -> str:
        raise error

    ledger, gate = Ledger(max_budget=1.0), Gate(1)
    with pytest.raises((LMError, KeyboardInterrupt)):  # the user's own, as trio raises it
        await send(ScriptedLM(buggy), ledger, gate=gate)
    assert gate.in_flight == 0
    assert not ledger.usage().complete


async def test_without_room_it_gives_its_permit_back_and_waits_for_the_ledger() -> None:
    # Money for one reservation only; a second account's request must pass the gate meanwhile.
    ledger, gate, pacer = Ledger(max_budget=450e-6, mode="hard"), Gate(2), Pacer()
    release = anyio.Event()

    async def slow(request: LMRequest) -> LMReply:
        await release.wait()
        return LMReply(text="x", usage=LMUsage(input_tokens=10, output_tokens=10))

    lm = ScriptedLM(slow)
    done: list[str] = []

    async def one() -> None:
        done.append((await paced(pacer, lm, REQUEST, gate=gate, ledger=ledger, need=need())).text)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(one)
            await settled(lambda: lm.in_flight == 1)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert gate.in_flight == 1
            assert len(lm.calls) == 1
            release.set()
    assert done == ["x"] * 3
    assert (lm.max_in_flight, gate.in_flight) == (1, 0)


async def test_the_hard_cap_goes_with_the_request_unless_it_has_a_lower_one() -> None:
    ledger = Ledger(max_tokens=100_000, mode="hard")
    lm = ScriptedLM([good(), good()])
    await send(lm, ledger, need=need(output_cap=None))
    await paced(
        Pacer(),
        lm,
        LMRequest(messages=REQUEST.messages, output_cap=7),
        gate=Gate(1),
        ledger=ledger,
        need=need(output_cap=None),
    )
    first, second = (call.output_cap for call in lm.calls)
    assert first == ledger.output_cap(need(output_cap=None))
    assert second == 7


async def test_both_gates_hold() -> None:
    pacer, ledger = Pacer(max_concurrent=3), Ledger()
    lm = ScriptedLM(lambda request: "x", latency=0.001)

    async def one(gate: Gate) -> None:
        await paced(pacer, lm, REQUEST, gate=gate, ledger=ledger, need=need())

    trees = [Gate(2), Gate(2)]
    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(one, trees[number % 2])
    assert lm.max_in_flight == 3
    assert [gate.in_flight for gate in (*trees, pacer)] == [0, 0, 0]


@pytest.mark.parametrize("events", range(14))
async def test_cancelled_anywhere_nothing_leaks_and_nothing_is_sent_afterwards(events: int) -> None:
    gate, ledger, pacer = Gate(1), Ledger(max_budget=1.0, mode="hard"), Pacer(max_concurrent=1)

    async def answer(request: LMRequest) -> LMReply:
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        if len(lm.calls) % 2:
            raise fault()
        return good()

    lm = ScriptedLM(answer)
    scope = anyio.CancelScope()
    sent = 0

    async def work() -> None:
        with scope:
            async with anyio.create_task_group() as inner:
                for _ in range(3):
                    inner.start_soon(call)

    async def call() -> None:
        await paced(pacer, lm, REQUEST, gate=gate, ledger=ledger, need=need())

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            for _ in range(events):
                await anyio.lowlevel.checkpoint()
            sent = len(lm.calls)
            scope.cancel()
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
    assert len(lm.calls) == sent
    assert (gate.in_flight, gate.waiting, pacer.in_flight, pacer.waiting) == (0, 0, 0, 0)
    assert ledger.left()["money"] == pytest.approx(1.0 - ledger.spent)
    assert "0 in flight" in repr(ledger)


async def test_cancelled_while_waiting_for_the_accounts_gate_gives_the_trees_back() -> None:
    gate, pacer, ledger = Gate(1), Pacer(max_concurrent=1), Ledger()
    assert account_of(pacer).enter_nowait(0) is not None
    with anyio.move_on_after(0.01) as scope:
        await paced(pacer, ScriptedLM([good()]), REQUEST, gate=gate, ledger=ledger, need=need())
    assert scope.cancelled_caught
    assert (gate.in_flight, pacer.waiting) == (0, 0)
