"""Several models for one request: who is asked when, whose limits hold for whom, and what is booked."""

from __future__ import annotations

import contextlib
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_serving import KEY
from msgspec import structs

from asyncrlm import AsyncRLM, Pacer
from asyncrlm.errors import LMError
from asyncrlm.events import ModelReplied, UsageSettled
from asyncrlm.ledger import Ledger, Need, Price
from asyncrlm.lm.base import LMReply, LMRequest, LMUsage, Message
from asyncrlm.lm.clients import ClientSpec, client_spec
from asyncrlm.lm.pacing.fallback import cost_of
from asyncrlm.lm.pacing.gate import Gate
from asyncrlm.lm.pacing.sender import Sender
from asyncrlm.repl.resources import ResourceScope
from asyncrlm.testing import FakeOpenAIServer, FakeReply, FakeRequest, ScriptedLM
from asyncrlm.types import RateHints

from .helpers import cell, submit
from .pacing_support import NO_FLOW, Limited, LimitedLM, all_at_once, on_a_jumping_clock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

pytestmark = pytest.mark.anyio

REQUEST = LMRequest(messages=(Message("system", "s"), Message("user", "u")))
USED = LMUsage(input_tokens=100, output_tokens=10)


def failing(kind: Any, **details: Any) -> ScriptedLM:
    return ScriptedLM([LMError(f"{kind} failed", kind=kind, **details)] * 9, model=f"model-{kind}")


@asynccontextmanager
async def asking(
    *models: Any,
    kwargs: Any = None,
    attempts: int = 1,
    pacer: Any = None,
    ledger: Ledger | None = None,
    gate: Gate | None = None,
) -> AsyncGenerator[Callable[..., Awaitable[LMReply]]]:
    """Sends to a list of models, as an engine would."""
    spec: ClientSpec = structs.replace(client_spec(list(models), kwargs), attempts=attempts)
    need = Need(model=spec.model, input_bytes=300, output_cap=100, price=spec.price, models=len(spec.each))
    async with ResourceScope() as scope:
        sender = Sender(scope.shared, pacer, gate=gate or Gate(10_000), ledger=ledger or Ledger(), flow=NO_FLOW)

        async def ask(text: str = "u", **changes: Any) -> LMReply:
            return await sender.send(spec, LMRequest(messages=(Message("user", text),)), need, **changes)

        yield ask


# --- who answers ------------------------------------------------------------------------------------------------------


async def test_the_next_one_answers_when_the_first_fails() -> None:
    broken, works = failing("authentication"), ScriptedLM(["fine"], model="works")
    spec = client_spec([broken, works, ScriptedLM([])])
    assert (spec.model, spec.backend, len(spec.each)) == ("model-authentication", "fallback", 3)
    async with asking(broken, works, ScriptedLM([])) as ask:
        reply = await ask()
    assert (reply.text, reply.model, reply.retries) == ("fine", "works", 0)


async def test_a_request_that_is_wrong_is_not_passed_on() -> None:
    spare = ScriptedLM(["never"])
    async with asking(failing("bad_request"), spare) as ask:
        with pytest.raises(LMError, match="bad_request"):
            await ask()
    assert spare.calls == []


async def test_when_all_fail_each_is_heard() -> None:
    def busy() -> ScriptedLM:
        return failing("rate_limit", retryable=True, retry_after=3.0)

    slow = failing("timeout", retryable=True, retry_after=9.0, charged=True)
    async with asking(failing("quota"), busy(), slow) as ask:
        with pytest.raises(
            LMError, match=r"model-quota: quota failed; .*rate_limit failed; .*timeout failed"
        ) as caught:
            await ask()
    error = caught.value
    assert (error.kind, error.retryable, error.retry_after, error.charged) == ("rate_limit", True, 3.0, True)
    async with asking(failing("quota"), failing("permission")) as ask:
        with pytest.raises(LMError) as caught:
            await ask()
    assert (caught.value.kind, caught.value.retryable, caught.value.retry_after) == ("quota", False, None)
    async with asking(busy(), failing("server", retryable=True)) as ask:
        with pytest.raises(LMError) as caught:
            await ask()
    assert caught.value.retry_after is None


