"""Measures asyncrlm beside the bare clients and `rlms`: `python benchmarks/run.py`, where asyncrlm is installed.

Starts a fake model server on loopback, gives every contender a fresh process on every row, one at a time and
interleaved (ours, floor, peer, ours, floor, peer, ...), and prints the table of medians.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import table
from measure import TreeMemory, descendants
from rows import ROWS, Row
from table import Results

if TYPE_CHECKING:
    from collections.abc import Generator

    from control import Figures

HERE = Path(__file__).resolve().parent


RLMS = "rlms==0.1.3"
GRACE = 10.0
"""Seconds a contender has beyond its row's limit to end by itself."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "asyncrlm-benchmarks"


class Peers:
    """A virtual environment of its own for `rlms`, and for the uvloop that the fake server is faster with."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "venv" / "bin" / "python"
        self.missing: str | None = None

    def prepare(self) -> None:
        """Install what is not there; `missing` says what went wrong with rlms."""
        if not self.python.exists():
            venv.create(self.python.parent.parent, with_pip=True)
        self.install("uvloop", "uvloop")
        self.missing = self.install(RLMS, "rlm")

    def install(self, requirement: str, module: str) -> str | None:
        check = [self.python, "-c", f"import {module}"]
        if subprocess.run(check, capture_output=True, check=False, timeout=60).returncode == 0:
            return None
        print(f"installing {requirement} into {self.python.parent.parent}", file=sys.stderr, flush=True)
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
        try:
            done = subprocess.run(pip, capture_output=True, check=False, timeout=600, text=True)
        except subprocess.TimeoutExpired:
            return f"{requirement} could not be had: pip did not end"
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return f"{requirement} could not be had: {lines[-1] if lines else 'pip failed'}" if done.returncode else None


@contextmanager
def fake_server(python: str | Path) -> Generator[int]:
    """The port of a fake server that lives as long as the block."""
    with subprocess.Popen([python, HERE / "fake_lm.py"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield int(process.stdout.readline().split()[1])
        finally:
            process.kill()


def adopt_orphans() -> None:
    """Make this process the parent of what a contender leaves behind, so that it can be counted and killed."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def clear(keep: set[int], patience: float) -> int:
    """Wait for our descendants, but those to keep, to end; kill and count those that do not."""
    deadline = time.monotonic() + patience
    while left := reaped(keep):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    for _ in range(100):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not reaped(keep):
            break
        time.sleep(0.02)
    return len(left)


def reaped(keep: set[int]) -> list[int]:
    """Our descendants that still run, but those to keep, once the dead among the adopted ones are waited for."""
    running: list[int] = []
    for pid, _ in descendants(os.getpid()):
        if pid in keep:
            continue
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                running.append(pid)
        except ChildProcessError:
            running.append(pid)  # a grandchild: its own parent waits for it, or leaves it to us
    return running


