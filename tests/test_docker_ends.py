"""How containers begin ahead of their time, end, and are told of, on a real Docker Engine."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncrlm import Repl, SandboxLost
from asyncrlm.environments import environment
from asyncrlm.environments.owners import LABEL, is_stray, owner_labels
from asyncrlm.repl.resources import ResourceScope

pytest.importorskip("aiodocker", reason="the Docker environment's SDK is not installed")

from asyncrlm.environments.docker import prune

from .docker_engine import IMAGE, ours

if TYPE_CHECKING:
    import httpx

    from asyncrlm.environments.remote_sandbox import RemoteSandbox

pytestmark = [pytest.mark.anyio, pytest.mark.soak]

CAP = 60.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # its SDK runs on nothing else


# ---- from outside ----


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("kill", "its container was killed from outside (signal 9)"),
        ("pause", "its container is paused"),
    ],
)
async def test_what_happens_to_a_container_in_the_middle_of_a_cell_is_told(
    docker: httpx.AsyncClient, action: str, said: str
) -> None:
    async with Repl("docker", environment_kwargs={"cell_timeout": 1.0}) as repl:
        await repl.execute("x = 1")
        (container,) = await ours(docker)

        async def act() -> None:
            await docker.post(f"/containers/{container['Id']}/{action}")

        async with anyio.create_task_group() as group:
            group.start_soon(act)
            with anyio.fail_after(CAP):
                result = await repl.execute("import time; time.sleep(60)")
        assert said in (result.error or "")
        assert "NameError" in ((await repl.execute("print(x)")).error or "")


async def test_a_container_that_is_killed_while_a_context_is_brought_there_is_told_of(
    docker: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream is full then, which the engine does not end."""
    from asyncrlm.environments.docker_container import Container

    original, sent, full = Container.send, 0, anyio.Event()

    async def counted(self: Container, data: bytes) -> None:
        nonlocal sent
        await original(self, data)
        sent += len(data)
        if sent > 20_000_000:
            full.set()

    monkeypatch.setattr(Container, "send", counted)

    async def use() -> None:
        with pytest.raises(SandboxLost, match=r"killed from outside|is paused"):
            async with Repl("docker", context=bytes(500_000_000)):
                pass

    with anyio.fail_after(CAP):
        async with anyio.create_task_group() as group:
            group.start_soon(use)
            await full.wait()
            (container,) = await ours(docker)
            await docker.post(f"/containers/{container['Id']}/pause")
            before = -1
            while sent > before:  # nothing more is taken
                before = sent
                await anyio.sleep(0.2)
            await docker.post(f"/containers/{container['Id']}/kill")


async def test_a_context_that_its_container_has_no_room_for_is_told_of(docker: httpx.AsyncClient) -> None:
    with anyio.fail_after(CAP), pytest.raises(SandboxLost, match="No space left on device"):
        async with Repl("docker", context=bytes(100_000_000), environment_kwargs={"tmp_size": "20MB"}):
            pass


async def test_a_pause_that_passes_is_nothing(docker: httpx.AsyncClient) -> None:
    async with Repl("docker") as repl:
        (container,) = await ours(docker)
        await docker.post(f"/containers/{container['Id']}/pause")
        await docker.post(f"/containers/{container['Id']}/unpause")
        assert (await repl.execute("print(1)")).stdout == "1\n"
        result = await repl.execute("import os; os._exit(3)")
        assert "exited with code 3" in (result.error or "")
        assert "pause" not in (result.error or "")


async def test_an_engine_that_tells_nothing_is_done_without(
    docker: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aiodocker import DockerError
    from aiodocker.events import DockerEvents

    async def refuse(_: DockerEvents, **__: Any) -> None:
        raise DockerError(500, "no events today")

    monkeypatch.setattr(DockerEvents, "run", refuse)
    async with Repl("docker") as repl:
        assert (await repl.execute("print(1)")).stdout == "1\n"
        (container,) = await ours(docker)
        await docker.post(f"/containers/{container['Id']}/kill")
        result = await repl.execute("1")  # the loss is told by this cell, or was this cell's
        assert "its engine is not heard any more: no events today" in result.stderr + (result.error or "")


# ---- cancelled ----


@pytest.mark.parametrize("stage", ["create", "attach", "start", "boot"])
async def test_cancelled_at_this_stage_it_leaves_no_container(
    docker: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    from aiodocker.containers import DockerContainer, DockerContainers

    from asyncrlm.environments.remote_sandbox import RemoteSandbox

    owner, name = {
        "create": (DockerContainers, "create"),
        "attach": (DockerContainer, "attach"),
        "start": (DockerContainer, "start"),
        "boot": (RemoteSandbox, "boot"),
    }[stage]
    original = getattr(owner, name)
    reached = anyio.Event()

    def watched(*args: Any, **kwargs: Any) -> Any:
        reached.set()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, watched)
    with anyio.fail_after(CAP):
        async with anyio.create_task_group() as group:

            async def use() -> None:
                async with Repl("docker") as repl:
                    await repl.execute("import time; time.sleep(60)")

            group.start_soon(use)
            await reached.wait()
            await anyio.sleep(0)
            group.cancel_scope.cancel()
    assert await ours(docker) == []


# ---- killed hosts ----

HOST = """
import anyio
from asyncrlm import Repl
async def main():
    async with Repl("docker") as repl:
        print("up", flush=True)
        await repl.execute("import subprocess, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)")
anyio.run(main)
"""


async def test_when_its_host_is_killed_a_container_ends(docker: httpx.AsyncClient) -> None:
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(HOST)], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        try:
            assert await anyio.to_thread.run_sync(host.stdout.readline) == b"up\n"
            assert len(await ours(docker)) == 1
        finally:
            host.send_signal(signal.SIGKILL)
    with anyio.fail_after(10):
        while await ours(docker):
            await anyio.sleep(0.02)