async def test_all_are_asked_again_after_a_failure_that_may_pass() -> None:
    first = ScriptedLM([LMError("down", kind="server", retryable=True, retry_after=0.0)] * 2, model="first")
    second = ScriptedLM([LMError("down", kind="server", retryable=True, retry_after=0.0), "up"], model="second")
    async with asking(first, second, attempts=3) as ask:
        reply = await ask()
    assert (reply.text, reply.model, reply.retries) == ("up", "second", 1)
    assert (len(first.calls), len(second.calls)) == (2, 2)


async def test_runs_of_one_engine_know_of_each_others_refusals() -> None:
    def refused(request: FakeRequest) -> FakeReply:
        return FakeReply.fault(429, retry_after=60)

    async with FakeOpenAIServer(refused) as busy, FakeOpenAIServer(lambda request: submit("1")) as free:
        kwargs = [{"base_url": server.base_url, "model_name": "m", "api_key": KEY} for server in (busy, free)]
        async with AsyncRLM(["vllm", "vllm"], backend_kwargs=kwargs) as rlm:
            for _ in range(3):
                assert (await rlm.acompletion("CTX")).response == "1"
    assert (len(busy.requests), len(free.requests)) == (1, 3)


def test_one_that_is_down_is_left_alone_ever_longer_until_it_answers() -> None:
    async def main() -> None:
        down = LMError("down", kind="server", retryable=True)
        first = ScriptedLM([*[down] * 5, *["up"] * 40], model="first")
        async with asking(first, ScriptedLM(lambda _: "fine", model="second")) as ask:
            asked: list[int] = []
            for _ in range(80):
                assert (await ask()).text == ("fine" if len(first.calls) < 6 else "up")
                asked.append(len(first.calls))
                await anyio.sleep(0.25)
        assert asked[:3] == [1, 2, 2]  # the first failure may be chance
        assert [asked.index(count) // 4 for count in range(3, 7)] == [1, 3, 7, 15]  # seconds
        assert asked[-1] > 10

    on_a_jumping_clock(main)


def test_what_fails_together_is_one_failure_and_a_single_one_is_asked_again() -> None:
    async def main() -> None:
        down = LMError("down", kind="connection", retryable=True)
        first = ScriptedLM([*[down] * 20, "up", "up"], model="first", latency=0.1)
        async with asking(first, ScriptedLM(lambda _: "fine", model="second")) as ask:
            await all_at_once(20, lambda _: ask())
            assert len(first.calls) == 20
            assert [(await ask()).model for _ in range(2)] == ["first", "first"]

    on_a_jumping_clock(main)


async def test_models_of_one_name_are_told_apart() -> None:
    poor = FakeReply.fault(402, "no credits")
    async with FakeOpenAIServer(lambda request: poor) as first, FakeOpenAIServer(lambda request: submit("1")) as second:
        kwargs = [{"base_url": server.base_url, "model_name": "m", "api_key": KEY} for server in (first, second)]
        address = second.base_url.removeprefix("http://").partition("/")[0]
        async with AsyncRLM(["vllm", "vllm"], backend_kwargs=kwargs).astream("CTX") as events:
            names = [event.answered_by async for event in events if isinstance(event, ModelReplied)]
    assert len(names) == 1
    assert str(names[0]).startswith(f"m (2 of 2, openai:{address}:")
    assert KEY not in str(names[0])


# --- whose limits hold for whom ---------------------------------------------------------------------------------------


def limited(name: str, wait: float | None, count: int, asked: list[str]) -> ScriptedLM:
    def answer(request: LMRequest) -> LMReply:
        asked.append(name)
        if asked.count(name) <= count:
            raise LMError("slow down", kind="rate_limit", retryable=True, retry_after=wait)
        return LMReply(text=name)

    return ScriptedLM(answer, model=name)


def test_a_rate_limit_holds_up_only_the_model_that_has_it() -> None:
    asked: list[str] = []

    async def main() -> None:
        async with asking(limited("a", 20.0, 1, asked), limited("b", None, 0, asked)) as ask:
            replies = [await ask() for _ in range(3)]
            assert ([reply.text for reply in replies], asked) == (["b"] * 3, ["a", "b", "b", "b"])
            await anyio.sleep(20.1)
            assert (await ask()).text == "a"

    on_a_jumping_clock(main)


def test_when_all_are_refused_the_first_to_come_back_is_waited_for() -> None:
    asked: list[str] = []

    async def main() -> None:
        async with asking(limited("a", 20.0, 1, asked), limited("b", 5.0, 1, asked)) as ask:
            with pytest.raises(LMError, match=r"slow down.*slow down") as caught:
                await ask()
            assert (caught.value.kind, caught.value.retryable, caught.value.charged) == ("rate_limit", True, False)
            assert caught.value.retry_after == 5.0
            began = anyio.current_time()
            reply = await ask()
            assert (reply.text, reply.waited) == ("b", pytest.approx(5.0, abs=0.1))
            assert anyio.current_time() - began == pytest.approx(5.0, abs=0.1)
        assert asked == ["a", "b", "b"]

    on_a_jumping_clock(main)


def test_one_that_is_down_is_asked_again_before_one_that_is_refused_is_waited_for() -> None:
    down = LMError("down", kind="server", retryable=True)

    async def main() -> None:
        asked: list[str] = []
        async with asking(ScriptedLM([down, down, "up"], model="a"), limited("b", 60.0, 1, asked), attempts=4) as ask:
            began = anyio.current_time()
            assert (await ask()).text == "up"
            assert anyio.current_time() - began < 10
        assert asked == ["b"]

    on_a_jumping_clock(main)


def test_one_that_has_no_quota_left_is_not_asked_again_for_a_while() -> None:
    async def main() -> None:
        poor = failing("quota")
        async with asking(poor, ScriptedLM(lambda _: "b", model="b")) as ask:
            assert [(await ask()).text for _ in range(5)] == ["b"] * 5
            assert len(poor.calls) == 1
            await anyio.sleep(61)
            assert (await ask()).text == "b"
            assert len(poor.calls) == 2
        async with asking(poor, failing("quota")) as ask:
            for _ in range(2):
                with pytest.raises(LMError) as caught:
                    await ask()
                assert (caught.value.kind, caught.value.retryable) == ("quota", False)

    on_a_jumping_clock(main)


def test_what_a_server_says_is_used_up_is_not_asked_for() -> None:
    rate = RateHints(requests_left=0, request_limit=10, requests_reset=30.0)

    async def main() -> None:
        first = ScriptedLM(lambda _: LMReply(text="a", rate=rate), model="a")
        async with asking(first, ScriptedLM(lambda _: "b", model="b")) as ask:
            assert [(await ask()).text for _ in range(3)] == ["a", "b", "b"]
            await anyio.sleep(31)
            assert (await ask()).text == "a"

    on_a_jumping_clock(main)


def test_refusals_narrow_only_the_account_that_gave_them() -> None:
    async def main() -> None:
        small, large = Limited(at_once=20, quota=10_000, period=60.0), Limited(at_once=400, quota=10_000, period=60.0)
        clients = [LimitedLM(small, tells=False), LimitedLM(large, tells=False)]
        clients[0].model, clients[1].model = "small", "large"
        pacers = {"small": Pacer(max_concurrent=100), "large": Pacer(max_concurrent=300)}
        texts: list[str] = []
        async with asking(*clients, pacer=pacers, attempts=6) as ask:

            async def one(number: int) -> None:
                texts.append((await ask(f"p{number}")).text)

            await all_at_once(1_000, one)
        assert sorted(texts) == sorted(f"P{number}" for number in range(1_000))
        assert pacers["small"].width < 60
        assert pacers["large"].width == 300
        assert large.wasted == 0
        assert (pacers["small"].in_flight, pacers["large"].in_flight) == (0, 0)
        assert (pacers["small"].waiting, pacers["large"].waiting) == (0, 0)

    on_a_jumping_clock(main)


@pytest.mark.parametrize("tells", [True, False])
def test_a_burst_beyond_the_first_ones_quota_goes_to_the_next(tells: bool) -> None:
    async def main() -> None:
        first, second = Limited(at_once=100, quota=600, period=60.0), Limited(at_once=100, quota=3_000, period=60.0)
        clients = [LimitedLM(first, tells=tells), LimitedLM(second, tells=tells)]
        clients[0].model, clients[1].model = "first", "second"
        texts: list[str] = []
        async with asking(*clients, attempts=6) as ask:

            async def one(number: int) -> None:
                texts.append((await ask(f"p{number}")).text)

            began = anyio.current_time()
            await all_at_once(2_000, one)
            assert anyio.current_time() - began < 60  # alone the first would take 200 s
        assert sorted(texts) == sorted(f"P{number}" for number in range(2_000))
        assert first.wasted + second.wasted <= 400

    on_a_jumping_clock(main)


def test_limits_of_the_callers_are_each_ones_own() -> None:
    async def main() -> None:
        models = [ScriptedLM(lambda _: "x", model=name, latency=1.0) for name in ("a", "b")]
        pacers = {"a": Pacer(max_concurrent=2), "b": Pacer(max_concurrent=5)}
        down = LMError("down", kind="server")
        async with asking(*models, pacer=pacers) as ask:
            await all_at_once(10, lambda number: ask())
        assert [model.max_in_flight for model in models] == [2, 0]
        models = [ScriptedLM([down] * 10, model="a"), ScriptedLM(lambda _: "x", model="b", latency=1.0)]
        async with asking(*models, pacer=pacers) as ask:
            await all_at_once(10, lambda number: ask())
        assert models[1].max_in_flight == 5

    on_a_jumping_clock(main)


def test_a_pacer_for_all_bounds_them_together_and_stops_only_when_all_refuse() -> None:
    asked: list[str] = []

    async def main() -> None:
        pacer = Pacer(max_concurrent=3)
        a, b = limited("a", 20.0, 1, asked), limited("b", 5.0, 0, asked)
        async with asking(a, b, pacer=pacer) as ask:
            began = anyio.current_time()
            await all_at_once(9, lambda number: ask())
            assert anyio.current_time() - began < 1
            assert pacer.width == 3
        assert max(a.max_in_flight, b.max_in_flight) <= 3
        asked.clear()
        both = [limited(name, wait, 1, asked) for name, wait in (("a", 20.0), ("b", 5.0))]
        async with asking(*both, pacer=pacer, attempts=2) as ask:
            began = anyio.current_time()
            assert (await ask()).text == "b"
            assert anyio.current_time() - began >= 5

    on_a_jumping_clock(main)


def test_who_waits_for_the_second_goes_back_to_the_first_when_it_rests_no_longer() -> None:
    asked: list[str] = []

    async def main() -> None:
        slow = ScriptedLM(lambda _: "slow", model="b", latency=50.0)
        async with asking(limited("a", 20.0, 1, asked), slow, pacer={"b": Pacer(max_concurrent=1)}) as ask:
            texts: list[str] = []

            async def one(number: int) -> None:
                texts.append((await ask()).text)

            began = anyio.current_time()
            await all_at_once(5, one)
            assert sorted(texts) == ["a"] * 4 + ["slow"]
            assert anyio.current_time() - began == pytest.approx(50, abs=1)

    on_a_jumping_clock(main)


@pytest.mark.parametrize("after", [0.05, 0.5, 1.5, 3.0, 6.5])
def test_cancelled_anywhere_nothing_is_kept(after: float) -> None:
    async def main() -> None:
        asked: list[str] = []
        pacers = {"a": Pacer(max_concurrent=2), "b": Pacer(max_concurrent=1)}
        a, b = limited("a", 5.0, 3, asked), limited("b", 2.0, 1, asked)
        a.latency = b.latency = 1.0
        ledger = Ledger(max_budget=100.0)
        prices = [{"price": (1, 1)}] * 2
        async with asking(a, b, kwargs=prices, pacer=pacers, ledger=ledger, attempts=5) as ask:

            async def one(number: int) -> None:
                with contextlib.suppress(LMError):  # there is no time for another attempt
                    await ask()

            with anyio.move_on_after(after):
                await all_at_once(9, one)
        assert [(p.in_flight, p.waiting) for p in pacers.values()] == [(0, 0)] * 2
        assert "0 in flight" in repr(ledger)

    on_a_jumping_clock(main)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), shared=st.booleans(), limit=st.floats(0.01, 30.0))
