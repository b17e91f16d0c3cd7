"""The local environment in a host that is not as usual: signals blocked, standard streams closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")

HOST = """
import os, signal, sys
import anyio
from asyncrlm import LocalEnvironment, Repl

async def main():
    {before}
    async with Repl(LocalEnvironment(cell_timeout=0.3, _mode=sys.argv[1])) as repl:
        printed = (await repl.execute("import os; x = 1; print(x, flush=True); _ = os.system('echo 2')")).stdout
        await repl.execute("while True: pass")
        printed += (await repl.execute("print(x + 2)")).stdout
    with open(sys.argv[2], "w") as file:
        file.write(printed)

anyio.run(main)
"""
STATES = {
    "blocked signals": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "no standard streams": "os.closerange(0, 3)",
}


@pytest.mark.parametrize(
    ("state", "mode"),
    [("blocked signals", "auto"), ("blocked signals", "portable"), ("no standard streams", "auto")],
)
def test_a_host_that_is_not_as_usual_runs_cells(state: str, mode: str, tmp_path: Path) -> None:
    out, said = tmp_path / "out", tmp_path / "said"
    command = [sys.executable, "-c", HOST.format(before=STATES[state]), mode, str(out)]
    with said.open("wb") as stderr:
        subprocess.run(command, stderr=stderr, timeout=10)
    assert out.exists(), said.read_text()
    assert out.read_text() == "1\n2\n3\n"
