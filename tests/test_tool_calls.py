"""Calls of tools from cells: recorded, approved, limited, timed, and what becomes of those that never end."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest
from repl_fakes import Worker, fake_session

from asyncrlm import ApprovalRequest, AsyncRLM, Repl, RLMLogger
from asyncrlm.events import CellFinished, ListenerFailed, ToolCalled
from asyncrlm.repl import channel as channel_module
from asyncrlm.repl.framing import LARGE, encode_frame
from asyncrlm.repl.messages import Reply
from asyncrlm.repl.room import Room
from asyncrlm.repl.tool_desk import ToolDesk, ToolFailure
from asyncrlm.repl.tool_threads import ToolThreads
from asyncrlm.repl.tools import HostTools

from .helpers import cell, scripted, submit, told

pytestmark = pytest.mark.anyio


def tried(code: str) -> str:
    """A cell that prints what `code` raises."""
    return f"try:\n    {code}\nexcept Exception as error:\n    print(type(error).__name__, error)"


async def printed(repl: Repl, code: str) -> str:
    result = await repl.execute(code)
    assert result.error is None, result.error
    return result.stdout


# ---- what is recorded ------------------------------------------------------------------------------------------------


async def test_each_call_is_an_event_and_in_the_trajectory_and_in_the_log(tmp_path: Path) -> None:
    async def look(text: str, *, api_key: str = "", deep: Any = None) -> str:
        await anyio.lowlevel.checkpoint()
        return "x" * 5_000

    def fail() -> None:
        raise KeyError("no such thing")

    code = f"look('y' * 9_000, api_key='{'k' * 9}', deep=(1, {{2: b'abc'}}, list(range(200))))\n" + tried("fail()")
    rlm = AsyncRLM(
        scripted(cell(code), submit("'done'")),
        custom_tools={"look": look, "fail": fail},
        logger=RLMLogger(log_dir=tmp_path),
    )
    seen: list[ToolCalled] = []
    with anyio.fail_after(10):
        async with rlm.astream("CTX") as events:
            async for event in events:
                if isinstance(event, ToolCalled):
                    seen.append(event)
    looked, failed = seen
    assert (looked.name, looked.error, failed.name) == ("look", None, "fail")
    assert looked.result_bytes > 5_000
    assert looked.seconds > 0
    assert len(looked.args[0]) < 1_200
    assert "8,000 of 9,000 characters left out" in looked.args[0]
    assert looked.kwargs["deep"][:2] == [1, {"2": "<3 bytes>"}]
    assert looked.kwargs["deep"][2][-1] == "[... 150 items left out ...]"
    assert failed.error == "KeyError: 'no such thing'"

    assert events.result is not None
    calls = events.result.metadata["iterations"][0]["code_blocks"][0]["result"]["tool_calls"]
    assert [call["name"] for call in calls] == ["look", "fail"]
    assert calls[0]["args"] == looked.args
    assert calls[0]["result_bytes"] == looked.result_bytes
    assert calls[1]["error"] == failed.error
    assert [call["execution_time"] for call in calls] == [looked.seconds, failed.seconds]

    (log,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    logged = [line for line in lines if line.get("type") == "ToolCalled"]
    assert [line["name"] for line in logged] == ["look", "fail"]
    assert logged[0]["kwargs"]["api_key"] == "[redacted]"
    assert logged[1]["error"] == failed.error


# ---- approval --------------------------------------------------------------------------------------------------------


async def test_a_cell_or_a_tool_call_can_be_refused_with_a_reason_that_the_model_reads() -> None:
    asked: list[ApprovalRequest] = []
    called: list[str] = []

    async def approve(request: ApprovalRequest) -> str | None:
        await anyio.lowlevel.checkpoint()
        asked.append(request)
        if request.kind == "cell" and "rm -rf" in request.code:
            return "nothing is deleted here"
        if request.kind == "tool" and request.args == ["secret"]:
            return "that item is private"
        return None

    def read(item: str) -> str:
        called.append(item)
        return f"about {item}"

    model = scripted(
        cell("x = 1\n# rm -rf"),
        cell("print('x' in globals(), read('plain'))\n" + tried("read('secret')")),
        submit("'done'"),
    )
    with anyio.fail_after(10):
        completion = await AsyncRLM(model, custom_tools={"read": read}, approve=approve).acompletion("CTX")
    assert completion.response == "done"
    assert "PermissionError: this cell was refused and not run: nothing is deleted here" in told(model, 2)
    assert "False about plain\nPermissionError read was refused: that item is private" in told(model, 3)
    assert called == ["plain"]
    assert [(request.kind, request.name, request.args) for request in asked[:3]] == [
        ("cell", "", []),
        ("cell", "", []),
        ("tool", "read", ["plain"]),
    ]
    assert {request.run_id for request in asked} == {completion.run_id}


@pytest.mark.parametrize("verdict", [True, False, "", "because", 5, ValueError("broken")])
async def test_what_a_hook_may_say(verdict: Any) -> None:
    def approve(request: ApprovalRequest) -> Any:
        if request.kind == "cell":
            return True
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    failures: list[ListenerFailed] = []
    rlm = AsyncRLM(
        scripted(cell(tried("print(f())")), submit("'done'")), custom_tools={"f": lambda: "called"}, approve=approve
    )
    outputs: list[str] = []
    with anyio.fail_after(10):
        async with rlm.astream("CTX") as events:
            async for event in events:
                if isinstance(event, ListenerFailed):
                    failures.append(event)
                if isinstance(event, CellFinished):
                    outputs.append(event.stdout.strip())
    says = {
        True: "called",
        False: "PermissionError f was refused",
        "": "PermissionError f was refused",
        "because": "PermissionError f was refused: because",
        5: "PermissionError f was refused: approval failed (TypeError)",
    }
    if isinstance(verdict, Exception):
        assert outputs[0] == "PermissionError f was refused: approval failed (ValueError)"
        assert failures[0].error == "ValueError: broken"
    else:
        assert outputs[0] == says[verdict]
        assert len(failures) == (verdict == 5 and verdict is not True)


async def test_children_and_repls_are_asked_too() -> None:
    asked: list[tuple[str, int]] = []

    async def approve(request: ApprovalRequest) -> bool:
        await anyio.lowlevel.checkpoint()
        asked.append((request.kind, request.depth))
        return True

    def reply(request: Any) -> str:
        root = any("ROOT" in message.content for message in request.messages)
        return submit("rlm_query('child')" if root else "f()")

    with anyio.fail_after(10):
        rlm = AsyncRLM(scripted_by(reply), max_depth=2, custom_tools={"f": lambda: "from f"}, approve=approve)
        assert (await rlm.acompletion("CTX", "ROOT")).response == "from f"
        assert asked == [("cell", 0), ("cell", 1), ("tool", 1)]
        async with Repl(custom_tools={"f": lambda: "from f"}, approve=lambda request: request.kind == "cell") as repl:
            assert await printed(repl, tried("f()")) == "PermissionError f was refused\n"
        async with Repl(approve=lambda request: "not now") as repl:
            result = await repl.execute("print(1)")
    assert result.stdout == ""
    assert "this cell was refused and not run: not now" in (result.error or "")


def scripted_by(function: Any) -> Any:
    from asyncrlm.testing import ScriptedLM

    return ScriptedLM(function)


# ---- how often -------------------------------------------------------------------------------------------------------


async def test_a_tool_may_be_called_so_often_in_one_completion_children_included() -> None:
    def reply(request: Any) -> str:
        root = any("ROOT" in message.content for message in request.messages)
        code = "for _ in range(3):\n    " + tried("f()").replace("\n", "\n    ")
        return cell(f"{code}\nanswer.update(content={'rlm_query(chr(65))' if root else repr('child')}, ready=True)")

    called: list[int] = []
    rlm = AsyncRLM(
        scripted_by(reply), max_depth=2, custom_tools={"f": {"tool": lambda: called.append(1), "max_calls": 4}}
    )
    errors: list[str | None] = []
    with anyio.fail_after(10):
        for _ in range(2):
            async with rlm.astream("CTX", "ROOT") as events:
                errors += [event.error async for event in events if isinstance(event, ToolCalled)]
    limit = "RuntimeError: f may be called 4 times in all, and was"
    assert errors == [None, None, None, None, limit, limit] * 2
    assert len(called) == 8


# ---- how long --------------------------------------------------------------------------------------------------------


async def test_a_slow_coroutine_is_cancelled_at_its_time_limit() -> None:
    cancelled = anyio.Event()

    async def hang() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    with anyio.fail_after(10):
        async with Repl(custom_tools={"hang": {"tool": hang, "timeout": 0.05}}) as repl:
            assert await printed(repl, tried("hang()")) == "TimeoutError hang took longer than 0.05 s\n"
            assert cancelled.is_set()
        async with Repl(custom_tools={"hang": hang}, tool_timeout=0.05) as repl:
            assert await printed(repl, tried("hang()")) == "TimeoutError hang took longer than 0.05 s\n"


async def test_a_plain_function_that_never_ends_is_left_behind_counted_and_capped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    leave = threading.Event()
    over: list[threading.Event] = []

    def hang() -> None:
        leave.wait(10)
        over.append(leave)

    threads = ToolThreads(most_left=2)
    desk = ToolDesk(threads, timeout=0.02)
    tools = HostTools({"hang": hang, "quick": lambda: 5, "later": anyio.lowlevel.checkpoint})
    with anyio.fail_after(10), caplog.at_level(logging.WARNING, "asyncrlm"):
        for count in (1, 2):
            with pytest.raises(ToolFailure, match=r"hang took longer than 0.02 s; it can't be stopped"):
                await desk.call(tools, "hang", [], {})
            assert threads.left == count
        assert "tool='hang'" in caplog.text
        assert "threads_left=2" in caplog.text
        with pytest.raises(ToolFailure, match=r"quick was not called: 2 calls .*\(hang 2\)"):
            await desk.call(tools, "quick", [], {})
        assert await desk.call(tools, "later", [], {}) is None
        leave.set()
        while threads.left:
            await anyio.sleep(0.005)
        assert await desk.call(tools, "quick", [], {}) == 5
    assert len(over) == 2


async def test_a_cell_goes_on_after_the_time_out_of_a_plain_function() -> None:
    leave = threading.Event()
    with anyio.fail_after(10):
        async with Repl(custom_tools={"hang": {"tool": lambda: leave.wait(10), "timeout": 0.05}}) as repl:
            code = tried("hang()") + "\nprint('on')"
            text = await printed(repl, code)
            assert (
                text == "TimeoutError hang took longer than 0.05 s; it can't be stopped, and goes on on the host\non\n"
            )
    leave.set()


async def test_threads_that_ended_in_time_are_not_counted() -> None:
    threads = ToolThreads()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(ToolDesk(threads).call, HostTools({"f": lambda: 1}), "f", [], {})
    assert threads.left == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
def test_a_tool_that_never_ends_does_not_keep_the_process(anyio_backend: str) -> None:
    script = """
