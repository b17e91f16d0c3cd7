"""Sub-calls from cells: every spelling, every failure, threads and loops together, and interrupts at any moment."""

# ruff: noqa: E501, ISC004 -- cells are read more easily on one line

from __future__ import annotations

import contextlib
import json
import random
import threading
from typing import TYPE_CHECKING

import pytest
from worker_host import Frame, Host, Outcome, wait_for

from asyncrlm.repl.worker import codec

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


@pytest.fixture(scope="module")
def shared() -> Iterator[Host]:
    with Host() as host:
        host.run("import asyncio, threading, time\nfrom concurrent.futures import ThreadPoolExecutor as T")
        yield host


@pytest.fixture
def host(shared: Host) -> Host:
    from worker_host import echo

    shared.serve = echo
    return shared


# ---- spellings -------------------------------------------------------------------------------------------------------

MAIN = "async def main():\n    return llm_query('a'), await llm_query('b')\n"
SPELLINGS = [
    ("llm_query('a')", "'A:a'"),
    ("await llm_query('a')", "'A:a'"),
    ("await allm_query('a')", "'A:a'"),
    ("x = llm_query('a')\nawait x", "'A:a'"),
    ("llm_query_batched(['a', 'b'])", "['A:a', 'A:b']"),
    ("llm_query_batched(c for c in 'ab')", "['A:a', 'A:b']"),
    ("await llm_query_batched(['a', 'b'])", "['A:a', 'A:b']"),
    ("await allm_query_batched(['a', 'b'])", "['A:a', 'A:b']"),
    ("rlm_query('a'), await arlm_query('b')", "('A:a', 'A:b')"),
    ("rlm_query_batched(['a']) + await arlm_query_batched(['b'])", "['A:a', 'A:b']"),
    ("await asyncio.gather(llm_query('a'), llm_query('a'), allm_query('b'))", "['A:a', 'A:a', 'A:b']"),
    ("xs = [llm_query('a'), llm_query('a')]\nprint(xs)\nawait asyncio.gather(*xs)", "['A:a', 'A:a']\n['A:a', 'A:a']"),
    ("x = llm_query('a')\nawait asyncio.gather(x, llm_query_batched(['b']))", "['A:a', ['A:b']]"),
    ("y = llm_query_batched(['b'])\nawait asyncio.gather(y, y)", "[['A:b'], ['A:b']]"),
    ("await asyncio.create_task(llm_query('a'))", "'A:a'"),
    ("x = llm_query('a')\nawait asyncio.create_task(x)", "'A:a'"),
    ("x = llm_query('a')\nawait asyncio.ensure_future(x)", "'A:a'"),
    ("await asyncio.wait_for(llm_query('a'), 5)", "'A:a'"),
    ("sorted([await f for f in asyncio.as_completed([llm_query(c) for c in 'aab'])])", "['A:a', 'A:a', 'A:b']"),
    ("asyncio.run(llm_query('a'))", "'A:a'"),
    (
        "async def main():\n    return await asyncio.gather(*(llm_query(c) for c in 'ab'))\nasyncio.run(main())",
        "['A:a', 'A:b']",
    ),
    (f"{MAIN}asyncio.run(main())", "('A:a', 'A:b')"),
    (f"{MAIN}a = await allm_query('1')\na, asyncio.run(main())", "('A:1', ('A:a', 'A:b'))"),
    (f"{MAIN}asyncio.get_event_loop().run_until_complete(main())", "('A:a', 'A:b')"),
    ("await asyncio.to_thread(llm_query, 'a')", "'A:a'"),
    ("with T(4) as t: print(list(t.map(llm_query, 'abc')))", "['A:a', 'A:b', 'A:c']"),
    ("t = asyncio.create_task(allm_query('t'))\nawait asyncio.sleep(0)\nllm_query('s'), await t", "('A:s', 'A:t')"),
    ("llm_query_batched([])", "[]"),
    ("await allm_query_batched([])", "[]"),
    ("llm_query([{'role': 'user', 'content': 'a'}])", "\"A:[{'role': 'user', 'content': 'a'}]\""),
    ("str.upper(llm_query('a')) + llm_query('b')[2:]", "'A:Ab'"),
    ("type(llm_query('a').strip()) is str, isinstance(llm_query('a'), str)", "(True, True)"),
    (
        "import pickle, copy, json\nx = llm_query_batched(['a'])\ntype(pickle.loads(pickle.dumps(x))), copy.deepcopy(x), json.dumps(x)",
        "(<class 'list'>, ['A:a'], '[\"A:a\"]')",
    ),
    ("import pickle\npickle.loads(pickle.dumps(llm_query('a'))).__class__", "<class 'str'>"),
    ("{llm_query('a'): 1}['A:a']", "1"),
    ("def llm_query(p): return 'mine'\nllm_query('x')", "'mine'"),
]
SPELLINGS += [
    (
        "async with asyncio.TaskGroup() as g:\n    ts = [g.create_task(llm_query(c)) for c in 'ab']\n[t.result() for t in ts]",
        "['A:a', 'A:b']",
    ),
    ("x = llm_query('a')\nasync with asyncio.TaskGroup() as g: t = g.create_task(x)\nt.result()", "'A:a'"),
]


