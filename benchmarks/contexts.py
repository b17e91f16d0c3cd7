"""A context larger than memory: a sparse file, the first cell, slices, searches, the index of its characters.

    python benchmarks/contexts.py [--gb 20] [--folder /somewhere] [--quick]

Fails where the worker takes more than 300 MB of anonymous memory, or the first cell more than a second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import anyio

from asyncrlm import Repl

MOST_MEMORY = 300e6
"""Bytes of anonymous memory of the worker."""
FIRST_CELL = 1.0
"""Seconds from the start to the end of the first cell."""
STARTS = 5
CELLS = (
    ("one more start and its first cell", "print(context.nbytes, context[:5])"),
    ("the last 1,000 characters", "print(repr(context[-9:]))"),
    ("`in`, all of it", "print('needle' in context)"),
    ("`find`, all of it", "print(context.find('needle'))"),
    ("`len`, the index", "print(len(context))"),
    ("a slice in the middle", "middle = len(context) // 2\nprint(len(context[middle : middle + 1000]))"),
    ("`search`, a tenth of it", "print(context.search('nee[d]le|middle').start() > 0)"),
)
MEMORY = """
with open("/proc/self/status") as status:
    print([line.split()[1] for line in status if line.startswith("RssAnon")][0])
"""


def make(path: Path, size: int) -> None:
    """A file of zeros with a word at its begin, after a tenth and at its end, which takes no room on the disk."""
    with path.open("wb") as file:
        file.truncate(size)
        for place, word in ((0, b"begin"), (size // 10, b"middle"), (size - 12, b"needle h\xc3\xa9\n")):
            file.seek(place)
            file.write(word)


async def first_cell(path: Path) -> float:
    """Seconds from nothing to the end of the first cell."""
    began = time.perf_counter()
    async with Repl(context=path, lazy=True) as repl:
        await repl.execute(CELLS[0][1])
        return time.perf_counter() - began


async def measure(path: Path) -> list[tuple[str, float, str]]:
    firsts = [await first_cell(path) for _ in range(STARTS)]
    rows: list[tuple[str, float, str]] = [(f"first cell, median of {STARTS} starts", statistics.median(firsts), "")]
    began = time.perf_counter()
    async with Repl(context=path, lazy=True, environment_kwargs={"cell_timeout": 600}) as repl:
        for what, code in CELLS:
            result = await repl.execute(code)
            if result.error is not None:
                raise RuntimeError(f"{what}: {result.error}")
            rows.append((what, time.perf_counter() - began, result.stdout.strip()))
            began = time.perf_counter()
        rows.append(("anonymous memory of the worker", int((await repl.execute(MEMORY)).stdout) * 1024, ""))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=20.0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--quick", action="store_true", help="a tenth of a gigabyte, to see that it runs")
    options = parser.parse_args()
    size = int((0.1 if options.quick else options.gb) * 1e9)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder, "context.txt")
        make(path, size)
        rows = anyio.run(measure, path)
        on_disk = os.stat(path).st_blocks * 512
    *timed, (what, memory, _) = rows
    print(f"a file of {size:,} bytes ({on_disk:,} on the disk)\n\n| | seconds | it printed |\n|---|---:|---|")
    for name, seconds, printed in timed:
        print(f"| {name} | {seconds:.3f} | `{printed[:60]}` |")
    print(f"\n{what}: {memory / 1e6:,.0f} MB")
    missed = [text for text, met in (("first cell within 1 s", timed[0][1] <= FIRST_CELL),
                                     ("300 MB of anonymous memory", memory <= MOST_MEMORY)) if not met]  # fmt: skip
    if missed:
        print("missed: " + ", ".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
