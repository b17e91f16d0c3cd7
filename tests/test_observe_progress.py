"""Progress lines for people."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import sys
from typing import TYPE_CHECKING, Any

import pytest

from asyncrlm.events import (
    CellFinished,
    CellStarted,
    Event,
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
from asyncrlm.observe.progress import Progress
from asyncrlm.types import ModelUsageSummary, UsageSummary

if TYPE_CHECKING:
    from collections.abc import Iterator

USAGE = UsageSummary(
    model_usage_summaries={
        "m": ModelUsageSummary(total_calls=3, total_input_tokens=1200, total_output_tokens=34, total_cost=0.5)
    }
)


def shown(*events: Event, **arguments: Any) -> str:
    stream = io.StringIO()
    progress = Progress(stream, **arguments)
    for event in events:
        progress(event)
    return stream.getvalue()


STORY: list[Event] = [
    RunStarted(
        run_id="0123456789",
        root_model="m",
        sub_models=["s"],
        environment="local",
        prompt_size=464_970,
        root_prompt="What is\nit?",
    ),
    SandboxOpened(
        run_id="0123456789", environment="local", in_force={"network": "seccomp", "disk": None}, seconds=0.005
    ),
    TurnStarted(run_id="0123456789", turn=1, max_turns=30),
    ModelReplied(
        run_id="0123456789", turn=1, model="m", prompt=[], text="x", input_tokens=1000, output_tokens=20, seconds=1.25
    ),
    CellStarted(run_id="0123456789", turn=1, cell=1, code="a = 1\nprint(a)\n"),
    CellFinished(run_id="0123456789", turn=1, cell=1, stdout="1\n", subcalls=2, failed_subcalls=1, seconds=0.5),
    TurnFinished(run_id="0123456789", turn=1, seconds=2.0),
    RunFinished(run_id="0123456789", stop_reason="answer", response="forty two", usage_summary=USAGE, seconds=2.5),
]


def test_a_run_from_start_to_answer() -> None:
    assert shown(*STORY).splitlines() == [
        "01234567 run: m (sub-calls: s); context: str, 464,970 characters",
        "01234567   question: What is it?",
        "01234567   environment: local, ready in 5 ms; isolation: network; not in force: disk",
        "01234567   turn 1/30: asking m",
        "01234567   m replied in 1.25 s, 1,000 -> 20 tokens",
        "01234567   cell 1, 2 lines",
        "01234567     | a = 1",
        "01234567     | print(a)",
        "01234567     > 1",
        "01234567   cell 1 done (0.50 s, 2 sub-calls, 1 failed)",
        "01234567   answer: forty two",
        "01234567 stopped by answer (1 turn, 2.50 s, 3 requests, 1,200 + 34 tokens, $0.5000)",
    ]


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            RunFinished(run_id="r", stop_reason="error", error="LMError: down", seconds=1),
            "r   LMError: down\nr failed (0 turns, 1.00 s",
        ),
        (
            RunStarted(run_id="r", parent_id="p", depth=1, root_model="m", prompt_size=3),
            "r   child run: m; context: str, 3 char",
        ),
        (
            RunStarted(run_id="r", root_model="m", prompt_type="bytes", prompt_size=3),
            "r run: m; context: bytes, 3 bytes",
        ),
        (
            SandboxOpened(run_id="r", environment="local", in_force={"net": "x", "disk": None}),
            "local, ready in 0 ms; isolation: net; not in force: disk",
        ),
        (SandboxOpened(run_id="r", environment="local", in_force={"net": None}), "no isolation"),
        (RunStarted(run_id="r", root_model="m", prompt_type="file", prompt_size=1), "context: file, 1 byte\n"),
        (SandboxDied(run_id="r", reason="killed"), "worker lost: killed\n"),
        (
            CellFinished(run_id="r", turn=1, cell=7, error="Traceback\nValueError: [/INST]"),
            "cell 7 failed: ValueError: [/INST]",
        ),
        (CellFinished(run_id="r", turn=1, cell=7, error=""), "cell 7 failed: "),
        (CellFinished(run_id="r", turn=1, cell=7, stderr="careful"), "    ! careful"),
        (ToolCalled(run_id="r", name="look", result_bytes=1200), "tool look returned 1,200 bytes"),
        (ToolCalled(run_id="r", name="look", error="KeyError: 1"), "tool look raised KeyError: 1"),
        (
            RequestWaiting(run_id="r", model="m", attempt=1, delay=2.5, reason="rate limit"),
            "m: rate limit; attempt 2 in 2.5 s",
        ),
        (LimitReached(run_id="r", limit="max_budget", reason="$1 of $1"), "limit reached: max_budget: $1 of $1"),
        (ListenerFailed(run_id="r", listener="mine", error="KeyError"), "listener mine failed: KeyError"),
        (ModelReplied(run_id="r", turn=1, model="m", prompt=[], text="", seconds=2), "m replied in 2.00 s\n"),
    ],
)
def test_lines(event: Event, line: str) -> None:
    assert line in shown(event)


def test_usage_that_is_partly_unknown_is_marked() -> None:
    usage = UsageSummary(model_usage_summaries={"m": ModelUsageSummary(total_calls=1, complete=False)})
    text = shown(RunFinished(run_id="r", stop_reason="text", usage_summary=usage))
    assert "(partly estimated)" in text
    assert "$" not in text


def test_sub_calls_are_summed_up_at_intervals() -> None:
    now = 0.0
    stream = io.StringIO()
    progress = Progress(stream, clock=lambda: now)
    progress(CellStarted(run_id="r", turn=1, cell=1, code="x"))
    for number in range(1, 1001):
        progress(SubcallStarted(run_id="r", subcall=number, kind="llm", model="m", prompt_preview="p"))
    for number in range(1, 1001):
        now += 0.01
        error = "no" if number % 100 == 0 else None
        progress(SubcallFinished(run_id="r", subcall=number, kind="llm", model="m", error=error))
    progress(CellFinished(run_id="r", turn=1, cell=1, subcalls=1000, failed_subcalls=10))
    lines = [line for line in stream.getvalue().splitlines() if "in flight" in line]
    # 10 s at a line every 0.2 s, and the last state.
    assert 40 <= len(lines) <= 52
    for line in lines:
        finished, started, flying, failed = (int(n) for n in re.findall(r"\d+", line.replace(",", "") + " 0")[:4])
        assert (finished + flying, started, failed) == (1000, 1000, finished // 100)
    assert lines[-1] == "r     sub-calls 1,000/1,000, 0 in flight, 10 failed"
    # The next cell counts from its own first call.
    progress(CellStarted(run_id="r", turn=1, cell=2, code="x"))
    progress(SubcallStarted(run_id="r", subcall=1001, kind="llm", model="m", prompt_preview="p"))
    progress(SubcallFinished(run_id="r", subcall=1001, kind="llm", model="m"))
    progress(CellFinished(run_id="r", turn=1, cell=2, subcalls=1))
    assert "sub-calls 1/1, 0 in flight\n" in stream.getvalue()


@pytest.mark.parametrize("brief", [False, True])
def test_many_calls_of_tools_are_counted(brief: bool) -> None:
    now = 0.0
    stream = io.StringIO()
    progress = Progress(stream, brief=brief, clock=lambda: now)
    for cell, called in ((1, 249), (2, 5)):
        progress(CellStarted(run_id="r", turn=1, cell=cell, code="x"))
        for number in range(1, called + 1):
            now += 0.001
            progress(ToolCalled(run_id="r", name="look", error="KeyError" if number % 100 == 0 else None))
        progress(CellFinished(run_id="r", turn=1, cell=cell))
    told = [line.strip().removeprefix("r").strip() for line in stream.getvalue().splitlines()]
    told = [line for line in told if "tool" in line]
    each, counts = "tool look returned 0 bytes (0.00 s)", [line for line in told if "calls of tools" in line]
    assert told == [each] * 5 + counts + [each] * 5
    assert len(counts) == (1 if brief else 2)
    assert counts[-1] == "249 calls of tools, 2 raised"


def test_brief_progress_has_a_line_for_what_matters() -> None:
    stream = io.StringIO()
    now = 0.0
    progress = Progress(stream, brief=True, clock=lambda: now)
    child: dict[str, Any] = {"run_id": "c", "parent_id": "r", "depth": 1}
    progress(RunStarted(run_id="r", root_model="m", prompt_size=3, root_prompt="What?"))
    progress(SandboxOpened(run_id="r", environment="local", in_force={"net": "x", "disk": "y"}, seconds=0.005))
    for turn in (1, 2):
        progress(TurnStarted(run_id="r", turn=turn, max_turns=30))
        progress(ModelReplied(run_id="r", turn=turn, model="m", prompt=[], text="secret"))
        for cell in (1, 2):
            progress(CellStarted(run_id="r", turn=turn, cell=cell, code="code"))
            progress(SubcallStarted(run_id="r", subcall=1, kind="rlm", model="m", prompt_preview="p"))
            progress(RunStarted(**child, root_model="m"))
            progress(CellFinished(**child, turn=1, cell=1, error="no"))
            progress(SubcallFinished(run_id="r", subcall=1, kind="rlm", model="m"))
            error = "ValueError: x" if cell == turn == 2 else None
            progress(CellFinished(run_id="r", turn=turn, cell=cell, stdout="out", error=error, subcalls=1))
        progress(TurnFinished(run_id="r", turn=turn, seconds=1.0))
    progress(RunFinished(run_id="r", stop_reason="answer", response="the answer", seconds=2.0))
    assert stream.getvalue().splitlines() == [
        "run r: m; context: str, 3 characters",
        "  question: What?",
        "  environment: local, ready in 5 ms; isolation: all 2 rows hold",
        "  turn 1/30: asking m",
        "    sub-calls started: asking m",
        "    2 cells, 2 sub-calls, 1.00 s",
        "  turn 2/30: asking m",
        "    sub-calls started: asking m",
        "    cell 2 failed: ValueError: x",
        "    2 cells, 2 sub-calls, 1.00 s",
        "stopped by answer (2 turns, 2.00 s, 0 requests, 0 + 0 tokens)",
    ]


def test_brief_progress_shows_a_long_batch_moving() -> None:
    stream = io.StringIO()
    now = 0.0
    progress = Progress(stream, brief=True, clock=lambda: now)
    progress(CellStarted(run_id="r", turn=1, cell=1, code="x"))
    for number in range(1, 101):
        progress(SubcallStarted(run_id="r", subcall=number, kind="llm", model="m", prompt_preview="p"))
    for number in range(1, 101):
        now += 0.1
        progress(SubcallFinished(run_id="r", subcall=number, kind="llm", model="m"))
    lines = stream.getvalue().splitlines()
    assert 9 <= len(lines) <= 12
    assert lines[0] == "    sub-calls started: asking m"
    assert "in flight" in lines[1]


def test_waits_are_summed_up_too() -> None:
    wait = RequestWaiting(run_id="r", model="m", attempt=1, delay=1.0, reason="429")
    now = 0.0
    stream = io.StringIO()
    progress = Progress(stream, clock=lambda: now)
    for _ in range(100):
        progress(wait)
        now += 0.01
    lines = stream.getvalue().splitlines()
    assert 4 <= len(lines) <= 6
    assert lines[-1].endswith("waits so far)")


def test_hostile_text_is_shown_literally_without_its_escapes() -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07[/bold] [red] {x} %s \u202e\r\x08"
    text = shown(
        RunStarted(run_id="r", root_model=hostile, root_prompt=hostile),
        CellStarted(run_id="r", turn=1, cell=1, code=hostile + "\nnext"),
        CellFinished(run_id="r", turn=1, cell=1, stdout=hostile, stderr=hostile, error=hostile),
        RunFinished(run_id="r", stop_reason="answer", response=hostile),
    )
    assert text.count("[/bold] [red] {x} %s") == 7
    assert not set(text) & set("\x1b\x07\x08\r\u202e")
    assert "owned" not in text


def test_long_code_and_output_are_cut() -> None:
    text = shown(
        CellStarted(run_id="r", turn=1, cell=1, code="\n".join(f"line{n}" for n in range(1000))),
        CellFinished(run_id="r", turn=1, cell=1, stdout="w" * 1_000_000),
    )
    assert "... 988 more lines" in text
    assert "line11" in text
    assert "line12" not in text
    assert max(map(len, text.splitlines())) < 200


def test_a_child_is_indented() -> None:
    event = TurnStarted(run_id="c", parent_id="p", depth=2, turn=1, max_turns=5)
    assert shown(event) == "c       turn 1/5\n"


def test_lines_of_runs_at_once_say_whose_they_are() -> None:
    first, second = ({"run_id": name * 12, "turn": 1} for name in "ab")
    text = shown(
        CellStarted(**first, cell=1, code="x"),
        CellStarted(**second, cell=1, code="y"),
        CellFinished(**second, cell=1, stdout="of b"),
        CellFinished(**first, cell=1, stdout="of a\nand more", error="ValueError: no"),
    )
    assert [line.split(maxsplit=1) for line in text.splitlines()] == [
        ["aaaaaaaa", "cell 1, 1 line"],
        ["aaaaaaaa", "| x"],
        ["bbbbbbbb", "cell 1, 1 line"],
        ["bbbbbbbb", "| y"],
        ["bbbbbbbb", "> of b"],
        ["bbbbbbbb", "cell 1 done (0.00 s)"],
        ["aaaaaaaa", "> of a"],
        ["aaaaaaaa", "> and more"],
        ["aaaaaaaa", "cell 1 failed: ValueError: no (0.00 s)"],
    ]


@pytest.mark.parametrize("brief", [True, False])
def test_why_a_run_failed_is_whole_or_left_to_the_caller(brief: bool) -> None:
    failed = RunFinished(run_id="r", stop_reason="error", error=f"LMError: {'no ' * 200}END", seconds=1)
    assert "END\n" in shown(failed, brief=brief)
    (line,) = shown(failed, brief=brief, reasons=False).splitlines()
    assert line.endswith("failed (0 turns, 1.00 s, 0 requests, 0 + 0 tokens)")
    child = RunFinished(run_id="c", parent_id="r", depth=1, stop_reason="error", error="LMError: no")
    assert ("LMError" in shown(child, brief=brief, reasons=False)) is not brief


@pytest.fixture
def terminal() -> Iterator[io.TextIOWrapper]:
    parent, child = pty.openpty()
    with open(child, "w", encoding="ascii") as stream:
        yield stream
    os.close(parent)


def test_colour_only_on_a_terminal_that_wants_it(terminal: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Progress(terminal)._colour is True
    monkeypatch.setenv("NO_COLOR", "1")
    assert Progress(terminal)._colour is False
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert Progress(terminal)._colour is False
    monkeypatch.delenv("TERM")
    assert Progress(io.StringIO())._colour is False
    text = shown(*STORY, colour=True)
    assert "\x1b[1m01234567   turn 1/30: asking m\x1b[0m" in text


def test_a_terminal_shows_how_long_something_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    now = 0.0
    parent, child = pty.openpty()
    with open(parent, "rb", buffering=0) as screen, open(child, "w", encoding="utf-8") as stream:
        progress = Progress(stream, brief=True, colour=False, clock=lambda: now)

        def shows(*events: Event, after: float, last: str) -> str:
            nonlocal now
            for event in events:
                progress(event)
            now += after
            progress.tick()
            text = ""
            while not text.endswith(last):
                assert select.select([screen], [], [], 10)[0], text
                text += screen.read(10_000).decode().replace("\r\n", "\n")
            return text

        shows(STORY[0], after=2, last="\n\r\x1b[K    starting local, 2 s")
        # The line that takes its place clears it first.
        text = shows(*STORY[1:3], after=8, last="asking m\n\r\x1b[K    asking m, 8 s")
        assert text.startswith("\r\x1b[K  environment: local")
        subcall = SubcallStarted(run_id="0123456789", subcall=1, kind="llm", model="m", prompt_preview="")
        shows(*STORY[3:5], subcall, subcall, after=61, last="    cell 1, 2 sub-calls in flight, 61 s")
        child_turn = TurnStarted(run_id="c", parent_id="0123456789", depth=1, turn=1, max_turns=3)
        shows(child_turn, after=1, last="\r\x1b[K    cell 1, 2 sub-calls in flight, 62 s")
        shows(*STORY[5:], after=1, last="tokens, $0.5000)\n")


def test_elsewhere_nothing_moves() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress(STORY[2])
    before = stream.getvalue()
    progress.tick()
    assert stream.getvalue() == before


def test_a_stream_without_unicode_still_gets_lines() -> None:
    written = io.BytesIO()
    progress = Progress(io.TextIOWrapper(written, encoding="ascii"))
    progress(LimitReached(run_id="r", limit="漢", reason="x"))
    progress(LimitReached(run_id="r", limit="\udc80", reason="x"))
    assert re.findall(rb"reached: (.*): x\n", written.getvalue()) == [rb"\u6f22", rb"\udc80"]


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [Broken(), io.StringIO()])
def test_a_closed_stream_does_not_fail_a_run(stream: io.StringIO) -> None:
    if not isinstance(stream, Broken):
        stream.close()
    progress = Progress(stream)
    for event in STORY:
        progress(event)


def test_without_standard_error_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    progress = Progress()
    for event in STORY:
        progress(event)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(sys, "stderr", object())
    Progress()


def test_standard_error_is_the_one_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress()
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    progress(STORY[0])
    assert "context: str" in later.getvalue()


def test_a_reader_that_does_not_read_does_not_hold_up_the_loop(no_leaks: None) -> None:
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as lines, open(writer, "w", encoding="utf-8") as stream:
        progress = Progress(stream)
        # Far more than a pipe holds: a blocking write would never return here.
        for number in range(5_000):
            progress(LimitReached(run_id="r", limit=str(number), reason="x" * 80))
        first = lines.readline()
        assert first.startswith("r   limit reached: 0:")
        while "4999" not in lines.readline():
            progress(TurnFinished(run_id="r", turn=1, seconds=1.0))
