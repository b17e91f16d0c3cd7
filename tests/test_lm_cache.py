"""Replies that are kept: equal calls asked once, recordings, and what a replay says it misses."""

from __future__ import annotations

import functools
import json
import os
import sqlite3
import stat
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
import pytest

from asyncrlm import AsyncRLM, BudgetExceededError, ConfigurationError, LMError, RLMError, TokenLimitExceededError
from asyncrlm.events import ModelReplied, SubcallFinished, UsageSettled
from asyncrlm.lm.base import LMReply, LMRequest, LMUsage, Message
from asyncrlm.lm.cache.asked import Asked, CacheSettings, Seen
from asyncrlm.lm.cache.replies import ReplyCache, open_cache
from asyncrlm.lm.cache.store import FILE_NAME, ReplyStore
from asyncrlm.lm.clients import client_spec
from asyncrlm.testing import FakeOpenAIServer, FakeRequest, ScriptedLM

from .helpers import cell, echo, scripted, submit

pytestmark = pytest.mark.anyio

NAMED: dict[str, Any] = {"backend_kwargs": {"cache_key": "root"}, "other_backend_kwargs": [{"cache_key": "sub"}]}

NAMED_ROOT: dict[str, Any] = {"backend_kwargs": {"cache_key": "root"}}

USED = LMUsage(input_tokens=100, output_tokens=20, cached_tokens=5, cost=0.5)


def asks(text: str = "hello", **changes: Any) -> LMRequest:
    return LMRequest(messages=(Message("user", text),), **changes)


def asked(request: LMRequest, **changes: Any) -> Asked:
    given: dict[str, Any] = {"backend": "b", "model": "m", "args": {}, "cap": None} | changes
    return Asked.of(given["backend"], given["model"], request, given["args"], given["cap"])


async def once(cache: ReplyCache, lm: ScriptedLM, request: LMRequest, seen: Seen | None = None) -> LMReply:
    return await cache.answer(asked(request), request, lambda: lm.acomplete(request), seen or Seen())


# --- the cache --------------------------------------------------------------------------------------------------------


async def test_an_equal_call_is_answered_from_disk(tmp_path: Path) -> None:
    said = LMReply(text="lone \udc80 ü", reasoning="why", finish_reason="stop", usage=USED, model="m-1")
    settings = CacheSettings(tmp_path / "cache", "cache")
    async with open_cache(settings) as cache:
        first = await once(cache, ScriptedLM([said]), asks())
        assert (first.text, first.cached, first.usage.cost) == (said.text, False, 0.5)
    async with open_cache(settings) as cache:
        kept = await once(cache, ScriptedLM([]), asks())
        assert (kept.text, kept.reasoning, kept.finish_reason, kept.model) == (said.text, "why", "stop", "m-1")
        assert (kept.cached, kept.usage.cost, kept.usage.input_tokens) == (True, 0.0, 100)
        other = await once(cache, ScriptedLM(["other"]), asks("other"))
        assert (other.text, other.cached) == ("other", False)


async def test_equal_calls_under_way_cost_one(tmp_path: Path) -> None:
    lm = ScriptedLM(["x"], latency=0.02)
    replies: list[LMReply] = []
    async with open_cache(CacheSettings(tmp_path, "cache")) as cache:

        async def one() -> None:
            replies.append(await once(cache, lm, asks()))

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(one)
    assert len(lm.calls) == 1
    assert Counter(reply.cached for reply in replies) == {False: 1, True: 19}


async def test_when_the_one_under_way_fails_all_hear_it_and_nothing_is_kept(tmp_path: Path) -> None:
    lm = ScriptedLM([LMError("down", kind="server"), "up"], latency=0.02)
    errors: list[LMError] = []
    async with open_cache(CacheSettings(tmp_path, "cache")) as cache:

        async def one() -> None:
            try:
                await once(cache, lm, asks())
            except LMError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(one)
        assert [str(error) for error in errors] == ["down"] * 3
        assert len({id(error) for error in errors}) == 3
        assert (await once(cache, lm, asks())).text == "up"


