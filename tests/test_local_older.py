"""Workers on the oldest Python there may be. The conformance suite runs on it as well, but not in every test run."""

from __future__ import annotations

import os

import anyio
import pytest

from asyncrlm import Repl

from .conformance_environments import oldest

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(os.name != "posix", reason="POSIX only")]

CELLS = {
    "import sys; print(sys.version_info[:2])": "(3, 9)",
    "def f(): return 1 / 0\nf()": "in f\n    def f(): return 1 / 0\nZeroDivisionError: division by zero",
    "x = 1 +": "SyntaxError: invalid syntax",
    "async def g(x): return await llm_query(x)": "",
    "import asyncio; print(await asyncio.gather(g('a'), g('b')))": "['re: a', 're: b']",
    "print(llm_query_batched(['c']), asyncio.run(g('d')))": "['re: c'] re: d",
    "try: f()\nexcept Exception as e: raise KeyError(1) from e": "The above exception was the direct cause",
    "import multiprocessing as m\nwith m.Pool(1) as p: print(p.map(abs, [-7]))": "[7]",
    "open('/etc/passwd')": "read_paths",
    "print(context, SHOW_VARS())": "hello f: function",
}


async def echo(messages: list[dict[str, str]]) -> str:
    return "re: " + messages[-1]["content"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_cells_run_and_fail_as_on_any_other() -> None:
    with anyio.fail_after(10):
        async with Repl(environment=oldest(), lm=echo, context="hello") as repl:
            for code, said in CELLS.items():
                result = await repl.execute(code)
                assert said in result.stdout + (result.error or "")
