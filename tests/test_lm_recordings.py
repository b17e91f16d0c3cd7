"""Whole runs recorded against real servers of ours, then replayed without any: all that users see is the same."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from lm_serving import KEY
from msgspec import Struct, structs

from asyncrlm import AsyncRLM, LMError, Repl, RLMChatCompletion, RLMError
from asyncrlm.events import (
    CellFinished,
    LimitReached,
    ModelReplied,
    RunFinished,
    SubcallFinished,
    UsageSettled,
)
from asyncrlm.lm.callable import CallableClient
from asyncrlm.testing import FakeOpenAIServer, FakeReply, FakeRequest

from .helpers import cell, submit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio

TOLD = (CellFinished, LimitReached, ModelReplied, RunFinished, SubcallFinished, UsageSettled)

OTHERWISE = ("time", "seconds", "waited", "retries", "cached", "run_id", "parent_id", "child_run_id", "subcall")
"""What a replay may say otherwise."""

USAGE = {"prompt_tokens": 500, "completion_tokens": 40}


class Scenario(Struct, frozen=True, kw_only=True):
    """What the servers say, in the order of the list of backends, and what the run is told."""

    root: Callable[[FakeRequest], Any]
    sub: Callable[[FakeRequest], Any] = lambda request: FakeReply(request.text.upper(), usage=USAGE)
    settings: dict[str, Any] = {}
    fallback: Callable[[FakeRequest], Any] | None = None
    error: type[RLMError] | None = None
    call: dict[str, Any] = {}


def turns(*texts: str) -> Callable[[FakeRequest], FakeReply]:
    """A root model that says one text after another, by how long its history is."""

    def answer(request: FakeRequest) -> FakeReply:
        said = sum(message["role"] == "assistant" for message in request.body["messages"])
        return FakeReply(texts[min(said, len(texts) - 1)], usage=USAGE)

    return answer


def sometimes_broken(request: FakeRequest) -> FakeReply:
    """The sub-model: slow, refusing, failing and empty ones among its replies."""
    match request.text:
        case "slow":
            return FakeReply("late", latency=60)
        case "refused":
            return FakeReply(None, refusal="I would rather not")
        case "wrong":
            return FakeReply.fault(400, "no such thing")
        case "empty":
            return FakeReply("", usage=USAGE)
        case text:
            return FakeReply(text.upper(), usage=USAGE)


FAULTS = cell(
    "replies = llm_query_batched(['good', 'slow', 'refused', 'wrong', 'empty', 'good'])\n"
    "for reply in replies: print(isinstance(reply, FailedReply), reply)"
)

SCENARIOS = {
    "a batch": Scenario(
        root=turns(cell("parts = llm_query_batched(list('abcab'))\nprint(parts)"), submit("''.join(parts)"))
    ),
    "children": Scenario(
        root=turns(
            submit("'|'.join(rlm_query_batched(['x', 'y'])) if context == 'CTX' else context + llm_query(context)")
        ),
        settings={"max_depth": 2},
    ),
    "faults and time-outs": Scenario(
        root=turns(FAULTS, submit("str(len(replies))")), sub=sometimes_broken, settings={"subcall_timeout": 1.0}
    ),
    "time-outs that raise": Scenario(
        root=turns(cell("llm_query('slow')"), submit("llm_query('good')")),
        sub=sometimes_broken,
        settings={"subcall_timeout": 0.5, "on_subcall_error": "raise"},
    ),
    "a budget that time-outs used up": Scenario(
        root=turns(cell("print(llm_query_batched(['slow'] * 3))")),
        sub=sometimes_broken,
        settings={"subcall_timeout": 0.5, "max_budget": 0.012},
        error=RLMError,
    ),
    "an answer given under a limit": Scenario(
        root=turns(cell("print(llm_query('a'))"), "So far A."), settings={"max_tokens": 4_000, "on_limit": "answer"}
    ),
    "a fallback": Scenario(
        root=lambda request: FakeReply.fault(401, "who are you?"),
        fallback=turns(cell("print(llm_query('a'))"), submit("'done'")),
    ),
    "an answer of a type": Scenario(
        root=turns(submit("[1, 'two']"), submit("[1, 2]")), call={"response_format": list[int]}
    ),
}


async def play(scenario: Scenario, servers: list[FakeOpenAIServer] | None, **mode: Any) -> tuple[Any, list[Any]]:
    """One run; without servers none could be reached."""
    names = ["root", *(["spare"] if scenario.fallback else []), "sub"]
    addresses = [server.base_url for server in servers] if servers else ["http://127.0.0.1:9/v1"] * len(names)
    key = {"api_key": KEY} if servers else {}
    kwargs: list[Any] = [
        {"base_url": address, "model_name": name, "price": (1, 1), "max_retries": 0, **key}
        for address, name in zip(addresses, names, strict=True)
    ]
    root = (["vllm"] * len(kwargs[:-1]), kwargs[:-1]) if scenario.fallback else ("vllm", kwargs[0])
    rlm = AsyncRLM(
        root[0],
        backend_kwargs=root[1],
        other_backends=["vllm"],
        other_backend_kwargs=kwargs[-1:],
        **scenario.settings,
        **mode,
    )
    told: list[Any] = []
    outcome: Any
    with anyio.fail_after(60):
        try:
            async with rlm, rlm.astream("CTX", "QUESTION", **scenario.call) as events:
                async for event in events:
                    if isinstance(event, TOLD):
                        told.append(event)
            outcome = events.result
        except RLMError as error:
            outcome = error
    return outcome, told


def timeless(events: list[Any]) -> list[str]:
    """Events without what a replay may say otherwise; those of sub-calls come in any order."""
    return sorted(
        f"{type(event).__name__} "
        + str({name: value for name, value in structs.asdict(event).items() if name not in OTHERWISE})
        for event in events
    )


@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_replay_is_the_recorded_run(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    scripts = [scenario.root, *([scenario.fallback] if scenario.fallback else []), scenario.sub]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeOpenAIServer(script)) for script in scripts]
        recorded, heard = await play(scenario, servers, record=tmp_path)
    began = time.monotonic()
    replayed, heard_again = await play(scenario, None, replay=tmp_path)
    assert time.monotonic() - began < 30
    assert timeless(heard_again) == timeless(heard)
    assert type(replayed) is type(recorded)
    if scenario.error is not None:
        assert isinstance(recorded, scenario.error)
        assert str(replayed) == str(recorded)
    else:
        assert isinstance(recorded, RLMChatCompletion), recorded
        assert (replayed.response, replayed.stop_reason) == (recorded.response, recorded.stop_reason)
    assert replayed.usage_summary == recorded.usage_summary


async def test_a_time_out_is_heard_at_once_in_a_replay(tmp_path: Path) -> None:
    scenario = Scenario(
        root=turns(cell("print(llm_query('slow'))"), submit("'done'")),
        sub=sometimes_broken,
        settings={"subcall_timeout": 2.0},
    )
    async with FakeOpenAIServer(scenario.root) as root, FakeOpenAIServer(scenario.sub) as sub:
        recorded, _ = await play(scenario, [root, sub], record=tmp_path)
    replayed, heard = await play(scenario, None, replay=tmp_path)
    assert replayed.response == recorded.response == "done"
    (subcall,) = [event for event in heard if isinstance(event, SubcallFinished)]
    assert (subcall.error_kind, "no reply within 2 s" in (subcall.error or "")) == ("timeout", True)
    assert subcall.seconds < 1.5


async def test_a_repl_is_recorded_replayed_and_cached_like_a_run(tmp_path: Path) -> None:
    asked: list[str] = []

    async def lm(messages: list[dict[str, str]]) -> str:
        asked.append(messages[-1]["content"])
        if asked[-1] == "slow":
            await anyio.sleep_forever()
        return f"{asked[-1]} {len(asked)}"

    codes = ["print(llm_query('a'), llm_query('a'))", "print(llm_query('slow'))", "print(llm_query('b'))"]
    heard: dict[str, list[str]] = {}
    with anyio.fail_after(30):
        for mode in ("record", "replay"):
            async with Repl(lm=lm, subcall_timeout=1.0, **{mode: tmp_path / "kept"}) as repl:  # type: ignore[arg-type]
                heard[mode] = [(await repl.execute(code)).stdout for code in codes]
        assert heard["replay"] == heard["record"]
        assert heard["record"][0] == "a 1 a 2\n"
        assert "no reply within 1 s" in heard["record"][1]
        assert len(asked) == 4
        async with Repl(lm=lm, replay=tmp_path / "kept") as repl:
            with pytest.raises(LMError, match="not in the recording") as caught:
                await repl.execute("print(llm_query('c'))")
        assert caught.value.kind == "replay_miss"
        named = CallableClient(lm)
        named.cache_key = "lm"
        for _ in range(2):
            async with Repl(lm=named, cache=tmp_path / "cache") as repl:
                result = await repl.execute("print(llm_query('d'), llm_query('d'))")
                assert result.stdout == "d 5 d 5\n"
    assert len(asked) == 5


async def test_a_repl_replays_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    async with FakeOpenAIServer(lambda request: request.text.upper()) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        async with Repl(lm="openai/m", record=tmp_path) as repl:
            recorded = await repl.execute("print(llm_query('a'))")
    monkeypatch.delenv("OPENAI_API_KEY")
    async with Repl(lm="openai/m", replay=tmp_path) as repl:
        assert (await repl.execute("print(llm_query('a'))")).stdout == recorded.stdout == "A\n"
