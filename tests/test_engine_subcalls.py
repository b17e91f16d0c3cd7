"""What listeners and callbacks hear of sub-calls, failed ones above all."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asyncrlm import AsyncRLM, LMClient, LMReply, LMRequest
from asyncrlm.events import Event, RunStarted, SubcallFinished, SubcallStarted

from .helpers import cell, echo, scripted, submit, told

pytestmark = pytest.mark.anyio


async def heard(rlm: AsyncRLM, question: str | None = None) -> tuple[list[Event], Any]:
    with anyio.fail_after(20):
        async with rlm.astream("CTX", question) as events:
            seen = [event async for event in events]
    assert events.result is not None
    return seen, events.result


def only(seen: list[Event]) -> tuple[SubcallStarted, SubcallFinished]:
    """The two events of the only sub-call."""
    (started,) = [event for event in seen if isinstance(event, SubcallStarted)]
    (finished,) = [event for event in seen if isinstance(event, SubcallFinished)]
    assert (started.subcall, started.kind, started.model) == (finished.subcall, finished.kind, finished.model)
    return started, finished


async def test_a_failed_child_is_named_and_its_trajectory_kept() -> None:
    root = scripted(cell("print(rlm_query('go'))"), "", "", "", submit("'ok'"))
    seen, result = await heard(AsyncRLM(root, max_depth=2))
    _, finished = only(seen)
    (child,) = [event for event in seen if isinstance(event, RunStarted) and event.depth == 1]
    assert (finished.child_run_id, finished.error_kind) == (child.run_id, "empty")
    (record,) = result.metadata["iterations"][0]["code_blocks"][0]["result"]["rlm_calls"]
    assert record["metadata"]["run_metadata"]["run_id"] == child.run_id
    assert "empty replies in a row" in record["error"]


class Broken(LMClient):
    """A client of somebody's own, with a bug."""

    model = "broken"

    async def acomplete(self, request: LMRequest) -> LMReply:
        raise KeyError("choices")


@pytest.mark.parametrize("query", ["llm_query", "rlm_query"])
async def test_a_bug_in_a_client_is_reported_as_what_it_is(query: str) -> None:
    ended: list[tuple[Any, ...]] = []
    root = scripted(cell(f"print({query}('x', model='broken'))"), submit("'ok'"))
    rlm = AsyncRLM(root, other_backends=[Broken()], max_depth=2, on_subcall_complete=lambda *heard: ended.append(heard))
    seen, _ = await heard(rlm)
    _, finished = only(seen)
    assert (finished.error, finished.error_kind) == ("broken raised KeyError: 'choices'", "other")
    assert "KeyError: 'choices'" in told(root, 2)
    assert [(model, error) for _, model, _, error in ended] == [("broken", "broken raised KeyError: 'choices'")]


@pytest.mark.parametrize("query", ["llm_query", "rlm_query"])
async def test_a_call_of_an_unknown_model_is_told_of(query: str) -> None:
    began: list[Any] = []
    ended: list[Any] = []
    rlm = AsyncRLM(
        scripted(cell(f"{query}('hello', model='nobody')"), submit("'ok'")),
        other_backends=[echo(model="known")],
        max_depth=2,
        on_subcall_start=lambda *heard: began.append(heard),
        on_subcall_complete=lambda *heard: ended.append(heard),
    )
    seen, result = await heard(rlm)
    started, finished = only(seen)
    assert (started.model, started.prompt_preview) == ("nobody", "hello")
    assert (finished.error_kind, finished.child_run_id) == ("unknown_model", None)
    assert "unknown model 'nobody'; known: scripted, known" in str(finished.error)
    assert began == [(1, "nobody", "hello")]
    assert [heard[-1] for heard in ended] == [finished.error]
    assert len(result.metadata["iterations"][0]["code_blocks"][0]["result"]["rlm_calls"]) == 1


async def test_a_call_that_was_cut_off_is_cancelled() -> None:
    async def sub(messages: list[dict[str, str]]) -> str:
        await anyio.sleep_forever()
        return ""

    code = "import asyncio\ntry:\n    await asyncio.wait_for(allm_query('x'), 0.05)\nexcept TimeoutError: pass"
    seen, _ = await heard(AsyncRLM(scripted(cell(code), submit("'ok'")), other_backends=[sub]))
    assert only(seen)[1].error == "cancelled"


@pytest.mark.parametrize(
    ("reason", "sign"),
    [
        ("length", "[cut off here: the reply reached its length limit]"),
        ("refusal", "[broken off here by a refusal or by a filter of the provider]"),
        ("error", "[broken off here by a failure of the server]"),
    ],
)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_sub_call_that_is_cut_off_says_so(reason: str, sign: str) -> None:
    sub = scripted(LMReply(text="half a sen", finish_reason=reason))
    root = scripted(cell("print(llm_query('x'))"), submit("'done'"))
    await AsyncRLM(root, other_backends=[sub]).acompletion("CTX")
    assert f"half a sen\n{sign}" in told(root, 2)
