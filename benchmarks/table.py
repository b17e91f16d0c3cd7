"""What the rows say: the reach of each, whether it is met, and the table in Markdown."""

from __future__ import annotations

import datetime as dt
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from measure import median

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from control import Figures

BEGIN, END = "<!-- figures: begin, written by run.py --write -->", "<!-- figures: end -->"


@dataclass(frozen=True)
class Results:
    """All runs of one row: contender → its figures, one a repetition, in the order they ran."""

    row: str
    title: str
    runs: dict[str, list[Figures]]

    def middle(self, contender: str, name: str) -> float | None:
        runs = self.runs.get(contender, [])
        return median(run[name] for run in runs if isinstance(run.get(name), int | float))

    def ratio(self, other: str, name: str = "seconds") -> float | None:
        """asyncrlm's figure over the other's, of each pair that ran one after the other: the median."""
        pairs = zip(self.runs.get("asyncrlm", []), self.runs.get(other, []), strict=False)
        return median(ours[name] / theirs[name] for ours, theirs in pairs if ours.get(name) and theirs.get(name))

    def fewest_right(self, contender: str) -> tuple[int, int] | None:
        runs = [run for run in self.runs.get(contender, []) if "of" in run]
        return min(((run["right"], run["of"]) for run in runs), default=None)

    def copies(self, contender: str, name: str) -> float | None:
        grown, size = self.middle(contender, name), self.middle(contender, "size_mb")
        return None if grown is None or not size else grown / size

    def first(self, contender: str, name: str) -> Any:
        return next((run[name] for run in self.runs.get(contender, []) if run.get(name)), None)

    def complaint(self) -> str | None:
        """What is wrong with asyncrlm's answers or its ending, if anything."""
        if error := self.first("asyncrlm", "error") or self.first("asyncrlm", "unsupported"):
            return str(error)
        if left := self.first("asyncrlm", "left_behind"):
            return f"left behind: {left}"
        if mixed := self.first("asyncrlm", "mixed_up"):
            return f"{mixed} prompts with another run's output or without their own"
        right = self.fewest_right("asyncrlm")
        if right is None:
            return "did not run"
        return None if right[0] == right[1] else f"{right[0]:,} of {right[1]:,} right"


@dataclass(frozen=True)
class Reach:
    """One figure to reach."""

    text: str
    value: Callable[[Results], float | None]
    most: float | None = None
    least: float | None = None
    unit: str = ""

    def verdict(self, results: Results) -> tuple[bool, str]:
        value = self.value(results)
        if value is None:
            return False, "no figure"
        met = (self.most is None or value <= self.most) and (self.least is None or value >= self.least)
        return met, f"{number(value)}{self.unit}"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def ours(name: str) -> Callable[[Results], float | None]:
    return lambda results: results.middle("asyncrlm", name)


def against(other: str, name: str = "seconds") -> Callable[[Results], float | None]:
    return lambda results: results.ratio(other, name)


def growth(results: Results) -> float | None:
    first, last = results.middle("asyncrlm", "first_ms"), results.middle("asyncrlm", "last_ms")
    return None if not first or last is None else last / first


def seconds(most: float) -> Reach:
    return Reach(f"≤ {most:g} s", ours("seconds"), most=most, unit=" s")


def share(most: float, other: str, name: str) -> Reach:
    return Reach(f"≤ {most:g} x {name}", against(other), most=most, unit=" x")


def copies(most: float, whose: str, name: str) -> Reach:
    return Reach(f"{whose} ≤ {most:g} copies", lambda r: r.copies("asyncrlm", name), most=most, unit=" copies")


def worst_stall(results: Results) -> float | None:
    return results.middle("asyncrlm", "stall_ms")


STALL = Reach("no stall over 50 ms", worst_stall, most=50, unit=" ms")
SDK = "the bare SDK"

REACH: dict[str, tuple[Reach, ...]] = {
    "a": (Reach("≤ 10 ms", ours("ms"), most=10, unit=" ms"),),
    "b": (
        Reach("last 20 ≤ 1.5 x first 20", growth, most=1.5, unit=" x"),
        Reach("≤ 3 ms", ours("last_ms"), most=3, unit=" ms"),
    ),
    "c-1000": (share(0.3, "openai", SDK), seconds(1.0), STALL),
    "c-10000": (share(0.35, "openai", SDK), seconds(7.0), STALL),
    "d": (
        Reach(f"≥ 1.7 x the rate of {SDK}", against("openai", "a_second"), least=1.7, unit=" x"),
        Reach("≥ 1,200 a second", ours("a_second"), least=1200, unit=" a second"),
    ),
    "e": (seconds(1.2),),
    "f": (seconds(3.5), STALL),
    "g-1000": (
        share(1.5, "plain", "a bare write and decode"),
        copies(1.1, "beyond the caller's own", "tree_mb"),
    ),
    "g-path": (copies(0.1, "in the host", "own_mb"), copies(1.1, "in all", "tree_mb")),
    "h": (
        seconds(0.5),
        Reach("bounded memory: ≤ 16 MB more", ours("tree_mb"), most=16, unit=" MB"),
    ),
    "i": (seconds(2.2),),
    "l-16": (share(1.4, "plain", "plain asyncio"), STALL),
    "l-64": (share(2.5, "plain", "plain asyncio"), STALL),
    "l-256": (share(8, "plain", "plain asyncio"), STALL),
    "m": (Reach("≤ 1 ms", ours("ms"), most=1, unit=" ms"),),
    "import": (
        Reach("≤ 8 x bare Python", ours("ratio"), most=8, unit=" x"),
        Reach("≤ 0.1 s", ours("seconds"), most=0.1, unit=" s"),
    ),
}
FASTER = {"a": "ms", "b": "last_ms"}
"""Which figure is compared with the peer's, where it is not the seconds."""


