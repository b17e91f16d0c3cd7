"""The local environment with nothing but POSIX, as on macOS; here by its private mode."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, Repl
from asyncrlm.environments.local import LocalEnvironment

from .helpers import cell, scripted, submit

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(os.name != "posix", reason="POSIX only")]


async def echo(messages: list[dict[str, str]]) -> str:
    return "re: " + messages[-1]["content"]


def portable(**settings: float) -> LocalEnvironment:
    return LocalEnvironment(_mode="portable", **settings)  # type: ignore[arg-type]


async def test_cells_make_sub_calls_print_and_leave_nothing() -> None:
    with anyio.fail_after(10):
        async with Repl(environment=portable(), lm=echo) as repl:
            result = await repl.execute(
                "import os, subprocess, sys\nprint(llm_query('a'))\nprint('err', file=sys.stderr)\n"
                "p = subprocess.Popen(['sleep', '600'])\nprint(os.getcwd(), os.getpid(), p.pid, sorted(os.environ))"
            )
            assert result.stderr == "err\n"
            first, second = result.stdout.splitlines()
            assert first == "re: a"
            folder, worker, child = second.split()[:3]
            assert Path(folder).is_dir()
    assert not Path(folder).parent.parent.exists()
    await gone(int(worker))
    await gone(int(child))


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")  # a killed orphan may wait for init to bury it
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


async def gone(pid: int) -> None:
    with anyio.fail_after(10):
        while not ended(pid):
            await anyio.sleep(0.01)


async def test_an_interrupt_keeps_the_namespace() -> None:
    with anyio.fail_after(10):
        async with Repl(environment=portable(cell_timeout=0.3)) as repl:
            assert (await repl.execute("x = 5\nwhile True: pass")).error is not None
            assert (await repl.execute("print(x)")).stdout == "5\n"


async def test_a_dead_worker_is_told_of_and_replaced() -> None:
    with anyio.fail_after(10):
        async with Repl(environment=portable()) as repl:
            result = await repl.execute("import os\nos._exit(3)")
            assert "exited with code 3" in (result.error or "") + result.stderr
            assert (await repl.execute("print(1)")).stdout == "1\n"


async def test_a_run_with_a_context_in_a_file_and_an_endless_cell() -> None:
    context = "long " * 100_000
    root = scripted(
        cell("while True:\n    try:\n        while True: pass\n    except KeyboardInterrupt: pass"),
        submit("str(len(context)) + llm_query('a')"),
    )
    with anyio.fail_after(20):
        rlm = AsyncRLM(root, other_backends=[echo], environment=portable(cell_timeout=0.3))
        completion = await rlm.acompletion(context)
    assert completion.response == f"{len(context)}re: a"


async def test_the_report_claims_nothing_it_does_not_hold() -> None:
    with anyio.fail_after(10):
        async with Repl(environment=portable()) as repl:
            assert repl.report is not None
            assert {row for row, held in repl.report.isolation.items() if held} == {"environment"}


async def test_strict_is_refused() -> None:
    with anyio.fail_after(10), pytest.raises(ConfigurationError, match="read_outside"):
        async with Repl(environment=LocalEnvironment(_mode="portable", isolation="strict")) as repl:
            await repl.execute("1")


HOST = """
import os, sys, anyio
for name in ("pidfd_open",):
    if hasattr(os, name): delattr(os, name)
import signal, socket, fcntl
for module, name in ((signal, "pidfd_send_signal"), (socket, "SOCK_SEQPACKET"), (fcntl, "F_SETPIPE_SZ")):
    if hasattr(module, name): delattr(module, name)
from asyncrlm import Repl
from asyncrlm.environments.local import LocalEnvironment
async def main():
    async with Repl(environment=LocalEnvironment(_mode="portable")) as repl:
        print((await repl.execute("import os; print(os.getpid(), os.getppid())")).stdout, end="", flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_without_linux_and_when_the_host_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        pids = [int(pid) for pid in host.stdout.readline().split()]
        assert len(pids) == 2
        host.send_signal(signal.SIGKILL)
        host.wait()
    for pid in pids:
        await gone(pid)
