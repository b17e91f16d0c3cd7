"""What one cell did, and the words for a worker that was lost."""

from __future__ import annotations

from msgspec import Struct, field

from .broker import MOST_REFUSALS, Broker
from .clock import Verdict
from .link import MAX_CODE, Link
from .messages import Answer, CellError


class SubmittedAnswer(Struct, frozen=True):
    """An `answer` that was ready when the cell ended."""

    content: str
    """The text that a caller gets."""
    empty: bool
    """Whether it is no answer at all: "", None or blank."""


class CellOutcome(Struct, kw_only=True):
    """What one cell did."""

    stdout: str = ""
    stderr: str = ""
    error: CellError | None = None
    variables: dict[str, str] = field(default_factory=dict[str, str])
    """Name → type."""
    values: dict[str, str] = field(default_factory=dict[str, str])
    """Name → short repr, if asked for."""
    seconds: float = 0.0
    answer: SubmittedAnswer | None = None
    """None unless ready at the end, or when the worker died."""
    subcalls: int = 0
    failures: dict[str, int] = field(default_factory=dict[str, int])
    """Kind → how many sub-calls failed that way."""
    lost: str | None = None
    """What happened, for the model to read, if this cell's worker died or was killed; the variables are gone then."""
    lost_before: str | None = None
    """What happened, if an earlier worker died between two cells: this one ran without the variables from before."""


def unrunnable(code: str) -> CellOutcome | None:
    """The outcome of a cell that can't be sent; None if it can. Who wrote it is told, as of any other error in it."""
    if len(code) <= MAX_CODE:
        return None
    text = f"this cell has {len(code):,} characters and was not run; at most {MAX_CODE:,} are possible"
    return CellOutcome(error=CellError(type="ValueError", message=text, traceback=f"ValueError: {text}"))


def submitted(answer: Answer) -> SubmittedAnswer:
    """A ready `answer` as the engine reads it."""
    return SubmittedAnswer(content=answer.text, empty=answer.empty)


def outcome_of(
    link: Link, broker: Broker, verdict: Verdict | None, *, limit: float | None, seconds: float
) -> CellOutcome:
    """What a cell did that ended, or whose worker did; `limit` is its `cell_timeout`, which the verdict is about."""
    stdout, stderr = (printed.text() for printed in link.take_output())
    answer, done = link.answer, link.done
    outcome = CellOutcome(
        stdout=stdout,
        stderr=stderr,
        seconds=seconds,
        answer=None if answer is None else submitted(answer),
        subcalls=broker.subcalls,
        failures=broker.failures,
    )
    if done is None:
        outcome.lost = _lost(link, verdict, limit)
        return outcome
    outcome.error, outcome.variables, outcome.values = done.error, done.variables, done.values
    if verdict is not None:
        _say_over(outcome.error, verdict, limit)
    return outcome


def _say_over(error: CellError | None, verdict: Verdict, limit: float | None) -> None:
    """Say in the error of a cell that was interrupted why it was."""
    if error is not None and error.interrupted:
        error.message = f"stopped: {_over(verdict, limit)}"
        error.traceback = f"{error.traceback.rstrip()}\n{error.message}".lstrip()


def _over(verdict: Verdict, limit: float | None) -> str:
    if verdict == "refused":
        return f"the cell went on to ask after a limit was met: it was refused {MOST_REFUSALS:,} times"
    if verdict == "cpu":
        return f"the cell used more than {limit:g} s of CPU time (cell_timeout)"
    return f"the cell ran for more than {limit:g} s (cell_timeout)"


def _lost(link: Link, verdict: Verdict | None, limit: float | None) -> str:
    """What became of a worker that did not outlive its cell."""
    if verdict is not None:
        what = f"{_over(verdict, limit)} and did not stop when it was interrupted, so its process was killed"
        if fate := link.sandbox.fate():
            what += f" ({fate})"
    else:
        what = f"the process that ran the cell is gone: {link.fate()}"
    return f"{what}. All variables are lost; `context` and tools are loaded again for the next cell."


def lost_between(link: Link) -> str:
    """What became of a worker that died between two cells."""
    return (
        f"the process that runs cells had gone: {link.fate()}. The cell ran in a fresh one: all earlier variables are "
        "lost, `context` and tools were loaded again."
    )
