"""Cases about what cells can reach and destroy, and about host tools, on the local environment."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import psutil
import pytest

import asyncrlm
from asyncrlm import AsyncRLM, ConfigurationError, RLMLogger

from .cases import CASES, covers, scripted
from .cases.models import ScriptedRoot, SubModel, cell, submit, whole
from .cases.runs import run, run_case

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.anyio

one = pytest.mark.parametrize("anyio_backend", ["asyncio"])
both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


@both
@covers("Z01")
async def test_cells_see_nothing_of_the_hosts_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-S3CRET")
    monkeypatch.setenv("MY_SERVICE_TOKEN", "tok-S3CRET")
    look = cell(
        "import os, subprocess, glob\n"
        "print(dict(os.environ))\n"
        "print(subprocess.run(['env'], capture_output=True, text=True).stdout)\n"
        "for path in glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline'):\n"
        "    try:\n"
        "        print(open(path).read())\n"
        "    except OSError:\n"
        "        pass\n"
    )
    with anyio.fail_after(10):
        outcome = await run([scripted(CASES["Z01"])[0], look, submit("'ok'")], logger=RLMLogger(log_dir=tmp_path))
    assert outcome.answer == "ok"
    assert "None None" in outcome.root.seen(2)
    for request in outcome.root.own:
        assert "S3CRET" not in whole(request)
    (log,) = tmp_path.glob("*.jsonl")
    assert "S3CRET" not in log.read_text()


@both
@covers("Z03")
async def test_a_worker_that_dies_takes_nothing_with_it() -> None:
    with anyio.fail_after(10):
        outcome = await run_case("Z03")
    assert outcome.answer == "alive"
    assert re.search(r"(?i)exit|ended|died|gone|lost", outcome.root.seen(2)), outcome.root.seen(2)


@one
@covers("Z03")
@pytest.mark.parametrize(
    "code",
    [
        "import ctypes\nctypes.string_at(0)",
        "import os\nos.abort()",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return [f, x].__eq__(x) or f(x)\nf(1)",
    ],
    ids=["segfault", "abort", "kill", "stack"],
)
async def test_a_crash_is_told_to_the_model(code: str) -> None:
    with anyio.fail_after(10):
        outcome = await run([cell("print('before')\n" + code), submit("context")])
    assert outcome.answer == "CTX"
    assert "before" in outcome.root.seen(2)


@both
@covers("Z04", "Z05")
async def test_nothing_listens_while_a_run_is_going() -> None:
    sub = SubModel(lambda _prompt: "done", hold=True)
    before = _listening()

    async def ask() -> None:
        outcome = await run([cell("x = llm_query('wait')"), submit("x")], sub=sub)
        assert outcome.answer == "done"

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await sub.wait_for_calls(1)
            assert _listening() == before
            sub.release.set()


def _listening() -> set[tuple[int, str]]:
    """Network sockets and paths that this process and all it started listen on."""
    here = psutil.Process()
    found: set[tuple[int, str]] = set()
    for process in [here, *here.children(recursive=True)]:
        inodes = set(_links(Path(f"/proc/{process.pid}/fd")))
        for table in ("tcp", "tcp6", "udp", "udp6", "unix"):
            for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                inode = fields[6] if table == "unix" else fields[9]
                # 0A is LISTEN; an unconnected UDP socket shows 07; the ACC flag of a Unix socket means that it listens
                open_door = int(fields[3], 16) & 0x10000 if table == "unix" else fields[3] in ("0A", "07")
                if open_door and f"socket:[{inode}]" in inodes:
                    found.add((process.pid, f"{table} {inode}"))
    return found


def _links(folder: Path) -> Iterator[str]:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this very listing is closed by now
            yield os.readlink(path)


@covers("Z07")
def test_the_host_has_no_code_that_would_run_what_a_sandbox_sends() -> None:
    package = Path(asyncrlm.__file__).parent
    sandbox_side = package / "repl" / "worker"
    codec = sandbox_side / "codec.py"  # shared with the host: it must be inert too
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        if sandbox_side in path.parents and path != codec:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _runs_data(node.func):
                found.append(f"{path.relative_to(package)}:{node.lineno} {ast.unparse(node.func)}")
    assert found == []


def _runs_data(called: ast.expr) -> bool:
    if isinstance(called, ast.Name):
        return called.id in {"eval", "exec", "Unpickler"}
    owners = {"pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
    return (
        isinstance(called, ast.Attribute)
        and isinstance(called.value, ast.Name)
        and called.value.id in owners
        and called.attr in {"load", "loads", "Unpickler", "open", "decode"}
    )


@covers("Z07")
def test_the_host_unpickles_nothing_in_a_whole_run() -> None:
    program = textwrap.dedent(
        """
        import sys
        from asyncrlm import RLM
        seen = []
        def watch(event, args):
            if event in ("pickle.find_class", "marshal.loads", "exec") and armed and event != "marshal.loads":
                seen.append((event, repr(args)[:200]))
        armed = False
        code = '''
        import pickle, os
        class Evil:
            def __reduce__(self):
                return os.system, ("echo pwned",)
        take(pickle.dumps(Evil()))
        take({"py/reduce": [{"py/function": "os.system"}, {"py/tuple": ["echo pwned"]}]})
        answer["content"] = {"evil": Evil(), "bytes": pickle.dumps(Evil())}
        answer["ready"] = True
        '''
        turns = ["```repl\\nx = 1\\n```", "```repl\\n" + code + "\\n```"]
        async def model(messages):
            return turns[sum(m["role"] == "assistant" for m in messages)]
        taken = []
        rlm = RLM(backend=model, custom_tools={"take": taken.append})
        rlm.completion("warm up, so that what loads late is loaded", max_iterations=30)
        taken.clear()
        sys.addaudithook(watch)
        armed = True
        result = rlm.completion("CTX")
        armed = False
        assert [type(t).__name__ for t in taken] == ["bytes", "dict"], taken
        assert isinstance(result.response, str)
        assert [s for s in seen if s[0] == "pickle.find_class"] == [], seen
        print("inert")
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=False, text=True)
    assert (done.returncode, done.stdout) == (0, "inert\n"), done.stderr


