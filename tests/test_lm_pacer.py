"""An account's pace: turns between runs, limits by the minute, what is learnt from a server's refusals."""

from __future__ import annotations

import gc
import pickle
import random
from collections import Counter
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lm_serving import spec_for

from asyncrlm import AsyncRLM, ConfigurationError, LMError, Pacer
from asyncrlm.events import SubcallFinished
from asyncrlm.lm.base import LMRequest
from asyncrlm.lm.pacing import Accounts
from asyncrlm.lm.pacing.account import BURST, Account
from asyncrlm.lm.pacing.accounts import KNOWN
from asyncrlm.lm.pacing.gate import Gate
from asyncrlm.lm.pacing.pacer import account_of
from asyncrlm.rlm import completions_of
from asyncrlm.testing import FakeOpenAIServer, FakeReply, FakeRequest, ScriptedLM

from .helpers import scripted, submit
from .pacing_support import Limited, LimitedLM, all_at_once, on_a_jumping_clock, send

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio

# --- a burst ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tells", "waits", "few", "seconds"),
    [(True, None, 180, 240), (False, None, 180, 240), (False, 0.0, 270, 300), (False, 1.0, 320, 260)],
    ids=["headers", "Retry-After", "silent", "wrong Retry-After"],
)
def test_a_burst_larger_than_the_server_takes_loses_none_and_wastes_few(
    tells: bool, waits: float | None, few: int, seconds: float
) -> None:
    answers: dict[int, str] = {}
    limited = Limited(at_once=100, quota=600, period=60.0)

    async def main() -> None:
        pacer, client = Pacer(), LimitedLM(limited, tells=tells, waits=waits)

        async def one(number: int) -> None:
            answers[number] = (await send(pacer, client, f"prompt {number}")).text

        began = anyio.current_time()
        await all_at_once(2_000, one)
        assert anyio.current_time() - began < seconds  # 200 s at 600 a minute

    on_a_jumping_clock(main)
    assert answers == {number: f"PROMPT {number}" for number in range(2_000)}
    assert limited.wasted <= few


@pytest.mark.soak
@pytest.mark.parametrize("tells", [True, False])
async def test_a_burst_on_the_wire(tells: bool) -> None:
    limited = Limited(at_once=50, quota=200, period=1.0)

    async def answer(request: FakeRequest) -> FakeReply:
        wait = limited.admit()
        headers = limited.headers if tells else {}
        if wait is not None:
            after = {"retry-after-ms": str(wait * 1_000)} if wait else {}
            return FakeReply(status=429, error="slow down", headers=headers | after)
        limited.in_flight += 1
        try:
            await anyio.sleep(0.02)
        finally:
            limited.in_flight -= 1
        return FakeReply(request.text.upper(), headers=headers)

    answers: dict[int, str] = {}
    pacer, gate = Pacer(), Gate(100)
    async with FakeOpenAIServer(answer) as server, spec_for(server).open() as client:

        async def one(number: int) -> None:
            answers[number] = (await send(pacer, client, f"prompt {number}", gate=gate)).text

        with anyio.fail_after(60):
            await all_at_once(600, one)
    assert answers == {number: f"PROMPT {number}" for number in range(600)}
    assert limited.wasted <= 200


def test_an_account_that_takes_nothing_fails_all_who_wait_for_it() -> None:
    limited = Limited(at_once=100, quota=0, period=60.0)

    async def main() -> None:
        pacer, client, failures = Pacer(), LimitedLM(limited, tells=False, waits=0.0), list[LMError]()

        async def one(number: int) -> None:
            with pytest.raises(LMError) as caught:
                await send(pacer, client)
            failures.append(caught.value)

        began = anyio.current_time()
        await all_at_once(500, one)
        assert anyio.current_time() - began < 600
        assert {error.kind for error in failures} == {"rate_limit"}
        assert len(failures) == 500
        assert (pacer.in_flight, pacer.waiting) == (0, 0)
        assert limited.wasted < 500

    on_a_jumping_clock(main)


def test_a_lone_request_outlasts_a_silent_minute() -> None:
    async def main() -> None:
        pacer, client = Pacer(), LimitedLM(Limited(at_once=9, quota=5, period=60.0), tells=False, waits=0.0)
        for _ in range(12):
            await send(pacer, client)
        assert client.limited.wasted < 25

    on_a_jumping_clock(main)


