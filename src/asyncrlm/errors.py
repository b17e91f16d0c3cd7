"""Every error of asyncrlm, one tree.

    RLMError
     ├── ConfigurationError            the caller's mistake; the message names the right call
     ├── LimitError                    a limit of the tree was met
     │    ├── BudgetExceededError
     │    ├── TimeoutExceededError
     │    ├── TokenLimitExceededError
     │    ├── SubcallLimitExceededError
     │    └── ErrorThresholdExceededError
     ├── CancellationError             Ctrl-C in a call of the blocking `RLM`
     ├── SandboxLost                   the place where cells run is gone and could not be had again
     ├── ProtocolError                 a worker sent what no honest worker sends
     └── LMError                       a model could not be asked, or did not answer

Each carries what a caller needs to go on: `partial_answer`, `usage_summary`, `run_id`, `metadata`.
All of them can be pickled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from .money import ReportedUsage
    from .types import RateHints, UsageSummary

LMErrorKind = Literal[
    "authentication",
    "permission",
    "not_found",
    "unknown_model",
    "bad_request",
    "too_long",
    "rate_limit",
    "quota",
    "timeout",
    "connection",
    "server",
    "bad_reply",
    "empty",
    "refusal",
    "replay_miss",
    "schema",
    "other",
]


def last_line(traceback: str | None) -> str:
    """What a traceback comes to: "ValueError: no"; "" if there is none."""
    return (traceback or "").rstrip().rpartition("\n")[2].strip()


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def _rebuild(cls: type[RLMError], args: tuple[Any, ...], state: dict[str, Any]) -> RLMError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class RLMError(Exception):
    """Base of every error that asyncrlm raises on purpose.

    Attributes:
        partial_answer: `answer["content"]` as it stood at the end of the last cell, else the last reply if it ran no
            code, else None.
        usage_summary: What the whole tree had used by then, or None before the first request.
        run_id: The run that ended, or None where no run had begun.
        metadata: The trajectory so far, kept only if a logger, a stream or `verbose` asked for it.
    """

    def __init__(
        self,
        message: str,
        *,
        partial_answer: str | None = None,
        usage_summary: UsageSummary | None = None,
        run_id: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.partial_answer = partial_answer
        self.usage_summary = usage_summary
        self.run_id = run_id
        self.metadata = metadata

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class ConfigurationError(RLMError, ValueError):
    """The call itself is wrong; the message says which call is right.

    Attributes:
        argument: The argument that is wrong, or would cure it, by its name in Python; None where that is not one alone.
        problem: The message without what to do about it, for those who call the cure by another name.
    """

    def __init__(
        self, message: str, *, argument: str | None = None, problem: str | None = None, **details: Any
    ) -> None:
        super().__init__(message, **details)
        self.argument = argument
        self.problem = message if problem is None else problem


class LimitError(RLMError):
    """A limit of the tree was met. Unlike `LMError`, asking again does not help."""

    argument: ClassVar[str] = ""
    """The argument that sets the limit."""


class BudgetExceededError(LimitError):
    """`spent` of a `budget`, both in USD."""

    argument = "max_budget"

    def __init__(self, spent: float, budget: float, message: str | None = None, **details: Any) -> None:
        super().__init__(message or f"budget exceeded: ${spent:.6f} of ${budget:.6f} spent", **details)
        self.spent = spent
        self.budget = budget


class TimeoutExceededError(LimitError):
    """`elapsed` of a `timeout`, both in seconds."""

    argument = "max_timeout"

    def __init__(self, elapsed: float, timeout: float, message: str | None = None, **details: Any) -> None:
        super().__init__(message or f"timeout exceeded: {_seconds(elapsed)} of {_seconds(timeout)}", **details)
        self.elapsed = elapsed
        self.timeout = timeout


class TokenLimitExceededError(LimitError):
    """`tokens_used` of a `token_limit`, input and output of the whole tree together."""

    argument = "max_tokens"

    def __init__(self, tokens_used: int, token_limit: int, message: str | None = None, **details: Any) -> None:
        super().__init__(message or f"token limit exceeded: {tokens_used:,} of {token_limit:,} used", **details)
        self.tokens_used = tokens_used
        self.token_limit = token_limit


class SubcallLimitExceededError(LimitError):
    """`subcalls` LM calls made by cells of the whole tree, of a `limit`."""

    argument = "max_subcalls"

    def __init__(self, subcalls: int, limit: int, message: str | None = None, **details: Any) -> None:
        super().__init__(message or f"sub-call limit exceeded: {subcalls:,} of {limit:,} made", **details)
        self.subcalls = subcalls
        self.limit = limit


class ErrorThresholdExceededError(LimitError):
    """`error_count` turns in a row whose cells raised, at a `threshold`; `last_error` is the last traceback."""

    argument = "max_errors"

    def __init__(
        self,
        error_count: int,
        threshold: int,
        last_error: str | None = None,
        message: str | None = None,
        **details: Any,
    ) -> None:
        if message is None:
            turns = "1 turn" if error_count == 1 else f"{error_count:,} turns in a row"
            message = f"{turns} failed (threshold {threshold})"
            message += f"; the last with {why}" if (why := last_line(last_error)) else ""
        super().__init__(message, **details)
        self.error_count = error_count
        self.threshold = threshold
        self.last_error = last_error


class CancellationError(RLMError):
    """Ctrl-C in a call of the blocking `RLM`, its stream or its session, or another thread stopped it meanwhile.

    Async callers see their framework's own cancellation instead.
    """


class SandboxLost(RLMError):
    """The sandbox ended and a new one could not be had, or kept ending."""


class ProtocolError(RLMError):
    """A worker broke the wire protocol. Its sandbox is closed; nothing else is touched."""


class LMError(RLMError):
    """A model could not be asked, or did not answer.

    Attributes:
        kind: What went wrong, in one word.
        status: The HTTP status, where there was one.
        retryable: Whether the same request may succeed later.
        retry_after: Seconds the server asked to wait, where it did.
        charged: Whether the failed request may have been paid for: it was sent, and the reply was lost.
        usage: What a charged one used, where the provider said so.
        rate: What the provider said of its rate limits, where it did.
        model: Which model it was, where a server was asked.
        where: The server's address, where it answered.
        attempts: How often it was tried.
        enough: After how many attempts to give up, where that is before the usual number.
        excused: Whether the request was refused only because its account had sent more than the server takes: that is
            none of its attempts.
    """

    model: str | None = None
    where: str | None = None
    attempts: int = 1
    enough: int | None = None
    excused: bool = False

    def __init__(
        self,
        message: str,
        *,
        kind: LMErrorKind = "other",
        status: int | None = None,
        retryable: bool = False,
        retry_after: float | None = None,
        charged: bool = False,
        usage: ReportedUsage | None = None,
        rate: RateHints | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message, **details)
        self.kind: LMErrorKind = kind
        self.status = status
        self.retryable = retryable
        self.retry_after = retry_after
        self.charged = charged
        self.usage = usage
        self.rate = rate

    @property
    def message(self) -> str:
        """What went wrong, without whose fault it is."""
        return super().__str__()

    def __str__(self) -> str:
        model = f"model {self.model!r}{f' at {self.where}' if self.where else ''}" if self.model else ""
        tried = f"tried {self.attempts} times" if self.attempts > 1 else ""
        about = ", ".join(part for part in (model, tried) if part)
        return f"{self.message} ({about})" if about else self.message