async def test_what_may_succeed_later_is_not_handed_to_others(tmp_path: Path) -> None:
    lm = ScriptedLM([LMError("its deadline", kind="timeout", retryable=True), "up"], latency=0.02)
    outcomes: list[str] = []
    async with open_cache(CacheSettings(tmp_path, "cache")) as cache:

        async def one() -> None:
            try:
                outcomes.append((await once(cache, lm, asks())).text)
            except LMError as error:
                outcomes.append(str(error))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(one)
    assert sorted(outcomes) == ["its deadline", "up", "up"]
    assert len(lm.calls) == 2


async def test_when_the_one_under_way_is_cancelled_the_next_asks(tmp_path: Path) -> None:
    first = anyio.Event()

    async def answer(request: LMRequest) -> str:
        if not first.is_set():
            first.set()
            await anyio.sleep_forever()
        return "second"

    lm = ScriptedLM(answer)
    replies: list[str] = []
    async with open_cache(CacheSettings(tmp_path, "cache")) as cache:

        async def one(scope: anyio.CancelScope) -> None:
            with scope:
                replies.append((await once(cache, lm, asks())).text)

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                doomed = anyio.CancelScope()
                tasks.start_soon(one, doomed)
                await first.wait()
                for _ in range(2):
                    tasks.start_soon(one, anyio.CancelScope())
                await anyio.lowlevel.checkpoint()
                doomed.cancel()
    assert (replies, len(lm.calls)) == (["second"] * 2, 2)


async def test_an_empty_reply_is_not_kept(tmp_path: Path) -> None:
    lm = ScriptedLM(["", "now"])
    async with open_cache(CacheSettings(tmp_path, "cache")) as cache:
        assert (await once(cache, lm, asks())).text == ""
        assert (await once(cache, lm, asks())).text == "now"


async def test_a_hit_takes_less_than_a_millisecond(tmp_path: Path) -> None:
    async with open_cache(CacheSettings(tmp_path, "cache")) as cache:
        await once(cache, ScriptedLM(["x" * 2_000]), asks())
        times: list[float] = []
        for _ in range(200):
            began = time.perf_counter()
            await once(cache, ScriptedLM([]), asks())
            times.append(time.perf_counter() - began)
    assert sorted(times)[100] < 0.001


def test_what_identifies_a_call_and_what_does_not() -> None:
    base = asked(asks()).key
    same = [
        asked(asks(sampling_args={"extra_headers": {"x": "secret"}, "extra_query": {"k": "v"}, "timeout": 3})),
        asked(asks(), args={"timeout": 3}),
    ]
    different = [
        asked(asks("hello ")),
        asked(asks(), model="n"),
        asked(asks(), backend="c"),
        asked(asks(), cap=7),
        asked(asks(), args={"temperature": 0.5}),
        asked(asks(sampling_args={"temperature": 0.7})),
        asked(LMRequest(messages=(Message("system", "hello"),))),
        asked(LMRequest(messages=(Message("user", "hel"), Message("user", "lo")))),
        asked(asks("\udc80")),
    ]
    assert {call.key for call in same} == {base}
    assert len({call.key for call in different} | {base}) == len(different) + 1
    assert asked(asks(sampling_args={"a": 1, "b": 2})).key == asked(asks(sampling_args={"b": 2}), args={"a": 1}).key


# --- the file ---------------------------------------------------------------------------------------------------------


