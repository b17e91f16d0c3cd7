"""Sampling arguments as callers give them: which types the names that all know must have, and numbers that are none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, float) or _whole(value)


def _seconds(value: object) -> bool:
    return _number(value) and cast("float", value) > 0


def _text(value: object) -> bool:
    return isinstance(value, str)


def _texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_text, cast("list[object]", value)))


def _text_or_texts(value: object) -> bool:
    return _text(value) or _texts(value)


def _dict(value: object) -> bool:
    return isinstance(value, Mapping)


_TYPES: tuple[tuple[str, Callable[[object], bool], tuple[str, ...]], ...] = (
    ("a whole number", _whole, ("max_tokens", "max_completion_tokens", "max_output_tokens")),
    ("a number", _number, ("temperature", "top_p", "presence_penalty", "frequency_penalty")),
    ("a positive number of seconds", _seconds, ("timeout",)),
    ("a str or a list of them", _text_or_texts, ("stop",)),
    ("a list of str", _texts, ("stop_sequences",)),
    ("a str", _text, ("user", "reasoning_effort")),
    (
        "a dict",
        _dict,
        ("metadata", "output_config", "response_format", "extra_body", "extra_headers", "extra_query"),
    ),
)
_CHECKS = {name: (right, check) for right, check, names in _TYPES for name in names}


def argument_problem(arguments: Mapping[Any, Any]) -> str | None:
    """What is wrong with the types of these sampling arguments, or None. Shows no text: it may be a secret."""
    for name, value in arguments.items():
        if not isinstance(name, str):
            return f"a name in sampling_args must be a str, not {type(name).__name__}"
        if value is None or name not in _CHECKS:
            continue
        right, check = _CHECKS[name]
        if not check(value):
            said = repr(value) if isinstance(value, int | float) else _kind(value)
            return f"{name} in sampling_args must be {right}, not {said}"
    return None


def _kind(value: Any) -> str:
    kind: str = type(value).__name__
    items = cast("list[object]", value) if isinstance(value, list | tuple) else ()
    wrong = next((f" with {type(item).__name__} in it" for item in items if not isinstance(item, str)), "")
    return kind + wrong


def endless(value: Any) -> float | None:
    """A NaN or an infinity somewhere in `value`, which JSON has no number for; None if there is none."""
    match value:
        case float():
            return None if math.isfinite(value) else value
        case Mapping():
            return _first_endless(cast("Mapping[Any, Any]", value).values())
        case list() | tuple():
            return _first_endless(cast("list[Any]", value))
        case _:
            return None


def _first_endless(values: Any) -> float | None:
    return next((found for value in values if (found := endless(value)) is not None), None)