def test_no_mix_of_failures_and_cancellations_leaves_anything_behind(seed: int, shared: bool, limit: float) -> None:
    rng = random.Random(seed)
    kinds: list[Any] = ["rate_limit", "rate_limit", "server", "timeout", "quota", "bad_request", "authentication"]

    def flaky(name: str) -> ScriptedLM:
        async def answer(request: LMRequest) -> LMReply:
            await anyio.sleep(rng.uniform(0.0, 2.0))
            if rng.random() < 0.5:
                return LMReply(
                    text=name, usage=USED, rate=RateHints(requests_left=rng.randrange(3), requests_reset=3.0)
                )
            kind = rng.choice(kinds)
            wait = rng.choice([None, 0.5, 5.0]) if kind in ("rate_limit", "server") else None
            retryable = kind in ("rate_limit", "server", "timeout")
            raise LMError(kind, kind=kind, retryable=retryable, retry_after=wait, charged=kind == "timeout")

        return ScriptedLM(answer, model=name)

    async def main() -> None:
        names = ["a", "b", "c"]
        pacers = {name: Pacer(max_concurrent=rng.randint(1, 3)) for name in names}
        one_for_all = Pacer(max_concurrent=2)
        ledger = Ledger(max_budget=1.0, mode=rng.choice(["soft", "hard"]))
        gate = Gate(rng.randint(1, 8))
        outcomes: list[str] = []
        async with asking(
            *map(flaky, names),
            kwargs=[{"price": (1, 1)}] * 3,
            pacer=one_for_all if shared else pacers,
            ledger=ledger,
            attempts=3,
            gate=gate,
        ) as ask:

            async def one(number: int) -> None:
                with anyio.move_on_after(rng.uniform(0.0, 20.0)):
                    try:
                        outcomes.append((await ask(str(number))).text)
                    except LMError as error:
                        outcomes.append(error.kind)

            with anyio.move_on_after(limit):
                await all_at_once(25, one)
        for pacer in (*pacers.values(), one_for_all):
            assert (pacer.in_flight, pacer.waiting) == (0, 0)
        assert (gate.in_flight, gate.waiting) == (0, 0)
        assert "0 in flight" in repr(ledger)
        assert ledger.left()["money"] == pytest.approx(1.0 - ledger.spent)
        assert ledger.spent <= 1.0

    on_a_jumping_clock(main)