def test_a_request_that_alone_is_refused_uses_up_its_attempts() -> None:
    async def answer(request: LMRequest) -> str:
        await anyio.sleep(0.1)
        if request.messages[0].content == "too large":
            raise LMError("429", kind="rate_limit", retryable=True)
        return ""

    async def main() -> None:
        pacer, client = Pacer(), ScriptedLM(answer)

        async def others() -> None:
            while True:
                await send(pacer, client)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(others)
            with pytest.raises(LMError) as caught:
                await send(pacer, client, "too large")
            assert caught.value.attempts == 6
            tasks.cancel_scope.cancel()

    on_a_jumping_clock(main)


# --- turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.soak
async def test_ten_prompts_of_one_run_do_not_wait_behind_ten_thousand_of_another() -> None:
    order: list[str] = []

    async def answer(request: LMRequest) -> str:
        order.append(request.messages[0].content)
        await anyio.lowlevel.checkpoint()
        return ""

    pacer, client = Pacer(max_concurrent=20), ScriptedLM(answer)
    async with anyio.create_task_group() as tasks:
        for _ in range(10_000):
            tasks.start_soon(lambda: send(pacer, client, "many", flow=("many", "many")))
        while pacer.waiting < 9_000:
            await anyio.lowlevel.checkpoint()
        before = len(order)
        for _ in range(10):
            tasks.start_soon(lambda: send(pacer, client, "few", flow=("few", "few")))
    last = len(order) - 1 - order[::-1].index("few")
    assert order.count("few") == 10
    assert last - before < 1_100


async def test_tenants_take_turns_whatever_the_number_of_their_runs() -> None:
    order: list[str] = []

    async def answer(request: LMRequest) -> str:
        order.append(request.messages[0].content)
        return ""

    pacer, client = Pacer(max_concurrent=1), ScriptedLM(answer)
    permit = account_of(pacer).enter_nowait(0)
    assert permit is not None
    async with anyio.create_task_group() as tasks:
        for run in range(4):
            for _ in range(3):
                tasks.start_soon(lambda run=run: send(pacer, client, f"a{run}", flow=("a", run)))
        while pacer.waiting < 12:
            await anyio.lowlevel.checkpoint()
        for _ in range(3):
            tasks.start_soon(lambda: send(pacer, client, "b", flow=("b", 0)))
        while pacer.waiting < 15:
            await anyio.lowlevel.checkpoint()
        account_of(pacer).leave(permit)
    assert [number for number, name in enumerate(order) if name == "b"] == [1, 3, 5]
    of_a = [name for name in order if name != "b"]
    assert of_a == of_a[:4] * 3  # its runs take turns, too
    assert len(set(of_a)) == 4


async def test_few_start_in_one_pass_of_the_loop() -> None:
    starts: list[int] = []
    passes = 0

    async def answer(request: LMRequest) -> str:
        starts.append(passes)
        await anyio.lowlevel.checkpoint()
        return ""

    pacer, client = Pacer(), ScriptedLM(answer)

    async def count() -> None:
        nonlocal passes
        while len(starts) < 200:
            passes += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        for _ in range(200):
            tasks.start_soon(send, pacer, client)
    # trio counts what was started in a pass before or after the counter itself, at random.
    assert max(Counter(starts).values()) <= 3 * BURST


# --- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["argument", "scope"])
def test_a_retry_after_beyond_the_deadline_fails_at_once(where: str) -> None:
    async def main() -> None:
        refusal = LMError("429", kind="rate_limit", retryable=True, retry_after=60.0)
        began, pacer = anyio.current_time(), Pacer()
        deadline = {"deadline": began + 30} if where == "argument" else {}
        with pytest.raises(LMError) as caught, anyio.fail_after(30):
            await send(pacer, ScriptedLM([refusal]), **deadline)
        assert caught.value is refusal
        # Nor does the next one wait for what it can't have.
        with pytest.raises(LMError, match="no room for another 60 s") as caught, anyio.fail_after(30):
            await send(pacer, ScriptedLM([]), **deadline)
        assert (caught.value.kind, caught.value.retryable) == ("rate_limit", True)
        assert anyio.current_time() == began

    on_a_jumping_clock(main)


