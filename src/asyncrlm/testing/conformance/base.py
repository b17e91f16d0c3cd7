"""What the checks share: how they are told apart, bounded, and what they may not leave behind."""

from __future__ import annotations

import functools
import os
import sys
import unittest
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import anyio
from msgspec.structs import replace

from ... import Environment, Repl, REPLResult

Check = Callable[[Any, Environment], Awaitable[None]]
C = TypeVar("C", bound=Check)


class Conformance:
    """How the checks of an environment are run. Override what differs where yours runs.

    A check fails with an AssertionError that says what was wanted and what came. It is bounded by `cap`, and what it
    leaves behind fails it too.
    """

    backends: ClassVar[Sequence[str]] = ("asyncio", "trio")
    """Event loops that the checks run on; `("asyncio",)` where an SDK has no other."""
    slow: ClassVar[bool] = True
    """Whether to run the checks that take long; they are also what `pytest -k "not slow"` leaves out."""
    cap: ClassVar[float] = 60.0
    """Seconds that a check may take; slow ones four times as many."""
    cell_timeout: ClassVar[float] = 0.5
    """Seconds after which checks of endless cells have them stopped."""
    big: ClassVar[int] = 100_000_000
    """Characters of the largest context."""
    flood: ClassVar[int] = 100_000_000
    """Bytes that a cell prints to see whether they are bounded."""
    cells: ClassVar[int] = 200
    """Cells in a row."""
    batch: ClassVar[int] = 500
    """Prompts of one batch."""
    at_once: ClassVar[int] = 10
    """Sandboxes that live at the same time."""
    settle: ClassVar[float] = 5.0
    """Seconds that what a check used may take to be gone, once it was closed."""
    known_failures: ClassVar[Mapping[str, str]] = {}
    """Name of a check → why it fails in this environment. It is run, and must fail: else it is known no more."""
    left_out: ClassVar[Mapping[str, str]] = {}
    """Name of a check → why it can't be run in this environment."""

    async def leftovers(self) -> Collection[str]:
        """What exists now and should be gone once sandboxes are closed; asked before and after each check.

        By default the processes that this one has started, on Linux. Override it to name your provider's sandboxes.
        """
        return descendants()

    def varied(self, environment: Environment, **settings: Any) -> Environment:
        """The environment with other common settings, such as `cell_timeout`."""
        return replace(environment, **settings)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        pytest: Any = sys.modules.get("pytest")  # who collects a class has it; nobody else needs it
        if pytest is None:
            return
        marks = cls.__dict__.get("pytestmark", [])
        mine: Any = cls
        mine.pytestmark = [*(marks if isinstance(marks, list) else [marks]), pytest.mark.anyio]
        if "anyio_backend" not in cls.__dict__:
            mine.anyio_backend = _backend_fixture(pytest, cls.backends)


def _backend_fixture(pytest: Any, backends: Sequence[str]) -> Any:
    def anyio_backend(self: object, request: Any) -> str:
        return request.param

    return pytest.fixture(params=list(backends))(anyio_backend)


def check(*, slow: bool = False) -> Callable[[C], C]:
    """Makes a check of a method: bounded, and nothing may be left behind."""

    def made(method: C) -> C:
        name = method.__name__

        @functools.wraps(method)
        async def run(self: Conformance, environment: Environment) -> None:
            if name in self.left_out:
                raise unittest.SkipTest(self.left_out[name])
            if slow and not self.slow:
                raise unittest.SkipTest("slow checks are switched off (slow = False)")
            if name not in self.known_failures:
                return await _bounded(self, method, environment, self.cap * (4 if slow else 1))
            try:
                await _bounded(self, method, environment, self.cap * (4 if slow else 1))
            except Exception as error:
                raise unittest.SkipTest(f"known failure: {self.known_failures[name]}") from error
            raise AssertionError(f"{name} passes: take it out of known_failures")

        if slow:
            run.__dict__["slow"] = True  # pytest's -k knows a function by its attributes too
        return cast("C", run)

    return made


async def _bounded(suite: Conformance, method: Check, environment: Environment, seconds: float) -> None:
    before = set(await suite.leftovers())
    try:
        with anyio.fail_after(seconds):
            await method(suite, environment)
    except TimeoutError as error:
        raise AssertionError(f"the check did not end within {seconds:g} s") from error
    await nothing_left(suite, before)


async def nothing_left(suite: Conformance, before: Collection[str]) -> None:
    """Fails if something exists that did not `before`, once it had time to go."""
    left = set(await suite.leftovers()) - set(before)
    with anyio.move_on_after(suite.settle):
        while left:
            await anyio.sleep(0.05)
            left = set(await suite.leftovers()) - set(before)
    expect(not left, f"left behind after everything was closed: {', '.join(sorted(left))}")


def expect(fact: object, otherwise: str) -> None:
    """Fails with this text unless the fact holds."""
    if not fact:
        raise AssertionError(otherwise)


def same(got: object, wanted: object, what: str) -> None:
    """Fails unless both are equal."""
    if got != wanted:
        raise AssertionError(f"{what}: wanted {_short(wanted)}, got {_short(got)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 2_000 else f"{text[:1_000]} … {text[-1_000:]} ({len(text):,} characters)"


def report(result: REPLResult) -> str:
    """What a cell printed and raised, for messages."""
    return f"it printed {_short(result.stdout)}; standard error {_short(result.stderr)}"


async def printed(repl: Repl, code: str, what: str = "") -> str:
    """What the cell prints; it must not raise."""
    result = await repl.execute(code)
    expect(result.error is None, f"{what or 'the cell'} raised, and should not have: {report(result)}\n{code[:2_000]}")
    return result.stdout


@asynccontextmanager
async def working(repl: Repl) -> AsyncGenerator[Repl]:
    """The Repl, entered; as a block ends well, another cell must work in it."""
    async with repl:
        yield repl
        same(await printed(repl, "print(6 * 7)"), "42\n", "a last cell after all that")


def cell(code: str) -> str:
    """A reply of a model, with one cell."""
    return f"```repl\n{code}\n```"


def submit(expression: str) -> str:
    """A reply whose cell submits the value of an expression."""
    return cell(f'answer["content"] = {expression}\nanswer["ready"] = True')


async def upper(messages: list[dict[str, Any]]) -> str:
    """A model that shouts what it is asked."""
    return messages[-1]["content"].upper()


async def never(messages: list[dict[str, Any]]) -> str:
    """A model that does not answer."""
    await anyio.sleep_forever()
    raise AssertionError("unreachable")


class Held:
    """Something that a cell waits for without end, a tool or a model: `hold`."""

    def __init__(self) -> None:
        self.begun = anyio.Event()
        self.cancelled = anyio.Event()

    async def hold(self) -> NoReturn:
        self.begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.cancelled.set()
        raise AssertionError("unreachable")

    async def seen(self) -> None:
        """A tool that returns once `hold` was called."""
        await self.begun.wait()


def descendants() -> set[str]:
    """The living processes that this one, or one of those, has started; none where there is no /proc."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (entry / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has ended meanwhile
        state, parent, *_ = rest.split()
        if state not in "ZX":
            parents[int(entry.name)] = (int(parent), name)
    found: set[int] = set()
    generation = {os.getpid()}
    while generation:
        generation = {pid for pid, (parent, _) in parents.items() if parent in generation}
        found |= generation
    return {f"process {pid} ({parents[pid][1]})" for pid in found}
