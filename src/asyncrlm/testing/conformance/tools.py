"""Checks of host tools: values and functions of the caller's that cells use."""

from __future__ import annotations

import importlib.util
import sys
import threading
import unittest
from fractions import Fraction
from typing import Any

import anyio
import anyio.lowlevel

from ... import Environment, MCPServer, Repl
from . import tool_server
from .base import Conformance, Held, check, expect, printed, report, same, working
from .web import serving


class Tools(Conformance):
    """Host tools."""

    @check()
    async def test_tools_take_and_give_plain_data(self, environment: Environment) -> None:
        taken: list[Any] = []

        def keep(*args: Any, **kwargs: Any) -> Any:
            taken.append((args, kwargs))
            return args[0] if args else None

        async def keep_later(value: Any) -> Any:
            await anyio.lowlevel.checkpoint()
            return keep(value)

        values: list[Any] = [None, True, 1.5, float("inf"), 10**30, "é\0\r\n\ud800", b"\0\xff", (1, (2,)), {"k": [{}]}]
        values += [{1: "a", None: "b"}, "", [], {1, 2}]
        code = (
            f"values = {values!r}\n".replace("inf", "float('inf')")
            + "print([keep(v) == v for v in values], [keep_later(v) == v for v in values], keep(), keep(1, a='b'))"
        )
        tools = {"keep": keep, "keep_later": keep_later, "LIMITS": {"low": 1, "high": (2, 3)}}
        async with working(Repl(environment, custom_tools=tools)) as repl:
            yes = [True] * len(values)
            same(await printed(repl, code), f"{yes} {yes} None 1\n", "values that a tool gave back")
            same([args[0] for args, _ in taken[: len(values)]], values, "what a tool was given")
            same(taken[-1], ((1,), {"a": "b"}), "arguments of a tool")
            same(await printed(repl, "print(LIMITS)"), "{'low': 1, 'high': (2, 3)}\n", "a value among the tools")
            same(await printed(repl, "print(len(keep('x' * 5_000_000)))"), "5000000\n", "a long value given back")

    @check()
    async def test_what_a_tool_raises_is_raised_in_the_cell(self, environment: Environment) -> None:
        def plain() -> None:
            raise ValueError("plain is broken")

        async def later() -> None:
            raise KeyError("later is broken")

        def leaves() -> None:
            raise SystemExit("leaving is broken")

        tools = {"plain": plain, "later": later, "leaves": leaves, "odd": object}
        code = "try:\n    {0}()\nexcept BaseException as e:\n    print(type(e).__name__, e)"
        async with working(Repl(environment, custom_tools=tools)) as repl:
            for name in ("plain", "later"):
                text = await printed(repl, code.format(name))
                expect(f"{name} is broken" in text, f"a cell must read what {name} raised, it read {text!r}")
            text = await printed(repl, code.format("leaves"))
            expect("leaving is broken" in text, f"a tool's SystemExit is the cell's, it read {text!r}")
            text = await printed(repl, code.format("odd"))
            expect("TypeError" in text and "can't be sent" in text, f"of a result that is no data it read {text!r}")
            result = await repl.execute("plain()")
            expect("plain is broken" in (result.error or ""), f"uncaught it must be the cell's error: {report(result)}")

    @check()
    async def test_a_slow_tool_is_not_charged_to_the_cell(self, environment: Environment) -> None:
        async def slow() -> str:
            await anyio.sleep(self.cell_timeout * 1.5)  # longer than the limit: that is what is looked at
            return "done"

        limited = self.varied(environment, cell_timeout=self.cell_timeout)
        async with working(Repl(limited, custom_tools={"slow": slow})) as repl:
            same(await printed(repl, "print(slow())"), "done\n", "a tool slower than cell_timeout")

    @check()
    async def test_tools_of_threads_run_at_once(self, environment: Environment) -> None:
        barrier = threading.Barrier(3)

        def meet(name: str) -> str:
            barrier.wait(30)
            return name.upper()

        code = (
            "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(3) as pool:\n"
            "    print(list(pool.map(meet, 'abc')))"
        )
        async with working(Repl(environment, custom_tools={"meet": meet})) as repl:
            same(await printed(repl, code), "['A', 'B', 'C']\n", "tools that wait for each other")

    @check()
    async def test_a_tool_is_cancelled_with_its_cell(self, environment: Environment) -> None:
        held = Held()
        async with working(Repl(environment, custom_tools={"hold": held.hold})) as repl:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(repl.execute, "hold()")
                await held.begun.wait()
                tasks.cancel_scope.cancel()
            expect(held.cancelled.is_set(), "a tool went on after its cell was cancelled")

    @check()
    async def test_a_tool_is_cancelled_when_its_cell_has_ended(self, environment: Environment) -> None:
        held = Held()
        code = "import threading\nthreading.Thread(target=hold, daemon=True).start()\nseen()\nprint('over')"
        async with working(Repl(environment, custom_tools={"hold": held.hold, "seen": held.seen})) as repl:
            same(await printed(repl, code), "over\n", "a cell that leaves a thread waiting for a tool")
            expect(held.cancelled.is_set(), "a tool went on after the cell that called it had ended")

    @check()
    async def test_an_object_stays_on_the_host_behind_its_functions(self, environment: Environment) -> None:
        counter = _Counter()
        async with working(Repl(environment, custom_tools={"counter": counter})) as repl:
            text = await printed(repl, "counter.add(2)\nprint(counter.add(number=3), hasattr(counter, 'total'))")
            same(text, "5 False\n", "an object that can't be pickled")
        same(counter.total, 5, "the object on the host")

    @check()
    async def test_an_object_goes_along_where_it_can_be_pickled(self, environment: Environment) -> None:
        async with working(Repl(environment, custom_tools={"part": Fraction(1, 3)})) as repl:
            text = await printed(repl, "print(type(part).__name__, 2 * part, part.numerator)")
            same(text, "Fraction 2/3 1\n", "an object that can be pickled")

    @check()
    async def test_a_tool_is_called_as_often_as_it_may_be(self, environment: Environment) -> None:
        called: list[int] = []
        code = (
            "for number in range(4):\n    try:\n        few(number)\n    except Exception as error:\n"
            "        print(number, 'may be called 2 times' in str(error))"
        )
        async with working(Repl(environment, custom_tools={"few": {"tool": called.append, "max_calls": 2}})) as repl:
            same(await printed(repl, code), "2 True\n3 True\n", "calls beyond max_calls")
        same(called, [0, 1], "calls that the tool got")

    @check()
    async def test_tools_of_a_server(self, environment: Environment) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise unittest.SkipTest("mcp is not installed: pip install 'asyncrlm[mcp]'")
        server = MCPServer(
            name="far",
            command=sys.executable,
            args=["-I", "-S", tool_server.__file__],
            env={"GIVEN": "yes"},
            tools=["add", "variables", "fail"],
        )
        # LC_CTYPE is set by Python itself.
        code = (
            "print(far_add(1), far_add(1, b=5), 'far_hidden' in globals())\n"
            "print(*[name for name in far_variables().split() if name != 'LC_CTYPE'])\n"
            "import inspect\nprint(inspect.signature(far_add), far_add.__doc__)\n"
            "try:\n    far_fail()\nexcept Exception as error:\n    print(error)"
        )
        near = (
            "print(near_add(2), 'near_variables' in globals())\n"
            "try:\n    near_fail()\nexcept Exception as error:\n    print(error)"
        )
        async with serving(tool_server.over_http) as url:
            servers = [server, MCPServer(name="near", url=url, tools=["add", "fail"])]
            async with working(Repl(environment, mcp_servers=servers)) as repl:
                first, variables, told, failed = (await printed(repl, code)).splitlines()
                same(first, "2 6 False", "what a server's tool gives, and what is not allowed")
                same(variables, "GIVEN", "the variables that a server has")
                expect(
                    told.startswith("(a: int, b: int = Ellipsis) -> int "),
                    f"the signature of a server's tool is {told!r}",
                )
                expect("Adds two numbers." in told, f"its text must be told, it read {told!r}")
                same(failed, "it is broken", "the error of a server's tool")
                same(await printed(repl, near), "3 False\nit is broken\n", "tools of a server over HTTP")

    @check()
    async def test_source_runs_where_cells_run(self, environment: Environment) -> None:
        tools = {"shout": "def shout(text):\n    return text.upper() + '!'", "double": "lambda x: 2 * x"}
        async with working(Repl(environment, custom_tools=tools)) as repl:
            same(await printed(repl, "shout = 5\nprint(double(4))"), "8\n", "a tool that is a lambda's source")
            same(await printed(repl, "print(shout('a'))"), "A!\n", "a tool that is a function's source")

    @check()
    async def test_a_tool_that_takes_too_long_is_a_time_out(self, environment: Environment) -> None:
        leave = threading.Event()

        async def later() -> None:
            await anyio.sleep_forever()

        tools = {"plain": {"tool": leave.wait, "timeout": 0.2}, "later": {"tool": later, "timeout": 0.2}}
        code = "for tool in (plain, later):\n    try:\n        tool()\n    except TimeoutError:\n        print('over')"
        try:
            async with working(Repl(environment, custom_tools=tools)) as repl:
                same(await printed(repl, code), "over\nover\n", "tools that never return")
        finally:
            leave.set()

    @check()
    async def test_a_thousand_tool_calls_from_threads(self, environment: Environment) -> None:
        async def later(number: int) -> int:
            await anyio.lowlevel.checkpoint()
            return number

        def plain(number: int) -> int:
            return number

        code = (
            "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(20) as pool:\n"
            "    print(sum(pool.map(later, range(500))) + sum(pool.map(plain, range(500))))"
        )
        async with working(Repl(environment, custom_tools={"later": later, "plain": plain})) as repl:
            same(await printed(repl, code), f"{2 * sum(range(500))}\n", "a thousand calls")


class _Counter:
    """Can't be pickled, and counts."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> int:
        with self._lock:
            self.total += number
            return self.total
