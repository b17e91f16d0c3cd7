"""What the two constructors take and refuse, and the blocking face."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from asyncrlm import RLM, AsyncRLM, ConfigurationError
from asyncrlm.testing import ScriptedLM

from .helpers import scripted, submit


@pytest.mark.parametrize("face", [AsyncRLM, RLM])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_iteration": 3}, "max_iterations"),
        ({"depth": 1}, "max_depth"),
        ({"max_depth": -1}, "max_depth"),
        ({"max_depth": "two"}, "max_depth"),
        ({"max_timeout": float("nan")}, "max_timeout"),
        ({"limits": "firm"}, "limits"),
        ({"compaction": True}, "context_window"),
        ({"environment": "nowhere"}, "local"),
        ({"environment_kwargs": {"cell_timout": 3}}, "cell_timeout"),
        ({"custom_tools": {"llm_query": 1}}, "llm_query"),
        ({"custom_tools": {"no name": 1}}, "no name"),
        ({"other_backends": "openai"}, "list"),
        ({"on_subcall_start": 3}, "on_subcall_start"),
        ({"logger": object()}, "RLMLogger"),
    ],
)
def test_wrong_arguments_are_named(face: type, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        face(scripted(), **arguments)


@pytest.mark.parametrize("vendor", ["anthropic", "gemini", "azure_openai", "portkey"])
def test_every_vendor_can_be_named_in_one_string(vendor: str) -> None:
    more = {"azure_endpoint": "https://r.openai.azure.com"} if vendor == "azure_openai" else {}
    AsyncRLM(f"{vendor}/m", backend_kwargs={"api_key": "a-key-of-some-length", **more})


def test_no_key_says_how_to_get_going(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ConfigurationError) as caught:
        AsyncRLM()
    for way in ("OPENAI_API_KEY", "base_url", "offline"):
        assert way in str(caught.value)


def test_both_faces_take_the_same_arguments() -> None:
    assert inspect.signature(RLM) == inspect.signature(AsyncRLM)


def test_an_instance_pickles_as_its_configuration() -> None:
    rlm = pickle.loads(pickle.dumps(AsyncRLM("offline", max_depth=2)))
    assert "offline" in repr(rlm)
    assert "offline" in repr(pickle.loads(pickle.dumps(RLM("offline"))))


def test_blocking_in_a_script(no_leaks: None) -> None:
    with RLM(ScriptedLM(lambda request: submit("context * 2"))) as rlm:
        assert rlm.completion("ab").response == "abab"
        assert rlm.completion("cd").response == "cdcd"


def test_blocking_inside_a_running_loop(no_leaks: None) -> None:
    async def notebook() -> str:
        with RLM(scripted(submit("'ok'"))) as rlm:
            return rlm.completion("CTX").response

    assert anyio.run(notebook) == "ok"


def test_blocking_from_many_threads(no_leaks: None) -> None:
    answers: dict[int, str] = {}
    with RLM(ScriptedLM(lambda request: submit("context"))) as rlm:

        def one(i: int) -> None:
            answers[i] = rlm.completion(f"ctx{i}").response

        threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert answers == {i: f"ctx{i}" for i in range(8)}


@pytest.mark.anyio
async def test_a_path_is_read_by_the_worker(tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_bytes("héllo\r\nworld".encode())
    completion = await AsyncRLM(scripted(submit("repr(context)"))).acompletion(file)
    assert completion.response == repr("héllo\r\nworld")


@pytest.mark.anyio
async def test_overrides_are_for_one_call() -> None:
    rlm = AsyncRLM(
        ScriptedLM(lambda request: submit("str(SHOW_LIMITS()['calls']) + tool()")), custom_tools={"tool": lambda: "a"}
    )
    first = await rlm.acompletion("CTX", max_subcalls=7, custom_tools={"tool": lambda: "b"})
    second = await rlm.acompletion("CTX")
    assert (first.response, second.response) == ("7b", "Nonea")
    with pytest.raises(ConfigurationError, match="max_subcalls"):
        await rlm.acompletion("CTX", max_subcall=7)


@pytest.mark.anyio
async def test_sampling_arguments_of_one_call_are_normalised_as_the_constructors_are() -> None:
    model = ScriptedLM(lambda request: submit("'ok'"))
    await AsyncRLM(model).acompletion("CTX", sampling_args={"stream": False, "temperature": 0})
    assert model.calls[0].sampling_args == {"temperature": 0}


def entered_in_another_loop() -> None:
    rlm = AsyncRLM(ScriptedLM(lambda request: submit("'ok'")))

    async def enter() -> None:
        await rlm.__aenter__()

    anyio.run(enter)
    with pytest.raises(ConfigurationError, match="event loop"):
        anyio.run(rlm.acompletion, "CTX")


def test_an_open_engine_belongs_to_its_loop() -> None:
    with pytest.warns(ResourceWarning, match="unclosed <AsyncRLM"):
        _ = entered_in_another_loop(), gc.collect()


def test_the_next_completion_opens_it_again_beside_one_that_still_runs() -> None:
    asked, go_on = threading.Event(), threading.Event()

    async def ask(messages: list[dict[str, str]]) -> str:
        if "first" in messages[-1]["content"]:
            asked.set()
            await anyio.to_thread.run_sync(go_on.wait)
        return submit("context")

    answers: list[str] = []
    with RLM(ask) as rlm:
        first = threading.Thread(target=lambda: answers.append(rlm.completion("CTX", "first").response))
        first.start()
        assert asked.wait(10)
        closer = threading.Thread(target=rlm.close)
        closer.start()
        closer.join(0.5)
        assert closer.is_alive()
        assert rlm.completion("meanwhile").response == "meanwhile"
        go_on.set()
        first.join(10)
        closer.join(10)
        assert answers == ["CTX"]
        assert rlm.completion("last").response == "last"
    assert not [thread for thread in threading.enumerate() if "portal" in thread.name]


FORKS = """
import gc, os, sys, threading
from asyncrlm import RLM
from asyncrlm.testing import ScriptedLM

