"""What can be measured without any package: CPU, memory of a process tree, the longest stall of an event loop.

Memory and process trees come from `/proc` and are Linux only; elsewhere they read as empty.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

PROC = Path("/proc")


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def cpu_seconds() -> float:
    """CPU of this process and of the children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def parents() -> dict[int, int]:
    """Pid to parent pid, of every process."""
    table: dict[int, int] = {}
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_bytes()
            except OSError:
                continue
            table[int(entry.name)] = int(stat[stat.rindex(b")") + 4 :].split()[0])
    return table


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for child, parent in parents().items():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    waiting = list(children.get(pid, ()))
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting += children.get(one, ())
    return found


def status_bytes(pid: int | str, name: str) -> int:
    """A field of /proc/PID/status that is given in kB, in bytes; 0 once the process is gone."""
    try:
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def held(pid: int) -> int:
    """Bytes of memory that are there because of this process: not shared with another (a worker is a fork), and no
    page cache of a file it maps. Its resident set where the kernel does not tell them apart."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return status_bytes(pid, "VmRSS")
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def tree_held(pid: int) -> int:
    return sum(held(one) for one in [pid, *descendants(pid)])


def reset_peak_rss() -> None:
    """Make `VmHWM` of this process start again from what it holds now."""
    try:
        (PROC / "self" / "clear_refs").write_text("5")
    except OSError:
        return


class Memory:
    """What this process and its tree held when made, for comparison with their peaks."""

    def __init__(self) -> None:
        reset_peak_rss()
        self.tree = tree_held(os.getpid())
        self.own = status_bytes("self", "VmRSS")
        self.start = time.monotonic()

    def figures(self) -> dict[str, Any]:
        """`window` says in which span of `time.monotonic()` the tree's peak, which only another process can watch
        without disturbing, is to be taken."""
        grown = max(0, status_bytes("self", "VmHWM") - self.own)
        return {"window": [self.start, time.monotonic()], "tree_before": self.tree, "own_mb": grown / 1e6}


class Stalls:
    """Measures, while entered, the longest time the running event loop was late for a timer."""

    def __init__(self, every: float = 0.005) -> None:
        self.every = every
        self.longest = 0.0
        """Seconds."""
        self.longest_cpu = 0.0
        """Seconds of the loop's own thread in the busiest span: a stall without CPU is the machine, not the loop."""

    async def __aenter__(self) -> Self:
        self._ticker = asyncio.create_task(self._tick())
        await asyncio.sleep(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.sleep(2 * self.every)  # lets a stall that is only just over be seen
        self._ticker.cancel()
        await asyncio.wait([self._ticker])

    async def _tick(self) -> None:
        while True:
            due, cpu = time.perf_counter() + self.every, time.thread_time()
            await asyncio.sleep(self.every)
            self.longest = max(self.longest, time.perf_counter() - due)
            self.longest_cpu = max(self.longest_cpu, time.thread_time() - cpu)

    def figures(self) -> dict[str, float]:
        return {"stall_ms": self.longest * 1e3, "stall_cpu_ms": self.longest_cpu * 1e3}
