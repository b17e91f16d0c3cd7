"""What a cell may reach under a keeper, with nothing around it but what the worker takes upon itself."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from local_support import CAP, Client, assault, denied, through

import asyncrlm.errors
from asyncrlm.repl.resources import ResourceScope
from asyncrlm.repl.worker import confine

from .remote_support import Plain, remote
from .test_local_attacks import HOST_READS, KERNEL, METADATA, NETWORK, ON_PROCESS, ON_USER, READS, SUID, WRITES, _looks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.soak,
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or confine.LANDLOCK_ABI < 6, reason="needs Landlock ABI 6 (Linux 6.12)"
    ),
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the attacks are the worker's


@contextlib.asynccontextmanager
async def client(environment: Any) -> AsyncIterator[Client]:
    async with ResourceScope() as scope:
        sandbox = await environment.open(scope)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(sandbox.pump)
                with anyio.fail_after(CAP):
                    started = await Client(sandbox).start()
                yield started
                group.cancel_scope.cancel()
        finally:
            await sandbox.aclose()


def keeper() -> int:
    process = Plain.made[-1].process
    assert process is not None
    return process.pid


async def test_reading_outside_is_denied(tmp_path: Path) -> None:
    secret = tmp_path / ".env"
    secret.write_text("KEY=1")
    async with client(remote()) as c:
        outcome = await assault(
            c,
            READS | HOST_READS,
            SECRET=str(secret),
            SOURCE=asyncrlm.errors.__file__,
            SCRIPT=str(Path(__file__).parent),
            HOST=os.getpid(),
            TMP=str(tmp_path),
            TEMPLATE=keeper(),
        )
    denied(outcome)


async def test_writing_outside_is_denied(tmp_path: Path) -> None:
    from msgspec.structs import replace

    victim = tmp_path / "victim"
    victim.write_text("whole")
    victim.chmod(0o644)
    before = _looks(victim)
    async with client(replace(remote(), read_paths=(str(victim),))) as c:
        denied(await assault(c, WRITES, VICTIM=str(victim)))
        await assault(c, {k: v for k, v in METADATA.items() if "passed" not in k}, VICTIM=str(victim))
        assert _looks(victim) == before
        denied(await assault(c, SUID))
    async with client(replace(remote(), write_paths=(str(tmp_path),))) as c:
        assert await c.attempt(f"open({str(victim)!r}, 'w').write('changed')") is None
    assert victim.read_text() == "changed"


async def test_a_network_is_there_only_where_it_is_allowed(tmp_path: Path) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    stream, datagram = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    stream.bind(str(tmp_path / "s"))
    stream.listen()
    datagram.bind(str(tmp_path / "d"))
    values = {"PORT": server.getsockname()[1], "STREAM": str(tmp_path / "s"), "DATAGRAM": str(tmp_path / "d")}
    with server, stream, datagram:
        async with client(remote()) as c:
            denied(await assault(c, NETWORK, **values))
        async with client(remote(network=True)) as c:
            allowed = {k: NETWORK[k] for k in ("TCP", "UDP", "IPv6")}
            assert through(await assault(c, allowed, **values)) == list(allowed)
            assert await c.attempt("socket.getaddrinfo('localhost', 80)") is None


async def test_other_processes_are_out_of_reach() -> None:
    async with client(remote()) as neighbour, client(remote()) as c:
        for pid in (os.getpid(), keeper()):
            denied(await assault(c, ON_PROCESS, PID=pid))
        denied(await assault(c, ON_USER))
        await c.run("os.kill(os.getppid(), 9)")
        await c.run("signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(-1, signal.SIGTERM)")
        assert await c.value("print(1)") == 1
        assert await neighbour.value("print(2)") == 2


async def test_the_kernel_is_small() -> None:
    async with client(remote()) as c:
        denied(await assault(c, KERNEL))
