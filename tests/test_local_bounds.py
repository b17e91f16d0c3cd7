"""What a worker may use up, what it sees of the host, which ordinary code it runs, and what its report says of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from local_support import (
    CAP,
    MODES,
    PRELUDE,
    PlainScope,
    assault,
    client,
    denied,
    mode_or_skip,
)

from asyncrlm.environments.local import ROWS, LocalEnvironment
from asyncrlm.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"  # the attacks are the worker's; the driver's tests run on both


@pytest.fixture(scope="module", params=MODES)
async def scope(request: pytest.FixtureRequest) -> AsyncIterator[PlainScope]:
    """One template in each mode for all attacks."""
    async with PlainScope(mode=request.param) as scope:
        await mode_or_skip(scope, request.param)
        yield scope


ORDINARY = {
    "copy": "import shutil; open('a', 'w').write('x'); shutil.copy('a', 'b'); shutil.copy2('a', 'c')",
    "move": "shutil.move('c', 'd')",
    "tree": "os.mkdir('t'); shutil.copytree('t', 'u'); shutil.rmtree('t')",
    "zip": "from zipfile import ZipFile as Z; z = Z('z.zip', 'w'); z.write('a'); z.close(); Z('z.zip').extractall('o')",
    "tar": "import tarfile; z=tarfile.open('z.tar','w'); z.add('a'); z.close(); tarfile.open('z.tar').extractall('p')",
    "tempfile": "import tempfile as t; d=t.TemporaryDirectory(); f = t.NamedTemporaryFile(); f.close(); d.cleanup()",
    "sqlite": "import sqlite3; d=sqlite3.connect('q.db'); d.execute('create table t(x)'); d.commit(); d.close()",
    "subprocess": "import subprocess; assert subprocess.check_output(['sh','-c','echo hi; cat /dev/null']) == b'hi\\n'",
    "threads": "from concurrent.futures import ThreadPoolExecutor as T; p=T(16); list(p.map(len, ['x'])); p.shutdown()",
    "socketpair": "a, b = socket.socketpair(); a.send(b'x'); assert b.recv(1) == b'x'; a.close(); b.close()",
    "own limits": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.nice(1); os.sched_setaffinity(0, {0})",
    "mime": "import mimetypes; mimetypes.guess_type('a.html')",
    "fifo": "os.mkfifo('fifo')",
    "random": "os.urandom(8); open('/dev/urandom','rb').read(8)",
    "hash and time": "import hashlib, datetime; hashlib.sha256(b'x').hexdigest(); datetime.datetime.now().astimezone()",
    "mmap": "m = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE); m.close()",
}


async def test_ordinary_code_works(scope: PlainScope) -> None:
    environment = LocalEnvironment(_mode=scope.mode)
    async with client(scope, environment) as c:
        outcome = await assault(c, ORDINARY)
        assert {k: v for k, v in outcome.items() if v} == {}
        if "proc" in scope.template.facts.mounts:
            pool = "import multiprocessing as m; p = m.Pool(2); assert p.map(abs, [-1]) == [1]; p.terminate(); p.join()"
            assert await c.attempt(pool) is None
        if "readonly" in scope.template.facts.mounts:
            script = (
                "n = open('s', 'w').write('#!/bin/sh\\necho ran')\n"
                "os.chmod('s', 0o755); print(subprocess.check_output('./s'))"
            )
            assert await c.run(script) == "b'ran\\n'\n"


# ---- secrets ---------------------------------------------------------------------------------------------------------


async def test_nothing_of_the_host_is_inherited(scope: PlainScope, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden")
    environment = LocalEnvironment(_mode=scope.mode)
    async with client(scope, environment), client(scope, environment) as c:
        seen = await c.value("import os, json; print(json.dumps(dict(os.environ)))")
        assert set(seen) <= {"PATH", "HOME", "TMPDIR", "PWD", "LANG", "LC_ALL"}
        assert seen["HOME"] == seen["TMPDIR"] == await c.value("print(json.dumps(os.getcwd()))")
        assert "hidden" not in await c.run("print(open('/proc/self/environ').read())")
        # Standard streams, the channel, whatever the worker itself opened: never the host's or a neighbour's files.
        links = await c.value(
            "print(json.dumps([os.readlink(f'/proc/self/fd/{n}') for n in sorted(os.listdir('/proc/self/fd'), key=int)"
            " if os.path.lexists(f'/proc/self/fd/{n}')]))"
        )
        assert links[0] == "/dev/null"
        assert sum(link.startswith("socket:") for link in links) <= 3
        assert not [link for link in links if link.startswith("/") and link != "/dev/null"]


# ---- bombs -----------------------------------------------------------------------------------------------------------

MEMORY = {
    "private": "x = bytearray(300 << 20)",
    "pieces": "y = [bytearray(1 << 20) for _ in range(300)]",
    "shared": "mmap.mmap(-1, 300 << 20)",
    "grows down": "mmap.mmap(-1, 300 << 20, flags=mmap.MAP_PRIVATE | 0x120)",
    "read, then write": (
        "libc.mmap.restype = ctypes.c_void_p; p = libc.mmap(None, ctypes.c_size_t(300 << 20), 1, 0x22, -1, 0)\n"
        "if libc.mprotect(ctypes.c_void_p(p), ctypes.c_size_t(300 << 20), 3): raise MemoryError"
    ),
    "memfd": "os.memfd_create('x')",
    "zero device": "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 300 << 20)",
    "shared memory folder": "open('/dev/shm/x', 'wb').write(bytes(100 << 20))",
}


async def test_memory_is_bounded(scope: PlainScope) -> None:
    environment = LocalEnvironment(_mode=scope.mode, memory_limit="256MB")
    async with client(scope, environment) as c:
        denied(await assault(c, MEMORY))
        assert await c.value("y = None; print(len(bytearray(50 << 20)))") == 50 << 20


PAGE_TABLES = (
    "libc.mmap.restype = ctypes.c_void_p\n"
    "if libc.mmap(None, ctypes.c_size_t(300 << 30), 1, 0x22, -1, 0) in (None, (1 << 64) - 1): raise MemoryError"
)


async def test_what_does_not_count_as_data_is_bounded_too(scope: PlainScope) -> None:
    environment = LocalEnvironment(_mode=scope.mode, memory_limit="256MB")
    async with client(scope, environment) as c:
        denied(await assault(c, {"page tables": PAGE_TABLES}))
        limits = [f"resource.getrlimit(resource.RLIMIT_{name})" for name in ("CORE", "NOFILE", "STACK")]
        core, files, stack = await c.value(f"print(json.dumps([{', '.join(limits)}]))")
        assert (core, files, stack[1]) == ([0, 0], [1024, 1024], 64 << 20)
        assert 0 < stack[0] <= 8 << 20  # what each thread of a program takes
        more = await c.attempt("resource.setrlimit(resource.RLIMIT_STACK, (1 << 30, 1 << 30))")
        assert more is not None
        assert more.startswith("ValueError: not allowed")
    async with client(scope, _mode=scope.mode, memory_limit=None) as c:
        assert await c.attempt(PRELUDE + PAGE_TABLES) is None


FORKS = """
n, pids = 0, []
try:
    for n in range(600):
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        pids.append(pid)
except OSError:
    pass