async def test_only_the_owner_can_read_it_and_it_holds_no_secret(tmp_path: Path) -> None:
    secret = "sk-do-not-write-this-0123456789abcdef"
    request = asks(sampling_args={"extra_headers": {"authorization": secret}, "extra_body": {"api_key": secret}})
    folder = tmp_path / "deep" / "folder"
    async with open_cache(CacheSettings(folder, "record")) as cache:
        await once(cache, ScriptedLM(["x"]), request)
        names = sorted(path.name for path in folder.iterdir())
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.iterdir()), names
        assert FILE_NAME + "-wal" in names
        assert not any(secret.encode() in path.read_bytes() for path in folder.iterdir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_a_cache_that_can_not_be_written_loses_no_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    for name in ("put", "cache"):
        monkeypatch.setattr(ReplyStore, name, full)
    async with open_cache(CacheSettings(tmp_path, "cache")) as cache:
        assert (await once(cache, ScriptedLM(["paid for"]), asks())).text == "paid for"
    async with open_cache(CacheSettings(tmp_path, "record")) as cache:
        with pytest.raises(Exception, match="can't record"):
            await once(cache, ScriptedLM(["x"]), asks())


# --- recordings -------------------------------------------------------------------------------------------------------


async def test_equal_calls_of_a_recording_are_separate_samples_and_errors_are_kept(tmp_path: Path) -> None:
    script = ["a", LMError("no", kind="refusal", status=400), "b"]
    heard: dict[str, list[str]] = {}
    for mode, lm in (("record", ScriptedLM(script)), ("replay", ScriptedLM([]))):
        seen = Seen()
        heard[mode] = []
        async with open_cache(CacheSettings(tmp_path, mode)) as cache:  # type: ignore[arg-type]
            for _ in script:
                try:
                    heard[mode].append((await once(cache, lm, asks(), seen)).text)
                except LMError as error:
                    heard[mode].append(f"{error} {error.kind} {error.status} {error.retryable}")
    assert heard["record"] == heard["replay"] == ["a", "no refusal 400 False", "b"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "1 equal calls were recorded, and this is number 2"),
        ({"text": "What is the nome?"}, "message 1 of 1 (of the user) differs at character 14: it was "),
        ({"model": "n"}, "the model was 'm' and is 'n'"),
        ({"backend": "c"}, "the backend was 'b' and is 'c'"),
        ({"cap": 9}, "the cap on output tokens was None and is 9"),
        ({"args": {"temperature": 1}}, "the sampling argument 'temperature' was 0 and is 1"),
        ({"args": {}}, "the sampling argument 'temperature' was 0 and is 'not given'"),
        ({"more": True}, "it had 1 messages and has 2"),
        ({"role": "system"}, "message 1 of 1 was of the user and is of the system"),
    ],
)
async def test_a_miss_says_what_differs(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    given = {"args": {"temperature": 0}}
    request = asks("What is the name?")
    recorded = Seen()
    async with open_cache(CacheSettings(tmp_path, "record")) as cache:
        call = asked(request, **given)
        await cache.answer(call, request, lambda: ScriptedLM(["x"]).acomplete(request), recorded)
        far = asks("Something else altogether")
        await cache.answer(asked(far), far, lambda: ScriptedLM(["y"]).acomplete(far), recorded)
    messages = [Message(change.get("role", "user"), change.get("text", "What is the name?"))]
    messages += [Message("assistant", "x")] if change.get("more") else []
    now = LMRequest(messages=tuple(messages))
    call = asked(
        now, **(given | {name: change[name] for name in ("model", "backend", "cap", "args") if name in change})
    )
    seen = Seen()
    if not change:
        seen.calls[recorded.run, call.key] = {0}
    async with open_cache(CacheSettings(tmp_path, "replay")) as cache:
        with pytest.raises(LMError, match="not in the recording") as caught:
            await cache.answer(call, now, lambda: ScriptedLM([]).acomplete(now), seen)
    assert said in str(caught.value)
    assert (caught.value.kind, caught.value.retryable) == ("replay_miss", False)


# --- through the engine -----------------------------------------------------------------------------------------------


async def test_two_equal_sub_calls_cost_one_and_without_a_cache_are_two_samples(tmp_path: Path) -> None:
    code = submit("'|'.join(llm_query_batched(['same'] * 10))")
    sub = ScriptedLM([LMReply(text="one", usage=USED)], latency=0.02)
    rlm = AsyncRLM(ScriptedLM(lambda request: code, model="root"), other_backends=[sub], cache=tmp_path, **NAMED)
    cached: list[bool] = []
    settled: list[str] = []
    async with rlm, rlm.astream("CTX") as events:
        async for event in events:
            if isinstance(event, SubcallFinished):
                cached.append(event.cached)
                assert event.cost == (0.0 if event.cached else 0.5)
            elif isinstance(event, UsageSettled):
                settled.append(event.model)
    result = events.result
    assert result is not None
    assert result.response == "|".join(["one"] * 10)
    assert Counter(cached) == {True: 9, False: 1}
    assert settled == ["root", "scripted"]
    assert result.usage_summary.model_usage_summaries["scripted"].total_calls == 1
    # Another run has all of it from disk, the root model's reply, too.
    again = AsyncRLM(ScriptedLM([], model="root"), other_backends=[ScriptedLM([])], cache=tmp_path, **NAMED)
    completion = await again.acompletion("CTX")
    assert (completion.response, completion.usage_summary.total_calls) == (result.response, 0)
    separate = ScriptedLM([str(number) for number in range(10)])
    rlm = AsyncRLM(ScriptedLM([code]), other_backends=[separate])
    assert sorted((await rlm.acompletion("CTX")).response.split("|")) == [str(number) for number in range(10)]


def family(sub: ScriptedLM, **settings: Any) -> AsyncRLM:
    def reply(request: LMRequest) -> LMReply:
        text = submit("context[::-1] + llm_query('leaf')")
        if "QUESTION" in request.messages[1].content:
            first = len(request.messages) <= 3
            text = cell("parts = llm_query_batched(['a', 'b', 'a'])\nprint(parts)") if first else FINISH
        return LMReply(text=text, usage=USED)

    root = ScriptedLM(reply, model="root") if "replay" not in settings else ScriptedLM([], model="root")
    return AsyncRLM(root, other_backends=[sub], max_depth=2, **settings)


FINISH = submit("'|'.join(parts + rlm_query_batched(['xy', 'zw']))")


async def test_a_run_is_replayed_without_asking_anybody(tmp_path: Path) -> None:
    count = iter(range(99))
    sub = ScriptedLM(lambda request: LMReply(text=f"{request.messages[0].content}{next(count)}", usage=USED))
    with anyio.fail_after(60):
        recorded = await family(sub, record=tmp_path).acompletion("CTX", "QUESTION")
        for _ in range(2):
            silent = ScriptedLM([])
            rlm = family(silent, replay=tmp_path)
            cached: list[bool] = []
            async with rlm.astream("CTX", "QUESTION") as events:
                async for event in events:
                    if (isinstance(event, SubcallFinished) and event.kind == "llm") or isinstance(event, ModelReplied):
                        cached.append(event.cached)
            replayed = events.result
            assert replayed is not None
            assert replayed.response == recorded.response
            assert replayed.usage_summary == recorded.usage_summary
            assert silent.calls == []
            assert set(cached) == {True}


async def test_two_runs_that_record_into_one_folder_keep_their_own_samples(tmp_path: Path) -> None:
    count = iter(range(99))
    both_asked = anyio.Event()

    async def sub(request: LMRequest) -> LMReply:
        number = next(count)
        if number == 3:
            both_asked.set()
        await both_asked.wait()
        return LMReply(text=str(number), usage=USED)

    code = submit("'|'.join(llm_query_batched(['same'] * 2))")
    got: list[str] = []

    async def record(rlm: AsyncRLM) -> None:
        got.append((await rlm.acompletion("CTX")).response)

    async with (
        AsyncRLM(ScriptedLM(lambda _: code), other_backends=[ScriptedLM(sub)], record=tmp_path) as rlm,
        anyio.create_task_group() as group,
    ):
        group.start_soon(record, rlm)
        group.start_soon(record, rlm)
    replayed = AsyncRLM(ScriptedLM([]), other_backends=[ScriptedLM([])], replay=tmp_path)
    assert sorted("|".join(got).split("|")) == ["0", "1", "2", "3"]
    assert (await replayed.acompletion("CTX")).response in got


async def test_what_a_cell_gave_up_in_a_recording_is_given_up_in_its_replay(tmp_path: Path) -> None:
    asked = anyio.Event()

    async def sub(request: LMRequest) -> LMReply:
        if request.messages[0].content == "slow":
            asked.set()
            await anyio.sleep_forever()
        await asked.wait()
        return LMReply(text="fast", usage=USED)

    code = """import asyncio
slow = asyncio.ensure_future(allm_query("slow"))
fast = await allm_query("fast")
slow.cancel()
answer["content"] = fast; answer["ready"] = True
"""
    models: dict[str, Any] = {"record": ScriptedLM(sub), "replay": ScriptedLM([])}
    for mode, lm in models.items():
        root = ScriptedLM(lambda _: cell(code)) if mode == "record" else ScriptedLM([])
        with anyio.fail_after(30):
            completion = await AsyncRLM(root, other_backends=[lm], **{mode: tmp_path}).acompletion("CTX")
        assert completion.response == "fast"


async def test_limits_are_met_in_a_replay_as_they_were(tmp_path: Path) -> None:
    def rlm(model: ScriptedLM, **settings: Any) -> AsyncRLM:
        return AsyncRLM(model, backend_kwargs={"price": (1, 1)}, **settings)

    loop = ScriptedLM(lambda request: LMReply(text=cell("print(1)"), usage=USED), needs_price=True)
    with pytest.raises(BudgetExceededError) as first:
        await rlm(loop, record=tmp_path, max_budget=2.0).acompletion("CTX")
    with pytest.raises(BudgetExceededError) as second:
        await rlm(ScriptedLM([], needs_price=True), replay=tmp_path, max_budget=2.0).acompletion("CTX")
    assert first.value.spent == second.value.spent > 0
    with pytest.raises(TokenLimitExceededError):
        await rlm(ScriptedLM([]), replay=tmp_path, max_budget=2.0, max_tokens=10).acompletion("CTX")


@pytest.mark.parametrize("on_subcall_error", ["return", "raise"])
async def test_a_miss_ends_the_run_whatever_the_cell_makes_of_it(tmp_path: Path, on_subcall_error: Any) -> None:
    root = [submit("llm_query('new' if 'B' in context else 'old')")]
    settings = {"on_subcall_error": on_subcall_error, "max_iterations": 2}
    record = AsyncRLM(ScriptedLM(root * 2), other_backends=[echo(model="sub")], record=tmp_path, **settings)
    assert (await record.acompletion("A")).response == "echo:old"
    replay = AsyncRLM(ScriptedLM([]), other_backends=[echo(model="sub")], replay=tmp_path, **settings)
    with (
        anyio.fail_after(20),
        pytest.raises(LMError, match=r"differs at character 1: it was 'old' and is 'new'") as caught,
    ):
        await replay.acompletion("B")
    assert caught.value.kind == "replay_miss"
    assert caught.value.run_id is not None


async def test_a_replay_needs_no_key_and_opens_no_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY"):
        AsyncRLM("openai/gpt-5", record=tmp_path)
    ReplyStore(tmp_path, writes=True).close()
    for backend in ("openai/gpt-5", ["openai/gpt-5", "openai/gpt-5-mini"]):
        rlm = AsyncRLM(backend, replay=tmp_path)
        with pytest.raises(LMError, match="nothing is recorded"):
            await rlm.acompletion("CTX")
    with pytest.raises(ConfigurationError, match="unknown backend"):
        AsyncRLM("opanai/gpt-5", replay=tmp_path)


def test_one_of_cache_record_and_replay_and_each_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cache and replay exclude one another"):
        AsyncRLM(scripted(), cache=tmp_path, replay=tmp_path)
    for wrong in (3, "", b"x"):
        with pytest.raises(ConfigurationError, match="record must be a folder"):
            AsyncRLM(scripted(), record=wrong)  # type: ignore[arg-type]
    assert json.loads(asked(asks()).text)["model"] == "m"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"eos_token": "</s>"}, {"eos_token": "<end>"}),
        ({"stop": ["Bearer abcdefgh12345678"]}, {"stop": ["Bearer hgfedcba87654321"]}),
        ({"tokens": [1] * 2_000}, {"tokens": [*([1] * 1_999), 2]}),
    ],
)
def test_arguments_that_are_shown_alike_are_told_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    request = LMRequest(messages=(Message("user", "x"),))
    keys = {Asked.of("openai", "m", request, args, None).key for args in (one, other, one)}
    assert len(keys) == 2