def test_a_retry_after_of_a_year_is_not_slept_for() -> None:
    async def main() -> None:
        refusal = LMError("503", kind="server", retryable=True, retry_after=365 * 86_400.0)
        began = anyio.current_time()
        await send(Pacer(), ScriptedLM([refusal, "x"]))
        assert anyio.current_time() - began <= 86_405
        with pytest.raises(LMError):
            await send(Pacer(), ScriptedLM([refusal, "x"]), deadline=anyio.current_time() + 90_000)

    on_a_jumping_clock(main)


async def test_a_run_fails_with_the_servers_error_and_not_with_its_own_timeout() -> None:
    refusal = LMError("429: come back later", kind="rate_limit", retryable=True, retry_after=60.0)
    rlm = AsyncRLM(ScriptedLM([refusal]), max_timeout=20.0)
    with anyio.fail_after(10), pytest.raises(LMError, match="come back later"):
        await rlm.acompletion("CTX")


# --- whose turns ------------------------------------------------------------------------------------------------------


async def test_one_for_each_account_and_model() -> None:
    accounts = Accounts()
    one, same, other = ScriptedLM([], model="x"), ScriptedLM([], model="x"), ScriptedLM([], model="y")
    assert accounts.of(one) is accounts.of(same)
    assert accounts.of(one) is not accounts.of(other)
    assert "ScriptedLM:x" in repr(accounts.of(one))


async def test_engines_on_one_account_share_its_turns_and_leave_nothing() -> None:
    def account_at(accounts: Accounts, model: str = "x") -> Account:
        return accounts.of(ScriptedLM([], model=model))

    one, two = Accounts(), Accounts()
    shared, given = account_at(one), Pacer()
    assert account_at(two) is shared
    assert account_at(two, "y") is not shared
    assert account_at(Accounts(given)) is account_of(given)
    assert account_at(Accounts({"y": given})) is shared
    alone = await anyio.to_thread.run_sync(lambda: anyio.run(lambda: _of_another_loop(account_at)))
    assert alone is not shared
    shared.pace.widest = 7
    del one, two, shared
    gc.collect()
    assert account_at(Accounts()).pace.widest != 7


async def _of_another_loop(account_at: Callable[[Accounts], Account]) -> Account:
    return account_at(Accounts())


async def test_runs_of_several_engines_have_one_account() -> None:
    batch = submit("str(len(llm_query_batched(['s'] * 8)))")
    asking, all_here = 0, anyio.Event()

    async def answer(request: FakeRequest) -> str:
        nonlocal asking
        if request.text != "s":
            return batch
        asking += 1
        if asking == 32:
            all_here.set()
        with anyio.fail_after(10):
            await all_here.wait()
        return "ok"

    async with FakeOpenAIServer(answer) as server:

        async def one(number: int) -> None:
            kwargs = {"base_url": server.base_url, "model_name": "m", "api_key": "secret-" * 5 + str(number % 2)}
            assert (await AsyncRLM("vllm", backend_kwargs=kwargs).acompletion("CTX")).response == "8"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(all_at_once, 4, one)
            await all_here.wait()
            known = dict(KNOWN.get())
            assert sorted(account.in_flight for account in known.values()) == [16, 16]
            assert "secret" not in repr(known)


async def test_a_pacer_of_the_callers_is_shared_by_all_it_is_given_to() -> None:
    pacer = Pacer(max_concurrent=3, name="shared")
    sub = ScriptedLM(lambda request: "x", latency=0.005)
    batch = submit("str(len(llm_query_batched(['a'] * 20)))")
    root = ScriptedLM(lambda request: batch, model="root")
    one, two = (AsyncRLM(root, other_backends=[sub], pacer={"scripted": pacer}) for _ in range(2))
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.acompletion, "CTX")
            tasks.start_soon(two.acompletion, "CTX")
    assert (len(sub.calls), sub.max_in_flight, pacer.in_flight) == (40, 3, 0)
    assert repr(pacer) == "<Pacer shared 0/3 in flight, 0 waiting>"


async def test_waiting_is_told_as_such() -> None:
    sub = ScriptedLM(lambda request: "x", latency=0.05)
    root = scripted(submit("str(len(llm_query_batched(['a', 'b'])))"))
    async with AsyncRLM(root, other_backends=[sub], pacer={"scripted": Pacer(max_concurrent=1)}).astream("C") as events:
        waited = sorted([event.waited async for event in events if isinstance(event, SubcallFinished)])
    assert waited[0] < 0.05 <= waited[1] < 5


