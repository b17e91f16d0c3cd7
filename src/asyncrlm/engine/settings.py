"""What an `AsyncRLM` was told, checked: the defaults by name, and the settings one call runs under."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from numbers import Integral, Real
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import msgspec
from msgspec import Struct

from ..errors import ConfigurationError
from ..ledger import LimitsMode
from ..lm.cache.asked import CacheSettings
from ..lm.pacing import Pacer
from ..lm.routing import Router
from ..mcp.server import MCPServer
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
DEFAULT_CACHE_SIZE: Final = "1GB"
"""What the replies in a cache may take at most."""
DEFAULT_TOOL_TIMEOUT: Final = 600.0
"""Seconds one call of a tool may take."""
CLOSING_TOKENS: Final = 1_024
"""Output tokens held back for the last turn of `on_limit="answer"`."""
CLOSING_GROWTH: Final = 30_000
"""Bytes that a turn may add to a history before its last turn: a reply, what its cells printed, the closing words."""
CLOSING_MESSAGE: Final = 4_000
"""Characters kept of what stands before the closing words of a last message that was refused as too much."""
CLOSING_SHARE: Final = 0.2
"""Share of `max_timeout` held back for the last turn of `on_limit="answer"`, at most `CLOSING_SECONDS`."""
CLOSING_SECONDS: Final = 30.0
MAX_EMPTY_REPLIES: Final = 3
"""Empty replies of a root model in a row before the run ends with an `LMError` of kind "empty"."""
MAX_REFUSAL: Final = 300
"""Characters kept of what a model says of its refusal in the error of a run."""

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
    tool_timeout: float | None = DEFAULT_TOOL_TIMEOUT


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "limits": get_args(LimitsMode),
    "on_limit": get_args(OnLimit),
    "on_subcall_error": get_args(OnSubcallError),
}
_SECONDS_OR_USD = frozenset({"max_budget", "max_timeout", "subcall_timeout", "tool_timeout"})
"""The limits that may have a fraction, or be infinite, which is no limit; the others count."""
_AT_LEAST_ONE = frozenset({"max_iterations", "max_errors", "max_concurrent_subcalls", "max_concurrent_requests"})
_NEVER_NONE = frozenset({"max_depth", "max_iterations", "max_concurrent_subcalls", "max_concurrent_requests"})


def checked_limits(base: Limits, given: Mapping[str, Any]) -> Limits:
    """`base` with what was `given`, every value checked.

    Raises:
        ConfigurationError: naming the parameter, what it takes and what it got.
    """
    known = Limits.__struct_fields__
    checked: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigurationError(f"unknown limit {name!r}; known are: {', '.join(known)}")
        checked[name] = _checked_choice(name, value) if name in _CHOICES else _checked_number(name, value)
    return msgspec.structs.replace(base, **checked)


def _checked_choice(name: str, value: Any) -> Any:
    if not isinstance(value, str) or value not in _CHOICES[name]:
        known = " or ".join(f'"{choice}"' for choice in _CHOICES[name])
        raise ConfigurationError(f"{name} must be {known}, not {_shown(value)}")
    return value


def _checked_number(name: str, value: Any) -> Any:
    counts, least = name not in _SECONDS_OR_USD, 1 if name in _AT_LEAST_ONE else 0
    if value is None and name not in _NEVER_NONE:
        return None
    if isinstance(value, Real) and value is not True and value is not False:
        number = cast("Any", value)  # numpy's, too
        if not counts and number == math.inf:
            return None
        if number >= least and (not counts or isinstance(value, Integral) or float(number).is_integer()):
            return int(number) if counts else float(number)
    form = f"{'a whole number' if counts else 'a number'}, {least} or more{'' if name in _NEVER_NONE else ', or None'}"
    raise ConfigurationError(f"{name} must be {form}, not {_shown(value)}")


def _shown(value: Any) -> str:
    """A wrong value in a message: what is neither a number nor short may be anything, a key among them."""
    if isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= 16):
        return repr(value)
    return f"a value of type {type(value).__name__}"


Ask: TypeAlias = Callable[[list[dict[str, str]]], Awaitable[str]]
"""Asks the root model with messages of "role" and "content", under the limits of the run. Returns its text."""
Compactor: TypeAlias = Callable[[list[dict[str, str]], Ask], Awaitable[str]]
"""Makes one text of a history that nears the window: `async def f(messages, ask) -> str`."""


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
    servers: tuple[MCPServer, ...]
    """Whose tools are beside `tools`."""
    approve: Callable[..., Any] | None
    """Looks at each cell and tool call first."""
    callbacks: Callbacks
    logger: Any
    verbose: bool
    persistent: bool
    compactor: Compactor | None
    """Makes one text of a history that nears the window; None: none is made."""
    compaction_threshold: float
    """Share of the window at which it is asked."""
    pacer: Pacer | Mapping[str, Pacer] | None
    tenant: str | None
    replies: CacheSettings | None
    """Where replies are kept, if anywhere."""
