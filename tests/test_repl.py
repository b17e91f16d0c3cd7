"""`Repl` with real workers in the local environment."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrlm import ConfigurationError, LMError, LMReply, LMRequest, LMUsage, Repl, REPLResult
from asyncrlm.lm.base import LMClient
from asyncrlm.testing import FakeOpenAIServer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]


async def echo(messages: list[dict[str, str]]) -> str:
    return "re: " + messages[-1]["content"]


async def one(code: str, **options: Any) -> Any:
    with anyio.fail_after(10):
        async with Repl(**options) as repl:
            return await repl.execute(code)


# ---- results ---------------------------------------------------------------------------------------------------------


async def test_a_cell_has_output_variables_and_a_traceback() -> None:
    with anyio.fail_after(10):
        async with Repl() as repl:
            result = await repl.execute("x = 'a' * 10\nimport sys\nprint('out')\nprint('err', file=sys.stderr)")
            assert (result.stdout, result.stderr, result.error) == ("out\n", "err\n", None)
            assert result.locals["x"] == "'aaaaaaaaaa'"
            assert result.execution_time > 0
            assert result.final_answer is None
            result = await repl.execute("print(x)\n1/0")
            assert result.stdout == "aaaaaaaaaa\n"
            assert result.error is not None
            assert "ZeroDivisionError" in result.error
            assert "line 2" in result.error
            assert result.stderr.endswith(result.error)
            assert (await repl.execute("print(len(x))")).stdout == "10\n"
            result = await repl.execute("raise ValueError('y' * 10_000_000)")
            assert result.error is not None
            assert len(result.error) < 70_000
            assert "left out" in result.error


async def test_all_that_is_printed_is_captured_in_order() -> None:
    codes = [
        "import subprocess; subprocess.run(['/bin/sh', '-c', 'echo sub'])",
        "import os; os.write(1, b'sub\\n')",
        "import sys; sys.stdout.write('sub\\n')",
        "import ctypes; ctypes.CDLL(None).puts(b'sub'); ctypes.CDLL(None).fflush(None)",
    ]
    with anyio.fail_after(10):
        async with Repl() as repl:
            for code in codes:
                result = await repl.execute(f"print('before')\n{code}; None\nprint('after')")
                assert result.stdout == "before\nsub\nafter\n", code


async def test_output_is_bounded_and_keeps_head_and_tail() -> None:
    result = await one("print('HEAD')\nfor i in range(200): print('x' * 100_000)\nprint('TAIL')")
    assert result.stdout.startswith("HEAD\nxxx")
    assert result.stdout.endswith("xxx\nTAIL\n")
    assert "bytes left out" in result.stdout
    assert len(result.stdout) < 140_000


# ---- sub-calls -------------------------------------------------------------------------------------------------------

SPELLINGS = {
    "plain": "r = [llm_query('a'), llm_query('b')]",
    "batched": "r = llm_query_batched(['a', 'b'])",
    "rlm": "r = [rlm_query('a'), *rlm_query_batched(['b'])]",
    "await plain": "r = [await llm_query('a'), await llm_query('b')]",
    "await allm": "r = [await allm_query('a'), await allm_query('b')]",
    "await batched": "r = await allm_query_batched(['a', 'b'])",
    "gather": "import asyncio\nr = await asyncio.gather(llm_query('a'), allm_query('b'))",
    "run": """
import asyncio
async def main():
    return await asyncio.gather(allm_query('a'), allm_query('b'))
r = asyncio.run(main())""",
    "group": """
import asyncio
async with asyncio.TaskGroup() as g:
    tasks = [g.create_task(allm_query(p)) for p in 'ab']
r = [t.result() for t in tasks]""",
    "as_completed": """
import asyncio
r = sorted([await f for f in asyncio.as_completed([allm_query('a'), allm_query('b')])])""",
    "pool": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    r = list(pool.map(llm_query, 'ab'))""",
    "messages": "r = [llm_query([{'role': 'user', 'content': p}]) for p in 'ab']",
}