@pytest.mark.parametrize(("code", "shown"), SPELLINGS, ids=[code for code, _ in SPELLINGS])
def test_spellings(host: Host, code: str, shown: str) -> None:
    assert host.show(code) == shown + "\n"


PARALLEL = [
    "await asyncio.gather(*[llm_query(str(i)) for i in range(8)])",
    "await asyncio.gather(*(llm_query(str(i)) for i in range(8)))",
    "async def ask(p): return await llm_query(p)\nawait asyncio.gather(*map(ask, map(str, range(8))))",
    "tasks = [llm_query(str(i)) for i in range(8)]\nrs = await asyncio.gather(*tasks)",
    "tasks = []\nfor i in range(8):\n    tasks.append(llm_query(str(i)))\nrs = await asyncio.gather(*tasks)",
    "for f in asyncio.as_completed([llm_query(str(i)) for i in range(8)]): await f",
    "ts = [asyncio.create_task(llm_query(str(i))) for i in range(8)]\nfor t in ts: await t",
    "with T(8) as t: list(t.map(llm_query, map(str, range(8))))",
    "llm_query_batched([str(i) for i in range(8)])",
    "await asyncio.gather(*[asyncio.to_thread(llm_query, str(i)) for i in range(8)]) if hasattr(asyncio, 'x') else await asyncio.gather(*[allm_query(str(i)) for i in range(8)])",
]


@pytest.mark.parametrize("code", PARALLEL)
def test_what_can_be_parallel_is(host: Host, code: str) -> None:
    """No call is answered before all eight are there."""
    calls: list[Frame] = []

    def together(call: Frame) -> Frame | None:
        calls.append(call)
        if len(calls) == 8:
            for one in reversed(calls[:-1]):
                host.reply(one, value=one["prompt"])
            return {"value": call["prompt"]}
        return None

    host.serve = together
    outcome = host.run(code)
    assert outcome.error is None, outcome.error
    assert sorted(call["prompt"] for call in calls) == sorted(map(str, range(8)))


def test_a_batch_shares_its_group_and_keeps_its_order(host: Host) -> None:
    calls: list[Frame] = []

    def backwards(call: Frame) -> Frame | None:
        calls.append(call)
        if len(calls) < 100:
            return None
        random.Random(1).shuffle(calls)
        for one in calls:
            host.reply(one, value=one["prompt"] * 2)
        return None

    host.serve = backwards
    outcome = host.run(
        "r = llm_query_batched([str(i) for i in range(100)])\nprint(r == [str(i) * 2 for i in range(100)])"
    )
    assert outcome.stdout == "True\n"
    assert len({call["group"] for call in calls}) == 1
    assert len({call["id"] for call in calls}) == 100


