"""Progress of a tree of runs as plain lines, for people."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TextIO

import anyio

from ..events import (
    CellFinished,
    CellStarted,
    ContextProgress,
    Event,
    HistoryCompacted,
    LimitReached,
    ListenerFailed,
    ModelReplied,
    RequestWaiting,
    RunFinished,
    RunStarted,
    SandboxDied,
    SandboxOpened,
    SubcallFinished,
    SubcallStarted,
    ToolCalled,
    TurnFinished,
    TurnStarted,
)
from .lines import Lines
from .text import counted, isolation, last_line, one_line, printable, used

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL: Final = 0.2
"""Seconds between two lines about the same thing in progress, at least."""

BRIEF_INTERVAL: Final = 1.0
"""The same where progress is brief."""

TICK: Final = 1.0
"""Seconds between two looks of `keep_moving`."""

MAX_LINES: Final = 12
"""Lines shown of one cell's code, or of what it printed."""

TOOL_LINES: Final = 5
"""Calls of tools in one cell that have a line each; those that follow are counted."""

_WIDTH: Final = 120
_LONG: Final = 1_000
"""Characters of why a run failed: there the end matters, too."""
_ENDED: Final = {"error": "failed", "cancelled": "cancelled"}
_STYLES: Final = {"head": "1", "dim": "2", "good": "32", "bad": "31", "warn": "33"}


_IN_BYTES = ("bytes", "file", "text", "binary", "documents", "texts", "table")
"""Kinds of contexts whose size is told in bytes."""


