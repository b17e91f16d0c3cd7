"""The records that come back, as plain data."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pytest

from asyncrlm import ModelUsageSummary, RLMChatCompletion, UsageSummary

USAGE = UsageSummary(model_usage_summaries={"m": ModelUsageSummary(total_calls=2, total_cost=0.5)})


@pytest.mark.parametrize(
    ("prompt", "plain"),
    [
        ({"k": [1, date(2024, 1, 2)]}, {"k": [1, "2024-01-02"]}),
        ({(1, 2): {None: ("x",)}, True: 1, 7: 2}, {"(1, 2)": {"None": ["x"]}, "True": 1, "7": 2}),
        ([{frozenset([1]): date(2024, 1, 2)}], [{"frozenset({1})": "2024-01-02"}]),
    ],
)
def test_whatever_the_keys_of_a_prompt_a_completion_is_json(prompt: Any, plain: Any) -> None:
    completion = RLMChatCompletion(root_model="m", prompt=prompt, response="r", usage_summary=USAGE, tags={"a": 1})
    data = completion.to_dict()
    assert data["prompt"] == plain
    assert data["usage_summary"]["total_cost"] == 0.5
    again = RLMChatCompletion.from_dict(json.loads(json.dumps(data)))
    assert (again.prompt, again.usage_summary, again.tags) == (plain, USAGE, {"a": 1})


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


LOOP: dict[str, Any] = {}
LOOP["self"] = LOOP


@pytest.mark.parametrize(
    ("tags", "plain"),
    [
        ({"a": LOOP}, "holds itself, or is too deep"),
        ({"a": nested(100_000)}, "holds itself, or is too deep"),
        ({10**5000: 1}, "has no JSON form"),
        ({"a": {date(2024, 1, 2): 10**50}}, {"a": {"2024-01-02": 10**50}}),
    ],
    ids=["itself", "deep", "huge", "large"],
)
def test_tags_without_a_json_form_cost_nothing_else(tags: dict[Any, Any], plain: Any) -> None:
    data = RLMChatCompletion(root_model="m", prompt="p", response="r", tags=tags).to_dict()
    assert (data["prompt"], data["response"]) == ("p", "r")
    assert plain in data["tags"] if isinstance(plain, str) else plain == data["tags"]