@both
@pytest.mark.parametrize(("id", "wanted"), [("B01", "18"), ("B02", "2"), ("B04", "4"), ("B05", "42")])
@covers("B01", "B02", "B04", "B05")
async def test_the_namespace_is_a_living_one(id: str, wanted: str) -> None:
    with anyio.fail_after(10):
        outcome = await run_case(id)
    assert outcome.answer == wanted
    if id == "B04":
        assert "kept" in outcome.root.seen(2)


@one
@covers("B03")
@pytest.mark.parametrize("logged", [False, True])
async def test_a_repr_that_raises_is_contained(logged: bool) -> None:
    more = cell(
        "class Worse:\n    def __repr__(self):\n        raise SystemExit\nworse = [Worse(), odd]\nprint('again')\nodd"
    )
    turns = [scripted(CASES["B03"])[0], more, submit("'ok'")]
    with anyio.fail_after(10):
        outcome = await run(turns, logger=RLMLogger() if logged else None)
    assert outcome.answer == "ok"
    assert "made" in outcome.root.seen(2)
    assert "again" in outcome.root.seen(3)


@both
@covers("B11")
async def test_memory_that_runs_out_fails_one_cell() -> None:
    with anyio.fail_after(10):
        outcome = await run_case("B11")
    assert outcome.answer == "ok"
    assert re.search("(?i)memory", outcome.root.seen(2))


@one
@covers("B11")
async def test_memory_taken_bit_by_bit_fails_one_cell() -> None:
    bomb = cell("hold = []\nwhile True:\n    hold.append(bytearray(8 << 20))")
    with anyio.fail_after(10):
        outcome = await run([bomb, submit("context")], environment_kwargs={"memory_limit": "256MB"})
    assert outcome.answer == "CTX"
    assert re.search("(?i)memory", outcome.root.seen(2))


@both
@covers("B12")
async def test_a_tool_that_holds_a_lock_of_the_host_is_called_on_the_host() -> None:
    lock = threading.Lock()
    threads: list[str] = []

    def lookup(key: str) -> str:
        with lock:
            threads.append(threading.current_thread().name)
            return f"{os.getpid()}:{key}"

    with anyio.fail_after(10):
        outcome = await run_case("B12", custom_tools={"lookup": lookup})
    assert outcome.answer == f"{os.getpid()}:k"
    assert threads != [threading.current_thread().name]


@both
@covers("M04")
async def test_an_async_tool_is_a_plain_call_in_a_cell() -> None:
    async def fetch(key: str) -> str:
        await anyio.lowlevel.checkpoint()
        return "val-" + key

    with anyio.fail_after(10):
        outcome = await run_case("M04", custom_tools={"fetch": fetch})
    assert outcome.answer == "val-k"


@both
@covers("M05")
async def test_what_a_tool_raises_is_raised_in_the_cell() -> None:
    def boom() -> None:
        raise ValueError("bad input")

    with anyio.fail_after(10):
        outcome = await run_case("M05", custom_tools={"boom": boom})
    assert "tool said bad input" in outcome.root.seen(2)
    assert outcome.answer == "ok"


@one
@covers("M05")
@pytest.mark.parametrize(
    "name",
    [
        *("context", "context_3", "history", "history_0", "answer", "SHOW_VARS", "SHOW_LIMITS", "FailedReply"),
        *(f"{a}{kind}_query{many}" for a in ("", "a") for kind in ("llm", "rlm") for many in ("", "_batched")),
        *("not a name", "class"),
    ],
)
@pytest.mark.parametrize("parameter", ["custom_tools", "custom_sub_tools"])
async def test_a_tool_cannot_take_a_reserved_name(name: str, parameter: str) -> None:
    arguments: dict[str, Any] = {parameter: {name: len}}
    with pytest.raises(ConfigurationError, match=re.escape(name)):
        AsyncRLM(backend=ScriptedRoot([]), **arguments)
