"""The trajectory of a run in the reference implementation's shape, folded from its tree's events."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..events import (
    CellFinished,
    CellStarted,
    Event,
    ModelReplied,
    RunFinished,
    RunStarted,
    SandboxOpened,
    SubcallFinished,
    ToolCalled,
    TurnFinished,
    TurnStarted,
)
from ..types import RLMChatCompletion, usage_of_one
from .text import plain


@dataclass(slots=True)
class _Run:
    run_metadata: dict[str, Any]
    iterations: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def iteration(self, turn: int, time: float) -> dict[str, Any]:
        """The record of `turn`, the newest one."""
        if not self.iterations or self.iterations[-1]["iteration"] != turn:
            stamp = datetime.fromtimestamp(time, UTC).isoformat()
            self.iterations.append(
                {
                    "type": "iteration",
                    "iteration": turn,
                    "timestamp": stamp,
                    "prompt": [],
                    "response": "",
                    "code_blocks": [],
                    "final_answer": None,
                    "iteration_time": None,
                }
            )
        return self.iterations[-1]

    def result(self) -> dict[str, Any] | None:
        """The newest cell's result; None before the first cell."""
        for iteration in reversed(self.iterations):
            if iteration["code_blocks"]:
                return iteration["code_blocks"][-1]["result"]
        return None


class Trajectory:
    """A listener that keeps what the runs of one tree did.

    `metadata()` is `{"run_metadata": {...}, "iterations": [...]}` as the reference shapes it: an iteration has
    `prompt` (only the messages that were new in that turn), `response`, `code_blocks`, `final_answer` and
    `iteration_time`; a code block's `result` has `stdout`, `stderr`, `locals` (name → short text), `execution_time`,
    `rlm_calls`, and `tool_calls` where it called tools of the host; the record of a child run carries the child's own
    trajectory as its `metadata`. All of it is strict JSON data, without NaN.
    """

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._root: str | None = None

    def __call__(self, event: Event) -> None:
        """Take one event of the tree."""
        if isinstance(event, RunStarted):
            if event.parent_id is None:
                self._root = event.run_id
            self._runs[event.run_id] = _Run(_run_metadata(event))
            return
        run = self._runs.get(event.run_id)
        if run is None:
            return
        match event:
            case SandboxOpened():
                run.run_metadata["in_force"] = plain(event.in_force)
            case TurnStarted():
                run.iteration(event.turn, event.time)
            case ModelReplied():
                _replied(run.iteration(event.turn, event.time), event)
            case CellStarted():
                block = {"code": event.code, "result": _empty_result()}
                run.iteration(event.turn, event.time)["code_blocks"].append(block)
            case CellFinished():
                _finished(run.result(), event)
            case SubcallFinished():
                self._subcall(run, event)
            case ToolCalled():
                _tool_called(run.result(), event)
            case TurnFinished():
                run.iteration(event.turn, event.time)["iteration_time"] = _number(event.seconds)
            case RunFinished():
                _ended(run, event)
            case _:
                pass

    def metadata(self, run_id: str | None = None) -> dict[str, Any] | None:
        """The trajectory so far of `run_id`, or of the root; None if that run has not begun."""
        run = self._runs.get(run_id or self._root or "")
        return None if run is None else {"run_metadata": run.run_metadata, "iterations": run.iterations}

    def _subcall(self, run: _Run, event: SubcallFinished) -> None:
        metadata = None
        if event.child_run_id is not None:
            metadata = self.metadata(event.child_run_id)
            # The record holds it from here on.
            self._runs.pop(event.child_run_id, None)
        result = run.result()
        if result is not None:
            result["rlm_calls"].append(_record(event, metadata))


def _run_metadata(event: RunStarted) -> dict[str, Any]:
    return plain(
        {
            "type": "metadata",
            "timestamp": datetime.fromtimestamp(event.time, UTC).isoformat(),
            "run_id": event.run_id,
            "parent_id": event.parent_id,
            "depth": event.depth,
            "root_model": event.root_model,
            "sub_models": event.sub_models,
            "max_depth": event.max_depth,
            "max_iterations": event.max_iterations,
            "environment_type": event.environment,
            "in_force": {},
            "limits": event.limits,
            "prompt_type": event.prompt_type,
            "prompt_size": event.prompt_size,
            "root_prompt": event.root_prompt,
            "tags": event.tags,
        }
    )


def _empty_result() -> dict[str, Any]:
    return {"stdout": "", "stderr": "", "locals": {}, "execution_time": None, "rlm_calls": [], "final_answer": None}


def _replied(iteration: dict[str, Any], event: ModelReplied) -> None:
    iteration["prompt"] = [*iteration["prompt"], *(dict(message) for message in event.prompt)]
    iteration["response"] = event.text
    iteration["model"] = event.model
    iteration["answered_by"] = event.answered_by
    iteration["input_tokens"] = event.input_tokens
    iteration["output_tokens"] = event.output_tokens
    if event.reasoning:
        iteration["reasoning"] = event.reasoning


def _finished(result: dict[str, Any] | None, event: CellFinished) -> None:
    if result is None:
        return
    result["stdout"] = event.stdout
    # The reference has one text for both, and programs written for it look for the error there.
    result["stderr"] = _joined(event.stderr, event.error)
    result["locals"] = dict(event.variables)
    result["execution_time"] = _number(event.seconds)


def _tool_called(result: dict[str, Any] | None, event: ToolCalled) -> None:
    if result is None:
        return
    # Only where there are any: the reference has no such field.
    result.setdefault("tool_calls", []).append(
        {
            "name": event.name,
            "args": plain(event.args),
            "kwargs": plain(event.kwargs),
            "error": event.error,
            "result_bytes": event.result_bytes,
            "execution_time": _number(event.seconds),
        }
    )


def _joined(stderr: str, error: str | None) -> str:
    if error is None or error in stderr:
        return stderr
    return f"{stderr}\n{error}" if stderr and not stderr.endswith("\n") else stderr + error


def _record(event: SubcallFinished, metadata: dict[str, Any] | None) -> dict[str, Any]:
    return RLMChatCompletion(
        root_model=event.model,
        prompt=event.prompt,
        response=event.response,
        usage_summary=usage_of_one(event.model, event),
        execution_time=_number(event.seconds) or 0.0,
        metadata=metadata,
        error=event.error,
        run_id=event.child_run_id,
    ).to_dict() | {"kind": event.kind, "answered_by": event.answered_by}


def _ended(run: _Run, event: RunFinished) -> None:
    run.run_metadata |= {"stop_reason": event.stop_reason, "execution_time": _number(event.seconds)}
    if event.error is not None:
        run.run_metadata["error"] = event.error
    if event.response is not None and run.iterations:
        run.iterations[-1]["final_answer"] = event.response
        result = run.result() if event.stop_reason == "answer" and run.iterations[-1]["code_blocks"] else None
        if result is not None:
            result["final_answer"] = event.response


def _number(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