# --- what is booked ---------------------------------------------------------------------------------------------------


async def test_each_is_booked_under_its_own_name_at_its_own_price() -> None:
    ledger = Ledger()
    said = LMUsage(input_tokens=1_000, output_tokens=0)
    lost = ScriptedLM([LMError("empty", kind="bad_reply", retryable=True, charged=True, usage=said)], model="dear")
    works = ScriptedLM([LMReply(text="x", usage=LMUsage(input_tokens=1_000, output_tokens=100))], model="cheap")
    kwargs = [{"price": (100, 100)}, {"price": (2, 4)}]
    async with asking(lost, works, kwargs=kwargs, ledger=ledger) as ask:
        reply = await ask()
    assert reply.usage.cost == pytest.approx(2_400e-6)
    booked = ledger.usage().model_usage_summaries
    assert {name: summary.total_cost for name, summary in booked.items()} == {"dear": 0.1, "cheap": 0.0024}
    assert booked["dear"].complete
    assert ledger.spent == pytest.approx(0.1024)


async def test_an_empty_reply_of_a_server_is_booked_as_it_says_and_the_next_one_answers() -> None:
    empty = {"choices": [], "usage": {"prompt_tokens": 70, "completion_tokens": 9, "cost": 0.25}}
    async with (
        FakeOpenAIServer(lambda _: FakeReply(body=str(empty).replace("'", '"').encode())) as broken,
        FakeOpenAIServer([cell("print(1)"), submit("'ok'")]) as works,
    ):
        kwargs = [
            {"base_url": server.base_url, "model_name": name, "api_key": KEY, "price": (1, 1)}
            for server, name in ((broken, "one"), (works, "two"))
        ]
        rlm = AsyncRLM(["vllm", "vllm"], backend_kwargs=kwargs)
        with anyio.fail_after(20):
            async with rlm.astream("CTX") as events:
                settled = [event async for event in events if isinstance(event, UsageSettled)]
    assert [(event.model, event.estimated) for event in settled] == [("one", False), ("two", False)] * 2
    assert [(event.input_tokens, event.output_tokens, event.cost) for event in settled[::2]] == [(70, 9, 0.25)] * 2
    assert events.result is not None
    assert events.result.usage_summary.model_usage_summaries["one"].total_cost == 0.5


