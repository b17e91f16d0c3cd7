"""Whether environments can be used here: one sandbox of each is tried, step by step."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import anyio
import msgspec

from .. import ConfigurationError, Environment, Repl, RLMError
from ..environments import NAMES, environment
from ..environments.remote import describe
from ..repl.sandbox import Settings

if TYPE_CHECKING:
    from ..repl.sandbox import Sandbox, Scope

State = Literal["usable", "missing", "failed"]
USABLE: Final = "usable"
MISSING: Final = "missing"
"""Something has to be installed, started or configured first."""
FAILED: Final = "failed"
"""All that it needs seems to be there, and it does not work."""
STEPS: Final = {
    "create": "create",
    "start": "start",
    "first_cell": "first cell",
    "subcall": "sub-call",
    "close": "close",
}
"""In the order in which they are taken: name → in words."""


class Checked(msgspec.Struct, kw_only=True):
    """What came of trying one environment."""

    environment: str
    state: State = USABLE
    problem: str | None = None
    """What is missing or went wrong, and what to do; None if nothing."""
    failed_step: str | None = None
    """The step in which that was seen; None if nothing went wrong, or it was seen before the first."""
    seconds: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Of each step that was taken: `create` until the driver has a sandbox, `start` until the worker in it is ready."""
    python: str | None = None
    isolation: dict[str, str | None] = msgspec.field(default_factory=dict[str, str | None])
    """Row → what holds it, or None where nothing does."""


class _Opening(Environment, frozen=True, kw_only=True):
    """Another environment, whose sandboxes tell when they were there."""

    name: ClassVar[str] = "checked"
    inner: Environment
    opened: list[float]

    async def open(self, scope: Scope) -> Sandbox:
        sandbox = await self.inner.open(scope)
        self.opened.append(time.perf_counter())
        return sandbox


class _Odd(Exception):
    """A cell that did not do what it should."""


async def checks(name: str | None, settings: dict[str, Any], seconds: float) -> AsyncGenerator[Checked]:
    """Try the environment of this name, or all, one after another.

    Raises:
        ConfigurationError: for a name or a setting that there is not.
    """
    for each in NAMES if name is None else (name,):
        yield await _check(each, environment(each, settings), seconds)


async def _check(name: str, place: Environment, seconds: float) -> Checked:
    found = Checked(environment=name)
    trial = _Trial(place, found)
    try:
        with anyio.fail_after(seconds):
            await trial.run()
    except ConfigurationError as error:
        found.state, found.problem = MISSING, str(error)
    except TimeoutError:
        found.state, found.problem = FAILED, f"it was not through within {seconds:g} s"
    except (RLMError, _Odd) as error:
        found.state, found.problem = FAILED, str(error)
    except Exception as error:  # noqa: BLE001 - whatever an SDK raises is what the user asked for
        found.state, found.problem = FAILED, describe(error)
    if found.problem is not None:
        found.problem, found.failed_step = " ".join(found.problem.split()), trial.step
    return found


class _Trial:
    def __init__(self, place: Environment, found: Checked) -> None:
        common = {name: getattr(place, name) for name in Settings.__struct_fields__}
        self._place = _Opening(inner=place, opened=[], **common)
        self._found = found
        self.step = "create"

    async def run(self) -> None:
        began = time.perf_counter()
        try:
            async with AsyncExitStack() as stack:
                repl = await stack.enter_async_context(Repl(self._place, lm=_pong))
                ready = time.perf_counter()
                self._found.seconds |= {
                    "create": self._place.opened[0] - began,
                    "start": ready - self._place.opened[0],
                }
                if repl.report is not None:
                    self._found.python = repl.report.python or None
                    self._found.isolation = dict(repl.report.isolation)
                await self._cell(repl, "first_cell", "print(6 * 7)", "42")
                await self._cell(repl, "subcall", "print(llm_query('ping'))", "pong")
                with self._timed("close"):
                    await stack.aclose()
        except BaseException:
            if self.step == "create" and self._place.opened:
                self.step = "start"
            raise

    async def _cell(self, repl: Repl, step: str, code: str, wanted: str) -> None:
        with self._timed(step):
            result = await repl.execute(code)
        if result.error is not None or result.stdout.strip() != wanted:
            came = result.error or f"{result.stdout.strip()!r} instead of {wanted!r}"
            raise _Odd(f"the cell {code} gave {came}")

    @contextmanager
    def _timed(self, step: str) -> Generator[None]:
        self.step = step
        began = time.perf_counter()
        yield
        self._found.seconds[step] = time.perf_counter() - began


async def _pong(messages: list[dict[str, Any]]) -> str:
    return "pong"


def told(found: Checked) -> str:
    """The result in a few lines for people."""
    verdict = {USABLE: "can be used", MISSING: "can't be used yet", FAILED: "does not work"}[found.state]
    lines = [f"{found.environment}: {verdict}" + (f" (Python {found.python})" if found.python else "")]
    if found.problem is not None:
        at = f"{STEPS[found.failed_step]}: " if found.state == FAILED and found.failed_step else ""
        lines.append(f"  {at}{found.problem}")
    if found.seconds:
        times = (f"{words} {_duration(found.seconds[step])}" for step, words in STEPS.items() if step in found.seconds)
        lines.append("  " + ", ".join(times))
    if open_rows := [row for row, by in found.isolation.items() if not by]:
        lines.append(f"  not held: {', '.join(open_rows)}")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
