"""Checks of sub-calls: however they are spelt, in batches, and as children of children."""

from __future__ import annotations

from typing import Any

import anyio

from ... import AsyncRLM, Environment, Repl
from .base import Conformance, cell, check, expect, printed, same, submit, upper, working

WIDTH = 4
AT_ONCE = {
    "llm_query_batched": "rs = llm_query_batched(qs)",
    "await llm_query_batched": "rs = await llm_query_batched(qs)",
    "await allm_query_batched": "rs = await allm_query_batched(qs)",
    "rlm_query_batched": "rs = rlm_query_batched(qs)",
    "await arlm_query_batched": "rs = await arlm_query_batched(qs)",
    "gather of allm_query": "import asyncio\nrs = await asyncio.gather(*[allm_query(q) for q in qs])",
    "gather of arlm_query": "import asyncio\nrs = await asyncio.gather(*[arlm_query(q) for q in qs])",
    "asyncio.run": (
        "import asyncio\nasync def main():\n    return await asyncio.gather(*(allm_query(q) for q in qs))\n"
        "rs = asyncio.run(main())"
    ),
    "tasks": (
        "import asyncio\ntasks = [asyncio.ensure_future(allm_query(q)) for q in qs]\n"
        "await asyncio.wait(tasks)\nrs = [t.result() for t in tasks]"
    ),
    "as_completed": (
        "import asyncio\ndone = []\nfor one in asyncio.as_completed([allm_query(q) for q in qs]):\n"
        "    done.append(await one)\nrs = sorted(done)"
    ),
    "thread pool": (
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(len(qs)) as pool:\n"
        "    rs = list(pool.map(llm_query, qs))"
    ),
    "threads": (
        "import threading\nrs = [None] * len(qs)\ndef ask(i):\n    rs[i] = llm_query(qs[i])\n"
        "ts = [threading.Thread(target=ask, args=(i,)) for i in range(len(qs))]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]"
    ),
    "asyncio.to_thread": "import asyncio\nrs = await asyncio.gather(*[asyncio.to_thread(llm_query, q) for q in qs])",
    "batches in threads": (
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(2) as pool:\n"
        "    a, b = pool.map(llm_query_batched, [qs[:2], qs[2:]])\nrs = a + b"
    ),
}
"""Spellings that ask all of `qs` at once and leave the replies in `rs`."""

ONE_BY_ONE = {
    "llm_query": "rs = [llm_query(q) for q in qs]",
    "await llm_query": "rs = [await llm_query(q) for q in qs]",
    "await allm_query": "rs = [await allm_query(q) for q in qs]",
    "rlm_query": "rs = [rlm_query(q) for q in qs]",
    "await arlm_query": "rs = [await arlm_query(q) for q in qs]",
    "gather of llm_query": "import asyncio\nrs = await asyncio.gather(*[llm_query(q) for q in qs])",
    "llm_query in a coroutine": "async def ask(q):\n    return llm_query(q)\nrs = [await ask(q) for q in qs]",
    "messages": 'rs = [llm_query([{"role": "user", "content": q}]) for q in qs]',
    "generator": "def ask():\n    for q in qs:\n        yield llm_query(q)\nrs = list(ask())",
}
"""Spellings that may ask one after another."""

NEST = """
fresh = "mine" not in globals()
mine = context
answer["content"] = f"{context}{sign()}{'' if fresh else '!'} > {rlm_query(str(int(context) + 1))}"
answer["ready"] = True
"""


