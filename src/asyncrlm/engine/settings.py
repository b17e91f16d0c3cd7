"""What an `AsyncRLM` was told, checked: the defaults by name, and the settings one call runs under."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from ..errors import ConfigurationError
from ..lm.asked import CacheSettings
from ..lm.pacing import Pacer
from ..lm.routing import Router
from ..repl.sandbox import Environment
from ..repl.tools import HostTools
from .prompts import Prompts

DEFAULT_BACKEND: Final = "openai"
"""The model family asked when none is named."""
DEFAULT_MAX_DEPTH: Final = 1
"""Runs nest to this depth: at 1 the root has a REPL and `rlm_query` is a plain call; at 2 children have REPLs."""
DEFAULT_MAX_ITERATIONS: Final = 30
"""Turns of one run before it must answer from what it has."""
DEFAULT_COMPACTION_THRESHOLD_PCT: Final = 0.85
"""Share of the root model's window at which a history is compacted."""
DEFAULT_MAX_CONCURRENT_SUBCALLS: Final = 16
"""Live children per depth of a tree."""
DEFAULT_MAX_CONCURRENT_REQUESTS: Final = 64
"""LM requests in flight per tree."""
DEFAULT_SUBCALL_TIMEOUT: Final = 600.0
"""Seconds one `llm_query` may take, retries included."""
CLOSING_TOKENS: Final = 1_024
"""Output tokens held back for the last turn of `on_limit="answer"`."""
CLOSING_GROWTH: Final = 30_000
"""Bytes that a turn may add to a history before its last turn: a reply, what its cells printed, the closing words."""
CLOSING_SHARE: Final = 0.2
"""Share of `max_timeout` held back for the last turn of `on_limit="answer"`, at most `CLOSING_SECONDS`."""
CLOSING_SECONDS: Final = 30.0
MAX_EMPTY_REPLIES: Final = 3
"""Empty replies of a root model in a row before the run ends with an `LMError` of kind "empty"."""

LimitsMode = Literal["soft", "hard"]
OnLimit = Literal["raise", "answer"]
OnSubcallError = Literal["return", "raise"]


class Limits(Struct, frozen=True, kw_only=True):
    """What one tree may use. Everything here can be given to one call as well."""

    max_depth: int = DEFAULT_MAX_DEPTH
    max_iterations: int = DEFAULT_MAX_ITERATIONS
    max_budget: float | None = None
    """USD."""
    max_timeout: float | None = None
    """Seconds."""
    max_tokens: int | None = None
    """Input and output tokens of the whole tree."""
    max_errors: int | None = None
    """Turns in a row with a cell that raised, per run."""
    max_subcalls: int | None = None
    max_concurrent_subcalls: int = DEFAULT_MAX_CONCURRENT_SUBCALLS
    max_concurrent_requests: int = DEFAULT_MAX_CONCURRENT_REQUESTS
    limits: LimitsMode = "soft"
    on_limit: OnLimit = "raise"
    on_subcall_error: OnSubcallError = "return"
    subcall_timeout: float | None = DEFAULT_SUBCALL_TIMEOUT


_AT_LEAST: Mapping[str, float] = {
    "max_depth": 0,
    "max_iterations": 1,
    "max_budget": 0,
    "max_timeout": 0,
    "max_tokens": 0,
    "max_errors": 1,
    "max_subcalls": 0,
    "max_concurrent_subcalls": 1,
    "max_concurrent_requests": 1,
    "subcall_timeout": 0,
}


def checked_limits(base: Limits, given: Mapping[str, Any]) -> Limits:
    """`base` with what was `given`, every value checked.

    Raises:
        ConfigurationError: naming the parameter, what it got and what it takes.
    """
    known = Limits.__struct_fields__
    for name, value in given.items():
        if name not in known:
            raise ConfigurationError(f"unknown limit {name!r}; known are: {', '.join(known)}")
        least = _AT_LEAST.get(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if least is not None and is_number and (math.isnan(value) or value < least):
            raise ConfigurationError(f"{name}={value!r}: must be {least:g} or more")
    try:
        return msgspec.convert({**msgspec.to_builtins(base), **given}, Limits)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"wrong limit: {_spelled(error)}") from None


def _spelled(error: msgspec.ValidationError) -> str:
    """`Expected int, got str - at $.max_depth` → `max_depth: expected int, got str`."""
    what, _, where = str(error).partition(" - at `$.")
    return f"{where.rstrip('`')}: {what[:1].lower()}{what[1:]}" if where else what


class Callbacks(Struct, frozen=True, kw_only=True):
    """The reference's callbacks, each a function or a coroutine function."""

    on_subcall_start: Callable[..., Any] | None = None
    """`(depth, model, prompt_preview)`, the preview at most 80 characters."""
    on_subcall_complete: Callable[..., Any] | None = None
    """`(depth, model, seconds, error_or_None)`."""
    on_iteration_start: Callable[..., Any] | None = None
    """`(depth, turn)`."""
    on_iteration_complete: Callable[..., Any] | None = None
    """`(depth, turn, seconds)`."""


class Configuration(Struct, frozen=True, kw_only=True):
    """Everything an `AsyncRLM` was told, checked. Holds no state of a run."""

    router: Router
    environment: Environment
    limits: Limits
    prompts: Prompts
    custom_system_prompt: str | None
    orchestrator: bool
    user_prologue: str | None
    tools: HostTools
    sub_tools: HostTools
    callbacks: Callbacks
    logger: Any
    verbose: bool
    pacer: Pacer | Mapping[str, Pacer] | None
    tenant: str | None
    replies: CacheSettings | None
    """Where replies are kept, if anywhere."""