AT = {"base_url": "http://127.0.0.1:1/v1", "azure_endpoint": "http://127.0.0.1:1"}

ROUTES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("vllm", {}, {"base_url": "http://127.0.0.1:2/v1"}),
    ("vllm", {"default_headers": {"X-Route": "a"}}, {"default_headers": {"X-Route": "b"}}),
    ("vllm", {"default_query": {"route": "a"}}, {"default_query": {"route": "b"}}),
    ("vllm", {"sampling_args": {"extra_headers": {"X-R": "a"}}}, {"sampling_args": {"extra_headers": {"X-R": "b"}}}),
    ("vllm", {"sampling_args": {"extra_query": {"r": "a"}}}, {"sampling_args": {"extra_query": {"r": "b"}}}),
    ("vllm", {"http_client": httpx2.AsyncClient(params={"r": "a"})}, {}),
    ("openai", {"organization": "a"}, {"organization": "b"}),
    ("portkey", {"provider": "a"}, {"provider": "b"}),
    ("portkey", {"config": "a"}, {"config": "b"}),
    ("portkey", {"virtual_key": "a"}, {"virtual_key": "b"}),
    ("azure_openai", {"azure_deployment": "a"}, {"azure_deployment": "b"}),
    ("azure_openai", {"api_version": "2024-10-01"}, {"api_version": "2024-12-01"}),
    ("anthropic", {"default_headers": {"anthropic-beta": "a"}}, {"default_headers": {"anthropic-beta": "b"}}),
    ("gemini", {"api_version": "v1"}, {"api_version": "v1beta"}),
]