def test_what_a_call_frame_says(host: Host) -> None:
    outcome = host.run("llm_query('p', 'big', schema={'type': 'object'})\nrlm_query_batched(['q'], model='small')")
    first, second = outcome.calls
    assert {**first, "id": 0} == {
        "t": "call", "id": 0, "kind": "llm", "model": "big", "schema": {"type": "object"}, "prompt": "p",
    }  # fmt: skip
    assert {**second, "id": 0} == {"t": "call", "id": 0, "kind": "rlm", "model": "small", "prompt": "q"}


@pytest.mark.parametrize(
    "text", ["\ud800", "za\u017c\u00f3\u0142\u0107 \U0001f389", "a\0b\r\n", "\u2028x", "x" * 3_000_000]
)
def test_text_arrives_as_it_is(host: Host, text: str) -> None:
    host.load("t", form="json", value=codec.encode(text))
    host.serve = lambda call: {"value": codec.encode(codec.decode(call["prompt"]) + "!")}
    assert host.show("print(llm_query(t) == t + '!', llm_query_batched([t, t]) == [t + '!'] * 2)") == "True True\n"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("llm_query(3)", "TypeError: prompt must be a str or a list of messages"),
        ("llm_query(b'x')", "decode it first"),
        ("llm_query(None)", "not NoneType"),
        ("llm_query('')", "ValueError: prompt is empty"),
        ("llm_query('  \\n')", "ValueError: prompt is empty"),
        ("llm_query([])", "ValueError: prompt is empty"),
        ("llm_query([{'role': 'user', 'content': ''}])", "ValueError: prompt is empty"),
        ("llm_query([{'content': 'x'}])", "TypeError: prompt[0] must be a message"),
        ("llm_query(['a', 'b'])", "_batched function"),
        (
            "llm_query([{'role': 'user', 'content': object()}])",
            "TypeError: prompt[0]['content']: a value of type object",
        ),
        ("llm_query('a', model=3)", "TypeError: model must be the name"),
        ("llm_query('a', schema=object())", "TypeError: schema: a value of type object"),
        ("llm_query()", "missing 1 required positional argument: 'prompt'"),
        ("llm_query('a', temperature=1)", "unexpected keyword argument 'temperature'"),
        ("llm_query_batched('abc')", "TypeError: llm_query_batched takes a list of prompts, not str"),
        ("llm_query_batched(3)", "not int"),
        ("llm_query_batched(['a', ''])", "ValueError: prompts[1] is empty"),
        ("await allm_query_batched(['a', 3])", "TypeError: prompts[1] must be a str"),
        ("llm_query('x' * (64 * 2**20))", "ValueError: too long"),
        ("llm_query_batched(['a', 'x' * (64 * 2**20)])", "ValueError: prompts[1] is too long"),
    ],
)
def test_wrong_prompts_are_refused_before_anything_is_sent(host: Host, code: str, error: str) -> None:
    outcome = host.run(code)
    assert error in outcome.trace
    assert outcome.calls == []


# ---- failures --------------------------------------------------------------------------------------------------------

FAILURE = {"error": "too many requests", "kind": "rate_limit", "retryable": True}


def failing(call: Frame) -> Frame | None:
    return FAILURE if "bad" in call["prompt"] else {"value": call["prompt"]}


def test_a_failed_call_is_told_apart(host: Host) -> None:
    host.serve = failing
    code = (
        "r = llm_query('bad')\nrs = llm_query_batched(['a', 'bad', 'b'])\nimport pickle\n"
        "p = pickle.loads(pickle.dumps(r))\n"
        "print(r, isinstance(r, FailedReply), bool(r), r.error, r.kind, r.retryable)\n"
        "print([isinstance(x, FailedReply) for x in rs], rs[0], rs[2], p.kind, type(p).__name__, (await r) is r)"
    )
    assert host.show(code) == (
        "Error: too many requests True True too many requests rate_limit True\n"
        "[False, True, False] a b rate_limit FailedReply True\n"
    )


