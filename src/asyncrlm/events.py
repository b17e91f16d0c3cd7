"""What happens in a tree of runs, as typed events. The log, the console and every other face are listeners.

A listener is a callable that takes one event. It is called on the event loop, in order, and must not block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct, field

from .types import UsageSummary

FORMAT_VERSION = 1
"""Version of the events and of the log files made of them. Readers refuse newer ones and skip unknown fields."""


class Event(Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Something that happened in one run."""

    run_id: str
    parent_id: str | None = None
    """The run whose cell started this run; None at the root."""
    depth: int = 0
    time: float = 0.0
    """Seconds since the epoch."""


class RunStarted(Event, frozen=True, kw_only=True):
    """A run begins: the root's, or a child's that a cell started."""

    root_model: str
    sub_models: list[str] = field(default_factory=list[str])
    environment: str = ""
    max_depth: int = 1
    max_iterations: int = 30
    limits: dict[str, Any] = field(default_factory=dict[str, Any])
    prompt_type: str = "str"
    prompt_size: int = 0
    """Characters of text, bytes of bytes or of a file."""
    root_prompt: str | None = None
    tags: dict[str, Any] | None = None


class ContextProgress(Event, frozen=True, kw_only=True):
    """A context is on its way: to the host, from the web or a stream, or from there to a sandbox that is elsewhere."""

    name: str = ""
    """The address without its query; "iterator" or "file" for a stream; to a sandbox the variable, or the document."""
    to: Literal["host", "sandbox"] = "host"
    received: int = 0
    """Bytes so far."""
    total: int | None = None
    """Bytes there will be; None where that is not known."""


class SandboxOpened(Event, frozen=True, kw_only=True):
    """A worker of the run is ready: once after `RunStarted`, and again for each that replaces one that died."""

    environment: str
    in_force: dict[str, Any] = field(default_factory=dict[str, Any])
    """What isolation holds where cells run: attack row → what holds it, or None where nothing does."""
    seconds: float = 0.0


class SandboxDied(Event, frozen=True, kw_only=True):
    """The worker is gone and its variables with it; a cell that still follows runs in a fresh one."""

    reason: str


class TurnStarted(Event, frozen=True, kw_only=True):
    """The root model of a run is about to be asked."""

    turn: int
    """From 1."""
    max_turns: int


class ModelReplied(Event, frozen=True, kw_only=True):
    """The root model of a run replied."""

    turn: int
    model: str
    prompt: list[dict[str, str]]
    """The messages that were new in this request."""
    text: str
    reasoning: str | None = None
    finish_reason: str | None = None
    answered_by: str | None = None
    """The name the provider answered with, where it did; of several fallbacks it says which one answered."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached: bool = False
    """Nothing was asked: the reply comes from a cache or a recording."""
    waited: float = 0.0
    """Seconds of `seconds` before the request was sent: for its turn, a rate limit, the ledger, between attempts."""
    retries: int = 0
    """How often the request was sent again after a failure."""
    seconds: float = 0.0


class HistoryCompacted(Event, frozen=True, kw_only=True):
    """A history neared its model's window; a summary stands in its place."""

    turn: int
    tokens_before: int
    """Of a request, about."""
    tokens_after: int
    summary: str
    seconds: float = 0.0


class CellStarted(Event, frozen=True, kw_only=True):
    """A cell of a reply is about to run."""

    turn: int
    cell: int
    """From 1, over the whole run."""
    code: str


class CellFinished(Event, frozen=True, kw_only=True):
    """A cell ended, whatever it came to."""

    turn: int
    cell: int
    stdout: str = ""
    stderr: str = ""
    error: str | None = None
    """The traceback, if the cell raised or was stopped; what became of the worker, if that was lost."""
    variables: dict[str, str] = field(default_factory=dict[str, str])
    """Name → type."""
    subcalls: int = 0
    failed_subcalls: int = 0
    seconds: float = 0.0


class SubcallStarted(Event, frozen=True, kw_only=True):
    """A cell asked a model (`llm`) or started a child (`rlm`)."""

    subcall: int
    """From 1, over the whole run."""
    kind: str
    model: str
    prompt_preview: str
    """At most 80 characters."""


class SubcallFinished(Event, frozen=True, kw_only=True):
    """A sub-call was answered, failed, or was cancelled with its cell."""

    subcall: int
    kind: str
    model: str
    prompt: str = ""
    response: str = ""
    error: str | None = None
    error_kind: str | None = None
    child_run_id: str | None = None
    answered_by: str | None = None
    """As of `ModelReplied`; None for a child run."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the input: read from the provider's cache."""
    reasoning_tokens: int | None = None
    """Of the output: thoughts."""
    cost: float | None = None
    cached: bool = False
    waited: float = 0.0
    """As in `ModelReplied`."""
    retries: int = 0
    seconds: float = 0.0


class ToolCalled(Event, frozen=True, kw_only=True):
    """A cell called a tool on the host, and it returned, raised, was refused or cancelled."""

    name: str
    """"name.function" where the function of an object was called."""
    args: list[Any] = field(default_factory=list[Any])
    """As plain data: texts longer than 1,000 characters clipped, long containers cut. `kwargs` likewise."""
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    error: str | None = None
    """Class and text of what the cell was raised: "PermissionError" if refused, "TimeoutError" if it took too long,
    "cancelled" if its cell ended first."""
    result_bytes: int = 0
    """Of what it returned, as JSON; 0 if it raised."""
    seconds: float = 0.0


class RequestWaiting(Event, frozen=True, kw_only=True):
    """A request failed in a way that may pass and will be sent again."""

    model: str
    attempt: int
    """The attempt that failed, from 1."""
    delay: float
    """Seconds until the next one."""
    reason: str


class UsageSettled(Event, frozen=True, kw_only=True):
    """One request of the tree was paid for, told of as its root's. Every sum of usage is a fold over these."""

    model: str
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    cost: float | None = None
    estimated: bool = False
    """True where the provider did not say, or the call was cut off: the reservation counts."""


class LimitReached(Event, frozen=True, kw_only=True):
    """The first limit of the tree that was met: it ends unless an answer is ready."""

    limit: str
    """The class of its error, such as "BudgetExceededError"."""
    reason: str


class ListenerFailed(Event, frozen=True, kw_only=True):
    """A callback of a run raised, or a listener of the tree, which is told of as its root's. The run goes on."""

    listener: str
    error: str


class TurnFinished(Event, frozen=True, kw_only=True):
    """A reply was read and its cells are done."""

    turn: int
    seconds: float


class RunFinished(Event, frozen=True, kw_only=True):
    """A run is over; nothing of it follows."""

    stop_reason: str
    """A `StopReason`, or "error" or "cancelled"."""
    response: str | None = None
    error: str | None = None
    usage_summary: UsageSummary = field(default_factory=UsageSummary)
    seconds: float = 0.0


AnyEvent = (
    RunStarted
    | ContextProgress
    | SandboxOpened
    | SandboxDied
    | TurnStarted
    | ModelReplied
    | HistoryCompacted
    | CellStarted
    | CellFinished
    | SubcallStarted
    | SubcallFinished
    | ToolCalled
    | RequestWaiting
    | UsageSettled
    | LimitReached
    | ListenerFailed
    | TurnFinished
    | RunFinished
)
"""Each kind of event: a `match` over it can be exhaustive."""

Listener = Callable[[Event], None]