class Calls(Conformance):
    """Sub-calls and children."""

    @check()
    async def test_sub_calls_one_by_one_in_every_spelling(self, environment: Environment) -> None:
        async with working(Repl(environment, lm=upper)) as repl:
            for name, code in ONE_BY_ONE.items():
                await self._ask(repl, name, code)

    @check()
    async def test_sub_calls_at_once_in_every_spelling(self, environment: Environment) -> None:
        waiting = 0
        all_here = anyio.Event()

        async def together(messages: list[dict[str, Any]]) -> str:
            nonlocal waiting, all_here
            waiting += 1
            if waiting == WIDTH:
                all_here.set()
            with anyio.move_on_after(10):
                await all_here.wait()
                return await upper(messages)
            return f"only {waiting} of {WIDTH} calls were under way together"

        async with working(Repl(environment, lm=together)) as repl:
            for name, code in AT_ONCE.items():
                waiting, all_here = 0, anyio.Event()
                await self._ask(repl, name, code)

    async def _ask(self, repl: Repl, name: str, code: str) -> None:
        text = await printed(repl, f"qs = ['q%d' % i for i in range({WIDTH})]\n{code}\nprint('|'.join(rs))", name)
        same(text, "Q0|Q1|Q2|Q3\n", f"replies of {name}")

    @check()
    async def test_a_large_batch_comes_back_in_order(self, environment: Environment) -> None:
        code = f"rs = llm_query_batched(['p%d' % i for i in range({self.batch})])\nprint(len(rs), '|'.join(rs))"
        wanted = "|".join(f"P{i}" for i in range(self.batch))
        async with working(Repl(environment, lm=upper)) as repl:
            same(await printed(repl, code), f"{self.batch} {wanted}\n", "replies of a batch")
            code = code.replace("llm_query_batched", "await allm_query_batched")
            same(await printed(repl, code), f"{self.batch} {wanted}\n", "replies of an awaited batch")

    @check()
    async def test_long_prompts_and_replies_arrive_whole(self, environment: Environment) -> None:
        async def echo(messages: list[dict[str, Any]]) -> str:
            return messages[-1]["content"]

        code = (
            "p = 'aé\\u4e2d\\U0001f600\\x00\\r\\n\\x01\\x01\\x01' * 100_000\n"
            "print([llm_query(q) == q for q in (p, 'x' * 3_000_000, '.', '\\x01')])"
            "\nprint(llm_query_batched([p, p]) == [p, p])"
        )
        async with working(Repl(environment, lm=echo)) as repl:
            same(await printed(repl, code), "[True, True, True, True]\nTrue\n", "prompts that a model repeated")

    @check()
    async def test_a_failed_call_fails_only_itself(self, environment: Environment) -> None:
        async def picky(messages: list[dict[str, Any]]) -> str:
            if messages[-1]["content"] == "b":
                raise RuntimeError("the model is out")
            return await upper(messages)

        code = (
            "rs = llm_query_batched(['a', 'b', 'c'])\n"
            "print(rs[0], rs[2], isinstance(rs[1], FailedReply), rs[1].startswith('Error:'), 'is out' in rs[1])"
        )
        async with working(Repl(environment, lm=picky)) as repl:
            same(await printed(repl, code), "A C True True True\n", "a batch with one failed call")
        async with Repl(environment, lm=picky, on_subcall_error="raise") as repl:
            result = await repl.execute("llm_query('b')")
            expect("SubcallError" in (result.error or ""), f'with "raise" a failed call must raise, got {result.error}')

    @check()
    async def test_replies_that_fit_a_schema(self, environment: Environment) -> None:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        asked: list[str] = []

        async def model(messages: list[dict[str, Any]]) -> str:
            text = str(messages)
            asked.append(messages[-1]["content"])
            return "five" if "never" in text or ("once" in text and "five" not in text) else '{"n": 5}'

        code = (
            f"import json\nschema = {schema}\n"
            "r, s = llm_query_batched(['once', 'never'], schema=schema)\n"
            "print(json.loads(r), isinstance(s, FailedReply), s.kind, json.loads(llm_query('now', schema=schema)))"
        )
        async with working(Repl(environment, lm=model)) as repl:
            same(await printed(repl, code), "{'n': 5} True schema {'n': 5}\n", "replies that must fit a schema")
        same(len(asked), 5, "requests: each misfit is told once")

        async def root(messages: list[dict[str, Any]]) -> str:
            wanted = f"rlm_query('part', schema={schema})"
            return submit(wanted if "ROOT" in str(messages) else "{'n': 7}")

        completion = await AsyncRLM(root, environment=environment, max_depth=2).acompletion("CTX", "ROOT")
        same(completion.response, '{"n": 7}', "the answer of a child that must fit a schema")

    @check()
    async def test_recursion_to_depth_3(self, environment: Environment) -> None:
        async def model(messages: list[dict[str, Any]]) -> str:
            return cell(NEST) if messages[0]["role"] == "system" else f"leaf {messages[-1]['content']}"

        rlm = AsyncRLM(
            model,
            environment=environment,
            max_depth=4,
            max_iterations=2,
            custom_tools={"sign": lambda: "r"},
            custom_sub_tools={"sign": lambda: "c"},
        )
        completion = await rlm.acompletion("0")
        wanted = "0r > 1c > 2c > 3c > leaf 4"
        same(completion.response, wanted, "a sandbox in a sandbox, down to depth 3, each with its own tools")

    @check()
    async def test_children_run_beside_each_other(self, environment: Environment) -> None:
        waiting = 0
        all_here = anyio.Event()

        async def model(messages: list[dict[str, Any]]) -> str:
            nonlocal waiting
            if messages[0]["role"] != "system":
                waiting += 1
                if waiting == WIDTH:
                    all_here.set()
                await all_here.wait()
                return await upper(messages)
            root = "Fan out" in str(messages)
            return submit("'|'.join(rlm_query_batched(context))" if root else "llm_query('leaf ' + context)")

        rlm = AsyncRLM(model, environment=environment, max_depth=2, max_iterations=2)
        completion = await rlm.acompletion(["a", "b", "c", "d"], "Fan out")
        same(completion.response, "LEAF A|LEAF B|LEAF C|LEAF D", "replies of children that wait for each other")

    @check()
    async def test_a_whole_run(self, environment: Environment) -> None:
        turns = [
            cell("parts = context.split('. ')\nprint(len(parts))"),
            cell("found = llm_query_batched(parts)\nprint(found)\n1 / 0"),
            submit("max(found, key=len)"),
        ]
        seen: list[str] = []

        async def root(messages: list[dict[str, Any]]) -> str:
            seen.append(messages[-1]["content"])
            return turns[len(seen) - 1]

        rlm = AsyncRLM(root, other_backends=[upper], environment=environment)
        completion = await rlm.acompletion("Short. A longer part", "Which is longest?")
        same(completion.response, "A LONGER PART", "the answer")
        expect("2" in seen[1], f"the model must see what its cell printed, saw {seen[1]!r}")
        expect("ZeroDivisionError" in seen[2], f"the model must see what its cell raised, saw {seen[2]!r}")