import threading
from asyncrlm import RLM
from asyncrlm.testing import ScriptedLM
def hang():
    threading.Event().wait()
code = "```repl\\ntry:\\n    hang()\\nexcept TimeoutError:\\n    answer.update(content='over', ready=True)\\n```"
print(RLM(ScriptedLM([code]), custom_tools={"hang": hang}, tool_timeout=0.1).completion("CTX").response)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (ran.returncode, ran.stdout) == (0, "over\n"), ran.stderr
    assert "tool='hang'" in ran.stderr


async def test_a_plain_function_may_run_an_event_loop_or_ask_the_one_that_waits() -> None:
    async def five() -> int:
        await anyio.lowlevel.checkpoint()
        return 5

    here = threading.get_ident()

    def until_cancelled() -> None:
        stopped = False
        while not stopped:
            try:
                anyio.from_thread.check_cancelled()
            except BaseException:
                stopped = True
                raise

    threads = ToolThreads()
    tools = {
        "own": lambda: anyio.run(five),
        "ours": lambda: anyio.from_thread.run(five),
        "where": lambda: anyio.from_thread.run_sync(threading.get_ident),
        "until_cancelled": until_cancelled,
    }
    with anyio.fail_after(10):
        desk, host = ToolDesk(threads, timeout=5), HostTools(tools)
        assert await desk.call(host, "own", [], {}) == 5
        assert await desk.call(host, "ours", [], {}) == 5
        assert await desk.call(host, "where", [], {}) == here
        with pytest.raises(ToolFailure, match="took longer"):
            await ToolDesk(threads, timeout=0.05).call(host, "until_cancelled", [], {})
        while threads.left:
            await anyio.sleep(0.005)


