"""The benchmark suite runs, checks answers, ends what never ends, and says when a figure is missed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import table  # noqa: E402

ENDLESS = """
import dataclasses, json, os, pathlib, sys
import run
run.GRACE = 0
run.adopt_orphans()
bench = run.Bench(port=0, peers=None, log=pathlib.Path(sys.argv[1]), quick=True)
child = "import time; print('started', flush=True); time.sleep(600)"
start = f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
parent = f"import subprocess, sys, time; {start}; time.sleep(600)"
bench.command = lambda row, contender, out: [sys.executable, "-c", parent]
found = bench.run(dataclasses.replace(run.ROWS[0], limit=1.0), "asyncrlm")
print(json.dumps([found, list(run.descendants(os.getpid()))]))
"""


def results(ours: dict[str, float], floor: dict[str, float]) -> table.Results:
    return table.Results("c-1000", "a batch", {"asyncrlm": [ours], "openai": [floor]})


GOOD = {"seconds": 0.5, "stall_ms": 20.0, "right": 1000, "of": 1000}
FLOOR = {"seconds": 2.0, "right": 1000, "of": 1000}


def test_one_command_measures_ours_beside_the_floors(tmp_path: Path, no_leaks: None) -> None:
    out = tmp_path / "runs.json"
    command = [sys.executable, BENCHMARKS / "run.py", "--quick", "--reps=1", "--scenario=d,l-16"]
    command += ["--only=asyncrlm,aiohttp,plain", f"--cache={tmp_path}", f"--json={out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    runs = json.loads(out.read_text())
    assert [(row, list(contenders)) for row, contenders in runs.items()] == [
        ("d", ["asyncrlm", "aiohttp"]),
        ("l-16", ["asyncrlm", "plain"]),
    ]
    for contenders in runs.values():
        for (figures,) in contenders.values():
            assert figures["right"] == figures["of"] > 0
            assert figures["seconds"] > 0
            assert figures.get("error") is None
            assert "left_behind" not in figures
    assert "| d | 500 sub-calls one after another |" in done.stdout


@pytest.mark.soak
def test_each_client_is_measured_beside_its_sdk() -> None:
    command = [sys.executable, BENCHMARKS / "clients.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    for name in ("openai", "azure_openai", "anthropic", "gemini"):
        assert f"| `{name}` |" in done.stdout
        for way in ("ours, aiohttp", "ours, httpx2", "bare SDK, aiohttp", "bare SDK, httpx2"):
            assert f"| `{name}`: {way}" in done.stdout
    assert "A cache hit: median" in done.stdout


def test_a_contender_that_never_ends_is_killed_with_all_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS, log], capture_output=True, text=True, timeout=60, check=True, cwd=BENCHMARKS
    )
    found, left = json.loads(done.stdout)
    assert "started" in log.read_text()
    assert found == {"error": "killed after 1 s"}
    assert left == []


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (GOOD, []),
        (GOOD | {"seconds": 0.9}, ["≤ 0.3 x the bare SDK"]),
        (GOOD | {"stall_ms": 51.0}, ["no stall over 50 ms"]),
        (GOOD | {"right": 999}, ["all right"]),
        (GOOD | {"left_behind": "1 processes, 0 files"}, ["all right"]),
        ({"error": "it broke"}, ["all right", "≤ 0.3 x the bare SDK", "≤ 1 s", "no stall over 50 ms"]),
    ],
)
def test_what_is_missed_is_said(ours: dict[str, float], missed: list[str]) -> None:
    row = results(ours, FLOOR)
    assert [text for text, met, _ in table.reach(row) if not met] == missed
    assert table.markdown([row]).count("missed**") == len(missed)
    assert (row.complaint() is not None) == ("all right" in missed)


def test_the_table_goes_between_the_markers_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.write(page, "new")
    assert page.read_text() == f"before\n{table.BEGIN}\nnew\n{table.END}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="must have one line"):
        table.write(page, "new")
    assert table.BEGIN in (BENCHMARKS / "README.md").read_text()


@pytest.mark.soak
def test_what_a_sandbox_costs_is_measured_in_each_place() -> None:
    command = [sys.executable, BENCHMARKS / "sandboxes.py", "--quick", "--only=local,ipython"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    for title in ("local", "ipython", "ipython, a kernel of Jupyter's"):
        assert f"| {title} | " in done.stdout
    assert "docker" not in done.stdout
