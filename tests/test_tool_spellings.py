"""Calls of tools in every spelling, what `help` tells of them in a cell, and what prompts do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from asyncrlm import Repl
from asyncrlm.repl.tools import HostTools

pytestmark = pytest.mark.anyio


class Together:
    """A tool that returns once as many calls as were announced are under way."""

    def __init__(self) -> None:
        self.calls = 0
        self._all_here = anyio.Event()

    async def meet(self, name: str) -> str:
        self.calls += 1
        if self.calls == 2:
            self._all_here.set()
        await self._all_here.wait()
        return name

    def __reduce__(self) -> Any:
        raise TypeError("stays on the host")


async def give(value: Any = None, *, deep: bool = False) -> Any:
    """What it is given."""
    await anyio.lowlevel.checkpoint()
    return value


def double(n: int) -> int:
    return 2 * n


AT_ONCE = {
    "gather": "print(await asyncio.gather(meet('a'), meet('b')))",
    "list": "calls = [meet(n) for n in 'ab']\nprint(await asyncio.gather(*calls))",
    "coroutine": "async def one(n):\n    return await meet(n)\nprint(await asyncio.gather(*map(one, 'ab')))",
    "run": "async def both():\n    return await asyncio.gather(meet('a'), meet('b'))\nprint(asyncio.run(both()))",
    "object": "print(await asyncio.gather(there.meet('a'), there.meet('b')))",
    "threads": "print(await asyncio.gather(*[asyncio.to_thread(meet, n) for n in 'ab']))",
}


@pytest.mark.parametrize("spelling", AT_ONCE)
async def test_calls_at_once(spelling: str) -> None:
    there = Together()
    with anyio.fail_after(10):
        async with Repl(custom_tools={"meet": there.meet, "there": there}) as repl:
            result = await repl.execute(f"import asyncio\n{AT_ONCE[spelling]}")
    assert result.stdout == "['a', 'b']\n", result.stderr
    assert there.calls == 2


ONE_BY_ONE = {
    "print(give(2) + 1, await give(2), double(2), await double(3))": "3 2 4 6",
    "later = give({'a': [1]})\nprint((await later)['a'], later, type(later), later == {'a': [1]})": (
        "[1] {'a': [1]} <class 'dict'> True"
    ),
    "kept = {n: give((n, 1.5)) for n in 'ab'}\nprint(await asyncio.gather(*kept.values()))": "[('a', 1.5), ('b', 1.5)]",
    "print(await asyncio.gather(*map(give, [1, 2.5, 'x', [3]])))": "[1, 2.5, 'x', [3]]",
    "print(await give(), await give(True), give() is None)": "None True True",
    "print(json.dumps(give({'n': give(2), 't': give((1,))})), give(give([1])))": '{"n": 2, "t": [1]} [1]',
    "kinds = [{}, 1, 1.0, (1,)]\nprint(pickle.loads(pickle.dumps([give(k) for k in kinds])))": "[{}, 1, 1.0, (1,)]",
    "def give(x): return x\nprint(give(3))": "3",
}


async def test_calls_one_by_one() -> None:
    with anyio.fail_after(10):
        async with Repl(custom_tools={"give": give, "double": double}) as repl:
            for code, printed in ONE_BY_ONE.items():
                result = await repl.execute(f"import asyncio, json, pickle\n{code}")
                assert result.stdout == printed + "\n", result.stderr
            result = await repl.execute("later = give()\nawait later")
            assert "don't await it once more" in result.stderr
            assert result.locals["kept"] == "{'a': ('a', 1.5), 'b': ('b', 1.5)}"


async def test_help_shows_what_a_function_takes() -> None:
    with anyio.fail_after(10):
        async with Repl(custom_tools={"give": give, "there": Together()}) as repl:
            result = await repl.execute(
                "import inspect\nhelp(give)\nprint(give.__doc__, inspect.signature(there.meet))"
            )
    assert "give(value: Any = None, *, deep: bool = False) -> Any\n    What it is given.\n" in result.stdout
    assert result.stdout.endswith("What it is given. (name: str) -> str\n")


def look(
    q: str,
    api_key: str = "sk-1",
    where: str = "a place whose name is long",
    table: Mapping[str, int] = {"a": 1},
    most: int = 10,
    sure: bool | None = None,
    *,
    unit: str = "m",
) -> str:
    return q


SOURCE = "def look(q, api_key='sk-1', where='a place whose name is long', *, unit='m', table={'a': 1}): return q"


def test_prompts_have_no_defaults_but_short_plain_ones() -> None:
    text = HostTools({"look": look}).describe("")
    assert "api_key: str = ..., where: str = ..., table: Mapping[str, int] = ..., most: int = 10" in text
    assert "sure: bool | None = None, *, unit: str = 'm') -> str" in text
    text = HostTools({"look": SOURCE}).describe("")
    assert "look(q, api_key=..., where=..., *, unit='m', table=...)" in text


def test_prompts_have_no_endless_signature() -> None:
    async def look(q: Any) -> None: ...

    look.__annotations__["q"] = "x" * 10_000
    assert HostTools({"look": look}).describe("") == "- `look(q: ...) -> None`"
