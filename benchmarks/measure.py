"""What can be measured without any package: CPU, memory of a process tree, the longest stall of an event loop.

Memory and process trees come from `/proc` and are Linux only; elsewhere they read as empty.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

PROC = Path("/proc")


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def cpu_seconds() -> float:
    """CPU of this process and of the children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in (PROC / str(pid) / "task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:  # gone, or no Linux
        return found
    return found


def descendants(pid: int) -> Iterator[tuple[int, int]]:
    """(pid, parent) of all that run below this process."""
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for child in children(parent):
            yield child, parent
            waiting.append(child)


def status_bytes(pid: int | str, name: str) -> int:
    """A field of /proc/PID/status that is given in kB, in bytes; 0 once the process is gone."""
    try:
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def private_bytes(pid: int) -> int:
    """Bytes of memory that are no page cache. What a fork shares with its parent counts in both."""
    return status_bytes(pid, "RssAnon") + status_bytes(pid, "RssShmem")


def reset_peak_rss() -> None:
    """Make `VmHWM` of this process start again from what it holds now."""
    try:
        (PROC / "self" / "clear_refs").write_text("5")
    except OSError:
        return


class Memory:
    """The memory this process has come to need since this was made."""

    def __init__(self) -> None:
        reset_peak_rss()
        self.own = status_bytes("self", "VmRSS")
        self.start = time.monotonic()

    def figures(self) -> dict[str, Any]:
        """`window` is the span of `time.monotonic()` for which a `TreeMemory` in another process is to be asked."""
        grown = max(0, status_bytes("self", "VmHWM") - self.own)
        return {"window": [self.start, time.monotonic()], "own_mb": grown / 1e6}


class TreeMemory:
    """The memory of a process and its descendants over time, watched from outside so as not to disturb it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._samples: list[tuple[float, int]] = []
        self._shared = {pid: 0}

    def sample(self) -> float:
        """Take one. Returns the seconds to wait until the next, so that watching stays under 5 % of a core."""
        start, cpu = time.monotonic(), time.thread_time()
        for pid, parent in descendants(self.pid):
            if pid not in self._shared:
                # What a fork found there is its parent's; what came later is its own, but for pages it only rewrote.
                self._shared[pid] = min(private_bytes(pid), private_bytes(parent))
        self._samples.append((start, sum(max(0, private_bytes(p) - had) for p, had in self._shared.items())))
        return max(0.01, 20 * (time.thread_time() - cpu))

    def growth(self, start: float, end: float) -> int:
        """Bytes by which the peak between these times is above what was there before."""
        before = max((sample for sample in self._samples if sample[0] <= start), default=(0.0, 0))[1]
        return max(0, max((size for at, size in self._samples if start <= at <= end), default=0) - before)


def settle() -> None:
    """Once warm, keep what is loaded out of the collector's way, as services do: a full collection that walks all the
    modules of a vendor's SDK stalls any loop, and would be measured wherever it happened to fall."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 10, 1_000)


class Stalls:
    """Measures, while entered, how late the running event loop came at worst to what it had to do at a certain time."""

    def __init__(self, every: float = 0.005) -> None:
        self.every = every
        self.longest = 0.0
        """Seconds."""
        self.longest_cpu = 0.0
        """Seconds of the loop's own thread in the busiest span: a stall without CPU is the machine, not the loop."""

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._schedule()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.sleep(2 * self.every)  # lets a stall that is only just over be seen
        self._timer.cancel()

    def _schedule(self) -> None:
        self._due, self._cpu = self._loop.time() + self.every, time.thread_time()
        self._timer = self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        self.longest = max(self.longest, self._loop.time() - self._due)
        self.longest_cpu = max(self.longest_cpu, time.thread_time() - self._cpu)
        self._schedule()

    def figures(self) -> dict[str, float]:
        return {"stall_ms": self.longest * 1e3, "stall_cpu_ms": self.longest_cpu * 1e3}
