"""The trajectory in the reference's shape."""

from __future__ import annotations

import json
import math
from typing import Any

from asyncrlm.events import (
    CellFinished,
    CellStarted,
    Event,
    ModelReplied,
    RunFinished,
    RunStarted,
    SubcallFinished,
    TurnFinished,
    TurnStarted,
    UsageSettled,
)
from asyncrlm.observe.trajectory import Trajectory


def turn(number: int, *between: Event, run: str = "root", text: str = "reply") -> list[Event]:
    return [
        TurnStarted(run_id=run, turn=number, max_turns=3, time=10.0),
        ModelReplied(
            run_id=run,
            turn=number,
            model="m",
            prompt=[{"role": "user", "content": f"new in {number}"}],
            text=text,
            input_tokens=3,
            output_tokens=2,
        ),
        *between,
        TurnFinished(run_id=run, turn=number, seconds=0.5),
    ]


def cell(number: int, *between: Event, run: str = "root", turn: int = 1, **fields: Any) -> list[Event]:
    return [
        CellStarted(run_id=run, turn=turn, cell=number, code=f"code {number}"),
        *between,
        CellFinished(run_id=run, turn=turn, cell=number, seconds=0.25, **fields),
    ]


def fold(*events: Event) -> Trajectory:
    trajectory = Trajectory()
    for event in events:
        trajectory(event)
    return trajectory


def test_a_run_in_the_references_shape() -> None:
    call = SubcallFinished(
        run_id="root", subcall=1, kind="llm", model="s", prompt="p", response="r", input_tokens=5, output_tokens=1,
        cached_tokens=4, cost=0.25, seconds=0.125,
    )  # fmt: skip
    failed = SubcallFinished(
        run_id="root", subcall=2, kind="llm", model="s", prompt="q", error="Error: no", cost=math.nan
    )
    trajectory = fold(
        RunStarted(run_id="root", root_model="m", environment="local", limits={"max_budget": math.inf}, time=1.0),
        *turn(1, *cell(1, call, failed, stdout="out", stderr="warned", error="Traceback", variables={"x": "int"})),
        *turn(2, *cell(2, turn=2, stdout="two"), *cell(3, turn=2, error="boom")),
        RunFinished(run_id="root", stop_reason="answer", response="42", seconds=2.0),
    )
    metadata = trajectory.metadata()
    assert metadata is not None
    json.dumps(metadata, allow_nan=False)
    about = metadata["run_metadata"]
    assert about["root_model"] == "m"
    assert about["environment_type"] == "local"
    assert about["stop_reason"] == "answer"
    assert about["timestamp"] == "1970-01-01T00:00:01+00:00"
    first, second = metadata["iterations"]
    assert (first["iteration"], second["iteration"]) == (1, 2)
    assert second["prompt"] == [{"role": "user", "content": "new in 2"}]
    assert first["response"] == "reply"
    assert first["iteration_time"] == 0.5
    assert first["final_answer"] is None
    assert second["final_answer"] == "42"
    (block,) = first["code_blocks"]
    assert block["code"] == "code 1"
    result = block["result"]
    assert result["stdout"] == "out"
    assert result["stderr"] == "warned\nTraceback"
    assert result["locals"] == {"x": "int"}
    assert result["execution_time"] == 0.25
    good, bad = result["rlm_calls"]
    assert (good["root_model"], good["prompt"], good["response"]) == ("s", "p", "r")
    assert good["usage_summary"]["total_cost"] == 0.25
    used = good["usage_summary"]["model_usage_summaries"]["s"]
    assert (used["total_input_tokens"], used["cached_tokens"], used["reasoning_tokens"]) == (5, 4, 0)
    assert "error" not in good
    assert bad["error"] == "Error: no"
    assert bad["usage_summary"]["complete"] is False
    assert [b["result"]["final_answer"] for b in second["code_blocks"]] == [None, "42"]


def test_children_are_nested_in_the_record_of_their_call() -> None:
    def child(run: str, answer: str) -> list[Event]:
        return [
            RunStarted(run_id=run, parent_id="root", depth=1, root_model="c"),
            *turn(1, *cell(1, run=run, stdout=answer), run=run),
            RunFinished(run_id=run, parent_id="root", depth=1, stop_reason="answer", response=answer),
        ]

    def ended(number: int, run: str, answer: str) -> Event:
        return SubcallFinished(run_id="root", subcall=number, kind="rlm", model="c", response=answer, child_run_id=run)

    one, two = child("one", "1"), child("two", "2")
    mixed = [event for pair in zip(one, two, strict=True) for event in pair]
    trajectory = fold(
        RunStarted(run_id="root", root_model="m"),
        *turn(1, *cell(1, *mixed, ended(2, "two", "2"), ended(1, "one", "1"))),
    )
    metadata = trajectory.metadata()
    assert metadata is not None
    records = metadata["iterations"][0]["code_blocks"][0]["result"]["rlm_calls"]
    assert [record["response"] for record in records] == ["2", "1"]
    for record in records:
        nested = record["metadata"]
        assert nested["run_metadata"]["root_model"] == "c"
        assert nested["iterations"][0]["code_blocks"][0]["result"]["stdout"] == record["response"]
    # Held by the record alone from then on.
    assert trajectory.metadata("one") is None


def test_what_is_there_when_a_run_breaks_off() -> None:
    trajectory = fold(
        RunStarted(run_id="root", root_model="m"),
        *turn(1, CellStarted(run_id="root", turn=1, cell=1, code="x")),
        TurnStarted(run_id="root", turn=2, max_turns=3),
        RunFinished(run_id="root", stop_reason="error", error="LMError: down"),
    )
    metadata = trajectory.metadata()
    assert metadata is not None
    assert metadata["run_metadata"]["error"] == "LMError: down"
    assert [i["response"] for i in metadata["iterations"]] == ["reply", ""]
    assert metadata["iterations"][0]["code_blocks"][0]["result"]["stdout"] == ""


def test_reasoning_is_kept_and_strangers_are_ignored() -> None:
    trajectory = fold(
        UsageSettled(run_id="root", model="m"),
        RunStarted(run_id="root", root_model="m"),
        UsageSettled(run_id="root", model="m"),
        CellFinished(run_id="root", turn=1, cell=1),
        SubcallFinished(run_id="root", subcall=1, kind="llm", model="m"),
        TurnStarted(run_id="root", turn=1, max_turns=1),
        ModelReplied(run_id="root", turn=1, model="m", prompt=[], text="t", reasoning="because"),
        RunFinished(run_id="root", stop_reason="text", response="t"),
    )
    metadata = trajectory.metadata()
    assert metadata is not None
    assert metadata["iterations"][0]["reasoning"] == "because"
    assert metadata["iterations"][0]["final_answer"] == "t"
    assert Trajectory().metadata() is None


def test_an_error_already_in_stderr_is_not_said_twice() -> None:
    trajectory = fold(
        RunStarted(run_id="root", root_model="m"),
        *turn(1, *cell(1, stderr="w\nTraceback", error="Traceback"), *cell(2, stderr="w\n", error="T")),
    )
    metadata = trajectory.metadata()
    assert metadata is not None
    blocks = metadata["iterations"][0]["code_blocks"]
    assert [b["result"]["stderr"] for b in blocks] == ["w\nTraceback", "w\nT"]
