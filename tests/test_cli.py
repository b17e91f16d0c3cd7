"""The `asyncrlm` command, as a Unix user expects it."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import asyncrlm
from asyncrlm.cli import demo, main
from asyncrlm.testing import FakeOpenAIServer, FakeReply, FakeRequest

from .helpers import killed_at_the_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


TEXT = "The cat sat on the mat. The dog slept under the table. It rained all day.\n"
COMMAND = [sys.executable, "-m", "asyncrlm"]


class Ran(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """The command inside this process."""
    for name in list(os.environ):
        if name.endswith("_API_KEY"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str | Path) -> Ran:
        monkeypatch.setattr(sys, "argv", ["asyncrlm", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        code = exit_.value.code
        out, err = capfd.readouterr()
        return Ran(code if isinstance(code, int) else 0 if code is None else 1, out, err)

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT + "".join(f"On day {day} it rained in the town.\n" for day in range(500)))
    return path


def test_version(cli: Callable[..., Ran]) -> None:
    assert cli("--version") == (0, f"asyncrlm {asyncrlm.__version__}\n", "")


def test_version_loads_no_engine() -> None:
    code = """
import atexit, runpy, sys
atexit.register(lambda: print([name for name in ("openai", "asyncrlm.engine", "tenacity") if name in sys.modules]))
sys.argv = ["asyncrlm", "--version"]
runpy.run_module("asyncrlm", run_name="__main__")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_the_answer_alone_goes_to_standard_output(cli: Callable[..., Ran], text: Path) -> None:
    ran = cli("run", text, "-q", "Where did the cat sit?", "--backend", "offline")
    assert ran.status == 0
    assert "The cat sat on the mat" in ran.out
    assert ran.err == ""