async def test_sub_calls_work_however_they_are_spelt() -> None:
    with anyio.fail_after(10):
        async with Repl(lm=echo) as repl:
            for name, code in SPELLINGS.items():
                result = await repl.execute(code + "\nprint(list(map(str, r)))")
                assert result.error is None, name
                assert result.stdout == "['re: a', 're: b']\n", name
                assert sorted(call.response for call in result.llm_calls) == ["re: a", "re: b"], name


async def test_a_model_named_by_its_backend_is_given_what_that_takes() -> None:
    async with FakeOpenAIServer(["pong"]) as server:
        settings = {"base_url": server.base_url, "model_name": "m", "api_key": "k-17", "sampling_args": {"seed": 3}}
        result = await one("print(llm_query('ping'))", lm="vllm", backend_kwargs=settings)
    assert (result.stdout, result.error) == ("pong\n", None)
    (request,) = server.requests
    assert (request.headers["authorization"], request.body["model"], request.body["seed"]) == ("Bearer k-17", "m", 3)


async def test_a_batch_is_as_wide_as_the_gate() -> None:
    running = widest = 0
    full = anyio.Event()

    async def lm(messages: list[dict[str, str]]) -> str:
        nonlocal running, widest
        running += 1
        widest = max(widest, running)
        if running == 50:
            full.set()
        await full.wait()
        running -= 1
        return messages[0]["content"][::-1]

    code = "r = llm_query_batched([f'p{i}' for i in range(1000)])\nprint(r == [f'p{i}'[::-1] for i in range(1000)])"
    result = await one(code, lm=lm, max_concurrent_requests=50)
    assert result.stdout == "True\n"
    assert widest == 50
    assert len(result.llm_calls) == 1000


class Priced(LMClient):
    model = "priced"

    async def acomplete(self, request: LMRequest) -> LMReply:
        if "fail" in request.messages[0].content:
            raise LMError("no such key", kind="authentication")
        return LMReply(text="ok", usage=LMUsage(input_tokens=3, output_tokens=1, cost=0.5))


async def test_calls_are_recorded_with_usage_and_error() -> None:
    with anyio.fail_after(10):
        async with Repl(lm=Priced()) as repl:
            result = await repl.execute("print(llm_query('hi'), llm_query('fail'), sep='\\n')")
            assert result.stdout == "ok\nError: no such key\n"
            good, bad = result.llm_calls
            assert (good.root_model, good.prompt, good.response, good.error) == ("priced", "hi", "ok", None)
            assert good.usage_summary.total_cost == 0.5
            assert good.usage_summary.total_input_tokens == 3
            assert bad.error == "no such key"
            result = await repl.execute("for _ in range(5): print(llm_query('fail'))")
            assert result.error is not None
            assert "no such key" in result.error
            assert len(result.llm_calls) == 3
            assert (await repl.execute("print(SHOW_LIMITS())")).error is None


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({}, "print(llm_query('x'))", "this Repl has no model"),
        ({"lm": echo}, "print(llm_query('x', model='gpt-0'))", "gpt-0"),
        ({"lm": Priced(), "on_subcall_error": "raise"}, "llm_query('fail')", "SubcallError"),
    ],
)
async def test_failed_calls_tell_why(options: dict[str, Any], code: str, text: str) -> None:
    result = await one(code, **options)
    assert text in result.stdout + (result.error or "")


async def test_a_call_longer_than_the_window_is_caught_before_it_is_sent() -> None:
    sent: list[str] = []

    class Small(LMClient):
        model = "gpt-4.1-mini"  # its window is in the catalogue

        async def acomplete(self, request: LMRequest) -> LMReply:
            sent.append(request.messages[0].content)
            return LMReply(text="ok")

    code = "print(*llm_query_batched(['short', 'x' * 10_000_000]), rlm_query('y' * 10_000_000), sep='\\n')"
    result = await one(code, lm=Small())
    first, *rest = result.stdout.splitlines()
    assert first == "ok"
    assert sent == ["short"]
    for line in rest:
        assert "its window is 1,047,576 tokens" in line
        assert "10,000,020 bytes" in line
    assert [call.error is None for call in result.llm_calls] == [True, False, False]