class Progress:
    """A listener that writes what happens in a tree of runs, a line at a time, each with the run's id in front.

    Brief, it writes of the root run only, and without the id: its turns, how many sub-calls they made, what went wrong,
    the end.

    Text of models and cells is written literally, without its terminal escapes and control characters. Colour is
    used only on a terminal, and not where `NO_COLOR` is set. Writing never blocks the event loop (lines wait while
    the reader of a pipe does not read) and never fails a run (a closed stream ends the writing).

    Args:
        stream: Where to write; None for standard error, as it is at the time of writing.
        brief: Leave out what models reply, code, what cells print, and children.
        reasons: Say why a root run failed. False where the caller says it.
        colour: True or False to force it.
        clock: Seconds, monotonic; for tests.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        brief: bool = False,
        reasons: bool = True,
        colour: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lines = Lines(stream)
        self._brief = brief
        self._reasons = reasons
        self._interval = BRIEF_INTERVAL if brief else INTERVAL
        self._colour = self._lines.wants_colour() if colour is None else colour
        self._clock = clock
        self._runs: dict[str, _Run] = {}
        self._doing: _Doing | None = None
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            RunStarted: self._run_started,
            ContextProgress: self._context_came,
            SandboxOpened: self._sandbox_opened,
            SandboxDied: self._sandbox_died,
            TurnStarted: self._turn_started,
            ModelReplied: self._model_replied,
            HistoryCompacted: self._history_compacted,
            CellStarted: self._cell_started,
            CellFinished: self._cell_finished,
            SubcallStarted: self._subcall_started,
            SubcallFinished: self._subcall_finished,
            ToolCalled: self._tool_called,
            RequestWaiting: self._request_waiting,
            LimitReached: self._limit_reached,
            ListenerFailed: self._listener_failed,
            RunFinished: self._run_finished,
        }
        if brief:
            self._handlers |= {TurnFinished: self._turn_finished, CellStarted: self._cell_counted}
            del self._handlers[ModelReplied]

    def __call__(self, event: Event) -> None:
        """Take one event; write a line if it is worth one."""
        handler = self._handlers.get(type(event))
        if handler is not None and not (self._brief and event.depth):
            handler(event)
        self._lines.flush()

    async def keep_moving(self) -> None:
        """On a terminal, show what the root run is doing and since when, second by second, until cancelled."""
        try:
            while True:
                await anyio.sleep(TICK)
                self.tick()
        finally:
            self._lines.status("")

    def tick(self) -> None:
        """Show it once; the next line takes its place."""
        if (doing := self._doing) is None:
            return
        flight = doing.run.started - doing.run.finished
        calls = f", {counted(flight, 'sub-call')} in flight" if flight else ""
        self._lines.status(f"    {one_line(doing.what, _WIDTH)}{calls}, {self._clock() - doing.since:.0f} s")

    # ---- writing -----------------------------------------------------------------------------------------------------

    def _say(self, event: Event, text: str, style: str = "", limit: int = _WIDTH + 40) -> None:
        line = self._begin(event) + " " * (len(text) - len(text.lstrip(" "))) + one_line(text, limit)
        if self._colour and style:
            line = f"\x1b[{_STYLES[style]}m{line}\x1b[0m"
        self._lines.add(line)

    def _quote(self, event: Event, text: str, mark: str, style: str = "dim") -> None:
        """Some lines of code or output, each behind `mark`."""
        # Beyond this nothing can be shown, and cleaning 100 kB for a dozen lines would cost.
        shown = printable(text[: MAX_LINES * _WIDTH * 2]).expandtabs(4).rstrip().split("\n")
        more = text.rstrip().count("\n") + 1 - len(shown[:MAX_LINES])
        for line in shown[:MAX_LINES]:
            cut = line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."
            prefix = f"{self._begin(event)}    {mark} "
            styled = f"\x1b[{_STYLES[style]}m{prefix}{cut}\x1b[0m" if self._colour else prefix + cut
            self._lines.add(styled.rstrip())
        if more > 0:
            self._say(event, f"    {mark} ... {counted(more, 'more line')}", style)

    def _begin(self, event: Event) -> str:
        """What each line begins with: several runs at once would else be one muddle."""
        return "  " * event.depth if self._brief else f"{event.run_id[:8]} {'  ' * event.depth}"

    def _of(self, event: Event) -> _Run:
        return self._runs.setdefault(event.run_id, _Run())

    def _now(self, event: Event, what: str) -> None:
        if event.parent_id is None:
            self._doing = _Doing(self._of(event), what, self._clock())

    # ---- events ------------------------------------------------------------------------------------------------------

    def _run_started(self, event: RunStarted) -> None:
        self._of(event).model = event.root_model
        what = "run" if event.parent_id is None else "child run"
        models = event.root_model
        subs = [name for name in event.sub_models if name != event.root_model]
        if subs:
            models += f" (sub-calls: {', '.join(subs)})"
        unit = "byte" if event.prompt_type in _IN_BYTES else "character"
        size = f"{event.prompt_type}, {counted(event.prompt_size, unit)}"
        if self._brief:
            what += f" {event.run_id[:8]}"
        self._say(event, f"{what}: {models}; context: {size}", "head")
        self._now(event, f"starting {event.environment}" if event.max_depth else f"asking {event.root_model}")
        if event.root_prompt:
            self._say(event, f"  question: {event.root_prompt}")

    def _context_came(self, event: ContextProgress) -> None:
        run = self._of(event)
        now = self._clock()
        if event.received == event.total or now - run.context_told >= 1.0:
            run.context_told = now
            of = "" if event.total is None else f"{event.received:,} of "
            size = counted(event.received if event.total is None else event.total, "byte")
            where = " into the sandbox" if event.to == "sandbox" else ""
            self._say(event, f"context: {event.name}, {of}{size}{where}", "dim")

    def _sandbox_opened(self, event: SandboxOpened) -> None:
        text = f"  environment: {event.environment}, ready in {event.seconds * 1000:.0f} ms"
        self._say(event, f"{text}; {isolation(event.in_force, brief=self._brief)}", "dim")

    def _sandbox_died(self, event: SandboxDied) -> None:
        self._say(event, f"  worker lost: {event.reason}", "bad")

    def _turn_started(self, event: TurnStarted) -> None:
        run = self._of(event)
        run.begin_turn(event.turn)
        asking = f": asking {run.model}" if run.model else ""
        self._say(event, f"  turn {event.turn}/{event.max_turns}{asking}", "head")
        self._now(event, f"asking {run.model}")

    def _model_replied(self, event: ModelReplied) -> None:
        tokens = ""
        if event.input_tokens is not None and event.output_tokens is not None:
            tokens = f", {event.input_tokens:,} -> {event.output_tokens:,} tokens"
        self._say(event, f"  {event.model} replied in {event.seconds:.2f} s{tokens}")

    def _history_compacted(self, event: HistoryCompacted) -> None:
        self._say(event, f"  history summarised: {event.tokens_before:,} tokens before, {event.tokens_after:,} now")

    def _cell_started(self, event: CellStarted) -> None:
        self._of(event).begin_cell()
        self._now(event, f"cell {event.cell}")
        lines = event.code.rstrip().count("\n") + 1
        self._say(event, f"  cell {event.cell}, {counted(lines, 'line')}")
        self._quote(event, event.code, "|")

    def _cell_counted(self, event: CellStarted) -> None:
        self._of(event).begin_cell()
        self._now(event, f"cell {event.cell}")

    def _turn_finished(self, event: TurnFinished) -> None:
        run = self._of(event)
        failed = f" ({run.turn_failed:,} failed)" if run.turn_failed else ""
        calls = f", {counted(run.turn_calls, 'sub-call')}{failed}" if run.turn_calls else ""
        self._say(event, f"    {counted(run.cells, 'cell')}{calls}, {event.seconds:.2f} s")

    def _cell_finished(self, event: CellFinished) -> None:
        run = self._of(event)
        run.turn_calls += event.subcalls
        run.turn_failed += event.failed_subcalls
        if run.tools_unsaid:
            self._tools_line(event, run)
        if self._brief:
            if event.error is not None:
                self._say(event, f"    cell {event.cell} failed: {last_line(event.error)}", "bad")
            return
        if run.unsaid:
            self._subcalls_line(event, run)
        if event.stdout.strip():
            self._quote(event, event.stdout, ">")
        if event.stderr.strip():
            self._quote(event, event.stderr, "!", "warn")
        outcome = "done" if event.error is None else f"failed: {last_line(event.error)}"
        calls = ""
        if event.subcalls:
            failed = f", {event.failed_subcalls:,} failed" if event.failed_subcalls else ""
            calls = f", {counted(event.subcalls, 'sub-call')}{failed}"
        text = f"  cell {event.cell} {outcome} ({event.seconds:.2f} s{calls})"
        self._say(event, text, "bad" if event.error is not None else "")

    def _subcall_started(self, event: SubcallStarted) -> None:
        run = self._of(event)
        run.started += 1
        run.unsaid = True
        self._maybe_subcalls(event, run)

    def _subcall_finished(self, event: SubcallFinished) -> None:
        run = self._of(event)
        run.finished += 1
        run.failed += event.error is not None
        run.unsaid = True
        self._maybe_subcalls(event, run)

    def _maybe_subcalls(self, event: SubcallStarted | SubcallFinished, run: _Run) -> None:
        now = self._clock()
        if run.said_at is None:
            # The first ones of a burst come together; a number at once would only be "1 of 1".
            run.said_at = now
            if not (self._brief and run.said_started):
                run.said_started = True
                self._say(event, f"    sub-calls started: asking {event.model}")
        elif now - run.said_at >= self._interval:
            run.said_at = now
            self._subcalls_line(event, run)

    def _subcalls_line(self, event: Event, run: _Run) -> None:
        run.unsaid = False
        failed = f", {run.failed:,} failed" if run.failed else ""
        flight = run.started - run.finished
        self._say(event, f"    sub-calls {run.finished:,}/{run.started:,}, {flight:,} in flight{failed}")

    def _tool_called(self, event: ToolCalled) -> None:
        run, now = self._of(event), self._clock()
        run.tools += 1
        run.tools_failed += event.error is not None
        if run.tools > TOOL_LINES:
            run.tools_unsaid = True
            if now - run.tools_said_at >= self._interval:
                run.tools_said_at = now
                self._tools_line(event, run)
            return
        run.tools_said_at = now
        outcome = (
            f"raised {event.error}" if event.error is not None else f"returned {counted(event.result_bytes, 'byte')}"
        )
        self._say(event, f"    tool {event.name} {outcome} ({event.seconds:.2f} s)")

    def _tools_line(self, event: Event, run: _Run) -> None:
        run.tools_unsaid = False
        failed = f", {run.tools_failed:,} raised" if run.tools_failed else ""
        self._say(event, f"    {counted(run.tools, 'call')} of tools{failed}")

    def _request_waiting(self, event: RequestWaiting) -> None:
        run = self._of(event)
        run.waits += 1
        now = self._clock()
        if run.wait_said_at is None or now - run.wait_said_at >= self._interval:
            run.wait_said_at = now
            times = f" ({run.waits:,} waits so far)" if run.waits > 1 else ""
            text = f"    {event.model}: {event.reason}; attempt {event.attempt + 1} in {event.delay:.1f} s{times}"
            self._say(event, text, "warn")

    def _limit_reached(self, event: LimitReached) -> None:
        self._say(event, f"  limit reached: {event.limit}: {event.reason}", "warn")

    def _listener_failed(self, event: ListenerFailed) -> None:
        self._say(event, f"  listener {event.listener} failed: {event.error}", "bad")

    def _run_finished(self, event: RunFinished) -> None:
        run = self._runs.pop(event.run_id, _Run())
        totals = f"{counted(run.turns, 'turn')}, {event.seconds:.2f} s"
        if event.parent_id is None:
            totals += used(event.usage_summary)
        if event.parent_id is None:
            self._doing = None
        if event.error is not None and (self._reasons or event.parent_id is not None):
            self._say(event, f"  {event.error}", "bad", _LONG)
        elif event.response is not None and event.error is None and not self._brief:
            self._say(event, f"  answer: {event.response}", "good")
        ended = _ENDED.get(event.stop_reason, f"stopped by {event.stop_reason}")
        self._say(event, f"{ended} ({totals})", "bad" if event.error is not None else "head")


@dataclass(slots=True)
class _Run:
    model: str = ""
    turns: int = 0
    cells: int = 0
    """Of this turn, as the next two."""
    turn_calls: int = 0
    turn_failed: int = 0
    started: int = 0
    finished: int = 0
    failed: int = 0
    unsaid: bool = False
    tools: int = 0
    """Called by this cell, as the next three."""
    tools_failed: int = 0
    tools_unsaid: bool = False
    tools_said_at: float = 0.0
    said_at: float | None = None
    context_told: float = float("-inf")
    said_started: bool = False
    """In this turn, that there are sub-calls."""
    waits: int = 0
    wait_said_at: float | None = None

    def begin_turn(self, turn: int) -> None:
        self.turns = turn
        self.said_started = False
        self.cells = self.turn_calls = self.turn_failed = 0

    def begin_cell(self) -> None:
        self.cells += 1
        self.started -= self.finished
        self.finished = self.failed = self.tools = self.tools_failed = 0
        self.tools_unsaid = False
        self.said_at = None


@dataclass(frozen=True, slots=True)
class _Doing:
    """What a root run is at."""

    run: _Run
    what: str
    since: float