for pid in pids:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print(n)
"""


async def test_processes_are_bounded(scope: PlainScope) -> None:
    environment = LocalEnvironment(_mode=scope.mode, max_processes=32)
    async with client(scope, environment) as c:
        facts = scope.template.facts
        assert bool(c.sandbox.report.isolation["fork_bomb"]) == (facts.userns or facts.pid_max)
        if facts.userns or facts.pid_max:
            await assault(c, {})
            assert await c.value(FORKS) <= (32 if facts.userns else 301)


async def test_disk_is_bounded(scope: PlainScope, tmp_path: Path) -> None:
    settings: Any = {"max_file_size": "8MB"}
    environment = LocalEnvironment(_mode=scope.mode, **settings)
    async with client(scope, environment) as c:
        big = {"big": "open('big', 'wb').write(bytes(9 << 20))"}
        denied(await assault(c, big))
        many = "for i in range(40): open(f'f{i}', 'wb').write(bytes(1 << 20))"
        assert bool(await c.attempt(many)) == bool(c.sandbox.report.isolation["disk"])
    async with client(scope, _mode=scope.mode, **settings, workdir=tmp_path) as c:
        denied(await assault(c, {"big": "open('big', 'wb').write(bytes(9 << 20))"}))
        assert c.sandbox.report.isolation["disk"] is None


# ---- the report ------------------------------------------------------------------------------------------------------


async def test_report_has_every_row_and_strict_reads_it(scope: PlainScope) -> None:
    environment = LocalEnvironment(_mode=scope.mode)
    async with client(scope, environment) as c:
        rows = c.sandbox.report.isolation
        assert tuple(rows) == ROWS
        assert c.ready["in_force"] == rows
    strict = LocalEnvironment(isolation="strict", _mode=scope.mode)
    failing = [row for row, holds in rows.items() if not holds]
    with anyio.fail_after(CAP):
        if failing:
            with pytest.raises(ConfigurationError, match=failing[0]):
                await strict.open(scope)
        else:
            async with client(scope, strict) as c:
                assert all(c.sandbox.report.isolation.values())
    async with client(scope, _mode=scope.mode, isolation="none") as c:
        held = [row for row, holds in c.sandbox.report.isolation.items() if holds]
        assert held == ([] if scope.mode == "walk" else ["outliving"])