def test_failures_raise_where_asked() -> None:
    with Host(raise_errors=True) as host:
        host.serve = failing
        outcome = host.run("llm_query('bad')")
        assert "SubcallError: too many requests" in outcome.trace
        code = (
            "try:\n    llm_query_batched(['a', 'bad'])\nexcept SubcallError as e:\n"
            "    import pickle\n    e = pickle.loads(pickle.dumps(e))\n"
            "    print(e, e.kind, e.retryable, e.replies[0], isinstance(e.replies[1], FailedReply))\n"
            "try: await allm_query('bad')\nexcept SubcallError as e: print(e.error, e.replies)"
        )
        assert host.show(code) == "too many requests rate_limit True a True\ntoo many requests []\n"


def test_a_reply_may_raise_whatever_was_asked(host: Host) -> None:
    host.serve = lambda call: {"error": "no key", "kind": "authentication", "raises": True}
    assert "SubcallError: no key" in host.run("llm_query('x')").trace


# ---- tools and limits ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tooled() -> Iterator[Host]:
    with Host(tools={"fetch": "fetch(url)"}) as host:
        yield host


@pytest.mark.parametrize(
    ("reply", "code", "printed"),
    [
        ({"value": {"$": "tuple", "v": [1, 2]}}, "print(fetch(1, k={'a'}))", "(1, 2)"),
        ({}, "print(fetch(1, k={'a'}))", "None"),
        ({"error": "bad input", "kind": "ValueError", "raises": True}, "try: fetch(1, k={'a'})\nexcept ValueError as e: print('said', e)", "said bad input"),
        ({"error": "gone", "kind": "HTTPError"}, "try: fetch(1, k={'a'})\nexcept RuntimeError as e: print(e)", "fetch: HTTPError: gone"),
        ({"error": "x", "kind": "SystemExit"}, "try: fetch(1, k={'a'})\nexcept RuntimeError as e: print(e)", "fetch: SystemExit: x"),
        ({"error": "x", "kind": "UnicodeDecodeError"}, "try: fetch(1, k={'a'})\nexcept RuntimeError as e: print(e)", "fetch: UnicodeDecodeError: x"),
        ({"error": "x"}, "try: fetch(1, k={'a'})\nexcept RuntimeError as e: print(e)", "fetch: x"),
    ],
)  # fmt: skip
def test_tools(tooled: Host, reply: Frame, code: str, printed: str) -> None:
    tooled.serve = lambda call: reply
    outcome = tooled.run(code)
    assert outcome.error is None, outcome.error
    assert outcome.stdout.strip() == printed
    (call,) = outcome.calls
    assert (call["kind"], call["name"], codec.decode(call["args"])) == ("tool", "fetch", [1])
    assert {key: codec.decode(value) for key, value in call["kwargs"].items()} == {"k": {"a"}}


def test_a_tool_refuses_what_cannot_be_sent(tooled: Host) -> None:
    outcome = tooled.run("fetch(1, [object()])")
    assert "TypeError: fetch() args[1][0]: a value of type object can't be sent" in outcome.trace
    assert "fetch() key: a value of type function" in tooled.run("fetch(key=lambda: 0)").trace
    assert outcome.calls == []
    assert tooled.run("fetch = 1").error is None
    tooled.serve = lambda call: {"value": 3}
    assert tooled.show("fetch()") == "3\n"


def test_show_limits(host: Host) -> None:
    host.serve = lambda call: {"value": {"money": 0.5, "calls": None}}
    outcome = host.run("SHOW_LIMITS()")
    assert outcome.stdout == "{'money': 0.5, 'calls': None}\n"
    assert [call["kind"] for call in outcome.calls] == ["limits"]


