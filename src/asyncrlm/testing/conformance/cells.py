"""Checks of cells: one living namespace, real tracebacks, answers."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

from ... import Environment, Repl
from .base import Conformance, check, expect, printed, report, same, working

VARIABLE = "ASYNCRLM_CONFORMANCE_SECRET"

NAMESPACE = [
    ("import math as m\nx = 3\ndef double(v): return v * 2", ""),
    ("print(m.sqrt(16), double(x))", "4.0 6\n"),
    (
        "class Point:\n    def __init__(self, x): self.x = x\n    def moved(self): return Point(self.x + 5)",
        "",
    ),
    ("p = Point(1).moved().moved()\nprint(p.x, isinstance(p, Point))", "11 True\n"),
    (
        "def counter():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n        return n\n    return up",
        "",
    ),
    ("up = counter(); up(); up()", None),
    ("print(up())", "3\n"),
    ("x = [i for i in range(x)]\nx = {v: double(v) for v in x}", ""),
    ("print(x)\ndel x\nprint('x' in globals())", "{0: 0, 1: 2, 2: 4}\nFalse\n"),
    ("import asyncio\nasync def later(v):\n    await asyncio.sleep(0)\n    return v\ny = await later(7)", ""),
    ("print(y, await asyncio.gather(later(1), later(2)))", "7 [1, 2]\n"),
    ("async def main(): return await later(8)\nprint(asyncio.run(main()))", "8\n"),
    ("import dataclasses, pickle\n@dataclasses.dataclass\nclass D:\n    a: int = 1", ""),
    ("print(pickle.loads(pickle.dumps(D(5))))", "D(a=5)\n"),
    ("open('notes.txt', 'w').write('in the working folder'); None", None),
    ("print(open('notes.txt').read())", "in the working folder\n"),
]
"""Cells one after another, and what each prints; None where that does not matter."""


@contextmanager
def _host_secret() -> Generator[str]:
    os.environ[VARIABLE] = "s3cr3t-of-the-host"
    try:
        yield os.environ[VARIABLE]
    finally:
        del os.environ[VARIABLE]


class Cells(Conformance):
    """Cells."""

    @check()
    async def test_one_namespace_for_all_cells(self, environment: Environment) -> None:
        async with working(Repl(environment)) as repl:
            for code, wanted in NAMESPACE:
                text = await printed(repl, code)
                expect(wanted is None or text == wanted, f"wanted {wanted!r}, got {text!r} from\n{code}")

    @check()
    async def test_what_was_set_before_an_exception_stays(self, environment: Environment) -> None:
        async with working(Repl(environment)) as repl:
            result = await repl.execute("a = 1\nprint('before')\nb = a + 1\n1 / 0\nc = 3")
            same(result.stdout, "before\n", "what was printed before the exception")
            same(await printed(repl, "print(a, b, 'c' in globals())"), "1 2 False\n", "variables")

    @check()
    async def test_tracebacks_name_the_line(self, environment: Environment) -> None:
        cases = [
            ("x = 1\n\nraise ValueError('no é')", ["ValueError: no é", "line 3", "raise ValueError"]),
            ("def f():\n    return {}['key']\nf()", ["KeyError: 'key'", "line 2", "line 3", "in f"]),
            ("x = (", ["SyntaxError", "line 1"]),
            (
                "try:\n    1 / 0\nexcept Exception as e:\n    raise TypeError('so') from e",
                ["ZeroDivision", "direct cause"],
            ),
            ("async def g():\n    await undefined\nawait g()", ["NameError", "undefined", "line 2"]),
            ("raise KeyboardInterrupt", ["KeyboardInterrupt"]),
        ]
        async with working(Repl(environment)) as repl:
            await repl.execute("kept = 1")
            for code, texts in cases:
                result = await repl.execute(code)
                for text in texts:
                    expect(text in (result.error or ""), f"the traceback of\n{code}\nlacks {text!r}: {report(result)}")
                expect(
                    (result.error or "?") in result.stderr, f"the traceback must end standard error: {report(result)}"
                )
            same(await printed(repl, "print(kept)"), "1\n", "a variable after all that was raised")

    @check()
    async def test_leaving_ends_the_cell_only(self, environment: Environment) -> None:
        async with working(Repl(environment)) as repl:
            await repl.execute("kept = 7")
            for code in ("exit()", "quit()", "import sys\nsys.exit(3)", "raise SystemExit"):
                result = await repl.execute(f"print('before')\n{code}\nprint('after')")
                same(result.stdout, "before\n", f"what a cell with {code!r} printed")
                same(await printed(repl, "print(kept)"), "7\n", f"a variable after {code!r}")

    @check()
    async def test_variables_are_listed(self, environment: Environment) -> None:
        odd = "class Odd:\n    def __repr__(self): raise RuntimeError('no')\nodd = Odd()\nloop = []\nloop.append(loop)"
        async with working(Repl(environment)) as repl:
            result = await repl.execute(f"{odd}\nword = 'é' * 3\n_hidden = 1\nbig = 'x' * 10_000_000")
            expect(result.error is None, f"the cell raised: {report(result)}")
            expect({"odd", "loop", "word", "big"} <= result.locals.keys(), f"variables: {sorted(result.locals)}")
            same(result.locals["word"], "'ééé'", "the short repr of a variable")
            expect(len(result.locals["big"]) < 2_000, "the repr of a large variable must be short")
            text = await printed(repl, "print(SHOW_VARS())")
            expect("word" in text and "str" in text, f"SHOW_VARS() must name a variable and its type, it said {text!r}")

    @check()
    async def test_answers(self, environment: Environment) -> None:
        cases = [
            ("answer['content'] = 'é'; answer['ready'] = True", "é"),
            ("answer = {'ready': True, 'content': {'k': [1, 2]}}", '{"k": [1, 2]}'),
            ("answer.update(content=2 ** 70, ready=True)\n1 / 0", str(2**70)),
            ("answer.update(content='x' * 2_000_000, ready=True)", "x" * 2_000_000),
            ("answer['content'] = 'not yet'", None),
        ]
        async with working(Repl(environment)) as repl:
            for code, wanted in cases:
                same((await repl.execute(code)).final_answer, wanted, f"the answer of {code!r}")
                await repl.execute("answer.update(content='', ready=False)")

    @check()
    async def test_two_hundred_cells_in_a_row(self, environment: Environment) -> None:
        async def model(messages: list[dict[str, str]]) -> str:
            return messages[-1]["content"]

        async with working(Repl(environment, lm=model)) as repl:
            await printed(repl, "seen = []")
            for number in range(self.cells):
                text = await printed(repl, f"seen.append(llm_query('{number}'))\nprint(len(seen), seen[-1])")
                same(text, f"{number + 1} {number}\n", f"cell {number + 1}")

    @check()
    async def test_setup_code_runs_first(self, environment: Environment) -> None:
        prepared = self.varied(environment, setup_code="import math\nSHOP = 'corner'")
        async with working(Repl(prepared)) as repl:
            same(await printed(repl, "print(SHOP, math.pi > 3)"), "corner True\n", "what setup_code had set")

    @check()
    async def test_nothing_of_the_hosts_environment_is_seen(self, environment: Environment) -> None:
        look = (
            "import glob, os, subprocess\nfound = [str(dict(os.environ))]\n"
            "found.append(subprocess.run(['/bin/sh', '-c', 'env'], stdout=subprocess.PIPE, text=True).stdout)\n"
            "for path in glob.glob('/proc/[0-9]*/environ'):\n    try:\n        found.append(open(path).read())\n"
            "    except OSError:\n        pass\nprint('PATH' in found[0], 's3cr3t' in str(found))"
        )
        with _host_secret():
            async with working(Repl(environment)) as repl:
                same(await printed(repl, look), "True False\n", "the host's environment variables")

    @check()
    async def test_it_says_where_cells_run_and_what_is_in_force(self, environment: Environment) -> None:
        async with working(Repl(environment)) as repl:
            told = repl.report
            expect(told is not None, "an open sandbox must have a report")
            if told is not None:
                same(told.environment, environment.name, "the name in the report")
                version = await printed(repl, "import platform\nprint(platform.python_version())")
                same(f"{told.python}\n", version, "Python's version in the report")
                expect(environment.name in repr(repl), f"repr(repl) must name the environment: {repl!r}")
