"""IPython's shell in local workers: what it adds, that all of it is text, and that the rules are those of Python."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import anyio
import pytest
from local_support import CAP, PlainScope, client

from asyncrlm import AsyncRLM, ConfigurationError, Repl
from asyncrlm.environments import environment
from asyncrlm.environments.ipython import IPythonEnvironment
from asyncrlm.testing import ScriptedLM

from .cases.models import SubModel, cell, submit
from .cases.runs import run
from .helpers import scripted
from .test_must_hold_spellings import ASK, WANTED, WIDTH

pytest.importorskip("IPython", reason="IPython is not installed")
pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")]
one = pytest.mark.parametrize("anyio_backend", ["asyncio"])


async def cells(*sources: str, **kwargs: Any) -> list[Any]:
    """What each of the cells came to, in one worker."""
    with anyio.fail_after(3 * CAP):
        async with Repl(environment="ipython", environment_kwargs=kwargs) as repl:
            return [await repl.execute(source) for source in sources]


async def out(*sources: str, **kwargs: Any) -> str:
    """What the last of the cells printed; none may raise."""
    outcomes = await cells(*sources, **kwargs)
    assert [o.stderr for o in outcomes] == [""] * len(outcomes)
    return outcomes[-1].stdout


# ---- what IPython adds -----------------------------------------------------------------------------------------------


async def test_values_are_shown_and_kept_in_out(no_leaks: None) -> None:
    first, second, third, quiet = await cells("6 * 7", "Out[1] + _", "_1, _2, In[1]", "6;")
    assert first.stdout == "Out[1]: 42\n"
    assert second.stdout == "Out[2]: 84\n"
    assert third.stdout == "Out[3]: (42, 84, '6 * 7')\n"
    assert quiet.stdout == ""


@one
@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        ("%timeit -n1 -r1 pass", r"per loop"),
        ("%%time\nx = 5", r"Wall time"),
        ("!echo one; echo two", r"one\ntwo\n"),
        ("print('a', end='')\n!echo b", r"ab\n"),
        ("w = 'hi'\n!echo {w} $w", r"hi hi\n"),
        ("lines = !printf 'a\\nb'\nprint(list(lines))", r"\['a', 'b'\]\n"),
        ("%%bash\necho from bash", r"from bash\n"),
        ("len?", r"Signature: +len\(obj, /\)"),
        ("def f(x):\n    '''Adds one.'''\n    return x + 1\nf??", r"return x \+ 1"),
        ("%%writefile made.txt\nabc", r"Writing made.txt"),
        ("%%capture c\nprint('x')", r"^$"),
        ("y = 1\n%who int", r"\by\b"),
        ("%cd -q .\n%pwd", r"Out\[1\]: '/"),
        ("%quickref", r"Quick Reference"),
        ("from IPython.display import Markdown, display\ndisplay(Markdown('# hi'), 3)", r"# hi\n3\n"),
        ("from IPython.display import HTML\nHTML('<b>x</b>')", r"Out\[1\]: <b>x</b>\n"),
        ("import asyncio\nawait asyncio.sleep(0, 'slept')", r"'slept'"),
        ("get_ipython().run_line_magic('precision', '2')\n1/3", r"0\.33"),
    ],
)
async def test_magics(source: str, pattern: str) -> None:
    text = await out(source)
    assert re.search(pattern, text), text
    assert "\x1b" not in text


@one
async def test_a_shell_in_the_working_folder_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(outside))
    work = tmp_path / "work"
    work.mkdir()
    home_before = set(os.listdir(Path.home()))
    async with PlainScope() as scope, client(scope, IPythonEnvironment(workdir=work)) as c:
        for source in ("x = 1", "%cd -q .", "%bookmark here", "!echo hi > made", "%history", "%%bash\ntrue", "1/0"):
            await c.run(source)
        assert os.listdir(work) == ["made"]
        [home] = outside.iterdir()
        assert {p.name for p in home.iterdir()} <= {
            "lock",
            "log",
            "work",
            "probe",
            *(p.name for p in home.glob("?" * 16)),
        }
        assert await c.run("import threading\nprint(threading.active_count())") == "1\n"
        assert os.stat(home / "log").st_size == 0
    assert list(outside.iterdir()) == []
    assert set(os.listdir(Path.home())) == home_before


# ---- errors ----------------------------------------------------------------------------------------------------------


@one
@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("a = 1\n1/0", 'File "<cell 1>", line 2, in <module>\n    1/0'),
        ("def f(:\n  pass", "SyntaxError: invalid syntax"),
        ("\n\n  x = 1\n y = 2", "IndentationError"),
        ("%%time\n1/0", "ZeroDivisionError: division by zero"),
        ("%nonexistent", "`%nonexistent` not found"),
        ("await missing()", "NameError: name 'missing' is not defined"),
        ("import sys\nsys.exit(3)", "SystemExit: 3\nThe cell ended here; its variables are kept."),
        ("quit()", "The cell ended here"),
        ("input()", "nobody is there to type"),
        ("open('/etc/passwd')", "[sandbox] files outside the working folder"),
        ("%%bash\nexit 3", "non-zero exit status 3"),
    ],
)
async def test_errors_are_told_as_in_python_cells(source: str, wanted: str) -> None:
    failed, after = await cells(source, "print('goes on')")
    assert wanted in failed.stderr
    assert failed.stderr.count("Error") <= 2  # told once
    assert "IPython/core" not in failed.stderr
    assert "\x1b" not in failed.stderr + failed.stdout
    assert after.stdout == "goes on\n"


@one
async def test_a_cell_that_runs_another_is_told_of_its_error() -> None:
    outcome, last = await cells("get_ipython().run_cell('1/0')\nprint('after')", "1/0\n")
    assert "ZeroDivisionError" in outcome.stderr
    assert outcome.stdout == "after\n"
    assert outcome.error is None
    assert last.error
    assert "in <module>" in (await cells("1/0", "%tb"))[1].stderr


# ---- the rules of cells ----------------------------------------------------------------------------------------------


@one
async def test_reserved_names_are_put_back() -> None:
    spoilt = "llm_query = SHOW_VARS = In = Out = get_ipython = 3\nanswer = {'content': 'x', 'ready': False}\nmine = 1"
    text = await out(spoilt, "print(callable(llm_query), type(Out).__name__, answer['content'], callable(get_ipython))")
    assert text == "True dict x True\n"
    assert await out(spoilt, "%reset -f", "print(callable(llm_query), 'mine' in globals(), type(In).__name__)") in (
        "True False list\n",
        "True False HistoryList\n",
    )


@one
async def test_only_what_cells_bound_is_listed() -> None:
    text = await out("x = 1\nx", "y = 'a'\n!true", "_private = 2", "print(SHOW_VARS())")
    assert text == "x: int\ny: str\n_private: int\n"
    outcome = (await cells("x = 1\nx", "!true\n2"))[-1]
    assert set(outcome.locals) == {"x"}


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(600)",
        "import asyncio\nawait asyncio.sleep(600)",
        "!sleep 600",
        "%%bash\nsleep 600",
        "%timeit -n1 -r1 __import__('time').sleep(600)",
    ],
)
async def test_interrupts(code: str, no_leaks: None) -> None:
    stopped, after = (await cells("mine = 7", code, "print(mine)", cell_timeout=0.5))[1:]
    assert re.search(r"(?i)stopped|interrupted|time limit|timed? ?out", stopped.stderr + (stopped.error or ""))
    assert after.stdout == "7\n"


@one
async def test_tasks_of_an_interrupted_cell_are_ended() -> None:
    begin = "import asyncio\nt = asyncio.create_task(asyncio.sleep(600))\nawait asyncio.sleep(0)\nwhile True: pass"
    assert (await cells(begin, "print(t.cancelled())", cell_timeout=0.5))[1].stdout == "True\n"


@one
@pytest.mark.parametrize("spelling", ASK)
async def test_asked_at_once(spelling: str) -> None:
    sub = SubModel(str.upper, hold=True)

    async def release() -> None:
        await sub.wait_for_calls(WIDTH)
        sub.release.set()

    turns = [cell(f"qs = ['q%d' % i for i in range({WIDTH})]\n{ASK[spelling]}"), submit("'|'.join(rs)")]
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(release)
            outcome = await run(turns, sub=sub, environment="ipython")
    assert outcome.answer == WANTED
    assert sub.max_in_flight == WIDTH


async def test_a_run_from_the_door_to_the_answer(no_leaks: None) -> None:
    root = scripted(
        cell("n = len(context)\nn"), cell("%%time\nreply = llm_query('say')"), submit("reply + str(n) + str(Out[1])")
    )
    with anyio.fail_after(3 * CAP):
        rlm = AsyncRLM(root, other_backends=[ScriptedLM(["yes"])], environment="ipython")
        completion = await rlm.acompletion("four")
    assert completion.response == "yes44"


@one
async def test_values_that_are_large_are_cut() -> None:
    text = await out("['x' * 1_000_000] * 1_000")
    assert len(text) < 50_000
    assert len(await out("'x' * 100_000_000")) < 50_000


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kernel_mode": "in_process"}, 'kernel_mode="in_process".*host\'s process'),
        ({"kernel_mode": "thread"}, "kernel_mode='thread'"),
        ({"subcall_timeout": 3}, "subcall_timeout: it is an argument of AsyncRLM"),
        ({"max_concurrent_subcalls": 3}, "max_concurrent_subcalls: it is an argument of AsyncRLM"),
        ({"cell_timeout": 0}, "cell_timeout"),
        ({"startup_timeout": 0}, "startup_timeout=0: use seconds above 0"),
        ({"colour": 1}, "no setting 'colour'; it has .*kernel_mode"),
    ],
)
def test_settings_that_can_not_be_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        environment("ipython", kwargs)


async def test_an_interpreter_without_ipython_is_named(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    async with PlainScope() as scope:
        with pytest.raises(ConfigurationError, match=r"has no IPython: install ipython>=8\.20"):
            await IPythonEnvironment(python=tmp_path / "bare" / "bin" / "python").open(scope)
