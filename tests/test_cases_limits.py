"""Cases about code that does not end, budgets, usage, depth, and how a run says that it did not finish."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest

from asyncrlm import RLM, AsyncRLM, BudgetExceededError, TimeoutExceededError
from asyncrlm.lm.base import LMUsage
from asyncrlm.types import RLMChatCompletion

from .cases import CASES, covers, scripted
from .cases.models import QUESTION, PlannedRoot, ScriptedRoot, SubModel, cell, submit
from .cases.runs import nothing_left, run, run_case, together

pytestmark = pytest.mark.anyio

both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
one = pytest.mark.parametrize("anyio_backend", ["asyncio"])

STOPPED = r"(?i)stopped|interrupted|time limit|timed? ?out|killed"


async def _cell_limit(id: str) -> None:
    """With a limit on cells the model is told, and goes on."""
    outcome = await run_case(id, environment_kwargs={"cell_timeout": 2.0})
    assert outcome.answer == "ok"
    assert outcome.seconds < 8
    told = outcome.root.seen(2)
    assert re.search(STOPPED, told), told


async def _run_limit(id: str) -> None:
    """With a limit on the run the caller is told."""
    began = time.monotonic()
    with pytest.raises(TimeoutExceededError) as ended:
        await run_case(id, max_timeout=2.0)
    assert 2 <= time.monotonic() - began < 8
    assert ended.value.timeout == 2.0
    assert ended.value.usage_summary is not None
    assert ended.value.usage_summary.total_calls == 1


@pytest.mark.parametrize(
    ("anyio_backend", "id"), [("asyncio", "T01"), ("trio", "T01"), ("asyncio", "T02"), ("asyncio", "T03")]
)
@covers("T01", "T02", "T03")
async def test_code_that_does_not_end_is_stopped(id: str) -> None:
    with nothing_left(), anyio.fail_after(10):
        await together(lambda: _cell_limit(id), lambda: _run_limit(id))


@covers("T01")
def test_the_process_can_exit_after_endless_code() -> None:
    program = textwrap.dedent(
        """
        from asyncrlm import RLM, TimeoutExceededError
        async def model(messages):
            return "```repl\\nwhile True:\\n    pass\\n```"
        try:
            RLM(backend=model, max_timeout=1.0).completion("CTX")
        except TimeoutExceededError as e:
            print("ended", e.timeout)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=10, check=False, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended 1.0\n", "")


@both
@covers("T05")
async def test_a_hanging_subcall_does_not_outlive_the_run() -> None:
    sub = SubModel(lambda _prompt: "late", delay=25)
    with nothing_left(), anyio.fail_after(8):
        with pytest.raises(TimeoutExceededError):
            await run_case("T05", sub=sub, max_timeout=2.0)
        assert (sub.asked, sub.in_flight) == (1, 0)


@covers("T06")
def test_a_time_limit_works_in_any_thread() -> None:
    async def model(messages: list[dict[str, str]]) -> str:
        return scripted(CASES["T06"])[0]

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(lambda: RLM(backend=model, max_timeout=5.0).completion("CTX")).result(10)
    assert result.response == "ok"


@one
@covers("T07")
async def test_waiting_for_a_subcall_is_not_the_cells_time() -> None:
    sub = SubModel(lambda _prompt: "late", delay=3)
    with anyio.fail_after(20):
        outcome = await run_case("T07", sub=sub, environment_kwargs={"cell_timeout": 1.0}, max_timeout=20.0)
    assert outcome.answer == "late"
    assert len(outcome.root.own) == 1


@one
@covers("T08")
async def test_the_session_goes_on_after_a_stopped_cell() -> None:
    with anyio.fail_after(10):
        outcome = await run_case("T08", environment_kwargs={"cell_timeout": 2.0}, max_timeout=30.0)
    assert outcome.answer == "5"  # the interrupt is enough here, so nothing is lost


