"""Checks of many sandboxes at once, of cancellation at every stage, and of what is left."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from ... import AsyncRLM, Environment, Repl, TimeoutExceededError
from .base import Conformance, Held, cell, check, expect, nothing_left, printed, same, submit, working

FRACTIONS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)


class Endings(Conformance):
    """Many at once, cancellation, cleanup."""

    @check()
    async def test_many_sandboxes_at_once(self, environment: Environment) -> None:
        here = 0
        all_here = anyio.Event()
        names: dict[int, str] = {}

        async def model(messages: list[dict[str, Any]]) -> str:
            nonlocal here
            here += 1
            if here == self.at_once:
                all_here.set()
            await all_here.wait()
            return messages[-1]["content"].upper()

        async def use(number: int) -> None:
            async with working(Repl(environment, context=f"context {number}", lm=model)) as repl:
                await printed(repl, f"mine = {number}\nopen('mine', 'w').write(str({number})); None")
                code = "print(llm_query(context), mine, open('mine').read())"
                names[number] = await printed(repl, code)

        async with anyio.create_task_group() as tasks:
            for number in range(self.at_once):
                tasks.start_soon(use, number)
        wanted = {n: f"CONTEXT {n} {n} {n}\n" for n in range(self.at_once)}
        same(dict(sorted(names.items())), wanted, "what each of the sandboxes has")

    @check()
    async def test_sandboxes_share_nothing(self, environment: Environment) -> None:
        async with Repl(environment) as repl:
            await repl.execute("import builtins, os\nbuiltins.left = 1\nos.environ['LEFT'] = '1'\nmine = 1")
            await repl.execute("open('left.txt', 'w').write('x')")
        async with working(Repl(environment)) as repl:
            code = "import builtins, os\nprint(hasattr(builtins, 'left'), 'LEFT' in os.environ, 'mine' in globals())"
            same(await printed(repl, code), "False False False\n", "what an earlier sandbox had set")

    # ---- cancellation ----

    @check()
    async def test_cancelled_while_it_opens(self, environment: Environment) -> None:
        async def use() -> None:
            async with Repl(environment) as repl:
                await printed(repl, "print(1)")

        await self._cut(use)

    @check()
    async def test_cancelled_while_it_loads(self, environment: Environment) -> None:
        value = {"text": "x" * min(20_000_000, self.big)}

        async def use() -> None:
            async with Repl(environment, context=value) as repl:
                await printed(repl, "print(len(context['text']))")

        await self._cut(use)

    async def _cut(self, use: Callable[[], Awaitable[None]]) -> None:
        """Cancel it at several points of the time that it takes; each time nothing may be left."""
        before = await self.leftovers()
        began = time.monotonic()
        await use()
        whole = time.monotonic() - began
        for part in FRACTIONS:
            with anyio.move_on_after(whole * part):
                await use()
            await nothing_left(self, before)

    @check()
    async def test_cancelled_in_a_cell(self, environment: Environment) -> None:
        begun = anyio.Event()

        async def here() -> None:
            begun.set()

        async with working(Repl(environment, context="CTX", custom_tools={"here": here})) as repl:
            await repl.execute("kept = 7")
            for code in ("while True: pass", "import time\ntime.sleep(600)", "sum(range(10**12))"):
                begun = anyio.Event()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(repl.execute, f"here()\n{code}")
                    await begun.wait()
                    tasks.cancel_scope.cancel()
                same(
                    (await repl.execute("print(context)")).stdout, "CTX\n", f"the context after {code!r} was cancelled"
                )

    @check()
    async def test_cancelled_in_a_sub_call(self, environment: Environment) -> None:
        held = Held()

        async def hold(messages: list[dict[str, Any]]) -> str:
            if "hold" not in messages[-1]["content"]:
                return "ok"
            return await held.hold()

        async with working(Repl(environment, lm=hold)) as repl:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(repl.execute, "llm_query_batched(['hold'] * 20)")
                await held.begun.wait()
                tasks.cancel_scope.cancel()
            expect(held.cancelled.is_set(), "a model was still being asked after its cell was cancelled")
            same((await repl.execute("print(llm_query('x'))")).stdout, "ok\n", "a sub-call after that")

    @check()
    async def test_a_run_cancelled_in_a_child(self, environment: Environment) -> None:
        deep = anyio.Event()
        before = await self.leftovers()

        async def model(messages: list[dict[str, Any]]) -> str:
            if messages[0]["role"] == "system":
                return cell("print(rlm_query(context))")
            deep.set()
            await anyio.sleep_forever()
            raise AssertionError("unreachable")

        rlm = AsyncRLM(model, environment=environment, max_depth=3)
        async with rlm, anyio.create_task_group() as tasks:
            tasks.start_soon(rlm.acompletion, "CTX")
            await deep.wait()
            tasks.cancel_scope.cancel()
        await nothing_left(self, before)

    @check()
    async def test_a_run_that_meets_its_time_limit(self, environment: Environment) -> None:
        async def model(messages: list[dict[str, Any]]) -> str:
            return cell("while True: pass") if messages[0]["role"] == "system" else "x"

        rlm = AsyncRLM(model, environment=environment)
        began = time.monotonic()
        async with rlm:
            await AsyncRLM(_submitting, environment=environment).acompletion("warm")
            opening = time.monotonic() - began
            try:
                await rlm.acompletion("CTX", max_timeout=opening * 2 + 0.5)
            except TimeoutExceededError:
                return
            raise AssertionError("a run with an endless cell went on after its max_timeout")

    # ---- what is left ----

    @check()
    async def test_what_cells_started_ends_with_the_sandbox(self, environment: Environment) -> None:
        daemons = (
            "import os, subprocess\nfor _ in range(2):\n    if os.fork() == 0:\n        os.setsid()\n"
            "        if os.fork(): os._exit(0)\n        os.execv('/bin/sh', ['sh', '-c', 'sleep 600'])\n    os.wait()\n"
            "kept = subprocess.Popen(['/bin/sh', '-c', 'sleep 600'], start_new_session=True)"
        )
        before = await self.leftovers()
        async with working(Repl(environment)) as repl:
            await printed(repl, daemons)
        await nothing_left(self, before)

    @check()
    async def test_an_exception_closes_the_sandbox(self, environment: Environment) -> None:
        before = await self.leftovers()
        try:
            async with Repl(environment) as repl:
                await repl.execute("import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()")
                raise ZeroDivisionError("of the caller's")
        except ZeroDivisionError:
            pass
        await nothing_left(self, before)

    @check()
    async def test_one_after_another(self, environment: Environment) -> None:
        for number in range(5):
            async with Repl(environment, context=str(number)) as repl:
                same(await printed(repl, "print(context)"), f"{number}\n", f"sandbox {number}")
        rlm = AsyncRLM(_submitting, environment=environment)
        async with rlm:
            for number in range(5):
                same((await rlm.acompletion(str(number))).response, str(number), f"run {number} of one AsyncRLM")


async def _submitting(messages: list[dict[str, Any]]) -> str:
    return submit("context")