def test_a_folder_and_a_pattern(cli: Callable[..., Ran], text: Path, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("The horse sat in the stable.\n")
    for what, lazy in ((tmp_path, []), (tmp_path / "*.txt", []), (text, ["--lazy"])):
        ran = cli("run", what, "-q", "Where did the cat sit?", "--backend", "offline", *lazy)
        assert (ran.status, ran.err) == (0, "")
        assert "The cat sat on the mat" in ran.out


def test_verbose_shows_progress_on_standard_error(cli: Callable[..., Ran], text: Path) -> None:
    ran = cli("run", text, "-q", "Where did the cat sit?", "--backend", "offline", "--verbose")
    assert ran.status == 0
    for part in ("context: ", "question: Where did the cat sit?", "turn 1/", "cell 1", "stopped by answer"):
        assert part in ran.err
    assert "turn 1/" not in ran.out


def test_json(cli: Callable[..., Ran], text: Path) -> None:
    ran = cli("run", text, "-q", "Where did the cat sit?", "--backend", "offline", "--json", "--verbose")
    completion = json.loads(ran.out)
    assert "The cat sat on the mat" in completion["response"]
    assert completion["stop_reason"] == "answer"
    assert completion["prompt"] == str(text)
    assert completion["usage_summary"]["model_usage_summaries"]
    assert not completion["metadata"]


def test_standard_input(cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    ran = cli("run", "-", "-q", "Where did the cat sit?", "--backend", "offline", "--json")
    completion = json.loads(ran.out)
    assert "The cat sat on the mat" in completion["response"]
    assert completion["prompt"] == "-"


def test_a_pipe_is_a_file_too(cli: Callable[..., Ran]) -> None:
    reader, writer = os.pipe()
    os.write(writer, TEXT.encode())
    os.close(writer)
    try:
        ran = cli("run", f"/dev/fd/{reader}", "-q", "Where did the cat sit?", "--backend", "offline")
    finally:
        os.close(reader)
    assert "The cat sat on the mat" in ran.out


def test_a_log_is_written(cli: Callable[..., Ran], text: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    ran = cli("run", text, "-q", "Where did the cat sit?", "--backend", "offline", "--log-dir", logs)
    assert ran.status == 0
    (log,) = logs.iterdir()
    assert json.loads(log.read_text().splitlines()[0])["format"] == "asyncrlm"


HERE = ["--backend", "vllm", "--model", "m", "--base-url", "http://127.0.0.1:9/v1"]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["run", "{missing}", "-q", "x"], 2, "asyncrlm: {missing}: No such file or directory"),
        (["run", "{folder}/none", "-q", "x", "--backend", "offline"], 2, "No such file or directory"),
        (["run", "{folder}/*.none", "-q", "x", "--backend", "offline"], 2, "no file matches"),
        (["run", "http://127.0.0.1:1/", "-q", "x", "--backend", "offline"], 2, "; --allow-private allows it"),
        (["run", "http://x/", "-q", "x", "--backend", "offline", "--max-download", "?"], 2, "--max-download"),
        (["run", "a\0b", "-q", "x"], 2, "null byte"),
        (["run", "{text}"], 2, "question"),
        (["run"], 2, "FILE"),
        (["run", "{text}", "-q", "x", "--nonsense"], 2, "--nonsense"),
        (["run", "{text}", "-q", "x", "--max-tokens", "many"], 2, "--max-tokens"),
        (["run", "{text}", "-q", "x", "--quiet", "--verbose"], 2, "exclude each other"),
        (["run", "{text}", "-q", "x", "--backend", "nope"], 2, "asyncrlm: unknown backend 'nope'; known: "),
        (["run", "{text}", "-q", "x", "--backend", "offline", "--model", "m"], 2, "from: leave --model 'm' out"),
        (["run", "{text}", "-q", "x", "--backend", "offline", "--sub-model", "m"], 2, "leave --model 'm' out"),
        (["run", "{text}", "-q", "x", "--backend", "offline", "--environment", "docker"], 2, "docker"),
        (["run", "{text}", "-q", "x", "--backend", "offline", "--limits", "odd"], 2, "limits"),
        (["run", "{text}", "-q", "x", "--backend", "offline", "--max-depth", "-1"], 2, "-1: use a whole number, 0 or"),
        (["run", "{text}", "-q", "x", "--backend", "offline", "--max-budget", "nan"], 2, "budget"),
        (["run", "{text}", "-q", "x", "--backend", "offline", "--subcall-timeout", "-1"], 2, "--subcall-timeout"),
        (["run", "{text}", "-q", "x", "--backend", "offline", "--on-subcall-error", "odd"], 2, "--on-subcall-error"),
        (
            ["run", "{text}", "-q", "x", "--backend", "offline", "--on-limit", "odd"],
            2,
            "on-limit': odd: use raise or",
        ),
        (["run", "{text}", "-q", "x", "--backend", "offline", "--max-subcalls", "1.5"], 2, "--max-subcalls"),
        (["run", "{text}", "-q", "x"], 2, "set OPENAI_API_KEY; use a local server, --backend vllm --base-url http"),
        (
            ["run", "{text}", "-q", "x", "--backend", "vllm"],
            2,
            "asyncrlm: --backend vllm needs a model: give --model NAME\n",
        ),
        (["run", "{text}", "-q", "x", "--backend", "vllm", "--model", "m"], 2, "server: give --base-url URL, such as "),
        (["run", "{text}", "-q", "x", "--backend", "anthropic"], 2, "anthropic needs a model: give --model NAME"),
        (["run", "{text}", "-q", "x", "--backend", "openai/a", "--model", "b"], 2, "'openai/a' and --model 'b'"),
        (["run", "{text}", "-q", "x", *HERE, "--max-budget", "1"], 2, "for 'm': give it with --price IN,OUT ("),
        (["run", "{text}", "-q", "x", "--base-url", "http://u:p@h/v1"], 2, "OPENAI_API_KEY to the key"),
        (["run", "{text}", "-q", "x", "--price", "1"], 2, "--price is two numbers"),
        (["run", "{latin}", "-q", "x", "--backend", "offline"], 2, "asyncrlm: {latin}: not UTF-8 text (byte 3)\n"),
        (
            ["run", "{latin}", "-q", "x", "--backend", "offline", "--max-depth", "0"],
            2,
            "{latin}: not UTF-8 text (byte 3)",
        ),
        (
            ["run", "{text}", "-q", "x", "--backend", "offline", "--log-dir", "{text}"],
            2,
            "--log-dir {text}: File exists",
        ),
        (
            ["run", "{text}", "-q", "x", "--backend", "offline", "--max-timeout", "0.000001"],
            124,
            " of 1e-06 s; raise --max-timeout, ",
        ),
        (
            ["run", "{text}", "-q", "x", "--backend", "offline", "--max-tokens", "1"],
            1,
            "asyncrlm: token limit exceeded: ",
        ),
        (
            ["run", "{text}", "-q", "x", "--backend", "offline", "--max-tokens", "1"],
            1,
            "raise --max-tokens, or give --on-",
        ),
        (["run", "{text}", "-q", " "], 2, "'-q': it is empty"),
        (["demo", "-q", ""], 2, "'-q': it is empty"),
        (["run", "{text}", "-q", "x", "--environment", "nope"], 2, "nope: use one of local, ipython, docker, "),
        (["run", "{text}", "-q", "x", "--set", "colour=red"], 2, "no setting 'colour'; it has cell_timeout, "),
        (
            ["run", "{text}", "-q", "x", "--set", "cell_timeout=soon"],
            2,
            "cell_timeout='soon': use a number or None, not str",
        ),
        (["run", "{text}", "-q", "x", "--set", "colour"], 2, "--set colour: use --set SETTING=VALUE"),
        (["nonsense"], 2, "nonsense"),
        (["demo", "--quiet", "--verbose"], 2, "exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_in_a_line(
    cli: Callable[..., Ran], text: Path, tmp_path: Path, arguments: list[str], status: int, says: str
) -> None:
    places = {"missing": tmp_path / "missing", "folder": tmp_path, "text": text, "latin": tmp_path / "latin"}
    places["latin"].write_bytes(b"caf\xe9 ")
    ran = cli(*(argument.format(**places) for argument in arguments))
    assert ran.status == status, ran.err
    assert says.format(**places) in ran.err
    assert "Traceback" not in ran.err
    assert "_kwargs" not in ran.err
    assert "Error: " not in ran.err.replace("\nError: ", "\n")
    assert ran.out == ""
    if ran.err.startswith("asyncrlm: "):
        assert ran.err.count("\n") == 1


def test_settings_of_the_environment(cli: Callable[..., Ran], text: Path, tmp_path: Path) -> None:
    where = [
        "--environment",
        "local",
        "--set",
        "isolation=none",
        "--set",
        "max_processes=7",
        "--log-dir",
        tmp_path / "l",
    ]
    assert cli("run", text, "-q", "Where did the cat sit?", "--backend", "offline", *where).status == 0
    (log,) = (tmp_path / "l").iterdir()
    (opened,) = (
        event for event in map(json.loads, log.read_text().splitlines()) if event.get("type") == "SandboxOpened"
    )
    assert opened["in_force"]["network"] is None


def test_help_tells_what_there_is(cli: Callable[..., Ran]) -> None:
    told = " ".join(cli("run", "--help").out.split())
    assert "Where cells run: local, ipython, docker, modal, daytona, e2b, prime." in told
    assert "--set SETTING=VALUE" in told
    assert "range" not in told


def test_a_failed_run_as_json(cli: Callable[..., Ran], text: Path) -> None:
    ran = cli("run", text, "-q", "Where?", "--backend", "offline", "--max-tokens", "1", "--json")
    assert ran.status == 1
    failure = json.loads(ran.out)
    assert failure["error"]["type"] == "TokenLimitExceededError"
    assert "run_id" in failure


LIMITS = {
    "max_depth": 2,
    "max_iterations": 7,
    "max_budget": 0.5,
    "max_timeout": 60.0,
    "max_tokens": 1_000_000,
    "max_errors": 3,
    "max_subcalls": 99,
    "max_concurrent_subcalls": 5,
    "max_concurrent_requests": 6,
    "limits": "hard",
    "on_limit": "answer",
    "on_subcall_error": "raise",
    "subcall_timeout": 30.0,
    "tool_timeout": 40.0,
}


def test_every_limit_of_the_constructor_has_an_option(cli: Callable[..., Ran], text: Path, tmp_path: Path) -> None:
    options = [part for name, value in LIMITS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    where = ["--environment", "local", "--log-dir", str(tmp_path / "logs")]
    ran = cli("run", text, "-q", "Where did the cat sit?", "--backend", "offline", *where, *options)
    assert (ran.status, ran.err) == (0, "")
    (log,) = (tmp_path / "logs").iterdir()
    started = json.loads(log.read_text().splitlines()[1])
    assert started["limits"] == LIMITS
    assert started["environment"] == "local"
    parameters = inspect.signature(asyncrlm.AsyncRLM).parameters
    named = {name for name in parameters if name.startswith("max_") or name.endswith("_timeout")}
    assert named <= LIMITS.keys()
    assert cli("run", text, "-q", "x", "--backend", "offline", "--subcall-timeout", "inf").status == 0


@pytest.mark.parametrize("data", [b"caf\xe9 " * 10])
def test_standard_input_that_is_no_text(cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    ran = cli("run", "-", "-q", "x", "--backend", "offline")
    assert (ran.status, ran.err) == (2, "asyncrlm: standard input: not UTF-8 text (byte 3)\n")


def test_standard_input_that_is_not_there(cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    ran = cli("run", "-", "-q", "x", "--backend", "offline")
    assert (ran.status, ran.err) == (2, "asyncrlm: standard input is closed; pipe a text into it or name a FILE\n")


ROOT = """```repl
found = llm_query("Where did the cat sit? " + context[:24])
```"""


def test_a_model_on_a_server(cli: Callable[..., Ran], text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "for-nobody")

    def reply(request: FakeRequest) -> str:
        if request.fields["model"] == "small":
            return "on the mat"
        return ROOT if len(server.requests) == 1 else "It sat on the mat, I think."

    with FakeOpenAIServer.serve_in_thread(reply) as server:
        models = ["--model", "big", "--sub-model", "small", "--base-url", server.base_url]
        ran = cli("run", text, "-q", "Where did the cat sit?", *models, "--max-iterations", "2", "--json", "--quiet")
    assert [request.fields["model"] for request in server.requests[:2]] == ["big", "small"]
    completion = json.loads(ran.out)
    assert ran.status == 0
    assert completion["root_model"] == "big"
    assert completion["response"] == "It sat on the mat, I think."
    # Nobody submitted this answer: whoever reads it should know.
    assert completion["stop_reason"] == "max_iterations"
    assert ran.err == "asyncrlm: stopped by max_iterations; the answer is from what there was by then\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_no_answer_is_no_success(
    cli: Callable[..., Ran], text: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "for-nobody")
    with FakeOpenAIServer.serve_in_thread(lambda request: "```repl\n1 / 0\n```") as server:
        where = ["--model", "m", "--base-url", server.base_url, "--max-iterations", "1", "--quiet"]
        ran = cli("run", text, "-q", "x", *where, *(["--json"] if as_json else []))
    why = "no answer after 1 turn and a last one; last error: ZeroDivisionError: division by zero"
    assert (ran.status, ran.err) == (1, f"asyncrlm: {why}\n")
    if as_json:
        completion = json.loads(ran.out)
        assert (completion["response"], completion["error"]) == ("", why)
    else:
        assert ran.out == ""


def test_a_limit_is_told_of_beside_the_answer(
    cli: Callable[..., Ran], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "for-nobody")
    code = "answer.update(content='half', ready=True)\nllm_query('a')"
    with FakeOpenAIServer.serve_in_thread(lambda request: f"```repl\n{code}\n```") as server:
        where = ["--model", "m", "--base-url", server.base_url, "--max-subcalls", "0", "--quiet"]
        ran = cli("run", text, "-q", "x", *where)
    assert (ran.status, ran.out) == (0, "half\n")
    assert ran.err == "asyncrlm: limit met: sub-call limit exceeded: 0 of 0 made; the answer may lack parts\n"


def test_a_budget_is_kept_by_a_price_of_the_command_line(
    cli: Callable[..., Ran], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply(request: FakeRequest) -> str:
        return (
            "7"
            if request.fields["model"] == "small"
            else "```repl\nanswer.update(content=llm_query('a'), ready=True)\n```"
        )

    with FakeOpenAIServer.serve_in_thread(reply) as server:
        where = ["--backend", "vllm", "--model", "big", "--sub-model", "small", "--base-url", server.base_url]
        prices = ["--max-budget", "1", "--price", "1,2", "--sub-price", "0.5, 1"]
        ran = cli("run", text, "-q", "x", *where, *prices, "--json", "--quiet")
    usage = json.loads(ran.out)["usage_summary"]["model_usage_summaries"]
    for model, price in {"big": 1, "small": 0.5}.items():
        tokens = usage[model]["total_input_tokens"] + 2 * usage[model]["total_output_tokens"]
        assert usage[model]["total_cost"] == pytest.approx(tokens * price / 1e6)


def test_models_are_named_by_options(text: Path) -> None:
    from asyncrlm.cli.ask import backend_arguments

    assert backend_arguments("offline", model=None, sub_model=None, base_url=None) == {"backend": "offline"}
    given: dict[str, Any] = backend_arguments("vllm", model="big", sub_model="small", base_url="http://h/v1")
    assert given == {
        "backend": "vllm",
        "backend_kwargs": {"base_url": "http://h/v1", "model_name": "big"},
        "other_backends": ["vllm"],
        "other_backend_kwargs": [{"base_url": "http://h/v1", "model_name": "small"}],
    }


def test_a_terminal_sees_time_pass_and_a_failure_once(
    cli: Callable[..., Ran], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    parent, child = pty.openpty()
    shown = ""

    def see(last: str) -> None:
        nonlocal shown
        while last not in shown:
            assert select.select([parent], [], [], 10)[0], shown
            shown += os.read(parent, 65536).decode()

    def refuse(request: FakeRequest) -> FakeReply:
        see("asking m, 1 s")
        return FakeReply.fault(400, "not this one")

    with open(child, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with FakeOpenAIServer.serve_in_thread(refuse) as server:
            ran = cli("run", text, "-q", "x", "--backend", "vllm", "--model", "m", "--base-url", server.base_url)
        see("asyncrlm: HTTP 400")
    os.close(parent)
    assert (ran.status, ran.out) == (1, "")
    assert shown.count("not this one") == 1
    assert "failed (1 turn, " in shown


@pytest.mark.parametrize(
    ("called", "advised"),
    [
        ("{bin}/asyncrlm", "asyncrlm"),
        (".venv/bin/asyncrlm", ".venv/bin/asyncrlm"),
        ("/x/asyncrlm/__main__.py", "python -m asyncrlm"),
    ],
)
def test_the_demo_advises_what_can_be_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, called: str, advised: str
) -> None:
    (tmp_path / "asyncrlm").write_text("")
    (tmp_path / "asyncrlm").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [called.format(bin=tmp_path)])
    monkeypatch.setattr(demo, "ask", lambda *args, **kwargs: None)
    demo.run_demo(None, progress="brief", as_json=False)
    assert f"The code of each turn: {advised} demo --verbose\n" in capsys.readouterr().err


def test_demo(cli: Callable[..., Ran]) -> None:
    ran = cli("demo")
    assert ran.status == 0, ran.err
    assert "generator" in ran.out
    assert "StopIteration" in ran.out
    assert "offline" in ran.err
    assert "no language model" in ran.err
    assert " sub-calls" in ran.err
    assert len(ran.err.splitlines()) < 20
    # The code of the cells, their output, the replies: for those who ask.
    assert "def as_text" not in ran.err
    long = cli("demo", "--verbose")
    assert (long.status, long.out) == (0, ran.out)
    assert "def as_text" in long.err
    assert "offline replied" in long.err
    quiet = cli("demo", "--quiet", "--json", "-q", "What does the pass statement do?")
    assert quiet.err == ""
    assert "pass" in json.loads(quiet.out)["response"]


# ---- in a process of its own -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def silent_server() -> Iterator[socket.socket]:
    """A server that takes requests and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        yield server


def test_ctrl_c_ends_it_with_130_and_no_traceback(text: Path) -> None:
    with silent_server() as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        process = subprocess.Popen(
            [*COMMAND, "run", text, "-q", "x", "--model", "m", "--base-url", url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OPENAI_API_KEY": "none"},
        )
        with killed_at_the_end(process), server.accept()[0] as connection:
            connection.settimeout(10)
            assert connection.recv(1)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (130, "", "asyncrlm: interrupted\n")


def test_ctrl_c_while_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ran = subprocess.run([*COMMAND, "demo"], capture_output=True, text=True, check=False, timeout=60, env=env)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "asyncrlm: interrupted\n")


def test_a_reader_that_has_gone_ends_it_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as stdout:
        ran = subprocess.run(
            [*COMMAND, "demo", "--quiet"], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_is_said() -> None:
    with open("/dev/full", "wb") as stdout:
        ran = subprocess.run(
            [*COMMAND, "demo", "--quiet"], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert (ran.returncode, ran.stderr) == (1, "asyncrlm: standard output: No space left on device\n")


def test_without_standard_error_the_answer_still_comes() -> None:
    script = f"exec {' '.join(COMMAND)} demo 2>&-"
    ran = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0
    assert "generator" in ran.stdout
    assert "The model is the offline one" not in ran.stdout


def test_without_standard_output_nothing_is_paid_for() -> None:
    script = f"exec {' '.join(COMMAND)} demo --quiet >&-"
    ran = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stderr) == (2, "asyncrlm: standard output is closed; nothing was run\n")


HOSTILE = "The cat sat \x1b[31mon the\x1b]0;owned\x07 red mat. The dog slept.\n"


def test_escapes_reach_nobody(tmp_path: Path) -> None:
    path = tmp_path / "hostile.txt"
    path.write_text(HOSTILE)
    arguments = [*COMMAND, "run", str(path), "-q", "Where did the cat sit?", "--backend", "offline"]
    piped = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
    assert "on the red mat" in piped.stdout
    assert "\x1b" not in piped.stdout
    shown = on_terminal(arguments)
    assert "on the red mat" in shown
    assert "owned" not in shown
    assert "\x1b[31m" not in shown
    # A terminal gets progress too.
    assert "turn 1/" in shown


def on_terminal(arguments: list[str]) -> str:
    parent, child = pty.openpty()
    env = os.environ | {"NO_COLOR": "1"}
    try:
        started = subprocess.Popen(arguments, stdin=child, stdout=child, stderr=child, env=env, text=True)
        with killed_at_the_end(started) as process:
            os.close(child)
            data = b""
            with contextlib.suppress(OSError):
                while select.select([parent], [], [], 60)[0]:
                    chunk = os.read(parent, 65536)
                    if not chunk:
                        break
                    data += chunk
            assert process.wait(10) == 0
    finally:
        os.close(parent)
    return data.decode()
