"""The caller's tools: checked on the host, called from cells."""

from __future__ import annotations

import datetime
import functools
import threading
from typing import Any

import anyio
import pytest
from repl_fakes import FunctionServices

from asyncrlm import ConfigurationError, Repl
from asyncrlm.backend import on_trio
from asyncrlm.environments import environment
from asyncrlm.repl.resources import ResourceScope
from asyncrlm.repl.session import Session, ToolRecord
from asyncrlm.repl.tool_desk import ToolDesk, ToolFailure
from asyncrlm.repl.tools import RESERVED_NAMES, HostTools

pytestmark = pytest.mark.anyio


class Thing:
    """A thing."""

    def __call__(self, x: int) -> int:
        return x + 1


class AsyncThing:
    async def __call__(self, x: int) -> int:
        await anyio.lowlevel.checkpoint()
        return x + 2


class Odd(BaseException):
    def __str__(self) -> str:
        raise ValueError


class Unsendable(list[int]):
    def __iter__(self) -> Any:
        raise GeneratorExit("why")


async def async_add(a: int, b: int = 1) -> int:
    """Adds, later."""
    await anyio.lowlevel.checkpoint()
    return a + b


def raising(kind: type[BaseException]) -> Any:
    def tool() -> None:
        raise kind("why")

    return tool


async def call(tool: Any, args: list[Any], desk: ToolDesk | None = None) -> Any:
    return await (desk or ToolDesk()).call(HostTools({"f": tool}), "f", args, {})


# ---- what may be a tool ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [*sorted(RESERVED_NAMES), "context_0", "history_12", "__builtins__", "a b", "", "class", 5]
)
def test_names_that_may_not_be(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=repr(name)):
        HostTools({name: 1})


def test_values_and_callables_are_told_apart() -> None:
    tools = HostTools(
        {
            "K": 1,
            "D": {"a": 1},
            "described": {"tool": [1], "description": " the list "},
            "f": {"tool": async_add, "description": "sums up"},
            "g": async_add,
            "thing": Thing(),
            "kind": Thing,
            "part": functools.partial(async_add, 1),
            "context_x": max,
        }
    )
    assert tools.values == {"K": 1, "D": {"a": 1}, "described": [1]}
    assert set(tools.names) == {"f", "g", "thing", "kind", "part", "context_x"}
    text = tools.describe("")
    for line in (
        "- `K`: int",
        "- `described`: list - the list",
        "- `f(a: int, b: int = 1) -> int` - sums up",
        "- `g(a: int, b: int = 1) -> int` - Adds, later.",
        "- `thing(x: int) -> int`",
        "- `kind(",
    ):
        assert line in text
    assert HostTools(None).describe("") == ""
    with pytest.raises(ConfigurationError, match="description of 'f'"):
        HostTools({"f": {"tool": max, "description": 5}})


# ---- calling them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "args", "result"),
    [
        (async_add, [1], 2),
        (functools.partial(async_add, 5), [1], 6),
        (Thing(), [1], 2),
        (AsyncThing(), [1], 3),
        (lambda a: async_add(a), [1], 2),
        (lambda a: a, [{"$": "tuple", "v": [1, 2]}], {"$": "tuple", "v": [1, 2]}),
        (max, [1, 4], 4),
        (lambda: "\ud800", [], {"$": "str", "v": "7aCA"}),
        (lambda: None, [], None),
    ],
)
async def test_results(tool: Any, args: list[Any], result: Any) -> None:
    with anyio.fail_after(10):
        assert await call(tool, args) == result


@pytest.mark.parametrize(
    ("tool", "kind", "text"),
    [
        (raising(KeyError), "KeyError", "why"),
        (raising(SystemExit), "SystemExit", "why"),
        (raising(StopIteration), "StopIteration", "why"),
        (raising(KeyboardInterrupt), "KeyboardInterrupt", "why"),
        (raising(GeneratorExit), "GeneratorExit", "why"),
        (raising(Odd), "Odd", "its text can't be had"),
        (lambda: Unsendable([1]), "TypeError", "the tool f returned a Unsendable, which can't be sent to a cell: why"),
        (lambda: object(), "TypeError", "the tool f returned a object, which can't be sent to a cell"),
        (lambda a: a, "TypeError", "missing 1 required positional argument"),
    ],
)
async def test_failures(tool: Any, kind: str, text: str) -> None:
    async def later() -> Any:
        result = tool()
        return await result if hasattr(result, "__await__") else result

    with anyio.fail_after(10):
        for function in (tool, later):
            if function is later and (kind == "StopIteration" or (kind == "KeyboardInterrupt" and on_trio())):
                continue  # impossible, or the user's Ctrl-C
            with pytest.raises(ToolFailure) as caught:
                await call(function, [])
            assert caught.value.kind == kind
            assert text in str(caught.value)


async def test_arguments_that_are_no_values() -> None:
    with pytest.raises(ToolFailure, match="the arguments of f could not be read"):
        await call(print, [{"$": "lie", "v": 1}])


async def test_a_plain_tool_is_left_behind_when_cancelled() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        leave.wait(10)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(call, slow, [])
            await anyio.to_thread.run_sync(entered.wait)
            group.cancel_scope.cancel()
        leave.set()


# ---- from cells ------------------------------------------------------------------------------------------------------