async def test_a_schema_is_refused_as_in_runs() -> None:
    result = await one("print(llm_query('x', schema={'type': 'obj'}))", lm=echo)
    assert result.stdout.startswith("Error: schema= is not a JSON schema")


async def test_thoughts_are_no_part_of_a_reply() -> None:
    async def thinker(messages: list[dict[str, str]]) -> str:
        return "<think>hm</think>" + ("" if messages[0]["content"] == "blank" else "so")

    result = await one("print(llm_query('x'), llm_query('blank'))", lm=thinker)
    assert result.stdout == "so Error: model 'thinker' gave thoughts and no text\n"


async def test_a_call_that_takes_too_long_is_a_failed_reply() -> None:
    async def never(messages: list[dict[str, str]]) -> str:
        await anyio.sleep_forever()
        return ""

    result = await one("print(llm_query('x'))", lm=never, subcall_timeout=0.1)
    assert result.stdout == "Error: no reply within 0.1 s (subcall_timeout)\n"


# ---- time and death --------------------------------------------------------------------------------------------------


async def test_an_endless_cell_is_interrupted_and_keeps_its_variables() -> None:
    with anyio.fail_after(10):
        async with Repl(lm=echo, environment_kwargs={"cell_timeout": 0.3}) as repl:
            await repl.execute("x = 1")
            for code in ("while True: pass", "import time; time.sleep(1000)", "llm_query('x')\nwhile True: pass"):
                result = await repl.execute(code)
                assert result.error is not None
                assert "ran for more than 0.3 s (cell_timeout)" in result.error
                assert (await repl.execute("print(x)")).stdout == "1\n"


async def test_a_cell_that_ignores_the_interrupt_is_killed_and_told() -> None:
    code = "sum(range(10**12))"
    began = time.monotonic()
    with anyio.fail_after(10):
        async with Repl(context="kept", environment_kwargs={"cell_timeout": 0.3}) as repl:
            await repl.execute("x = 1")
            result = await repl.execute(f"answer['content'] = 5; answer['ready'] = True\n{code}")
            assert result.error is not None
            assert "did not stop" in result.error
            assert result.final_answer == "5"
            assert (await repl.execute("print(context, 'x' in globals())")).stdout == "kept False\n"
    assert time.monotonic() - began < 8


async def test_sub_calls_are_not_charged_to_cell_timeout() -> None:
    async def slow(messages: list[dict[str, str]]) -> str:
        await anyio.sleep(0.5)  # longer than the limit: it is what is measured
        return "ok"

    result = await one(
        "print(llm_query('x'), *llm_query_batched(['y']))", lm=slow, environment_kwargs={"cell_timeout": 0.4}
    )
    assert result.error is None
    assert result.stdout == "ok ok\n"


async def test_a_cell_that_burns_cpu_behind_a_call_is_stopped() -> None:
    async def never(messages: list[dict[str, str]]) -> str:
        await anyio.sleep_forever()
        return ""

    code = "import threading\nthreading.Thread(target=llm_query, args=('x',), daemon=True).start()\nwhile True: pass"
    result = await one(code, lm=never, environment_kwargs={"cell_timeout": 0.5})
    assert result.error is not None
    assert "CPU time" in result.error


async def test_a_worker_that_dies_is_told_and_replaced() -> None:
    deaths = {
        "import os; os._exit(1)": "exited with code 1",
        "import os; print('last'); os.kill(os.getpid(), 9)": "SIGKILL",
        "import ctypes; ctypes.string_at(0)": "SIGSEGV",
    }
    with anyio.fail_after(10):
        async with Repl(context=["a"], custom_tools={"K": 5}) as repl:
            for code, text in deaths.items():
                await repl.execute("x = 1")
                result = await repl.execute(code)
                assert result.error is not None
                assert text in result.error
                assert "All variables are lost" in result.error
                assert ("last" in result.stdout) is ("last" in code)
                assert (await repl.execute("print(context, K, 'x' in globals())")).stdout == "['a'] 5 False\n"


