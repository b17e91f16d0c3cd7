"""Cases made from public bug reports: the data, and what the tests beside this package share to run it.

`cases.json` is data and stays as it came. A test says with `covers` which cases it checks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

F = TypeVar("F", bound=Callable[..., Any])


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One reproduction. The prose fields are for the reader; the tests run `model_turns` and judge by `expect`."""

    id: str
    area: str
    symptom: str
    expected: str
    model_turns: list[str | None]
    """What the root model replies, in order; None is a reply without content."""
    sub_answers: str | None
    context: Any
    setup: str | None
    check: str
    expect: dict[str, Any] | None
    kind: str


def _load() -> dict[str, Case]:
    raw = (Path(__file__).parent / "cases.json").read_bytes()
    return {case.id: case for case in msgspec.json.decode(raw, type=list[Case])}


CASES = _load()


def covers(*ids: str) -> Callable[[F], F]:
    """Mark a test as the check of these cases."""
    unknown = [i for i in ids if i not in CASES]
    assert not unknown, f"no such case: {unknown}"

    def mark(test: F) -> F:
        test.covers = ids  # type: ignore[attr-defined]
        return test

    return mark


def scripted(case: Case) -> list[str]:
    """The turns of a case as texts."""
    return [turn or "" for turn in case.model_turns]
