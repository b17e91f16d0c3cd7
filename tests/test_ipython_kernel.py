"""Cells in a kernel that Jupyter knows: one of another virtual environment, under the rules of every other worker."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import psutil
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, Repl, SandboxLost
from asyncrlm.environments import environment
from asyncrlm.testing import ScriptedLM

from .cases.models import cell, submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Specs = Callable[..., dict[str, Any]]

pytest.importorskip("ipykernel", reason="ipykernel is not installed")
pytest.importorskip("jupyter_client", reason="jupyter_client is not installed")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kernels are tested on Linux"),
]
CAP = 60.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # jupyter_client runs on nothing else


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another virtual environment, which has the packages of this one and a module more; its interpreter."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "ours.pth").write_text("\n".join(ours))
    (packages / "only_there.py").write_text("VALUE = 'of the other environment'\n")
    return folder / "bin" / "python"


@pytest.fixture
def specs(tmp_path: Path, other: Path) -> Specs:
    """Makes a kernel spec and gives the settings that name it."""

    def make(argv: list[str] | None = None, language: str = "python", **more: Any) -> dict[str, Any]:
        folder = tmp_path / "kernels" / "other"
        folder.mkdir(parents=True, exist_ok=True)
        argv = argv or [str(other), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = {"argv": argv, "display_name": "Other", "language": language} | more
        (folder / "kernel.json").write_text(json.dumps(spec))
        ours = [path for path in sys.path if Path(path).name == "site-packages"]
        return {"kernel": "other", "kernel_dirs": [str(folder.parent)], "read_paths": ours}

    return make


async def ask(messages: list[dict[str, str]]) -> str:
    return messages[-1]["content"].upper()


async def test_cells_run_in_the_kernel_of_another_environment(specs: Specs, no_leaks: None) -> None:
    kwargs = specs(env={"FLAVOUR": "sweet"})
    async with Repl("ipython", context="é" * 1000, lm=ask, environment_kwargs=kwargs) as repl:
        for code, printed in (
            ("import only_there, sys; x = 5; print(only_there.VALUE, sys.prefix.endswith('venv'))", "of the other env"),
            ("print(x, len(context), llm_query('a'), len(llm_query_batched(['b'] * 200)))", "5 1000 A 200"),
            ("type(get_ipython()).__name__, x + 1", "Out[3]: ('ZMQInteractiveShell', 6)"),
            ("!echo $FLAVOUR", "sweet"),
            ("import asyncio\nprint(await asyncio.sleep(0, 1), asyncio.run(asyncio.sleep(0, 2)))", "1 2"),
            ("import multiprocessing as m\np = m.Process(target=print, args=('child',)); p.start(); p.join()", "child"),
            ("import os; os.system('echo from C'); print(os.listdir('.'))", "from C\n[]"),
            ("print(SHOW_VARS())", "x: int"),
        ):
            result = await repl.execute(code)
            assert (result.error, result.stderr) == (None, "")
            assert printed in result.stdout
        failed = await repl.execute("x = 6\n1/0")
        assert failed.error is not None
        assert 'File "<cell 9>", line 2' in failed.error
        assert (await repl.execute("print(x)")).stdout == "6\n"


async def test_a_run_from_the_door_to_the_answer(specs: Specs, no_leaks: None) -> None:
    root = ScriptedLM([cell("n = len(context)\nn"), submit("llm_query('say') + str(n) + str(Out[1])")])
    with anyio.fail_after(CAP):
        rlm = AsyncRLM(root, other_backends=[ScriptedLM(["yes"])], environment="ipython", environment_kwargs=specs())
        completion = await rlm.acompletion("four")
    assert completion.response == "yes44"


async def test_no_port_is_opened_and_nobody_listens_once_it_is_a_worker(specs: Specs) -> None:
    async with Repl("ipython", environment_kwargs=specs() | {"isolation": "none"}) as repl:
        pid = int((await repl.execute("import os; print(os.getpid())")).stdout)
        mine = psutil.Process(pid).net_connections("all")
        assert [c for c in mine if c.family.name != "AF_UNIX"] == []
        assert [c.laddr for c in mine if "kernel-ipc" in str(c.laddr)] == []


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        ("open('/etc/passwd')", "Permission denied"),
        (f"open({str(Path.home() / 'planted')!r}, 'w')", "Permission denied"),
        ("open('/usr/lib/x', 'w')", "Permission denied"),
        ("socket.socket()", "Operation not permitted"),
        ("socket.socket(socket.AF_UNIX)", "Operation not permitted"),
        ("os.kill(HOST, 0)", "Operation not permitted"),
        ("os.kill(os.getppid(), 9)", "Operation not permitted"),
        ("open(f'/proc/{HOST}/environ').read()", "Permission denied"),
        ("import ctypes; os.setuid(1)", "Operation not permitted"),
        ("bytes(3 << 30)", "MemoryError"),
    ],
)  # fmt: skip
async def test_attacks_fail_as_elsewhere(specs: Specs, attack: str, said: str) -> None:
    setup = f"import os, socket\nHOST = {os.getpid()}"
    async with Repl("ipython", environment_kwargs=specs() | {"setup_code": setup}) as repl:
        with anyio.fail_after(CAP):
            result = await repl.execute(attack)
        assert result.error is not None
        assert said in result.error
        assert repl.report is not None
        held = repl.report.isolation
        assert {row for row, by in held.items() if by} >= {
            "read_outside",
            "write_outside",
            "network",
            "kernel",
            "memory",
        }
        assert not held.get("fork_bomb")  # told as it is


async def test_with_no_isolation_nothing_is_reported_as_held(specs: Specs) -> None:
    async with Repl("ipython", environment_kwargs=specs() | {"isolation": "none"}) as repl:
        assert (await repl.execute("import socket; print(socket.socket().fileno() > 0)")).stdout == "True\n"
        assert repl.report is not None
        assert {row for row, by in repl.report.isolation.items() if by} <= {"outliving"}


async def test_one_that_takes_too_long_to_start_is_lost(specs: Specs, no_leaks: None) -> None:
    with pytest.raises(SandboxLost, match=r"not ready within 0\.01 s"):
        async with Repl("ipython", environment_kwargs=specs() | {"startup_timeout": 0.01}):
            pass


async def test_strict_is_refused_where_a_row_does_not_hold(specs: Specs) -> None:
    with pytest.raises(ConfigurationError, match=r'isolation="strict" does not hold .*fork_bomb'):
        async with Repl("ipython", environment_kwargs=specs() | {"isolation": "strict"}):
            pass


async def test_interrupts_deaths_and_fresh_kernels(specs: Specs, no_leaks: None) -> None:
    async with Repl("ipython", context="c", environment_kwargs=specs() | {"cell_timeout": 0.5}) as repl:
        await repl.execute("mine = 7")
        for code in ("while True: pass", "import time\ntime.sleep(600)", "!sleep 600", "await asyncio.sleep(600)"):
            with anyio.fail_after(CAP):
                stopped = await repl.execute("import asyncio\n" + code)
            assert stopped.error is not None
            assert "cell_timeout" in stopped.error
        assert (await repl.execute("print(mine)")).stdout == "7\n"
        gone = await repl.execute("import subprocess, os\nsubprocess.Popen(['sleep', '600'])\nos._exit(3)")
        assert gone.error is not None
        assert "exit" in gone.error
        with anyio.fail_after(CAP):
            assert (await repl.execute("print(context)")).stdout == "c\n"


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where homes are made; its path is short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        monkeypatch.undo()


async def test_cancelled_at_any_stage_it_leaves_nothing(specs: Specs, no_leaks: None, temporary: Path) -> None:
    for step in range(8):
        with anyio.move_on_after(step * 0.15):
            async with Repl("ipython", environment_kwargs=specs()) as repl:
                await repl.execute("import time; time.sleep(600)")
    assert list(temporary.iterdir()) == []


async def test_a_folder_of_yours_stays_and_one_of_a_kernel_goes_with_it(
    specs: Specs, temporary: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    kwargs = specs(env={"PATH": "/more:${PATH}"}) | {"workdir": work}
    turns = [cell("!echo $PATH > made"), submit("open('made').read()")]
    async with AsyncRLM(ScriptedLM(turns), environment="ipython", environment_kwargs=kwargs) as rlm:
        completion = await rlm.acompletion("context")
        assert completion.response.startswith("/more:/usr/local/bin:")
        (home,) = temporary.iterdir()
        assert [path.name for path in home.iterdir()] == ["lock"]
    assert os.listdir(work) == ["made"]


# ---- what can not be ----


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ({"language": "julia"}, ConfigurationError, "for julia; cells run in kernels of Python"),
        ({"argv": ["/bin/sh", "-c", "true"]}, ConfigurationError, "'/bin/sh', for python; cells run in kernels"),
        ({"argv": ["/nowhere/python", "-m", "ipykernel"]}, ConfigurationError, "can't be run: No such file"),
        ({"argv": [sys.executable, "-c", "import none_such"]}, SandboxLost, "No module named 'none_such'"),
    ],
)
async def test_a_kernel_that_can_not_be_one(
    specs: Specs, spec: dict[str, Any], error: type[Exception], message: str, no_leaks: None
) -> None:
    with pytest.raises(error, match=message), anyio.fail_after(CAP):
        async with Repl("ipython", environment_kwargs=specs(**spec)):
            pass


async def test_an_unknown_kernel_is_told_with_those_there_are(specs: Specs) -> None:
    with pytest.raises(ConfigurationError, match=r"kernel='none-such': there is no such kernel; there is .*'other'"):
        async with Repl("ipython", environment_kwargs=specs() | {"kernel": "none-such"}):
            pass


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_another_event_loop_is_refused(specs: Specs, anyio_backend: str) -> None:
    with pytest.raises(ConfigurationError, match="jupyter_client runs on asyncio only"):
        async with Repl("ipython", environment_kwargs=specs()):
            pass


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kernel": "x", "kernel_mode": "in_process"}, 'kernel_mode="in_process"'),
        ({"kernel": "x", "python": "/usr/bin/python3"}, "leave python= out"),
        ({"kernel": "x", "pool_size": 3}, "kernels are not kept ahead"),
        ({"kernel": "x", "kernel_dirs": "/kernels"}, "kernel_dirs=.*use a list"),
        ({"kernel_dirs": ["/kernels"]}, "kernel=, which is not given"),
    ],
)
def test_settings_that_can_not_be_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        environment("ipython", kwargs)