async def test_strays_of_processes_that_are_gone_are_removed_and_no_others(docker: httpx.AsyncClient) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine = owner_labels()
    dead = mine | {f"{LABEL}.process": f"{gone.pid}:1"}
    strays = {
        "dead": dead,
        "reused-id": mine | {f"{LABEL}.process": mine[f"{LABEL}.process"].partition(":")[0] + ":1"},
        "rebooted": mine | {f"{LABEL}.boot": "another"},
    }
    kept = {
        "elsewhere": dead | {f"{LABEL}.host": "another-machine"},
        "same-name": dead | {f"{LABEL}.host": f"{platform.node()} 0123", f"{LABEL}.boot": "another"},
        "other-processes": dead | {f"{LABEL}.namespace": "pid:[1]"},
        "odd": mine | {f"{LABEL}.process": "?"},
    }
    for name, labels in (strays | kept).items():
        body = {"Image": IMAGE, "Cmd": ["sleep", "100"], "Labels": labels}
        (await docker.post("/containers/create", params={"name": name}, json=body)).raise_for_status()
    async with Repl("docker") as repl:
        assert sorted(await prune()) == sorted(strays)
        assert (await repl.execute("print(1)")).stdout == "1\n"
    assert sorted(c["Names"][0].lstrip("/") for c in await ours(docker)) == sorted(kept)
    for name in kept:
        await docker.delete(f"/containers/{name}")
    assert not is_stray({})


# ---- kept ahead ----


async def _first_frame(sandbox: RemoteSandbox, docker: httpx.AsyncClient | None = None) -> bytes:
    """What it says first, once there are three containers if `docker` is to be asked."""
    async with anyio.create_task_group() as group:
        group.start_soon(sandbox.pump)
        with anyio.fail_after(CAP):
            data = await sandbox.receive()
            while docker is not None and len(await ours(docker)) < 3:
                await anyio.sleep(0.02)
        group.cancel_scope.cancel()
    return data


async def test_containers_are_kept_ahead_and_each_that_is_taken_is_replaced(docker: httpx.AsyncClient) -> None:
    place = environment("docker", {"pool_size": 2})
    async with ResourceScope(long_lived=True) as scope:
        names: set[str] = set()
        for _ in range(3):
            sandbox: Any = await place.open(scope)
            running = {c["Names"][0].lstrip("/") for c in await ours(docker)}
            assert len(running) == 2
            assert sandbox.machine._name in running
            names.add(sandbox.machine._name)
            assert b"ready" in await _first_frame(sandbox, docker)  # and its replacement was made beside
            await sandbox.aclose()
            assert len(await ours(docker)) == 2
        assert len(names) == 3
    assert await ours(docker) == []


async def test_a_pool_can_be_made_ready_before_any_run(docker: httpx.AsyncClient) -> None:
    async with ResourceScope(long_lived=True) as scope:
        await environment("docker", {"pool_size": 2}).prepare(scope)
        assert len(await ours(docker)) == 2
    assert await ours(docker) == []


async def test_one_kept_ahead_that_has_ended_is_replaced(docker: httpx.AsyncClient) -> None:
    place = environment("docker", {"pool_size": 2})
    async with ResourceScope(long_lived=True) as scope:
        taken: Any = await place.open(scope)
        (spare,) = [c for c in await ours(docker) if c["Names"][0].lstrip("/") != taken.machine._name]
        await docker.post(f"/containers/{spare['Id']}/pause")
        other: Any = await place.open(scope)
        assert other.machine._name != spare["Names"][0].lstrip("/")
        assert b"ready" in await _first_frame(other)
        await taken.aclose()
        await other.aclose()


async def test_a_pool_that_can_not_be_filled_says_why_and_leaves_nothing(docker: httpx.AsyncClient) -> None:
    place = environment("docker", {"pool_size": 3, "network": "nowhere"})
    async with ResourceScope(long_lived=True) as scope:
        with pytest.raises(SandboxLost, match="nowhere"):
            await place.open(scope)
        assert await ours(docker) == []


async def test_a_pool_that_is_being_filled_can_be_cancelled(docker: httpx.AsyncClient) -> None:
    place = environment("docker", {"pool_size": 3})
    async with ResourceScope(long_lived=True) as scope, anyio.create_task_group() as group:
        group.start_soon(place.open, scope)
        while not await ours(docker):
            await anyio.sleep(0)
        group.cancel_scope.cancel()
    assert await ours(docker) == []
