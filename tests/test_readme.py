"""The README's snippets run as they stand, and print what it says they print."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import asyncrlm

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def keyless(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.endswith("_API_KEY"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(("code", "prints"), SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet(code: str, prints: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_leaks: None) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(code, "utf-8")
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip()
    if prints:
        assert printed == prints


def _run_suite(folder: Path, wanted: str) -> str:
    """The part of the conformance suite that `wanted` selects, over the environment that the README shows."""
    (code,) = (code for code, _ in SNIPPETS if "EnvironmentConformance" in code)
    (folder / "test_mine.py").write_text(code, "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", wanted, "test_mine.py"]
    environ = os.environ | {"PYTHONPATH": str(Path(asyncrlm.__file__).parent.parent)}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param("one_namespace or plain_data or large_batch", id="a few"),
        pytest.param("Mine", id="all", marks=pytest.mark.soak),
    ],
)
def test_the_environment_shown_passes_the_suite(wanted: str, tmp_path: Path) -> None:
    told = _run_suite(tmp_path, wanted).splitlines()[-1]
    assert re.match(r"=*\s*\d+ passed", told), told


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 6


def test_the_first_screen_has_the_two_commands() -> None:
    screen = "\n".join(README.splitlines()[:24])
    commands = re.findall(r"```sh\n(.*?)\n```", screen, re.DOTALL)
    assert len(commands) == 2
    first, second = commands
    assert first.endswith("asyncrlm demo")
    assert "pytest" in second
    assert all("\n" not in command for command in commands)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?:|#)([^)#]+)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (ROOT / target).exists()


@pytest.mark.parametrize("anchor", sorted(set(re.findall(r"\]\(#([^)]+)\)", README))))
def test_anchors_lead_somewhere(anchor: str) -> None:
    headings = [re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)", README, re.M)]
    assert anchor in headings