@one
@covers("T08")
async def test_the_model_is_told_what_a_killed_cell_lost() -> None:
    uninterruptible = cell("sum(range(10**13))")  # one C loop that never looks at signals
    turns = [cell("keep = 5"), uninterruptible, scripted(CASES["T08"])[2]]
    with anyio.fail_after(10):
        outcome = await run(turns, environment_kwargs={"cell_timeout": 0.5})
    assert outcome.answer == "reset"
    told = outcome.root.seen(3)
    assert "keep" in told or "variables" in told, told


@both
@covers("U10")
async def test_children_spend_from_the_same_budget() -> None:
    usage = LMUsage(input_tokens=10, output_tokens=5, cost=1.0)
    sub = SubModel(child=lambda _text, _turn: submit("'child'"), usage=usage)
    root = ScriptedRoot(scripted(CASES["U10"]), child=sub.child, usage=usage)
    rlm = AsyncRLM(backend=root, other_backends=[sub], max_depth=2, max_budget=5.0)
    with anyio.fail_after(10), pytest.raises(BudgetExceededError) as ended:
        await rlm.acompletion("CTX", QUESTION)
    assert root.asked + sub.asked < 7
    assert (ended.value.spent, ended.value.budget) == (root.asked + sub.asked, 5.0)


@both
@covers("U11")
async def test_usage_is_that_of_the_whole_tree() -> None:
    sub = SubModel(child=lambda _text, _turn: submit("'child'"))
    with anyio.fail_after(10):
        outcome = await run_case("U11", sub=sub, max_depth=2)
    usage = outcome.completion.usage_summary
    assert outcome.answer == "done"
    assert (usage.total_calls, usage.total_input_tokens, usage.total_output_tokens) == (4, 40, 20)
    assert usage.complete


@one
@covers("U14")
async def test_a_run_that_ran_out_of_turns_says_so() -> None:
    with anyio.fail_after(10):
        outcome = await run_case("U14", max_iterations=2)
    assert outcome.completion.stop_reason == "max_iterations"


@one
@covers("U14")
async def test_a_finished_run_says_so() -> None:
    with anyio.fail_after(10):
        assert (await run([submit("'done'")])).completion.stop_reason == "answer"


@both
@covers("U15")
async def test_depth_zero_gives_the_usual_result() -> None:
    with anyio.fail_after(10):
        completion = (await run_case("U15", max_depth=0)).completion
    assert isinstance(completion, RLMChatCompletion)
    assert completion.response == "plain reply"
    assert completion.stop_reason == "text"
    assert completion.usage_summary.total_calls == 1


def _child(_text: str, _turn: int) -> str:
    return cell("g = rlm_query('leaf task')\nanswer[\"content\"] = 'child:' + g\nanswer[\"ready\"] = True")


@one
@pytest.mark.parametrize("id", ["U16", "U17"])
@covers("U16", "U17")
async def test_depth_is_the_hosts_to_decide(id: str) -> None:
    sub = SubModel(lambda _prompt: "leaf", child=_child)
    with anyio.fail_after(10):
        outcome = await run_case(id, sub=sub, max_depth=2)
    assert outcome.answer == "child:leaf"
    assert outcome.root.asked + sub.asked == 3
    assert sub.plain == ["leaf task"]
    assert "RLM_MAX_DEPTH" not in os.environ


@one
@covers("U16")
@pytest.mark.parametrize(("max_depth", "conversations"), [(1, 1), (2, 2), (3, 3), (4, 4)])
async def test_every_depth_below_the_last_has_a_repl(max_depth: int, conversations: int) -> None:
    def plan(_text: str, _turn: int) -> str:
        return cell("answer.update(content='>' + rlm_query('down'), ready=True)")

    root = PlannedRoot(plan)
    sub = SubModel(lambda _prompt: "leaf", child=plan)
    rlm: Any = AsyncRLM(backend=root, other_backends=[sub], max_depth=max_depth)
    with anyio.fail_after(10):
        result = await rlm.acompletion("CTX")
    assert result.response == ">" * conversations + "leaf"
