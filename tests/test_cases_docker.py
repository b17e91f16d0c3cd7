"""Cases about containers, on a real Docker Engine."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import anyio
import psutil
import pytest

from asyncrlm import Repl

from .cases import CASES, covers, scripted
from .cases.models import SubModel, cell, submit
from .cases.runs import run
from .docker_engine import ours
from .helpers import killed_at_the_end

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

CAP = 60.0
LISTENING = "0A"
"""The state of a socket that listens, in `/proc/net/tcp`."""

PROXIES = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy"), "http://10.255.255.1:9")


@covers("B06", "B09")
@pytest.mark.parametrize(("id", "env"), [("B06", {}), ("B09", PROXIES)])
async def test_a_sub_call_needs_no_network_and_no_proxy(
    docker: httpx.AsyncClient, id: str, env: dict[str, str]
) -> None:
    with anyio.fail_after(CAP):
        outcome = await run(
            scripted(CASES[id]),
            sub=SubModel(lambda prompt: {"ping": "pong"}[prompt]),
            environment="docker",
            environment_kwargs={"env": env},
        )
    assert outcome.answer == "pong"


@covers("Z04")
@pytest.mark.usefixtures("docker")
async def test_nothing_listens_while_a_cell_asks() -> None:
    seen: list[Any] = []

    def listening(prompt: str) -> str:
        ours_now = psutil.Process().net_connections(kind="inet")
        seen.append([each for each in ours_now if each.status == psutil.CONN_LISTEN])
        return "paid answer"

    look = cell(
        "import pathlib\nr = llm_query('x')\n"
        "rows = [r for p in ('tcp', 'tcp6') if (f := pathlib.Path('/proc/net', p)).exists()\n"
        "        for r in f.read_text().splitlines()[1:]]\n"
        f"listening = [row for row in rows if row.split()[3] == {LISTENING!r}]"
    )
    with anyio.fail_after(CAP):
        outcome = await run(
            [look, submit("str((r, listening))")],
            sub=SubModel(listening),
            environment="docker",
            environment_kwargs={"isolation": "none"},
        )
    assert outcome.answer == "('paid answer', [])"
    assert seen == [[]]


HOST = """
import anyio
from asyncrlm import Repl
async def main():
    async with Repl("docker") as repl:
        print("up", flush=True)
        await repl.execute("import time; time.sleep(1000)")
anyio.run(main)
"""


@covers("B07")
@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_no_container_outlives_its_host(docker: httpx.AsyncClient, ended_by: signal.Signals) -> None:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with killed_at_the_end(subprocess.Popen([sys.executable, "-c", HOST], **pipes)) as host:
        assert host.stdout is not None
        try:
            assert await anyio.to_thread.run_sync(host.stdout.readline) == b"up\n"
            assert len(await ours(docker)) == 1
        finally:
            host.send_signal(ended_by)
        await anyio.to_thread.run_sync(host.wait, 10)
    with anyio.fail_after(10):
        while await ours(docker):
            await anyio.sleep(0.02)


@covers("B08")
async def test_files_of_a_cell_stay_in_its_container(
    docker: httpx.AsyncClient, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with anyio.fail_after(CAP):
        outcome = await run(scripted(CASES["B08"]), environment="docker")
    assert outcome.answer == "ok"
    assert list(tmp_path.rglob("*")) == []


@covers("B13")
async def test_a_container_that_is_killed_in_mid_cell_is_told_and_replaced(docker: httpx.AsyncClient) -> None:
    async with Repl("docker") as repl:

        async def kill() -> None:
            (container,) = await ours(docker)
            await docker.post(f"/containers/{container['Id']}/kill")

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(kill)
                result = await repl.execute("import time\ntime.sleep(1000)")
            assert "its container was killed from outside" in (result.error or "")
            assert (await repl.execute("print('ok')")).stdout == "ok\n"