async def test_a_cancelled_cell_leaves_a_usable_repl() -> None:
    asked = anyio.Event()
    stopped = anyio.Event()

    async def lm(messages: list[dict[str, str]]) -> str:
        asked.set()
        try:
            await anyio.sleep_forever()
        finally:
            stopped.set()
        return ""

    with anyio.fail_after(10):
        async with Repl(lm=lm, context="kept") as repl:
            async with anyio.create_task_group() as group:
                group.start_soon(repl.execute, "llm_query('x')")
                await asked.wait()
                group.cancel_scope.cancel()
            assert stopped.is_set()
            result = await repl.execute("print(context)")
            assert result.stdout == "kept\n"
            assert "its cell was cancelled" in result.stderr
            assert result.error is None
            assert (await repl.execute("1")).error is None


# ---- answers ---------------------------------------------------------------------------------------------------------


ANSWERS: list[tuple[str, str | None]] = [
    ("answer['content'] = 'a'; answer['ready'] = True", "a"),
    ("answer['ready'] = True; answer['content'] = 'a'", "a"),
    ("answer.update(content='a', ready=True)", "a"),
    ("answer |= {'content': 'a', 'ready': True}", "a"),
    ("answer = {'content': 'a', 'ready': True}", "a"),
    (
        "answer['content'] = {'k': [1, 2]}; answer['ready'] = True; answer['content']['k'].append(3)",
        '{"k": [1, 2, 3]}',
    ),
    ("answer['content'] = 2 ** 70; answer['ready'] = True", str(2**70)),
    ("answer['content'] = 'a'", None),
    ("answer.update(content='a', ready=True); answer['ready'] = False", None),
    ("answer.update(content='a', ready=True); 1/0", "a"),
]


async def test_an_answer_counts_however_it_is_set() -> None:
    with anyio.fail_after(10):
        async with Repl() as repl:
            for code, content in ANSWERS:
                assert (await repl.execute(code)).final_answer == content, code
                assert (await repl.execute("answer.update(content='', ready=False)")).final_answer is None


# ---- the object ------------------------------------------------------------------------------------------------------


async def test_repr_tells_state_and_isolation() -> None:
    with anyio.fail_after(10):
        repl = Repl()
        assert repr(repl) == "<Repl local, new>"
        with pytest.raises(ConfigurationError, match="is new, not open"):
            await repl.execute("1")
        async with repl:
            assert re.match(r"<Repl local, open; python 3\.\d+\.\d+\S*; in force: .*\w", repr(repl))
            assert repl.report is not None
            with pytest.raises(ConfigurationError, match="once"):
                await repl.__aenter__()
        assert repr(repl).startswith("<Repl local, closed")
        with pytest.raises(ConfigurationError, match="is closed, not open"):
            await repl.execute("1")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"environment": "marsian"}, "marsian"),
        ({"environment_kwargs": {"cell_timeot": 1}}, "cell_timeot"),
        ({"context": object()}, "object"),
        ({"lm": "no-such-backend"}, "no-such-backend"),
        ({"lm": lambda messages: "x"}, "async"),
        ({"custom_tools": {"llm_query": 1}}, "'llm_query' is reserved"),
        ({"max_concurrent_requests": 0}, "max_concurrent_requests must be a whole number, 1 or more, not 0"),
        ({"max_concurrent_requests": "many"}, "max_concurrent_requests must be a whole number"),
        ({"on_subcall_error": "ignore"}, 'on_subcall_error must be "return" or "raise"'),
        ({"subcall_timeout": "long"}, "subcall_timeout must be a number"),
        ({"custom_tools": ["f"]}, "custom_tools must be a dict"),
        ({"environment_kwargs": "x"}, "environment_kwargs must be a dict"),
    ],
)
async def test_wrong_arguments_fail_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        Repl(**options)


async def test_a_context_that_can_not_be_loaded_fails_on_entry() -> None:
    with anyio.fail_after(10), pytest.raises(ConfigurationError, match=r"context\['a'\]\[1\]"):
        await one("1", context={"a": [1, object()]})