# ---- credit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "print(sum(map(len, llm_query_batched(['x' * 900] * 50))))",
        "print(sum(map(len, await allm_query_batched(['x' * 900] * 50))))",
        "print(sum(map(len, await asyncio.gather(*[allm_query('x' * 900) for _ in range(50)]))))",
        "with T(8) as t: print(sum(map(len, t.map(llm_query, ['x' * 900] * 50))))",
        "with T(8) as t:\n    f = [t.submit(lambda: asyncio.run(allm_query_batched(['x' * 900] * 5))) for _ in range(5)]\n"
        "    g = [t.submit(llm_query_batched, ['x' * 900] * 5) for _ in range(5)]\n"
        "    print(sum(len(x) for h in (*f, *g) for x in h.result()))",
        "print(sum(map(len, llm_query_batched(['x' * 90000] * 2))) - 180000 + 45000)",
    ],
)
def test_credit_bounds_what_is_unanswered(code: str) -> None:
    credit = 5000
    with Host(credit=credit) as host:
        host.run("import asyncio\nfrom concurrent.futures import ThreadPoolExecutor as T")
        owed: dict[int, int] = {}
        most = 0

        def late(call: Frame) -> Frame | None:
            """Replies to the oldest only once no more calls can come."""
            nonlocal most
            owed[call["id"]] = len(json.dumps(call, separators=(",", ":"))) + 1
            total = sum(owed.values())
            assert total <= credit or len(owed) == 1
            most = max(most, total)
            if total > credit - 1100 or served + len(owed) >= 50 or (len(owed) == 1 and owed[call["id"]] > credit):
                release()
            return None

        served = 0

        def release() -> None:
            nonlocal served
            for number in list(owed):
                del owed[number]
                served += 1
                host.reply({"id": number}, value="y" * 900)

        host.serve = late if "90000" not in code else lambda call: {"value": "y" * 90000}
        outcome = host.run(code)
        assert outcome.error is None, outcome.error
        assert outcome.stdout.strip() == "45000"
        if "90000" not in code:
            assert most > credit // 2


def test_a_call_with_more_lists_than_a_host_takes_is_an_error_in_the_cell() -> None:
    with Host(tools={"t": ""}) as host:
        host.serve = lambda call: {"value": len(call["args"][0])}
        assert "send them as text" in host.run("t([[]] * 1_000_000)").trace
        assert host.show("print(t('[{' * 1_000_000))") == "2000000\n"


def test_a_worker_waits_beyond_the_calls_it_may_have_unanswered() -> None:
    with Host(calls=7) as host:
        held: list[int] = []
        most = served = 0

        def late(call: Frame) -> Frame | None:
            """Replies once no more calls can come."""
            nonlocal most, served
            held.append(call["id"])
            most = max(most, len(held))
            if len(held) == 7 or served + len(held) == 200:
                served += len(held)
                while held:
                    host.reply({"id": held.pop()}, value="r")
            return None

        host.serve = late
        assert host.show("print(len(llm_query_batched(['x'] * 200)))") == "200\n"
    assert most == 7


def test_calls_that_were_dropped_with_their_cell_are_over_and_leave_room() -> None:
    with Host(calls=4) as host:
        code = (
            "import threading\nout = []\n"
            "t = threading.Thread(target=lambda: out.extend(llm_query_batched(['x'] * 3)))\n"
            "t.start()\nllm_query('go on')"
        )
        host.serve = lambda call: None if call["prompt"] == "x" else {"value": "y"}
        host.run(code)
        said = host.show("t.join()\nprint(*[r.kind for r in out], len(llm_query_batched(['y'] * 9)))")
        assert said == "cancelled cancelled cancelled 9\n"


def test_cancelled_waits_give_their_place_and_credit_back() -> None:
    with Host(credit=2000) as host:
        held: list[Frame] = []

        def hold(call: Frame) -> Frame | None:
            if call["prompt"].startswith("hold"):
                held.append(call)
                return None
            return {"value": "ok"}

        host.serve = hold
        code = (
            "import asyncio\n"
            "t = asyncio.create_task(allm_query('hold' + 'x' * 1500))\nawait asyncio.sleep(0)\n"
            "for _ in range(3):\n    try: await asyncio.wait_for(allm_query('y' * 1000), 0.01)\n"
            "    except asyncio.TimeoutError: pass\n"
            "t.cancel()\nprint(await allm_query('z' * 1000), llm_query('z' * 1900))"
        )
        outcome = host.run(code)
        assert outcome.error is None, outcome.error
        assert outcome.stdout == "ok ok\n"
        assert outcome.cancelled == [held[0]["id"]]


# ---- cancelling, leaving ---------------------------------------------------------------------------------------------


