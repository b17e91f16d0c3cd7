"""Checks of what cells print: all of it, in order, bounded."""

from __future__ import annotations

from ... import Environment, Repl
from .base import Conformance, check, expect, printed, same, working

WAYS = {
    "print": "print('way')",
    "sys.stdout": "import sys\nsys.stdout.write('way\\n')",
    "the descriptor": "import os\nos.write(1, b'way\\n')",
    "a subprocess": "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'echo way'])",
    "os.system": "import os\nos.system('echo way')",
    "C code": "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.puts(b'way')\nlibc.fflush(None)",
    "a thread": "import threading\nt = threading.Thread(target=print, args=('way',))\nt.start(); t.join()",
    "a fork": (
        "import os\npid = os.fork()\nif not pid:\n    os.write(1, b'way\\n')\n    os._exit(0)\nos.waitpid(pid, 0)"
    ),
}

BREAKS = [
    "import sys\nsys.stdout.close()",
    "import sys\nsys.stdout = sys.stderr = None",
    "import sys, io\nsys.stdout = io.StringIO()",
    "import os\nos.close(1)",
    "import os\nos.closerange(0, 3)",
    "import os\nos.dup2(os.open(os.devnull, os.O_WRONLY), 1)",
]
"""Cells after which the next one must be able to print again."""


class Outputs(Conformance):
    """Output."""

    @check()
    async def test_all_that_is_written_is_captured_in_order(self, environment: Environment) -> None:
        async with working(Repl(environment)) as repl:
            for way, code in WAYS.items():
                text = await printed(repl, f"print('before')\n{code}; None\nprint('after')", way)
                same(text, "before\nway\nafter\n", f"output by {way}")
            result = await repl.execute("import sys\nfor i in range(3):\n    print(i)\n    print(-i, file=sys.stderr)")
            same((result.stdout, result.stderr), ("0\n1\n2\n", "0\n-1\n-2\n"), "standard output and error")
            lines = "".join(f"{n}\n" for n in range(5_000))
            same(await printed(repl, "for n in range(5000): print(n)"), lines, "five thousand lines")
            same(await printed(repl, "print('no newline', end='')"), "no newline", "a line without an end")
            same(await printed(repl, "1 + 1\nNone"), "", "a cell that prints nothing")

    @check()
    async def test_any_text_can_be_printed(self, environment: Environment) -> None:
        text = "é 中 \U0001f600 e\u0301 \u202e NUL \0 \r\n \u2028 \x01\x01\x01 \x1b[31m {}"
        async with working(Repl(environment)) as repl:
            same(await printed(repl, f"print({text!r})"), text + "\n", "an odd text")
            for char in ("\x01", "\n", " ", "x", "é"):
                same(await printed(repl, f"print({char!r}, end='')"), char, "one character")
            result = await repl.execute(
                "print('lone \\ud800 surrogate')\nimport os\nos.write(1, b'\\xff\\xfe\\n')\nNone"
            )
            expect(
                result.error is None and "lone" in result.stdout,
                f"text that is no UTF-8 must be printable: {result.stdout!r} {result.error}",
            )
            same(await printed(repl, "é_中 = 'ok'\nprint(é_中)"), "ok\n", "names that are not ASCII")

    @check()
    async def test_a_cell_can_not_read_the_hosts_input(self, environment: Environment) -> None:
        limited = self.varied(environment, cell_timeout=self.cell_timeout * 10)
        async with working(Repl(limited)) as repl:
            result = await repl.execute("input('name? ')")
            expect("EOFError" in (result.error or ""), f"input() must meet an end at once: {result.error}")
            same(await printed(repl, "import sys\nprint(repr(sys.stdin.read()))"), "''\n", "standard input")

    @check()
    async def test_the_next_cell_can_print_again(self, environment: Environment) -> None:
        async with working(Repl(environment)) as repl:
            await repl.execute("kept = 7")
            for code in BREAKS:
                await repl.execute(code)
                text = await printed(repl, "print(kept, 'again')", f"the cell after {code!r}")
                same(text, "7 again\n", f"what the cell after {code!r} printed")

    @check(slow=True)
    async def test_a_flood_is_bounded_and_keeps_head_and_tail(self, environment: Environment) -> None:
        lines = self.flood // 100_000
        flood = "import sys\nfor f in (sys.stdout, sys.stderr):\n    print('HEAD-MARK', file=f)\n"
        flood += f"    for _ in range({lines}): print('x' * 99_999, file=f)\n    print('TAIL-MARK', file=f)"
        most = environment.max_output + 10_000
        async with working(Repl(environment)) as repl:
            result = await repl.execute(flood)
            for name, text in (("output", result.stdout), ("error", result.stderr)):
                expect(len(text) <= most, f"standard {name} has {len(text):,} characters, max_output bounds them")
                expect(text.startswith("HEAD-MARK\nxx"), f"the head of standard {name} is lost: {text[:80]!r}")
                expect(text.endswith("xx\nTAIL-MARK\n"), f"the tail of standard {name} is lost: {text[-80:]!r}")
                expect("left out" in text, f"standard {name} must say that something was left out")
        small = self.varied(environment, max_output=1_000)
        async with working(Repl(small)) as repl:
            result = await repl.execute("print('x' * 100_000)")
            expect(len(result.stdout) < 1_200, f"max_output=1000 let {len(result.stdout):,} characters through")
