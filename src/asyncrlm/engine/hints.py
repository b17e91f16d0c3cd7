"""What a caller meant who gave an argument that there is not, or a class where an object belongs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from ..environments import takers
from ..errors import ConfigurationError

_MODEL = ("backend", 'backend="openai/gpt-5.4-mini" or backend_kwargs={"model_name": …}')
_SUB_MODEL = ("other_backends", 'other_backends=["openai/gpt-5.4-mini"]')
_REQUESTS = ("max_concurrent_requests", "max_concurrent_requests=…")
_MEANT: dict[str, tuple[str, str]] = {
    "model": _MODEL,
    **{
        name: ("backend_kwargs", f'backend_kwargs={{"{name}": …}}')
        for name in ("model_name", "api_key", "base_url", "price", "context_window", "max_retries", "default_headers")
    },
    **{
        name: ("sampling_args", f'sampling_args={{"{name}": …}}')
        for name in ("temperature", "top_p", "top_k", "seed", "stop", "reasoning_effort", "max_completion_tokens")
    },
    **dict.fromkeys(("sub_model", "sub_models", "submodel", "child_model", "small_model"), _SUB_MODEL),
    **dict.fromkeys(("concurrency", "max_concurrency", "max_workers", "parallelism"), _REQUESTS),
    "log_dir": ("logger", "logger=RLMLogger(log_dir=…)"),
}
"""What other libraries call it → the argument that it is here, and how it is given."""
_OTHER_NAMES = {
    **dict.fromkeys(("max_turns", "max_steps"), "max_iterations"),
    **dict.fromkeys(("recursion_depth", "max_recursion", "max_recursion_depth", "recursion_limit"), "max_depth"),
    **dict.fromkeys(("sandbox", "executor"), "environment"),
    **dict.fromkeys(("question", "query", "instruction", "instructions"), "root_prompt"),
    **dict.fromkeys(("context", "document", "documents", "text", "input", "messages"), "prompt"),
    **dict.fromkeys(("schema", "output_type", "output_schema", "response_model"), "response_format"),
    **dict.fromkeys(("system_prompt", "system"), "custom_system_prompt"),
    **dict.fromkeys(("budget", "max_cost"), "max_budget"),
    "timeout": "max_timeout",
    "tools": "custom_tools",
    "functions": "custom_tools",
    "llm": "lm",
    "model": "lm",
}
_OF_CALL = ("prompt", "root_prompt", "tags", "response_format", "lazy", "web")


def unknown_argument(name: str, known: Iterable[str], *, elsewhere: Iterable[str] = (), of: str) -> ConfigurationError:
    """The error for an argument that there is not.

    Args:
        name: As it was given.
        known: Those that could be given here.
        elsewhere: Those that can be given where an argument of the same purpose would go.
        of: What takes them: "constructor" or "call".
    """
    known, elsewhere = list(known), list(elsewhere)
    other = {"call": "the constructor", "constructor": "a call"}[of]
    here = "known are" if of == "constructor" else "for one call you can give"
    argument, form = _meant(name, known, elsewhere)
    places = [] if argument or "environment_kwargs" not in (*known, *elsewhere) else takers(name)
    if places:
        where = "the environment" if "local" in places else f"environment {' or '.join(map(repr, places))}"
        hint = f'; that is a setting of {where}: environment_kwargs={{"{name}": …}}; '
    elif name == "stream":
        hint = ": use astream(…), or stream(…) of an RLM, in place of the completion; "
    elif argument is None:
        hint = "; "
    elif argument in known:
        hint = f"; did you mean {argument!r}? " if form is None else f": give {form}; "
    else:
        hint = f": {form or argument} is given to {other}; "
    return ConfigurationError(f"unknown argument {name!r}{hint}{here}: {', '.join(known)}", argument=name)


def _meant(name: str, known: list[str], elsewhere: list[str]) -> tuple[str | None, str | None]:
    """The argument meant by a name, and its form where it does not stand for itself; None where nobody can tell."""
    if name in _MEANT and _MEANT[name][0] in (*known, *elsewhere):
        return _MEANT[name]
    if name in elsewhere:
        return name, None
    for names in (known, elsewhere):
        if _OTHER_NAMES.get(name) in names:
            return _OTHER_NAMES[name], None
    if takers(name):
        return None, None
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7) or difflib.get_close_matches(
        name, elsewhere, n=1, cutoff=0.8
    )
    return (near[0] if near else None), None


def of_call(known: Iterable[str]) -> list[str]:
    """What can be given to a call, beside `known`."""
    return list(dict.fromkeys((*known, *_OF_CALL)))


def got(value: Any) -> str:
    """What a value is that can't be, to stand at the end of a message."""
    if isinstance(value, type):
        return f"not the class itself: an object of it, {value.__name__}(…)"
    return f"not {type(value).__name__}"