def test_a_cancelled_call_is_cancelled_at_the_host(host: Host) -> None:
    host.serve = lambda call: None if call["prompt"] == "never" else {"value": "ok"}
    outcome = host.run(
        "try: await asyncio.wait_for(asyncio.gather(*[allm_query('never') for _ in range(3)]), 0.01)\n"
        "except asyncio.TimeoutError: print('late', llm_query('x'))"
    )
    assert outcome.stdout == "late ok\n"
    assert sorted(outcome.cancelled) == sorted(call["id"] for call in outcome.calls[:3])


def test_a_call_after_its_cell_is_refused(host: Host) -> None:
    code = (
        "go, out = threading.Event(), []\ndef late():\n    go.wait()\n    try: llm_query('x')\n"
        "    except RuntimeError as e: out.append(str(e))\n"
        "import atexit\nth = threading.Thread(target=late); th.start()\nthreading.Timer(0.05, go.set).start()"
    )
    assert host.run(code).error is None
    host.load("synchronise", form="code", value="th.join()\nsynchronise = 1")
    assert "is over" in host.show("print(out[0])")


def test_a_task_goes_on_in_the_next_cell(host: Host) -> None:
    host.run("async def two(): return llm_query('1') + await allm_query('2')")
    host.run("import asyncio\ntask = asyncio.get_event_loop().create_task(two())")
    assert host.show("await task") == "'A:1A:2'\n"


def test_replies_to_unknown_calls_are_ignored(host: Host) -> None:
    host.send({"t": "reply", "id": 10**6, "value": "x"})
    host.socket.sendall(b"\n  \n")
    assert host.show("llm_query('x')") == "'A:x'\n"


# ---- interrupts ------------------------------------------------------------------------------------------------------

ENDLESS = [
    "while True: pass",
    "time.sleep(100)",
    "llm_query('never')",
    "llm_query_batched(['never'] * 50)",
    "await asyncio.gather(*[allm_query('never') for _ in range(20)])",
    "asyncio.run(waits())",
    "while True: await asyncio.sleep(0)",
    "with T(8) as t: list(t.map(llm_query, ['never'] * 100))",
    "ts = [threading.Thread(target=lambda: asyncio.run(waits()), daemon=True) for _ in range(3)]\n[t.start() for t in ts]\n[t.join() for t in ts]",
    "await asyncio.to_thread(llm_query, 'never')",
    "await asyncio.sleep(0)\nasyncio.run(waits())",
    "while True: llm_query('x')",
    "while True: llm_query_batched(['x'] * 50)",
    "while True: await allm_query('x')",
    "with T(8) as t: list(t.map(lambda i: [llm_query('x') for _ in range(10**6)], range(8)))",
    "threading.Event().wait()",
    "import subprocess\nsubprocess.run(['/bin/sleep', '100'])",
    "class W:\n    def __repr__(self):\n        while True: pass\nW()",
    "async def stubborn():\n    while True:\n        try: await asyncio.sleep(100)\n        except asyncio.CancelledError: break\nawait stubborn()",
]  # fmt: skip


def selective(call: Frame) -> Frame | None:
    return None if call["prompt"] == "never" else {"value": "A:" + call["prompt"]}


def interrupted(host: Host, code: str) -> Outcome:
    """Start the code, wait until it is under way, interrupt it."""
    host.start("print('go', flush=True)\n" + code)
    seen = ""

    def started() -> bool:
        nonlocal seen
        seen += host.output(0)
        return seen.startswith("go")

    wait_for(started)
    host.interrupt()
    with interrupted_again(host):
        return host.finish()


@contextlib.contextmanager
def interrupted_again(host: Host) -> Generator[None]:
    """As every host must do: Python and asyncio can lose an interrupt, or leave a lock of a thread pool's held by it."""
    again = threading.Timer(0.6, host.interrupt)
    again.start()
    try:
        yield
    finally:
        again.cancel()
        again.join()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("code", ENDLESS)