async def test_cells_call_tools() -> None:
    def fail() -> None:
        raise LookupError("no such thing")

    seen: list[Any] = []
    tools = {
        "add": lambda a, *, b: a + b,
        "later": async_add,
        "fail": fail,
        "bad": lambda: open,
        "see": seen.append,
        "K": {1: (2,)},
    }
    cells = {
        "print(add(1, b=2), later(3), K)": "3 4 {1: (2,)}\n",
        "try: fail()\nexcept Exception as e: print(type(e).__name__, e)": "no such thing",
        "try: bad()\nexcept TypeError as e: print(e)": "the tool bad returned a builtin_function_or_method",
        "import sys\ntry: add(1, b=sys)\nexcept TypeError as e: print(e)": "module",
        "help(later)": "later(a: int, b: int = 1) -> int",
        "print(later.__doc__)": "Adds, later.",
        "add = 5\nprint(add)": "5\n",
        "print(add(1, b=1))": "2\n",
        "import datetime as d\nsee({'d': d.date(2026, 1, 2), 'b': b'x', 's': {1}, 'n': 10**30, 't': (1e999,)})": "",
    }
    with anyio.fail_after(10):
        async with Repl(custom_tools=tools) as repl:
            for code, output in cells.items():
                result = await repl.execute(code)
                assert result.error is None, code
                assert output in result.stdout, code
    assert seen == [{"d": datetime.date(2026, 1, 2), "b": b"x", "s": {1}, "n": 10**30, "t": (float("inf"),)}]


async def test_a_cell_reads_what_went_wrong_inside_task_groups() -> None:
    async def fail(*kinds: str) -> None:
        async with anyio.create_task_group() as group:
            for kind in kinds:
                group.start_soon(fail_once, kind)

    async def fail_once(kind: str) -> None:
        raise {"key": KeyError, "value": ValueError}[kind](f"no {kind}")

    code = """
for kinds in (["value"], ["key", "value"]):
    try:
        fail(*kinds)
    except Exception as error:
        print(type(error).__name__, error)"""
    with anyio.fail_after(10):
        async with Repl(custom_tools={"fail": fail}) as repl:
            result = await repl.execute(code)
    assert result.error is None
    one, several = result.stdout.splitlines()
    assert one == "ValueError no value"
    assert several.startswith("RuntimeError fail: ExceptionGroup: ")


def _undecodable(size: int) -> Any:
    return (b"\xff" * size).decode()


class Lookup(KeyError):
    pass


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (KeyError("a"), "KeyError ('a',) 'a'"),
        (KeyError(("a", 5)), "KeyError (('a', 5),) ('a', 5)"),
        (ValueError(), "ValueError () "),
        (ValueError(object()), "ValueError ('<object object at "),
        (FileNotFoundError(2, "none", "/x"), "FileNotFoundError (2, 'none') [Errno 2] none: '/x' 2 /x None"),
        (OSError(18, "no", "/x", None, "/y"), "OSError (18, 'no') [Errno 18] no: '/x' -> '/y' 18 /x /y"),
        (lambda: _undecodable(1), r"UnicodeDecodeError ('utf-8', b'\xff', 0, 1, 'invalid start byte') 'utf-8' codec"),
        (lambda: _undecodable(300_000), "RuntimeError ('fail: UnicodeDecodeError: 'utf-8' codec can't"),
        (Lookup("a"), """RuntimeError ("fail: Lookup: 'a'",) """),
    ],
)
async def test_what_a_tool_raises_is_in_the_cell_what_it_was(error: Any, shown: str) -> None:
    def fail() -> None:
        if callable(error):
            error()
        raise error

    code = """
try:
    fail()
except Exception as error:
    files = [error.errno, error.filename, error.filename2] if isinstance(error, OSError) else []
    print(type(error).__name__, error.args, error, *files)"""
    with anyio.fail_after(10):
        async with Repl(custom_tools={"fail": fail}) as repl:
            result = await repl.execute(code)
    assert result.stdout.replace('("fail', "('fail").startswith(shown.replace('("fail', "('fail")), result


async def test_a_thousand_tool_calls_at_once_from_threads() -> None:
    records: list[ToolRecord] = []
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(50) as pool:
    a = list(pool.map(plain, range(500)))
    b = list(pool.map(later, range(500)))
print(a == [i * 2 for i in range(500)], b == [i + 1 for i in range(500)])"""
    with anyio.fail_after(10):
        async with (
            ResourceScope() as scope,
            Session(
                environment("local"),
                scope,
                FunctionServices(),
                tools=HostTools({"plain": lambda i: i * 2, "later": async_add}),
                on_tool=records.append,
            ) as session,
        ):
            outcome = await session.execute(code)
    assert outcome.stdout == "True True\n"
    assert outcome.error is None
    assert outcome.subcalls == 0
    assert len(records) == 1000
    assert {record.name for record in records} == {"plain", "later"}
    assert {record.error for record in records} == {None}
    assert sorted({record.result_bytes for record in records}) == [1, 2, 3]  # as many as the numbers have digits


async def test_slow_tools_are_cancelled_with_their_cell_and_not_charged() -> None:
    records: list[ToolRecord] = []
    stopped = anyio.Event()

    async def wait() -> str:
        await anyio.sleep(0.5)  # longer than the limit: it is what is measured
        return "waited"

    async def hang() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            stopped.set()

    code = """
import threading
threading.Thread(target=hang, daemon=True).start()
print(wait())"""
    with anyio.fail_after(10):
        async with (
            ResourceScope() as scope,
            Session(
                environment("local", {"cell_timeout": 0.4}),
                scope,
                FunctionServices(),
                tools=HostTools({"wait": wait, "hang": hang}),
                on_tool=records.append,
            ) as session,
        ):
            outcome = await session.execute(code)
            assert stopped.is_set()
            assert (await session.execute("print('next')")).stdout == "next\n"
    assert outcome.stdout == "waited\n"
    assert sorted((record.name, record.error) for record in records) == [
        ("hang", "cancelled: cancelled"),
        ("wait", None),
    ]