def reach(results: Results) -> list[tuple[str, bool, str]]:
    """(what is to be reached, whether it is, the figure)."""
    found = [(one.text, *one.verdict(results)) for one in REACH.get(results.row, ())]
    complaint = results.complaint()
    found.insert(0, ("all right", complaint is None, complaint or "yes"))
    if results.runs.get("rlms") and results.row != "import":
        ratio = results.ratio("rlms", FASTER.get(results.row, "seconds"))
        if ratio is not None:
            found.append(("faster than rlms", ratio < 1, f"{number(ratio)} x"))
    return found


def cell(results: Results, contender: str) -> str:
    """One contender's figures on one row."""
    runs = results.runs.get(contender)
    if not runs:
        return "-"
    if why := results.first(contender, "unsupported"):
        return str(why)
    text = figures(results, contender)
    if text and results.row.startswith(("c", "f", "l")):
        stall = results.middle(contender, "stall_ms")
        text += f", stall {stall:.0f} ms" if stall is not None else ""
    right = results.fewest_right(contender)
    if right and (right[0] != right[1] or results.row == "k"):
        text += f", {right[0]:,} of {right[1]:,} right"
    if error := results.first(contender, "error"):
        text = f"{text}, {error}" if text else str(error)
    return text.replace("|", "/").replace("\n", " ")


def figures(results: Results, contender: str) -> str:
    def middle(name: str) -> float | None:
        return results.middle(contender, name)

    def show(name: str, unit: str) -> str:
        value = middle(name)
        return "" if value is None else f"{number(value)}{unit}"

    match results.row.partition("-")[0]:
        case "a":
            cold = show("cold_ms", " ms")
            return show("ms", " ms") + (f" (first {cold})" if cold else "")
        case "b":
            return f"{show('first_ms', '')} → {show('last_ms', ' ms')}" if middle("last_ms") is not None else ""
        case "d":
            return show("a_second", " a second")
        case "g":
            more, own = results.copies(contender, "tree_mb"), results.copies(contender, "own_mb")
            held = "" if more is None or own is None else f", {more:.2f} copies more, {own:.2f} in the host"
            return show("seconds", " s") + held
        case "h":
            more = middle("tree_mb")
            return show("seconds", " s") + ("" if more is None else f", {more:.0f} MB more")
        case "m":
            return show("ms", " ms")
        case "import":
            return f"{show('seconds', ' s')} ({show('ratio', ' x')})"
        case _:
            return show("seconds", " s")


def markdown(all_results: list[Results]) -> str:
    heads = {name: version(all_results, name) for name in ("asyncrlm", "openai", "aiohttp", "rlms")}
    counts = sorted({len(one.runs["asyncrlm"]) for one in all_results if one.runs.get("asyncrlm")})
    lines = [
        f"Medians of {' or '.join(map(str, counts)) or 'no'} runs, {dt.datetime.now(dt.UTC):%Y-%m-%d}, {machine()}.",
        "",
        (
            f"| | | {heads['asyncrlm']} | bare SDK: {heads['openai']} | bare {heads['aiohttp']} or plain Python "
            f"| {heads['rlms']} | to reach: reached |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for results in all_results:
        plain = "aiohttp" if results.runs.get("aiohttp") else "plain"
        cells = [cell(results, name) for name in ("asyncrlm", "openai", plain, "rlms")]
        said = [f"{text}: {value}" if met else f"**{text}: {value}, missed**" for text, met, value in reach(results)]
        lines.append(f"| {results.row.partition('-')[0]} | {results.title} | {' | '.join(cells)} | {'; '.join(said)} |")
    return "\n".join(lines)


def version(all_results: list[Results], name: str) -> str:
    found = [value for one in all_results if (value := one.first(name, "version"))]
    return f"{name} {found[-1]}" if found else name


def machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.system()} {platform.machine()}, {cores} cores, Python {platform.python_version()}"


def write(path: Path, table: str) -> None:
    """Put the table between the markers of the file.

    Raises:
        ValueError: if the file has no such markers.
    """
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{path} must have one line {BEGIN!r} and one line {END!r}")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    path.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}")