class Bench:
    """Runs contenders, one process at a time."""

    def __init__(self, *, port: int, peers: Peers, log: Path, quick: bool) -> None:
        self.port, self.peers, self.log, self.quick = port, peers, log, quick
        self.keep = {pid for pid, _ in descendants(os.getpid())}

    def command(self, row: Row, contender: str, out: Path) -> list[str]:
        python = str(self.peers.python) if contender == "rlms" else sys.executable
        params = row.params | (row.quick if self.quick else {})
        given = {"row": row.name, "contender": contender, "params": json.dumps(params), "port": self.port, "out": out}
        return [python, str(HERE / "contender.py"), *[f"--{key}={value}" for key, value in given.items()]]

    def run(self, row: Row, contender: str) -> Figures:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder, self.log.open("a") as log:
            out, temporary = Path(folder, "figures.json"), Path(folder, "tmp")
            temporary.mkdir()
            environment = os.environ | {"TMPDIR": str(temporary)}
            if contender == "rlms":
                environment.pop("PYTHONPATH", None)
            print(f"--- {row.name} {contender}", file=log, flush=True)
            command = self.command(row, contender, out)
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            killed = True
            try:
                memory, killed = self.watch(process, row)
            finally:
                process.kill()
                process.wait()
                processes = clear(self.keep, 0.0 if killed else 2.0)
            files = len(list(temporary.iterdir()))
            found: Figures = json.loads(out.read_text()) if out.exists() else {}
        if killed:
            found["error"] = f"killed after {row.limit + GRACE:.0f} s"
        elif not found:
            found["error"] = f"exit {process.returncode}"
        elif processes or files:
            found["left_behind"] = f"{processes} processes, {files} files"
        window = found.pop("window", None)
        if window and row.memory:
            found["tree_mb"] = max(found["own_mb"], memory.growth(*window) / 1e6)
        return found

    def watch(self, process: subprocess.Popen[bytes], row: Row) -> tuple[TreeMemory, bool]:
        """Wait for its end. Returns what memory it took, if that is watched, and whether its time is up."""
        memory, deadline = TreeMemory(process.pid), time.monotonic() + row.limit + GRACE
        while (left := deadline - time.monotonic()) > 0:
            try:
                process.wait(min(left, memory.sample() if row.memory else 0.5))
            except subprocess.TimeoutExpired:
                continue
            return memory, False
        return memory, True

    def row(self, row: Row, repetitions: int, names: set[str]) -> Results:
        contenders = [name for name in row.contenders if name in names]
        runs: dict[str, list[Figures]] = {name: [] for name in contenders}
        if "rlms" in runs and self.peers.missing:
            runs["rlms"].append({"unsupported": self.peers.missing})
        for _ in range(repetitions):
            for name in contenders:
                if runs[name] and gave_up(runs[name][-1]):
                    continue
                runs[name].append(self.run(row, name))
                print(f"{row.name:8} {name:9} {brief(runs[name][-1])}", file=sys.stderr, flush=True)
        return Results(row.name, row.title, runs)


def gave_up(figures: Figures) -> bool:
    """A contender that can't or never ends will not do better the next time."""
    return "unsupported" in figures or str(figures.get("error", "")).startswith(("no end", "killed"))


def brief(figures: Figures) -> str:
    shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()}
    return json.dumps({key: value for key, value in shown.items() if value is not None}, ensure_ascii=False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="", help="rows by letter (c) or name (c-1000), with commas; default: all")
    parser.add_argument("--only", default="", help="contenders, with commas: asyncrlm, openai, aiohttp, plain, rlms")
    parser.add_argument("--reps", type=int, default=5, help="runs of each contender on each row")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: proves that it works, not that it is fast")
    parser.add_argument("--write", action="store_true", help="put the table into README.md beside this file")
    parser.add_argument("--json", type=Path, help="write every run of every contender to this file")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="default: %(default)s")
    given = parser.parse_args()
    if given.write and given.quick:
        parser.error("--write with --quick would publish figures that mean nothing")
    return given


def chosen(names: str) -> list[Row]:
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    found = [row for row in ROWS if not wanted or wanted & {row.name, row.name.partition("-")[0]}]
    known = {name for row in ROWS for name in (row.name, row.name.partition("-")[0])}
    if unknown := wanted - known:
        raise SystemExit(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    return found


def merged(path: Path, fresh: list[Results]) -> list[Results]:
    """These rows and, from earlier runs, those not measured now; the file remembers all."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    known |= {one.row: one.runs for one in fresh}
    path.write_text(json.dumps(known, indent=1))
    return [Results(row.name, row.title, known[row.name]) for row in ROWS if row.name in known]


def main() -> int:
    given = arguments()
    todo = chosen(given.scenario)
    names = {name for name in given.only.split(",") if name} or {name for row in todo for name in row.contenders}
    given.cache.mkdir(parents=True, exist_ok=True)
    peers = Peers(given.cache)
    if "rlms" in names:
        peers.prepare()
    adopt_orphans()
    log = given.cache / "last.log"
    log.write_text("")
    done: list[Results] = []
    with fake_server(peers.python if peers.python.exists() else sys.executable) as port:
        bench = Bench(port=port, peers=peers, log=log, quick=given.quick)
        for row in todo:
            done.append(bench.row(row, given.reps, names))
    if given.json:
        given.json.write_text(json.dumps({one.row: one.runs for one in done}, indent=1))
    print(table.markdown(done))
    if not given.quick:
        everything = merged(given.cache / "results.json", done)
        if given.write:
            table.write(HERE / "README.md", table.markdown(everything))
    return int("asyncrlm" in names and any(one.complaint() for one in done))


if __name__ == "__main__":
    sys.exit(main())
