"""The small language of the `expect` field: what a scripted run must have shown."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .models import ScriptedRoot, SubModel


class Evidence:
    """What one run left to judge: its answer, what both models saw, its seconds."""

    def __init__(self, answer: str | None, root: ScriptedRoot, sub: SubModel, seconds: float) -> None:
        self.answer = answer
        self.root = root
        self.sub = sub
        self.seconds = seconds


def failures(expect: dict[str, Any], run: Evidence) -> list[str]:
    """What of `expect` does not hold, each as one line; empty if all holds."""
    found: list[str] = []
    for check, wanted in expect.items():
        found += _CHECKS[check](run, wanted)
    return found


def _all(run: Evidence, wanted: list[dict[str, Any]]) -> list[str]:
    return [line for part in wanted for line in failures(part, run)]


def _any(run: Evidence, wanted: list[dict[str, Any]]) -> list[str]:
    parts = [failures(part, run) for part in wanted]
    return [] if any(not part for part in parts) else [line for part in parts for line in part]


def _answer_equals(run: Evidence, wanted: str) -> list[str]:
    return [] if run.answer == wanted else [f"answer is {run.answer!r}, not {wanted!r}"]


def _answer_json(run: Evidence, wanted: Any) -> list[str]:
    try:
        value = json.loads(run.answer or "")
    except ValueError:
        return [f"answer is no JSON: {run.answer!r}"]
    return [] if value == wanted else [f"answer is {value!r}, not {wanted!r}"]


def _answer_not_contains(run: Evidence, wanted: str) -> list[str]:
    return [f"answer holds {wanted!r}: {run.answer!r}"] if wanted in (run.answer or "") else []


def _seen(run: Evidence, turn: int) -> str:
    return run.root.seen(turn) if turn <= len(run.root.own) else ""


def _seen_contains(run: Evidence, wanted: tuple[int, str]) -> list[str]:
    turn, text = wanted
    seen = _seen(run, turn)
    return [] if turn <= len(run.root.own) and text in seen else [f"turn {turn} lacks {text!r}: {seen[-600:]!r}"]


def _seen_not_contains(run: Evidence, wanted: tuple[int, str]) -> list[str]:
    turn, text = wanted
    return [f"turn {turn} holds {text!r}"] if turn > len(run.root.own) or text in _seen(run, turn) else []


def _seen_regex(run: Evidence, wanted: tuple[int, str]) -> list[str]:
    turn, pattern = wanted
    seen = _seen(run, turn)
    return [] if re.search(pattern, seen) else [f"turn {turn} does not match {pattern!r}: {seen[-600:]!r}"]


def _seen_max(run: Evidence, wanted: tuple[int, int]) -> list[str]:
    turn, most = wanted
    size = len(_seen(run, turn))
    return [] if 0 < size < most else [f"turn {turn} has {size:,} characters, wanted fewer than {most:,}"]


def _seen_utf8(run: Evidence, turn: int) -> list[str]:
    try:
        return [] if _seen(run, turn).encode() else [f"there was no turn {turn}"]
    except UnicodeEncodeError as error:
        return [f"turn {turn}: {error}"]


def _root_calls(run: Evidence, wanted: int) -> list[str]:
    return [] if len(run.root.own) == wanted else [f"{len(run.root.own)} root calls, not {wanted}"]


def _sub_calls(run: Evidence, wanted: int) -> list[str]:
    return [] if run.sub.asked == wanted else [f"{run.sub.asked} sub-calls, not {wanted}"]


def _wall_max(run: Evidence, wanted: float) -> list[str]:
    return [] if run.seconds < wanted else [f"took {run.seconds:.1f} s, wanted less than {wanted}"]


def _alternate(run: Evidence, _wanted: bool) -> list[str]:
    for request in run.root.own:
        roles = [m.role for m in request.messages]
        spoken = roles[1:] if roles[0] == "system" else roles
        if spoken != [("user", "assistant")[i % 2] for i in range(len(spoken))]:
            return [f"roles do not alternate: {roles}"]
    return []


def _ends_user(run: Evidence, _wanted: bool) -> list[str]:
    ends = [request.messages[-1].role for request in run.root.own]
    return [] if set(ends) == {"user"} else [f"last roles of the requests: {ends}"]


def _no_empty_assistant(run: Evidence, _wanted: bool) -> list[str]:
    blank = sum(m.role == "assistant" and not m.content.strip() for r in run.root.own for m in r.messages)
    return [f"{blank} blank assistant messages"] if blank else []


_CHECKS = {
    "all": _all,
    "any": _any,
    "answer_equals": _answer_equals,
    "answer_json": _answer_json,
    "answer_not_contains": _answer_not_contains,
    "seen_contains": _seen_contains,
    "seen_not_contains": _seen_not_contains,
    "seen_regex": _seen_regex,
    "seen_max": _seen_max,
    "seen_utf8": _seen_utf8,
    "root_calls": _root_calls,
    "sub_calls": _sub_calls,
    "wall_max": _wall_max,
    "alternate": _alternate,
    "ends_user": _ends_user,
    "no_empty_assistant": _no_empty_assistant,
}
