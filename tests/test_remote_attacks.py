"""What a cell may reach elsewhere than in the local environment, whose attacks these are."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import psutil
import pytest
from local_support import CAP, Client, assault, denied, through
from msgspec import Struct
from msgspec.structs import replace

import asyncrlm.errors
from asyncrlm.environments import environment
from asyncrlm.repl.resources import ResourceScope
from asyncrlm.repl.worker import confine

from .remote_support import remote
from .test_local_attacks import HOST_READS, KERNEL, METADATA, NETWORK, ON_PROCESS, ON_USER, READS, SUID, WRITES, _looks
from .vendors import SDK_WARNINGS, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.soak,
    *SDK_WARNINGS,
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


OPEN = {
    "keeper": {"network": True},
    "modal": {"block_network": False},
    "daytona": {"network_block_all": False},
    "e2b": {"allow_internet_access": True},
    "prime": {"network_access": True},
    "docker": {"network": "host"},
}
"""Place → the setting that gives it a network."""
NEEDS = {"docker": "aiodocker", "ipython": "IPython", "kernel": "ipykernel"}
ELSEWHERE = ("docker", "ipython", "kernel")
"""Places whose settings that let cells write outside are tested with them."""


@pytest.fixture(params=[*OPEN, "ipython", "kernel"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if needs := NEEDS.get(request.param):
        pytest.importorskip(needs, reason=f"{needs} is not installed")
    if request.param == "keeper":
        yield Place(request.param, _keeper)
    elif request.param == "docker":
        host = request.getfixturevalue("docker_host")
        yield Place(request.param, lambda **settings: environment("docker", {"docker_host": host, **settings}))
    elif request.param in ("ipython", "kernel"):
        kw = {"kernel": "python3"} if request.param == "kernel" else {}
        yield Place(request.param, lambda **settings: environment("ipython", {**kw, **settings}))
    else:
        with serving(request.param, tmp_path_factory.mktemp("vendor")) as vendor:
            yield Place(request.param, vendor.environment)


class Place(Struct):
    name: str
    make: Callable[..., Any]
    """An environment with these settings."""


def _keeper(**settings: Any) -> Any:
    ours = {name: value for name, value in settings.items() if name.endswith("_paths")}
    return replace(remote(**{k: v for k, v in settings.items() if k not in ours}), **ours)


def keeper() -> int:
    """The first that runs here, else what has started the workers; this process where that is the engine's."""
    below = psutil.Process().children(recursive=True)
    keepers = (process for process in below if {"-I", "-u", "-c"} <= set(process.cmdline()))
    return [*keepers, *below, psutil.Process()][0].pid


async def test_reading_outside_is_denied(place: Place, tmp_path: Path) -> None:
    secret = tmp_path / ".env"
    secret.write_text("KEY=1")
    async with client(place.make()) as c:
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


async def test_writing_outside_is_denied(place: Place, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    victim.chmod(0o644)
    before = _looks(victim)
    async with client(place.make(read_paths=(str(victim),))) as c:
        denied(await assault(c, WRITES, VICTIM=str(victim)))
        await assault(c, {k: v for k, v in METADATA.items() if "passed" not in k}, VICTIM=str(victim))
        assert _looks(victim) == before
        denied(await assault(c, SUID))
    if place.name in ELSEWHERE:
        return
    async with client(place.make(write_paths=(str(tmp_path),))) as c:
        assert await c.attempt(f"open({str(victim)!r}, 'w').write('changed')") is None
    assert victim.read_text() == "changed"


async def test_a_network_is_there_only_where_it_is_allowed(place: Place, tmp_path: Path) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    stream, datagram = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    stream.bind(str(tmp_path / "s"))
    stream.listen()
    datagram.bind(str(tmp_path / "d"))
    values = {"PORT": server.getsockname()[1], "STREAM": str(tmp_path / "s"), "DATAGRAM": str(tmp_path / "d")}
    with server, stream, datagram:
        async with client(place.make()) as c:
            denied(await assault(c, NETWORK, **values))
        if place.name not in OPEN:
            return
        async with client(place.make(**OPEN[place.name])) as c:
            allowed = {k: NETWORK[k] for k in ("TCP", "UDP", "IPv6")}
            assert through(await assault(c, allowed, **values)) == list(allowed)
            assert await c.attempt("socket.getaddrinfo('localhost', 80)") is None


async def test_other_processes_are_out_of_reach(place: Place) -> None:
    async with client(place.make()) as neighbour, client(place.make()) as c:
        for pid in (os.getpid(), keeper()):
            denied(await assault(c, ON_PROCESS, PID=pid))
        denied(await assault(c, ON_USER))
        await c.run("if os.getppid(): os.kill(os.getppid(), 9)")  # kill(0) would be suicide
        await c.run("signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(-1, signal.SIGTERM)")
        assert await c.value("print(1)") == 1
        assert await neighbour.value("print(2)") == 2


async def test_the_kernel_is_small(place: Place) -> None:
    async with client(place.make()) as c:
        denied(await assault(c, KERNEL))


async def test_memory_and_files_are_bounded(place: Place) -> None:
    attacks = {
        "memory": "bytearray(400 << 20)",
        "mapped memory": "mmap.mmap(-1, 400 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)",
        "more memory": "resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))",
        "a file": "open('big', 'wb').write(bytes(2 << 20))",
        "a long file": "open('long', 'wb').truncate(2 << 20)",
    }
    async with client(place.make(memory_limit="300MB", max_file_size="1MB")) as c:
        outcome = await assault(c, attacks)
        outcome["more memory"] = (outcome["more memory"] or "").replace("ValueError", "OSError") or None
        denied(outcome)


async def test_nothing_of_the_host_or_the_vendor_is_there(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "hidden")
    async with client(place.make()) as c:
        names = await c.value("import json, os; print(json.dumps(sorted(os.environ)))")
        assert not [name for name in names if "SECRET" in name or "KEY" in name or "TOKEN" in name], names
        links = "[f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd')]"
        held = await c.value(f"print(json.dumps([os.readlink(p) for p in {links} if os.path.lexists(p)]))")
        # Jupyter's kernel has the history of its cells open, in its own folder.
        nobodys = ("/dev/null", "/proc/", *([f"{tempfile.gettempdir()}/asyncrlm-"] if place.name == "kernel" else []))
        files = [name for name in held if name.startswith("/") and not name.startswith(nobodys)]
        assert files == []