def test_an_interrupt_ends_the_cell_and_keeps_the_namespace(host: Host, code: str) -> None:
    host.serve = selective
    host.run("keep = 41\nasync def waits(): await asyncio.gather(*[allm_query('never') for _ in range(20)])")
    error = interrupted(host, code).error
    assert error is not None
    assert error["interrupted"] is True
    assert error["type"] in ("KeyboardInterrupt", "CancelledError")
    assert "<cell " in error["traceback"]
    code = "print(keep + 1, llm_query('ok'), llm_query_batched(['a', 'b']), await allm_query('z'))"
    assert host.show(code) == "42 A:ok ['A:a', 'A:b'] A:z\n"


LEFT = {
    "an order to stop": "async def main(): asyncio.get_event_loop().call_soon(kill)\nawait main()",
    "that a loop runs": "real = asyncio.events._set_running_loop\ndef first(loop):\n    if loop is None:\n"
    "        asyncio.events._set_running_loop = real\n        kill()\n    real(loop)\n"
    "asyncio.events._set_running_loop = first\nawait asyncio.sleep(0)",
    "an order to stop, in a loop of the cell's": "async def main():\n"
    "    t = asyncio.ensure_future(waits())\n    asyncio.get_event_loop().call_soon(kill)\nasyncio.run(main())",
}


@pytest.mark.parametrize("code", LEFT.values(), ids=LEFT)
def test_an_interrupt_inside_the_loops_own_code_leaves_nothing_of_it(host: Host, code: str) -> None:
    host.serve = selective
    host.run(
        "import os, signal\ndef kill():\n    os.kill(os.getpid(), signal.SIGINT)\n    for _ in range(9): pass\n"
        "async def waits(): await asyncio.gather(*[allm_query('never') for _ in range(20)])"
    )
    host.run("task = asyncio.get_event_loop().create_task(waits())\nawait asyncio.sleep(0)")
    error = host.run(code).error
    assert error is not None
    assert (error["type"], error["interrupted"]) == ("KeyboardInterrupt", True)
    assert host.show("print(llm_query('ok'), await allm_query('z'))") == "A:ok A:z\n"


def test_a_late_interrupt_means_nothing(host: Host) -> None:
    for _ in range(5):
        assert host.show("llm_query('x')") == "'A:x'\n"
        host.interrupt()
    assert host.show("llm_query('x')") == "'A:x'\n"


def test_an_interrupted_cell_makes_no_new_calls(host: Host) -> None:
    host.serve = selective
    outcome = interrupted(
        host,
        "try:\n    time.sleep(100)\nexcept KeyboardInterrupt:\n    try: llm_query('again')\n"
        "    except KeyboardInterrupt: print('refused')",
    )
    assert outcome.calls == []
    assert "refused" in outcome.stdout
    assert outcome.error is None


STORM = [
    "while True: llm_query('x')",
    "with T(4) as t: list(t.map(lambda i: [llm_query('x') for _ in range(10**6)], range(4)))",
    "while True: await asyncio.gather(*[allm_query(str(i)) for i in range(5)])",
    "with T(4) as t: list(t.map(lambda i: asyncio.run(many()), range(4)))",
    "while True: llm_query_batched(['x' * 300] * 20)",
]


@pytest.mark.filterwarnings("ignore")
def test_a_storm_of_interrupts_breaks_nothing() -> None:
    chance = random.Random(7)
    with Host(credit=20_000) as host:
        host.run("import asyncio\nfrom concurrent.futures import ThreadPoolExecutor as T")
        host.run("async def many():\n    while True: await asyncio.gather(*[allm_query('y' * 100) for i in range(5)])")
        for turn in range(50):
            left = chance.randrange(1, 60)

            def count(frame: Frame) -> None:
                nonlocal left
                left -= 1
                if left in (0, -200):
                    host.interrupt()

            host.start(STORM[turn % len(STORM)])
            with interrupted_again(host):
                error = host.finish(count).error
            assert error is not None, STORM[turn % len(STORM)]
            assert error["interrupted"], error
            assert host.show("print(llm_query('ok'), await allm_query('ok'))") == "A:ok A:ok\n"
