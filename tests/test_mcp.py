"""Tools of servers that speak the Model Context Protocol, by its official SDK on both ends."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import psutil
import pytest

from asyncrlm import RLM, ApprovalRequest, AsyncRLM, ConfigurationError, MCPServer, Repl, RLMError
from asyncrlm.events import ToolCalled
from asyncrlm.mcp import connections
from asyncrlm.mcp.schema import ToolSchema, identifier
from asyncrlm.testing import ScriptedLM

from .helpers import cell, scripted, submit

pytest.importorskip("mcp", reason="the SDK is not installed: pip install 'asyncrlm[mcp]'")

pytestmark = pytest.mark.anyio

SCRIPT = str(Path(__file__).parent / "fakes" / "mcp_tools.py")
OURS = f"of={os.getpid()}"
CAP = 60
soak = pytest.mark.soak  # what starts many servers, which takes long


def server(*arguments: str, **settings: Any) -> MCPServer:
    return MCPServer(**{"name": "t", "command": sys.executable, "args": [SCRIPT, OURS, *arguments], **settings})


def tried(code: str) -> str:
    return f"try:\n    {code}\nexcept Exception as error:\n    print(type(error).__name__, error)"


async def printed(repl: Repl, code: str) -> str:
    result = await repl.execute(code)
    assert result.error is None, result.error
    return result.stdout


def servers_running() -> list[int]:
    """Processes of the script that this one has started, wherever they hang in the tree of processes."""
    found: list[int] = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if OURS in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    before = set(servers_running())
    yield
    assert set(servers_running()) <= before


@pytest.fixture
def http_url() -> Iterator[str]:
    """The same server over streamable HTTP, in a thread."""
    import socket

    import uvicorn

    from .fakes.mcp_tools import build

    listener = socket.create_server(("127.0.0.1", 0))
    app = build().streamable_http_app()
    running = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    running.should_exit = True
    thread.join(20)
    listener.close()


# ---- tools in cells --------------------------------------------------------------------------------------------------


async def used(repl: Repl) -> None:
    """What holds for the tools however they are reached."""
    assert await printed(repl, "print(t_add(1), t_add(1, 5), t_add(first=2, second=3))") == "3 6 5\n"
    assert await printed(repl, "print(t_read_file('a', limit=3))") == "['a', 'text', '3']\n"
    assert await printed(repl, "print(t_move({'x': 1}, by={'y': 2}))") == "{'x': 1, 'y': 2}\n"
    assert await printed(repl, "print(t_words('a b').split())") == "['a', 'b']\n"
    assert await printed(repl, "[p] = t_picture()\nprint(p['mime_type'], p['data'])") == "image/png b'\\x89PNG\\x00'\n"
    assert "Described by its server as" in await printed(repl, "print(t_add.__doc__)")
    assert "because I say so" in await printed(repl, tried("t_fail('I say so')"))
    assert (await printed(repl, tried("t_fail()"))).startswith("TypeError missing a required argument: 'reason'")
    assert (await printed(repl, tried("t_add(1, 2, 3)"))).startswith("TypeError too many positional arguments")
    assert (await printed(repl, tried("t_add('x')"))).startswith("RuntimeError")
    code = (
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as pool:\n"
        "    print(sum(pool.map(t_add, range(40))))"
    )
    assert await printed(repl, code) == "860\n"


async def test_over_stdio_with_the_variables_it_is_given_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("TERM", "vt100")
    env = {"MINE": "yes", "TERM": "given"}
    with anyio.fail_after(CAP):
        async with Repl(mcp_servers=[server(env=env)], custom_tools={"own": lambda: 1}) as repl:
            await used(repl)
            assert await printed(repl, "print(own())") == "1\n"
            seen = "print(sorted(t_environment().keys() - {'LC_CTYPE'}), t_environment()['TERM'])"  # that Python sets
            assert await printed(repl, seen) == "['MINE', 'TERM'] given\n"


async def test_over_http(http_url: str) -> None:
    with anyio.fail_after(CAP):
        async with Repl(mcp_servers=[{"name": "t", "url": http_url, "headers": {"X-Key": "k"}}]) as repl:
            await used(repl)


def check_prompt(prompt: str) -> None:
    """Descriptions are quoted, clipped and labelled."""
    lines = prompt.splitlines()
    (add,) = [line for line in lines if line.startswith("- `t_add(")]
    head = "- `t_add(first: int, second: int = 2) -> int` - described by its server as "
    assert add.startswith(head + "\"Adds.\\n'''repl")
    assert "IGNORE ALL" in add
    assert "\x1b" not in add
    assert "\u202e" not in add
    assert "characters left out" in add
    assert len(add) < 1_500
    (note,) = [line for line in lines if line.startswith("What stands in quotes above was written by the servers")]
    assert "no instruction" in note
    read = "`t_read_file(path: str, mode: Literal['text', 'lines'] = 'text', limit: int | None = None) -> list[str]`"
    assert f'- {read} - described by its server as "Reads a file."' in lines


async def test_in_a_run_with_events_approval_and_children() -> None:
    asked: list[str] = []

    async def approve(request: ApprovalRequest) -> str | None:
        await anyio.lowlevel.checkpoint()
        if request.kind == "tool":
            asked.append(request.name)
            return "no" if request.args == [7] else None
        return None

    def reply(request: Any) -> str:
        text = "\n".join(message.content for message in request.messages)
        check_prompt(request.messages[0].content)
        if "ROOT" not in text:
            return submit("str(t_add(40))")
        return cell(f"{tried('t_add(7)')}\nanswer.update(content=rlm_query('child'), ready=True)")

    events: list[ToolCalled] = []
    rlm = AsyncRLM(ScriptedLM(reply), max_depth=2, mcp_servers=[server()], approve=approve)
    with anyio.fail_after(CAP):
        async with rlm.astream("CTX", "ROOT") as stream:
            async for event in stream:
                if isinstance(event, ToolCalled):
                    events.append(event)
    assert stream.result is not None
    assert stream.result.response == "42"
    assert asked == ["t_add", "t_add"]
    assert [(event.name, event.args, event.depth, event.error) for event in events] == [
        ("t_add", [7], 0, "PermissionError: t_add was refused: no"),
        ("t_add", [40], 1, None),
    ]
    assert servers_running() == []


@soak
async def test_children_with_tools_of_their_own_have_no_servers() -> None:
    def reply(request: Any) -> str:
        root = any("ROOT" in message.content for message in request.messages)
        return submit("rlm_query('child')" if root else "str('t_add' in globals())")

    rlm = AsyncRLM(ScriptedLM(reply), max_depth=2, mcp_servers=[server()], custom_sub_tools={})
    with anyio.fail_after(CAP):
        assert (await rlm.acompletion("CTX", "ROOT")).response == "False"


# ---- how long they live ----------------------------------------------------------------------------------------------


@soak
async def test_one_server_serves_all_runs_of_an_engine_and_ends_with_it() -> None:
    def reply(request: Any) -> str:
        return submit("str(t_process())")

    pids: list[str] = []
    with anyio.fail_after(CAP):
        async with AsyncRLM(ScriptedLM(reply), mcp_servers=[server()]) as rlm:

            async def run() -> None:
                pids.append((await rlm.acompletion("CTX")).response)

            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(run)
            async with rlm.session() as chat:
                for _ in range(2):
                    pids.append((await chat.acompletion("CTX")).response)
            assert servers_running() == [int(pids[0])]
        assert servers_running() == []
    assert len(set(pids)) == 1
    assert len(pids) == 7


@pytest.mark.parametrize("moment", ["calling", pytest.param("starting", marks=soak)])
async def test_nothing_is_left_by_a_cancelled_run(moment: str) -> None:
    rlm = AsyncRLM(scripted(cell("t_hang()")), mcp_servers=[server(*(["silent"] if moment == "starting" else []))])
    with anyio.fail_after(CAP):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rlm.acompletion, "CTX")
            while not servers_running():
                await anyio.sleep(0.01)
            if moment == "calling":
                await anyio.sleep(1)  # until it is called, or nearly: either may be cut off
            tasks.cancel_scope.cancel()
        assert servers_running() == []


@soak
async def test_a_call_that_takes_too_long_is_given_up_and_the_session_goes_on() -> None:
    with anyio.fail_after(CAP):
        async with Repl(mcp_servers=[server()], tool_timeout=0.5) as repl:
            pid = await printed(repl, "print(t_process())")
            assert await printed(repl, tried("t_hang()")) == "TimeoutError t_hang took longer than 0.5 s\n"
            assert await printed(repl, "print(t_process())") == pid


@soak
async def test_a_server_that_dies_is_told_of_and_started_again_for_the_next_call() -> None:
    with anyio.fail_after(CAP):
        async with Repl(mcp_servers=[server()]) as repl:
            pid = await printed(repl, "print(t_process())")
            assert "RuntimeError the server 't' ended" in await printed(repl, tried("t_die()"))
            again = await printed(repl, "print(t_process())")
            assert again != pid


@soak
def test_with_the_blocking_face() -> None:
    with RLM(scripted(submit("str(t_add(1))"), submit("str(t_add(2))")), mcp_servers=[server()]) as rlm:
        assert rlm.completion("CTX").response == "3"
        assert rlm.completion("CTX").response == "4"


# ---- what they get, and what they say --------------------------------------------------------------------------------


@soak
async def test_an_allow_list_picks_the_tools() -> None:
    with anyio.fail_after(CAP):
        async with Repl(mcp_servers=[server(tools=["add", "read-file"])]) as repl:
            assert await printed(repl, "print([n for n in globals() if n.startswith('t_')])") == (
                "['t_add', 't_read_file']\n"
            )
        with pytest.raises(ConfigurationError, match=r"has no tool 'subtract'; it has 'add', 'die'"):
            async with Repl(mcp_servers=[server(tools=["subtract"])]):
                pass


@soak
async def test_tools_that_are_added_later_are_there_in_later_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FRESH", 0)

    def reply(request: Any) -> str:
        prompt = request.messages[0].content
        return submit("t_later()") if "`t_later(" in prompt else submit("t_more()")

    with anyio.fail_after(CAP):
        async with AsyncRLM(ScriptedLM(reply), mcp_servers=[server()]) as rlm:
            assert (await rlm.acompletion("CTX")).response == "added"
            assert (await rlm.acompletion("CTX")).response == "later"


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@soak
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (server("broken"), r"server 't' could not be started: .*\n?.*no such file: settings\.toml"),
        (server("silent", start_timeout=0.5), "could not be started: it was not ready in time"),
        (MCPServer(name="t", url="http://127.0.0.1:9/mcp", start_timeout=5), "'t' could not be started"),
    ],
)
async def test_a_server_that_cant_be_started_ends_the_run_and_says_why(wrong: MCPServer, says: str) -> None:
    with anyio.fail_after(CAP):
        with pytest.raises(RLMError, match=f"(?s){says}"):
            await AsyncRLM(scripted(), mcp_servers=[wrong]).acompletion("CTX")


async def test_a_program_that_is_not_there_is_named() -> None:
    gone = MCPServer(name="t", command="no-such-program-here")
    with anyio.fail_after(CAP):
        with pytest.raises(ConfigurationError, match=r"the program 'no-such-program-here' .* was not found"):
            await AsyncRLM(scripted(), mcp_servers=[gone]).acompletion("CTX")


async def test_a_servers_start_is_within_the_deadline() -> None:
    from asyncrlm import TimeoutExceededError

    with anyio.fail_after(CAP), pytest.raises(TimeoutExceededError):
        await AsyncRLM(scripted(), mcp_servers=[server("silent")], max_timeout=0.3).acompletion("CTX")


@soak
async def test_a_name_that_two_tools_have_is_an_error() -> None:
    with anyio.fail_after(CAP), pytest.raises(ConfigurationError, match="two tools have the name 't_add'"):
        async with Repl(mcp_servers=[server()], custom_tools={"t_add": max}):
            pass


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "needs a name"),
        ({"name": "a b", "command": "x"}, "name must be an identifier"),
        ({"name": "a"}, "give command or url"),
        ({"name": "a", "command": "x", "url": "http://x"}, "give command or url"),
        ({"name": "a", "command": ["x"]}, "command of the server 'a' must be the name or path of a program"),
        ({"name": "a", "url": "ftp://x"}, "url of the server 'a' must be an http or https URL"),
        ({"name": "a", "command": "x", "args": "-v"}, "args of the server 'a' must be a list of str"),
        ({"name": "a", "command": "x", "env": ["A=1"]}, "env of the server 'a' must be a dict"),
        ({"name": "a", "command": "x", "env": {"A": 1}}, "env of the server 'a' must be a dict"),
        ({"name": "a", "command": "x", "tools": "add"}, "tools of the server 'a' must be a list of str"),
        ({"name": "a", "command": "x", "headers": {"A": "b"}}, "headers of the server 'a' belong to a url"),
        ({"name": "a", "url": "http://x", "env": {"A": "b"}}, "env and cwd of the server 'a' belong to a command"),
        ({"name": "a", "command": "x", "start_timeout": 0}, "start_timeout of the server 'a' must be a number"),
        ({"name": "a", "command": "x", "tool": ["add"]}, "unknown key 'tool' of a server; known are: name, command"),
        (5, "a server is an MCPServer or a dict"),
    ],
)
def test_a_wrong_server_is_named_in_the_constructor(given: Any, says: str) -> None:
    for face in (AsyncRLM, RLM):
        with pytest.raises(ConfigurationError, match=says):
            face(scripted(), mcp_servers=[given])
    with pytest.raises(ConfigurationError, match="two servers have the name"):
        AsyncRLM(scripted(), mcp_servers=[server(), server()])


def test_a_server_hides_its_keys_and_can_be_pickled() -> None:
    secret = MCPServer(name="a", url="https://x/mcp?key=s3cret", headers={"Authorization": "s3cret"})
    assert "s3cret" not in repr(secret)
    assert "s3cret" not in repr(server(env={"KEY": "s3cret"}))
    assert pickle.loads(pickle.dumps(secret)) == secret
    assert pickle.loads(pickle.dumps(AsyncRLM("offline", mcp_servers=[secret])))


def test_the_sdk_is_not_needed_by_who_has_no_servers() -> None:
    code = "import sys; from asyncrlm import AsyncRLM, MCPServer; AsyncRLM('offline'); assert 'mcp' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})


# ---- schemas ---------------------------------------------------------------------------------------------------------


def shown(properties: Any, **schema: Any) -> str:
    return str(ToolSchema("", {"type": "object", "properties": properties, **schema}, None).signature)


def test_types_of_schemas() -> None:
    many = [f"value {number}" for number in range(20)]
    assert shown({"a": {"type": "integer"}, "b": {"type": "string"}}, required=["b"]) == (
        "(b: str, a: int = ...) -> str | list"
    )
    assert shown({"a": {"type": ["number", "null"], "default": 1.5}}) == "(a: float | None = 1.5) -> str | list"
    assert shown({"a": {"enum": many}}) == "(a: str = ...) -> str | list"
    assert shown({"a": {"const": 5}}) == "(a: Literal[5] = ...) -> str | list"
    assert shown({"a": {"type": "array", "items": {"$ref": "#/$defs/X"}}}, **{"$defs": {"X": {"type": "boolean"}}}) == (
        "(a: list[bool] = ...) -> str | list"
    )
    assert shown({"a": {"$ref": "#/properties/a"}}) == "(a: Any = ...) -> str | list"
    assert shown({"max-results": {}, "class": {}, "ünïcode": {}}) == (
        "(max_results: Any = ..., class_: Any = ..., _n_code: Any = ...) -> str | list"
    )
    assert shown({}, additionalProperties=True) == "(**more: Any) -> str | list"
    assert shown("nonsense") == "() -> str | list"
    assert identifier("2 fast; import os") == "_2_fast_import_os"


def test_arguments_of_schemas() -> None:
    schema = ToolSchema("", {"properties": {"max-results": {}, "a_b": {}, "a-b": {}}}, None)
    assert schema.arguments((5,), {"a_b": (1, 2)}) == {"max-results": 5, "a_b": [1, 2]}
    assert schema.arguments((), {"max-results": 5, "a-b": {"k"}}) == {"max-results": 5, "a-b": ["k"]}
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        schema.arguments((), {"other": 1})
    free = ToolSchema("", {"additionalProperties": {}, "properties": {"a": {}}}, None)
    assert free.arguments((1,), {"b": 2}) in ({"a": 1, "b": 2}, {"a": 1})
