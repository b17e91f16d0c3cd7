"""What must hold under load: many runs at once, no cross-talk, nothing lost, nothing left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import pytest

from asyncrlm import AsyncRLM

from .cases.load import Load
from .cases.models import QUESTION, ScriptedRoot, SubModel, cell, submit
from .cases.runs import nothing_left

pytestmark = pytest.mark.anyio

one = pytest.mark.parametrize("anyio_backend", ["asyncio"])
both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go in this test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("anyio_backend", "runs"),
    [("asyncio", 200), ("trio", 200)],
)
async def test_many_runs_at_once_on_one_instance(runs: int, folder: Path) -> None:
    load = Load(runs, 10)
    with nothing_left(), anyio.fail_after(60):
        await load.go()
    assert load.wrong == []
    assert (load.root.asked, load.sub.asked) == (2 * runs, 10 * runs)
    assert list(folder.iterdir()) == []


def program(folder: Path, *arguments: object) -> tuple[dict[str, object], list[str]]:
    """The report of `cases.load` run as a program, and the other lines it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cases.load", *map(str, arguments)],
        env=dict(os.environ, TMPDIR=str(folder)),
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        timeout=90,
        check=False,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *lines, report = done.stdout.splitlines()
    return json.loads(report), lines


@pytest.mark.parametrize("runs", [48, pytest.param(200, marks=pytest.mark.soak)])
def test_few_descriptors_are_enough(runs: int, tmp_path: Path) -> None:
    report, _lines = program(tmp_path, runs, 10, 1024 if runs == 200 else 192)
    assert report["wrong"] == []
    assert report["after"] == report["before"]
    assert report["children"] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("runs", [64, pytest.param(256, marks=pytest.mark.soak)])
def test_no_line_of_the_hosts_own_output_is_lost(runs: int, tmp_path: Path) -> None:
    report, lines = program(tmp_path, runs, 16)
    assert report["wrong"] == []
    assert lines == [f"host line {i}" for i in range(len(lines))]
    assert len(lines) == report["lines"]
    assert report["children"] == 0


TALK = """
import time, subprocess
for i in range(20):
    print('said by', context, i)
    time.sleep(0.002)
_ = subprocess.run(['echo', 'echoed for ' + context])
"""


@both
async def test_children_that_print_at_once_get_their_own_output() -> None:
    outputs: list[str] = []

    def child(text: str, turn: int) -> str:
        if turn == 1:
            return cell(TALK)
        outputs.append(text.rsplit("```", 1)[-1])  # what came after the child's own code
        return submit("context")

    ask = "print('parent first')\nrs = rlm_query_batched([f'child-{i}' for i in range(8)])\nprint('parent last')"
    root, sub = ScriptedRoot([cell(ask), submit("'|'.join(rs)")], child=child), SubModel(child=child)
    with anyio.fail_after(10):
        result = await AsyncRLM(backend=root, other_backends=[sub], max_depth=2).acompletion("CTX", QUESTION)
    children = [f"child-{i}" for i in range(8)]
    assert result.response == "|".join(children)
    told = root.seen(2)
    assert "parent first" in told
    assert "parent last" in told
    assert "said by" not in told
    speakers = []
    for text in outputs:
        (speaker,) = set(re.findall(r"said by (child-\d) \d", text))
        assert re.findall(rf"said by {speaker} (\d+)", text) == [str(i) for i in range(20)]
        assert re.findall(r"echoed for (child-\d)", text) == [speaker]
        speakers.append(speaker)
    assert sorted(speakers) == children