def _where(backend: Any, kwargs: dict[str, Any]) -> str | None:
    url = "azure_endpoint" if backend == "azure_openai" else "base_url"
    given = {url: AT[url], "model_name": "m", "api_key": "a-key"} | kwargs
    # As one of a list it is told apart as well.
    spec, other = client_spec(backend, given), client_spec([backend, "offline"], [given, {}])
    assert spec.where is not None
    assert other.where is not None
    return spec.where + other.where


@pytest.mark.parametrize(("backend", "one", "other"), ROUTES)
def test_routes_of_one_model_name_are_told_apart(backend: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert len({_where(backend, kwargs) for kwargs in (one, other, dict(one))}) == 2


def test_who_pays_and_who_traces_makes_no_other_call() -> None:
    told = [{"api_key": "one"}, {"api_key": "two"}, {"default_headers": {"Authorization": "Bearer three"}}]
    told += [{"default_headers": {"traceparent": "00-1"}}, {"sampling_args": {"extra_headers": {"X-Request-Id": "1"}}}]
    assert len({_where("vllm", kwargs) for kwargs in told}) == 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_calls_that_are_sent_another_way_are_asked_again(tmp_path: Path) -> None:
    def answer(request: FakeRequest) -> str:
        return submit(repr("by " + request.headers.get("x-route", "") + request.path.partition("?")[2]))

    async with FakeOpenAIServer(answer) as server:
        kwargs = {"base_url": server.base_url, "model_name": "m"}
        async with AsyncRLM("vllm", backend_kwargs=kwargs, cache=tmp_path) as rlm:
            for sampling in ({"extra_headers": {"X-Route": "a"}}, {"extra_query": {"b": "c"}}, {}):
                heard = [await rlm.acompletion("CTX", sampling_args=sampling) for _ in range(2)]
                expected = {"extra_headers": "a", "extra_query": "b=c"}.get(next(iter(sampling), ""), "")
                assert [each.response.strip() for each in heard] == [f"by {expected}".strip()] * 2
        assert len(server.requests) == 3


async def _answers(messages: list[dict[str, str]]) -> str:
    return submit("'b'")


class _Model:
    def __init__(self, says: str) -> None:
        self.says = says
        self.asked = 0

    async def __call__(self, messages: list[dict[str, str]]) -> str:
        self.asked += 1
        return submit(repr(self.says))


def test_only_a_function_of_a_module_is_named_by_itself() -> None:
    async def closure(messages: list[dict[str, str]]) -> str:
        return "a"

    named = client_spec(_answers).where
    assert named is not None
    assert "_answers" in named
    for unnamed in (closure, functools.partial(_answers), _Model("a"), ScriptedLM([])):
        assert client_spec(unnamed).where is None
        assert client_spec([unnamed, _answers]).where is None
        keys = {client_spec(unnamed, {"cache_key": key}).where for key in ("a", "b", "a")}
        assert len(keys) == 2
        assert None not in keys
    with pytest.raises(ConfigurationError, match="cache_key must be a str"):
        client_spec(closure, {"cache_key": 3})


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_has_no_name_is_not_cached_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models = [_Model("a"), _Model("b")]
    for model in models:
        async with AsyncRLM(model, cache=tmp_path) as rlm:
            for _ in range(2):
                assert (await rlm.acompletion("CTX")).response == model.says
    assert [model.asked for model in models] == [2, 2]
    assert caplog.text.count("replies of this model are not cached") == 2
    for model in models:
        kept = AsyncRLM(model, backend_kwargs={"cache_key": model.says}, cache=tmp_path)
        for _ in range(2):
            assert (await kept.acompletion("CTX")).response == model.says
    assert [model.asked for model in models] == [3, 3]


def _truncated(file: Path) -> None:
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    os.truncate(file, 4096)


def _changed(*statements: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        with sqlite3.connect(file) as db:
            for statement in statements:
                db.execute(statement)
        db.close()

    return change


def _outcome(text: str) -> Callable[[Path], None]:
    return _changed(f"UPDATE cached SET outcome = '{text}'", f"UPDATE replies SET outcome = '{text}'")


DAMAGE: list[Any] = [
    pytest.param(_truncated, id="truncated"),
    pytest.param(_changed("DROP TABLE cached", "DROP TABLE replies"), id="no table"),
    pytest.param(_outcome("{not"), id="no JSON"),
    pytest.param(_outcome("[1]"), id="a list"),
    pytest.param(_outcome("null"), id="nothing"),
    pytest.param(_outcome('{"text": 5, "usage": {}}'), id="no text"),
    pytest.param(_outcome('{"text": "x", "usage": {}, "booked": [{"x": 1}, 2]}'), id="no bill"),
    pytest.param(_outcome('{"error": "x"}'), id="half an error"),
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_damaged_cache_is_a_miss_and_a_damaged_recording_an_error(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    root = [submit("'fine'")]
    modes: list[dict[str, Any]] = [{"cache": tmp_path / "cache", **NAMED_ROOT}, {"record": tmp_path / "kept"}]
    for settings in modes:
        async with AsyncRLM(ScriptedLM(root * 2), **settings) as rlm:
            await rlm.acompletion("CTX")
            if "record" in settings:
                continue
            damage(tmp_path / "cache" / FILE_NAME)
            assert (await rlm.acompletion("CTX")).response == "fine"
            assert "a cached reply can't be read" in caplog.text
    async with AsyncRLM(ScriptedLM([]), replay=tmp_path / "kept") as rlm:
        async with open_cache(CacheSettings(tmp_path / "kept", "replay")):
            damage(tmp_path / "kept" / FILE_NAME)
        with pytest.raises(RLMError, match=r"can't be (read|used)"):
            await rlm.acompletion("CTX")


def test_what_a_later_release_adds_to_a_reply_is_left_out(tmp_path: Path) -> None:
    store = ReplyStore(tmp_path, writes=True)
    store.cache(b"key", LMReply(text="text", usage=USED))
    _changed("""UPDATE cached SET outcome = '{"text": "x", "usage": {"cost": 2, "new": 1}, "new": 1}'""")(store.path)
    assert store.get(b"key") == LMReply(text="x", usage=LMUsage(cost=2), cached=True)
    store.close()