async def test_what_a_tool_may_raise_is_one_error_in_the_cell() -> None:
    class Odd(BaseException):
        pass

    def raising(kind: type[BaseException]) -> Any:
        def tool() -> None:
            raise kind("why")

        return tool

    async def leaves() -> None:
        await anyio.lowlevel.checkpoint()
        raise SystemExit("why")

    tools = {"odd": raising(Odd), "exits": raising(SystemExit), "breaks": raising(KeyboardInterrupt), "leaves": leaves}
    with anyio.fail_after(10):
        async with Repl(custom_tools=tools) as repl:
            for name, kind in zip(tools, ("Odd", "SystemExit", "KeyboardInterrupt", "SystemExit"), strict=True):
                assert await printed(repl, tried(f"{name}()")) == f"RuntimeError {name}: {kind}: why\n"


# ---- many and large --------------------------------------------------------------------------------------------------


async def test_a_thousand_threads_call_at_once() -> None:
    inside = most = 0

    def plain(number: int) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        inside -= 1
        return number

    async def later(number: int) -> int:
        await anyio.lowlevel.checkpoint()
        return number

    code = """
import threading
threading.stack_size(256 * 1024)
begin, results = threading.Barrier(1_000), {}
def ask(number):
    begin.wait()
    results[number] = (plain if number % 2 else later)(number)
threads = [threading.Thread(target=ask, args=(number,)) for number in range(1_000)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(results == {number: number for number in range(1_000)})"""
    with anyio.fail_after(30):
        async with Repl(
            environment_kwargs={"max_processes": 2_000}, custom_tools={"plain": plain, "later": later}
        ) as repl:
            assert await printed(repl, code) == "True\n"
    assert 1 <= most <= 64