async def test_a_reply_is_priced_by_the_model_that_gave_it() -> None:
    usage = LMUsage(input_tokens=1_000, cached_tokens=500, output_tokens=100)
    cheap = ScriptedLM([LMReply(text="x", usage=usage)] * 2, model="cheap")
    kwargs = [{"price": (100, 100)}, {"price": {"input": 2, "output": 4, "cached": 1}}]
    assert client_spec([failing("server"), cheap], kwargs).price == Price(input=100, cached=100, output=100)
    async with asking(failing("server"), cheap, kwargs=kwargs) as ask:
        cost = (await ask()).usage.cost
    assert cost == pytest.approx((500 * 2 + 500 * 1 + 100 * 4) / 1e6)
    assert cost_of(Price(1.0), LMUsage(input_tokens=10, cached_tokens=99)) == pytest.approx(10e-6)
    written = LMUsage(input_tokens=100, cached_tokens=40, cache_write_tokens=50)
    assert cost_of(Price(1.0, 0.1, cache_write=1.25), written) == pytest.approx((10 + 4 + 62.5) / 1e6)
    assert cost_of(Price(1.0), written) == pytest.approx(100e-6)
    hour = structs.replace(written, cache_write_1h_tokens=30)
    dear = Price(1.0, 0.1, cache_write=1.25, cache_write_1h=2.0)
    assert cost_of(dear, hour) == pytest.approx((10 + 4 + 20 * 1.25 + 30 * 2) / 1e6)
    assert cost_of(Price(1.0, 0.1, cache_write=1.25), hour) == pytest.approx((10 + 4 + 62.5) / 1e6)


