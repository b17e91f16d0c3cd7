"""What comes back from a run, and the records inside it. Names follow the reference implementation."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, Self, cast

import msgspec
from msgspec import Struct, field

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Parsed = TypeVar("Parsed", default=Any)
else:  # before Python 3.13 no TypeVar of the standard library has a default
    from typing import TypeVar

    Parsed = TypeVar("Parsed")

StopReason = Literal["answer", "max_iterations", "limit", "text"]


def _plain(value: Any) -> Any:
    """What `to_dict` writes for a value that has no JSON form of its own."""
    dump: Any = getattr(value, "model_dump", None)
    return dump(mode="json") if callable(dump) else str(value)


def _text_keys(value: Any) -> Any:
    """`value` with keys as JSON can have them: such as a tuple becomes its text."""
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {k if type(k) in (str, int, float) else str(k): _text_keys(item) for k, item in items}
    if isinstance(value, (list, tuple)):
        return [_text_keys(item) for item in cast("list[Any]", value)]
    return value


def _as_can_be(value: Any) -> Any:
    """`value` as builtin types, or what is the matter with it."""
    try:
        return msgspec.to_builtins(_text_keys(value), enc_hook=_plain, str_keys=True)
    except (ValueError, RecursionError) as error:
        why = "it holds itself, or is too deep" if isinstance(error, RecursionError) else str(error)
        return f"<{type(value).__name__} that has no JSON form: {why}>"


class _Record(Struct, kw_only=True):
    """A record with the reference's `to_dict` and `from_dict`."""

    def to_dict(self) -> dict[str, Any]:
        """A dict of builtin types; fields that are None are left out."""
        try:
            plain = msgspec.to_builtins(self, enc_hook=_plain, str_keys=True)
        except (TypeError, ValueError, RecursionError):  # a prompt or tags of another kind than JSON
            plain = {name: _as_can_be(getattr(self, name)) for name in self.__struct_fields__}
        return {name: value for name, value in plain.items() if value is not None}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The record that `to_dict` wrote; unknown keys are ignored.

        Raises:
            msgspec.ValidationError: if a field has the wrong type; the message names its path.
        """
        return msgspec.convert(data, cls, strict=False)


class RateHints(Struct, frozen=True, kw_only=True):
    """What a provider said of its own rate limits, as it stood after one request. None: it did not say."""

    requests_left: int | None = None
    request_limit: int | None = None
    requests_reset: float | None = None
    """Seconds until all requests are there again."""
    tokens_left: int | None = None
    token_limit: int | None = None
    tokens_reset: float | None = None


class ModelUsageSummary(_Record):
    """What one model was used for in a tree."""

    total_calls: int = 0
    total_input_tokens: int = 0
    total_output_tokens: int = 0
    total_cost: float | None = None
    """USD; None while no call of this model had a known cost."""
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    complete: bool = True
    """False when some call did not say what it used, or only some of them have a known cost: the sums are then lower
    bounds or estimates."""


class UsageSummary(_Record):
    """What a whole tree used, by model."""

    model_usage_summaries: dict[str, ModelUsageSummary] = field(default_factory=dict[str, ModelUsageSummary])

    @property
    def total_cost(self) -> float | None:
        """USD of all calls whose cost is known (see `complete`); None if there is none."""
        costs = [m.total_cost for m in self.model_usage_summaries.values() if m.total_cost is not None]
        return sum(costs) if costs else None

    @property
    def total_calls(self) -> int:
        """Requests, those of sub-calls and children among them."""
        return sum(m.total_calls for m in self.model_usage_summaries.values())

    @property
    def total_input_tokens(self) -> int:
        """Of all models; a lower bound where `complete` is False."""
        return sum(m.total_input_tokens for m in self.model_usage_summaries.values())

    @property
    def total_output_tokens(self) -> int:
        """Of all models, what they thought included."""
        return sum(m.total_output_tokens for m in self.model_usage_summaries.values())

    @property
    def cached_tokens(self) -> int:
        """Input tokens that a provider had in its cache, and charged less for."""
        return sum(m.cached_tokens for m in self.model_usage_summaries.values())

    @property
    def reasoning_tokens(self) -> int:
        """Output tokens that were thoughts, as far as providers say."""
        return sum(m.reasoning_tokens for m in self.model_usage_summaries.values())

    @property
    def complete(self) -> bool:
        """False when some call did not say what it used, or `total_cost` leaves out calls whose cost is not known."""
        models = self.model_usage_summaries.values()
        priced = [m.total_cost is not None for m in models]
        return all(m.complete for m in models) and (all(priced) or not any(priced))

    def to_dict(self) -> dict[str, Any]:
        models = {name: m.to_dict() for name, m in self.model_usage_summaries.items()}
        totals: dict[str, Any] = {"model_usage_summaries": models, "complete": self.complete}
        if self.total_cost is not None:
            totals["total_cost"] = self.total_cost
        return totals


class Used(Protocol):
    """What a provider said that a reply used; None: it did not say."""

    @property
    def input_tokens(self) -> int | None: ...
    @property
    def output_tokens(self) -> int | None: ...
    @property
    def cached_tokens(self) -> int | None: ...
    @property
    def reasoning_tokens(self) -> int | None: ...
    @property
    def cost(self) -> float | None: ...


def usage_of_one(model: str, used: Used) -> UsageSummary:
    """The summary of one request; `used` is what its provider said, None where it did not say."""
    summary = ModelUsageSummary(
        total_calls=1,
        total_input_tokens=used.input_tokens or 0,
        total_output_tokens=used.output_tokens or 0,
        total_cost=used.cost if used.cost is not None and math.isfinite(used.cost) else None,
        cached_tokens=used.cached_tokens or 0,
        reasoning_tokens=used.reasoning_tokens or 0,
        complete=used.input_tokens is not None and used.output_tokens is not None,
    )
    return UsageSummary(model_usage_summaries={model: summary})


class RLMChatCompletion(_Record, Generic[Parsed]):
    """The result of a run, and the record of a sub-call; `Parsed` is the type that was asked for, if one was."""

    root_model: str
    prompt: Any
    response: str
    usage_summary: UsageSummary = field(default_factory=UsageSummary)
    execution_time: float = 0.0
    """Seconds."""
    metadata: dict[str, Any] | None = None
    """The trajectory, kept only if a logger, a stream or `verbose` asked for it."""
    error: str | None = None
    """Why a sub-call failed, or why a run has no answer; None where neither is so."""
    run_id: str | None = None
    stop_reason: StopReason = "answer"
    limit_reached: str | None = None
    """The first limit that the tree met, though there is a response: it may lack what sub-calls were to add."""
    parsed: Parsed = cast("Parsed", None)
    """The answer as `response_format` asked for it, checked; None without one."""
    tags: dict[str, Any] | None = None

    def __repr__(self) -> str:
        """Short: a prompt may be a gigabyte."""
        prompt = f"{type(self.prompt).__name__} of {len(self.prompt):,}" if isinstance(self.prompt, Sized) else "…"
        return (
            f"<RLMChatCompletion {self.stop_reason} by {self.root_model}: {self.response[:80]!r}, prompt: {prompt}, "
            f"{self.usage_summary.total_calls} calls, {self.execution_time:.1f} s>"
        )

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"usage_summary": self.usage_summary.to_dict()}


class REPLResult(_Record):
    """What one cell did."""

    stdout: str = ""
    stderr: str = ""
    """What the cell wrote to its standard error, then the traceback if it raised. Above it, if an earlier cell's worker
    was lost meanwhile, what became of that."""
    locals: dict[str, str] = field(default_factory=dict[str, str])
    """Variable name → short repr."""
    execution_time: float = 0.0
    """Seconds."""
    llm_calls: list[RLMChatCompletion] = field(default_factory=list[RLMChatCompletion])
    final_answer: str | None = None
    """The answer that this cell submitted; the next cell begins without one."""
    error: str | None = None
    """The traceback, if the cell raised or was stopped."""

    @property
    def rlm_calls(self) -> list[RLMChatCompletion]:
        """The reference's other name for `llm_calls`."""
        return self.llm_calls