async def test_a_repl_never_closed_warns() -> None:
    with anyio.fail_after(10):
        repl = Repl()
        await repl.__aenter__()
        held = repl._held
        assert held is not None
        holder = [repl]
        del repl
        with pytest.warns(ResourceWarning, match="unclosed <Repl local, open"):
            holder.clear()  # the last reference
        await held.__aexit__(None, None, None)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a b", "'a b' is no Python identifier"),
        ("", "'' is no Python identifier"),
        (5, "5 is no Python identifier"),
        ("class", "'class' is a keyword"),
        ("None", "'None' is a keyword"),
        ("answer", "'answer' is reserved"),
        ("llm_query", "'llm_query' is reserved"),
        ("SHOW_VARS", "'SHOW_VARS' is reserved"),
        ("FailedReply", "'FailedReply' is reserved"),
        ("__name__", "'__name__' is reserved"),
        ("\uff41nswer", "reads the name '\uff41nswer' as 'answer'"),
        ("tool", "'tool' is that of one of the custom_tools"),
        ("VALUE", "'VALUE' is that of one of the custom_tools"),
    ],
)
async def test_names_that_cells_have_for_something_else_are_refused(name: Any, why: str) -> None:
    with anyio.fail_after(10):
        async with Repl(custom_tools={"tool": lambda: 1, "VALUE": 2}) as repl:
            with pytest.raises(ConfigurationError, match=re.escape(why)):
                await repl.load(name, 1)
            assert (await repl.execute("print(type(answer).__name__, callable(llm_query), VALUE)")).error is None


async def test_names_of_contexts_can_be_loaded() -> None:
    with anyio.fail_after(10):
        async with Repl() as repl:
            for name in ("context", "context_1", "history", "history_2", "mine", "match"):
                await repl.load(name, {"a": name})
                assert (await repl.execute(f"print({name})")).stdout == f"{{'a': {name!r}}}\n"


class Untouched(list[str]):
    def __iter__(self) -> Any:
        raise AssertionError("it takes long to walk")


def test_a_context_is_not_walked_by_the_constructor(tmp_path: Path) -> None:
    Repl(context=Untouched(["x"]))
    with pytest.raises(ConfigurationError, match="can't be read"):
        Repl(context=tmp_path / "none")


async def test_a_second_cell_beside_the_first_is_refused_and_takes_nothing_from_it() -> None:
    asked, go_on = anyio.Event(), anyio.Event()

    async def lm(messages: list[dict[str, str]]) -> str:
        asked.set()
        await go_on.wait()
        return "yes"

    results: list[REPLResult] = []
    with anyio.fail_after(10):
        async with Repl(lm=lm) as repl:

            async def first() -> None:
                results.append(await repl.execute("llm_query('x')\nllm_query('y')"))

            async with anyio.create_task_group() as group:
                group.start_soon(first)
                await asked.wait()
                with pytest.raises(ConfigurationError, match=r"`execute` while `execute`.*one at a time"):
                    await repl.execute("1")
                go_on.set()
    assert [call.prompt for call in results[0].llm_calls] == ["x", "y"]


async def test_each_cell_has_its_own_answer() -> None:
    with anyio.fail_after(10):
        async with Repl(environment_kwargs={"setup_code": "answer.update(content='early', ready=True)"}) as repl:
            cells = (
                "1",
                "answer.update(content='a', ready=True)",
                "2",
                "answer.update(content='a', ready=True)",
                "1 / 0",
            )
            answers = [(await repl.execute(code)).final_answer for code in cells]
            assert answers == [None, "a", None, "a", None]
            result = await repl.execute("import os, sys\nanswer.update(content='b', ready=True)\nos._exit(3)")
            assert result.final_answer == "b"
            assert (await repl.execute("3")).final_answer is None


async def test_what_is_bound_to_the_name_of_the_answer_is_told_to_be_none() -> None:
    with anyio.fail_after(10):
        async with Repl() as repl:
            result = await repl.execute("answer = 'done'")
            assert result.stderr.startswith("[answer] `answer` is a dict")
            assert result.final_answer is None
            result = await repl.execute("answer = {'content': 'done', 'ready': True}")
            assert (result.stderr, result.final_answer) == ("", "done")