def test_fallbacks_are_as_dear_as_the_dearest_and_as_short_as_the_shortest() -> None:
    free, paid = ScriptedLM([]), ScriptedLM([], needs_price=True)
    both = client_spec([free, paid], [{"context_window": 50}, {"price": (3, 4), "context_window": 40}])
    assert (both.needs_price, both.price, both.window) == (True, Price(input=3, cached=3, output=4), 40)
    writes = client_spec([paid, paid], [{"price": {"input": 2, "output": 1, "cache_write": 2.5}}, {"price": (3, 4)}])
    assert writes.price == Price(input=3, cached=3, output=4, cache_write=3)
    hours = client_spec(
        [paid, paid], [{"price": {"input": 2, "output": 1, "cache_write": 2.5, "cache_write_1h": 9}}, {"price": (3, 4)}]
    )
    assert hours.price == Price(input=3, cached=3, output=4, cache_write=3, cache_write_1h=9)
    unknown = client_spec([free, paid])
    assert (unknown.price, unknown.window) == (None, None)
    assert client_spec([paid], [{"price": (3, 4)}]).backend == "ScriptedLM"
    assert not client_spec([free, free], None).needs_price


# --- the gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paused", [False, True])
def test_who_waits_for_a_rate_limit_does_not_hold_the_gate_for_others(paused: bool) -> None:
    """Whether the limit is the caller's, or the server says it when requests are on their way already."""
    answered: list[tuple[str, float]] = []

    async def main() -> None:
        began, gate = anyio.current_time(), Gate(2)
        refusals = [LMError("slow down", kind="rate_limit", retryable=True, retry_after=60.0)] * (3 if paused else 0)

        async def slow(request: LMRequest) -> str:
            await anyio.sleep(0.01)
            if refusals:
                raise refusals.pop()
            return "slow"

        lms = ScriptedLM(slow, model="slow"), ScriptedLM(lambda _: "quick", model="quick")
        pacers = {"slow": Pacer(requests_per_minute=None if paused else 1)}
        async with ResourceScope() as scope:
            sender = Sender(scope.shared, pacers, gate=gate, ledger=Ledger(), flow=NO_FLOW)

            async def one(number: int) -> None:
                lm = lms[number >= 40]
                if number >= 40:
                    await anyio.sleep(1)
                need = Need(model=lm.model, input_bytes=300, output_cap=100, price=None)
                await sender.send(client_spec(lm, None), REQUEST, need)
                answered.append((lm.model, anyio.current_time() - began))

            with anyio.move_on_after(300):
                await all_at_once(60, one)
        assert gate.in_flight == 0

    on_a_jumping_clock(main)
    quick = [seconds for model, seconds in answered if model == "quick"]
    assert len(quick) == 20
    assert max(quick) < 2
    assert len(answered) - len(quick) == (40 if paused else 5)  # and none of the minutes is lost


async def test_a_call_that_is_cut_off_among_fallbacks_is_charged_in_full() -> None:
    ledger = Ledger(max_budget=1.0, mode="hard")
    hangs = anyio.Event()

    async def hanging(request: LMRequest) -> str:
        hangs.set()
        await anyio.sleep_forever()
        return ""

    price = [{"price": (1, 1)}] * 2
    first, second = failing("timeout", charged=True, retryable=True), ScriptedLM(hanging, model="hangs")
    async with asking(first, second, kwargs=price, ledger=ledger) as ask, anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await hangs.wait()
        tasks.cancel_scope.cancel()
    assert ledger.tokens == 2 * (300 + 100)
    assert not ledger.usage().complete