def test_a_tenant_and_a_pacer_are_checked() -> None:
    lm = scripted()
    with pytest.raises(ConfigurationError, match="tenant must be a str"):
        AsyncRLM(lm, tenant=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigurationError, match="tenant must be a str"):
        completions_of(AsyncRLM(lm)).prepare({"tenant": 3})
    assert completions_of(AsyncRLM(lm, tenant="a")).prepare({}).tenant == "a"
    assert completions_of(AsyncRLM(lm, tenant="a")).prepare({"tenant": "b"}).tenant == "b"
    for wrong in (3, {"scripted": 3}):
        with pytest.raises(ConfigurationError, match="pacer must be"):
            AsyncRLM(lm, pacer=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigurationError, match="'other'; known: scripted"):
        AsyncRLM(lm, pacer={"other": Pacer()})


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("rpm", "requests_per_minute"),
        ("tpm", "tokens_per_minute"),
        ("concurrency", "max_concurrent"),
        ("max_concurent", "max_concurrent"),
        ("colour", None),
    ],
)
def test_what_a_pacer_does_not_take_names_what_it_takes(wrong: str, right: str | None) -> None:
    with pytest.raises(ConfigurationError, match=f"^Pacer takes no '{wrong}'") as caught:
        Pacer(**{wrong: 5})  # pyright: ignore[reportArgumentType]
    assert f"did you mean {right!r}?" in str(caught.value) or right is None
    assert caught.value.argument == wrong


def test_on_another_loop_a_pacer_begins_anew_unless_it_is_in_use() -> None:
    pacer = Pacer(max_concurrent=10, requests_per_minute=1)
    for _ in range(2):
        anyio.run(lambda: _bound(pacer))

    async def in_use() -> None:
        assert account_of(pacer).enter_nowait(0) is not None
        with pytest.raises(ConfigurationError, match="another event loop"):
            await anyio.to_thread.run_sync(lambda: anyio.run(lambda: _bound(pacer)))

    pacer = Pacer()
    anyio.run(lambda: _bound(pacer))

    async def main() -> None:
        account_of(pacer)
        await in_use()

    anyio.run(main)


async def _bound(pacer: Pacer) -> None:
    account_of(pacer)
    with anyio.fail_after(5):
        await send(pacer, ScriptedLM(["x"]))


def test_a_pacer_is_pickled_as_its_settings() -> None:
    again = pickle.loads(pickle.dumps(Pacer(max_concurrent=7, name="n")))
    assert (again.width, again.name) == (7, "n")


# --- every order ------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 4),
    rate=st.sampled_from([None, 3, 50]),
    holders=st.integers(1, 25),
    cancelled=st.sets(st.integers(0, 24)),
    seed=st.integers(0, 2**16),
)
@example(width=3, rate=3, holders=4, cancelled={2}, seed=1)
def test_no_interleaving_loses_a_turn_or_gives_one_too_many(
    width: int, rate: int | None, holders: int, cancelled: set[int], seed: int
) -> None:
    rng = random.Random(seed)
    served: list[int] = []

    async def answer(request: LMRequest) -> str:
        for _ in range(rng.randrange(4)):
            await anyio.lowlevel.checkpoint()
        if rng.random() < 0.2:
            raise LMError("429", kind="rate_limit", retryable=True, retry_after=rng.choice([None, 0.0, 2.0]))
        return ""

    lm = ScriptedLM(answer)
    pacer = Pacer(max_concurrent=width, requests_per_minute=rate)

    async def one(number: int, scope: anyio.CancelScope) -> None:
        with scope:
            await send(pacer, lm, flow=(number % 3, number % 5), attempts=99)
            served.append(number)

    async def main() -> None:
        scopes = [anyio.CancelScope() for _ in range(holders)]
        with anyio.fail_after(100_000):
            async with anyio.create_task_group() as tasks:
                for number, scope in enumerate(scopes):
                    tasks.start_soon(one, number, scope)
                for number in sorted(cancelled, key=lambda _: rng.random()):
                    for _ in range(rng.randrange(6)):
                        await anyio.lowlevel.checkpoint()
                    if number < holders:
                        scopes[number].cancel()

    on_a_jumping_clock(main)
    assert (pacer.in_flight, pacer.waiting) == (0, 0)
    assert lm.max_in_flight <= width
    assert set(served) >= set(range(holders)) - cancelled