CELL = '```repl\\nanswer["content"] = context\\nanswer["ready"] = True\\n```'
rlm, dropped = RLM(ScriptedLM(lambda request: CELL)), RLM(ScriptedLM(lambda request: CELL))
print(rlm.completion("before").response, dropped.completion("x").response, flush=True)
stream = rlm.stream("CTX")
events = stream.__enter__()
next(events)
child = os.fork()
if not child:
    try:
        next(events)
    except ValueError as error:
        print(error, flush=True)
    stream.__exit__(None, None, None)
    del dropped
    gc.collect()
    WHAT
    sys.stdout.flush()
    END
_, status = os.waitpid(child, 0)
print("status", status, flush=True)
stream.__exit__(None, None, None)
print(rlm.completion("after").response, dropped.completion("x").response, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)", "rlm.close(); sys.exit(0)"])
@pytest.mark.parametrize("what", ["pass", "print(rlm.completion('in the child').response)", "rlm.close()"])
def test_a_forked_process_opens_its_own(what: str, end: str) -> None:
    code = FORKS.replace("WHAT", what).replace("END", end)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    said = ["in the child"] if "print" in what else []
    refused = "this stream belongs to the process it was begun in, not to one forked from it"
    assert ran.stdout.splitlines() == ["before x", refused, *said, "status 0", "after x"]
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("opened", [True, False])
def test_a_callback_that_would_wait_for_its_own_thread_is_told_so(opened: bool) -> None:
    said: list[BaseException] = []
    with RLM(scripted(submit("'inner'"))) as inner:
        if opened:
            inner.completion("CTX")

        def callback(*_: object) -> None:
            try:
                inner.completion("CTX")
            except ConfigurationError as error:
                said.append(error)

        with RLM(scripted(submit("'outer'")), on_iteration_complete=callback) as outer:
            assert outer.completion("CTX").response == "outer"
    assert "await AsyncRLM" in str(said[0])