async def test_large_results_wait_while_the_worker_takes_none() -> None:
    made = 0
    seen: list[int] = []
    size = 4 * 1024 * 1024

    async def large() -> str:
        nonlocal made
        made += 1
        await anyio.lowlevel.checkpoint()
        return "x" * size

    async def script(worker: Worker) -> None:
        await worker.hello()
        number, _ = await worker.cell()
        for call in range(1, 41):
            await worker.send(t="call", id=call, kind="tool", name="large")
            if call == 1:
                assert len((await worker.take())["value"]) == size
        await anyio.wait_all_tasks_blocked()
        seen.append(made)
        for _ in range(39):
            assert len((await worker.take())["value"]) == size
        await worker.done(number)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            session, _ = fake_session(tasks, script, tools=HostTools({"large": large}), capacity=size, chunk=size)
            async with session:
                assert (await session.execute("x")).error is None
            tasks.cancel_scope.cancel()
    assert made == 40
    assert seen[0] <= 1 + 16 + 1, "64 MiB are 16 such results; one is being sent"


async def test_room_is_given_in_order_by_what_results_took_before() -> None:
    unsent = 0
    room = Room(lambda: unsent, limit=100)
    room.learn("large", 60)
    room.learn("small", 10)
    order: list[str] = []
    leave = anyio.Event()

    async def call(name: str, number: int) -> None:
        async with room.place(name):
            order.append(f"{name}{number}")
            await leave.wait()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for number, name in enumerate(["large", "small", "large", "small", "large"]):
                tasks.start_soon(call, name, number)
                await anyio.wait_all_tasks_blocked()
            assert order == ["large0", "small1"]
            leave.set()
        assert order == ["large0", "small1", "large2", "small3", "large4"]
        unsent, leave = 100, anyio.Event()
        leave.set()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, "small", 5)
            await anyio.wait_all_tasks_blocked()
            assert len(order) == 5
            unsent = 0
            room.look()
        with anyio.move_on_after(0.01):
            unsent = 1_000
            await call("small", 6)
        unsent = 0
        await call("huge", 7)
    assert order[5:] == ["small5", "huge7"]


class Threaded(list[int]):
    """Knows in which thread it was read."""

    def __iter__(self) -> Iterator[int]:
        self.read_in = threading.get_ident()
        return super().__iter__()


async def test_large_results_are_encoded_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    here, encoded = threading.get_ident(), dict[int, int]()

    def spied(frame: Any) -> bytes:
        data = encode_frame(frame)
        if isinstance(frame, Reply):
            encoded[len(data)] = threading.get_ident()
        return data

    monkeypatch.setattr(channel_module, "encode_frame", spied)
    many, text = Threaded(range(100_000)), "é" * 200_000

    async def numbers() -> list[int]:
        return many

    async def long() -> str:
        return text

    async def model(_: list[dict[str, str]]) -> str:
        return text

    tools = {"numbers": numbers, "long": long, "plain": lambda: text}
    with anyio.fail_after(10):
        async with Repl(custom_tools=tools, lm=model) as repl:
            code = "print(len(numbers()), sum(numbers()), len(long()), len(plain()), len(llm_query('x')))"
            assert await printed(repl, code) == "100000 4999950000 200000 200000 200000\n"
    assert many.read_in != here
    assert len(encoded) >= 2
    assert here not in {thread for size, thread in encoded.items() if size > LARGE}
