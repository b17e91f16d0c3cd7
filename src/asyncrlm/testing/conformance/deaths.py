"""Checks of cells that do not end, end too much, or attack the wire."""

from __future__ import annotations

import re
from typing import Any

import anyio

from ... import Environment, ProtocolError, Repl, REPLResult, SandboxLost
from .base import Conformance, Held, check, expect, never, printed, report, same, upper, working

ENDLESS = [
    "while True: pass",
    "import time\ntime.sleep(600)",
    "import asyncio\nawait asyncio.sleep(600)",
    "import threading\nthreading.Event().wait()",
    "llm_query('x')\nwhile True: pass",
    "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'sleep 600'])",
]
STUBBORN = [
    "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "sum(range(10**12))",
    "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\nwhile True: pass",
]
DEATHS = [
    "import os\nos._exit(1)",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "import os\nos.abort()",
    "import ctypes\nctypes.string_at(0)",
]
STOPPED = r"(?i)stopped|interrupted|killed|time limit"

GARBAGE = [
    b"\x00\xff\xfe no frame at all\n",
    b"\n\n   \n{}\n[]\nnull\n",
    b'{"t":"call","id":-1,"kind":"llm","prompt":"x"}\n',
    b'{"t":"call","id":1,"kind":"nonsense"}\n{"t":"call","id":1,"kind":"tool","name":"nonsense"}\n',
    b'{"t":"ready","version":999}\n',
    b'{"t":"done","cell":999999}\n',
    b'{"t":"output","stream":"stdout","head":"' + b"A" * 100_000 + b'"}\n',
    b'{"t":"answer","content":' + b"[" * 50_000 + b"\n",
    b"x" * 1_000_000,
]
FLING = """
import os
for fd in range(256):
    try:
        os.set_blocking(fd, False)
        os.write(fd, {0!r})
    except OSError:
        pass
"""


class Deaths(Conformance):
    """Interrupts, time limits, lost workers, hostile cells."""

    @check()
    async def test_an_endless_cell_is_stopped_and_variables_stay(self, environment: Environment) -> None:
        limited = self.varied(environment, cell_timeout=self.cell_timeout)
        async with working(Repl(limited, lm=upper)) as repl:
            await repl.execute("kept = 7")
            for code in ENDLESS:
                result = await repl.execute(f"print('before')\n{code}")
                same(result.stdout, "before\n", f"what was printed before {code!r}")
                expect(re.search(STOPPED, result.error or ""), f"{code!r} must be stopped: {report(result)}")
                same(await printed(repl, "print(kept)"), "7\n", f"a variable after {code!r}")

    @check(slow=True)
    async def test_a_cell_that_resists_is_killed_and_told(self, environment: Environment) -> None:
        limited = self.varied(environment, cell_timeout=self.cell_timeout)
        async with working(Repl(limited, context="CTX")) as repl:
            for code in STUBBORN:
                await repl.execute("kept = 7\nanswer.update(content='so far', ready=True)")
                result = await repl.execute(f"print('before')\n{code}")
                same(result.stdout, "before\n", f"what was printed before {code!r}")
                expect(re.search(STOPPED, result.error or ""), f"{code!r} must be stopped: {report(result)}")
                same(await printed(repl, "print(context)"), "CTX\n", f"the context after {code!r}")

    @check()
    async def test_sub_calls_are_not_charged_to_the_cell(self, environment: Environment) -> None:
        async def slow(messages: list[dict[str, Any]]) -> str:
            await anyio.sleep(self.cell_timeout * 1.5)  # longer than the limit: that is what is looked at
            return "ok"

        limited = self.varied(environment, cell_timeout=self.cell_timeout)
        async with working(Repl(limited, lm=slow)) as repl:
            same(await printed(repl, "print(llm_query('x'), *llm_query_batched(['y', 'z']))"), "ok ok ok\n", "replies")

    @check()
    async def test_a_model_that_does_not_answer_fails_its_call(self, environment: Environment) -> None:
        async with working(Repl(environment, lm=never, subcall_timeout=0.2)) as repl:
            same(await printed(repl, "print(isinstance(llm_query('x'), FailedReply))"), "True\n", "subcall_timeout")

    @check()
    async def test_a_worker_that_dies_is_told_and_replaced(self, environment: Environment) -> None:
        async with working(Repl(environment, context=["CTX"], custom_tools={"K": 5}, lm=upper)) as repl:
            for code in DEATHS:
                await repl.execute("kept = 7")
                result = await repl.execute(f"print('before', flush=True)\n{code}")
                expect("before" in result.stdout, f"what was printed before {code!r} is lost: {report(result)}")
                expect(re.search("(?i)exit|signal|SIG|gone|lost", result.error or ""), f"{code!r}: {report(result)}")
                text = await printed(repl, "print('kept' in globals(), context, K, llm_query('x'))", "the next cell")
                same(text, "False ['CTX'] 5 X\n", f"what the next worker has after {code!r}")

    @check()
    async def test_a_worker_that_dies_in_a_sub_call_takes_the_call_along(self, environment: Environment) -> None:
        held = Held()

        async def hold(messages: list[dict[str, Any]]) -> str:
            return await held.hold()

        code = "import os, threading\nthreading.Thread(target=llm_query, args=('x',)).start()\nseen()\nos._exit(3)"
        async with working(Repl(environment, lm=hold, custom_tools={"seen": held.seen})) as repl:
            result = await repl.execute(code)
            expect(result.error, "a worker that died was not told of")
            expect(held.cancelled.is_set(), "a model was still being asked for a worker that had died")

    @check()
    async def test_garbage_on_every_descriptor_harms_its_own_sandbox_only(self, environment: Environment) -> None:
        async with working(Repl(environment)) as neighbour, working(Repl(environment, context="CTX")) as repl:
            await repl.execute("kept = 7")
            await neighbour.execute("kept = 8")
            for garbage in GARBAGE:
                await self._survives(repl, FLING.format(garbage), f"{garbage[:40]!r} on every descriptor")
                same(await printed(neighbour, "print(kept)"), "8\n", "a variable of a neighbour")
            await self._survives(repl, "import os\nos.closerange(0, 256)", "closing every descriptor")
            same(await printed(neighbour, "print(kept)"), "8\n", "a variable of a neighbour")

    async def _survives(self, repl: Repl, code: str, what: str) -> None:
        await self._attempt(repl, code)
        # What was flung may be found out in the next cell only.
        for _ in range(3):
            result = await self._attempt(repl, "print(context)")
            if result is not None and result.error is None and "CTX" in result.stdout:
                return
        raise AssertionError(f"after {what} no cell ran again")

    async def _attempt(self, repl: Repl, code: str) -> REPLResult | None:
        try:
            return await repl.execute(code)
        except (ProtocolError, SandboxLost):
            return None
