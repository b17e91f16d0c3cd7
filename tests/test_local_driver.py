"""The driver of the local environment: start, speak, interrupt, end; and that nothing outlives what owns it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from local_support import CAP, COMETS, DAEMONS, Client, PlainScope, client, marked, mode_or_skip, opening, until

from asyncrlm.environments.local import LocalEnvironment
from asyncrlm.environments.local_process import STOP_LIMIT
from asyncrlm.environments.local_template import SPARES

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")]
everywhere = pytest.mark.parametrize(
    ("anyio_backend", "mode"),
    [("asyncio", "pidns"), ("trio", "pidns"), ("asyncio", "warden"), ("asyncio", "scope"), ("asyncio", "walk")],
)


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every home of these tests lies here; a name that needs care is taken care of."""
    folder = tmp_path_factory.mktemp('it\'s a "folder" $x')
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def tag() -> str:
    return f"{time.time_ns() % 10**12}"


def pid_of(c: Client) -> int:
    text = Path(f"/proc/self/fdinfo/{c.sandbox._pidfd}").read_text()
    return int(text.partition("Pid:\t")[2].split()[0])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# ---- speaking --------------------------------------------------------------------------------------------------------


async def test_a_cell_runs_and_nothing_is_left(no_leaks: None, temporary: Path) -> None:
    async with PlainScope() as scope:
        async with client(scope) as c:
            assert c.ready["python"] == c.sandbox.report.python == sys.version.split()[0]
            printed = await c.run(
                "import os, subprocess, ctypes, sys\nprint('py')\nsubprocess.run(['echo', 'sub'])\n"
                "ctypes.CDLL(None).puts(b'C'); ctypes.CDLL(None).fflush(None)\nn = os.write(1, b'raw')"
            )
            assert printed == "py\nsub\nC\nraw"
            assert c.sandbox.cpu_seconds() is not None
            await c.run("import time; t = time.process_time()\nwhile time.process_time() < t + 0.05: pass")
            assert c.sandbox.cpu_seconds() >= 0.04
            assert "open" in repr(c.sandbox)
            assert os.listdir(temporary)
        sandbox = c.sandbox
        await sandbox.aclose()
        assert "closed" in repr(sandbox)
        assert sandbox.cpu_seconds() is None
        sandbox.interrupt()
        sandbox.kill()
        with pytest.raises(anyio.EndOfStream):
            await sandbox.receive()
        with pytest.raises(anyio.BrokenResourceError):
            await sandbox.send(b"x")
        with pytest.raises(anyio.BrokenResourceError):
            await sandbox.pass_file(opening(Path(__file__)))
    assert os.listdir(temporary) == []


async def test_output_is_bounded_and_all_there(no_leaks: None) -> None:
    async with PlainScope() as scope, client(scope, max_output=1000) as c:
        await c.begin("print('<' + 'x' * 5_000_000 + '>')\nimport sys; print('e' * 700, file=sys.stderr)")
        assert (await c.frame())["t"] == "done"
        out, err = c.sandbox.take_output()
        assert (out.head[:1], out.tail[-2:], len(out.head), len(out.tail)) == (b"<", b">\n", 500, 500)
        assert out.omitted == 5_000_003 - 1000
        assert err.text() == "e" * 700 + "\n"
        assert await c.run("pass") == ""
        await c.run("import subprocess; p = subprocess.Popen(['/usr/bin/yes'], start_new_session=True)")
        with anyio.fail_after(CAP):
            await c.run("p.kill()")
            assert await c.attempt("p.wait()") is None


async def test_big_messages_pass_both_ways(no_leaks: None) -> None:
    async with PlainScope() as scope, client(scope) as c:
        frame = {"t": "load", "id": 1, "name": "x", "form": "text", "value": "y" * 3_000_000}
        await c.sandbox.send(json.dumps(frame).encode() + b"\n")
        await c.frame()
        assert (await c.attempt("raise ValueError('z' * 2_000_000)") or "").startswith("ValueError")


async def test_files_are_put_and_passed(no_leaks: None, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("passed")
    async with PlainScope() as scope, client(scope) as c:
        path = await c.sandbox.put_file("data", iter([b"ab", b"c" * 100_000]))
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert await c.value(f"print(len(open({path!r}).read()))") == 100_002
        assert await c.attempt(f"open({path!r}, 'a')")
        for name in ("", "..", "a/b", "/etc/x"):
            with pytest.raises(ValueError, match="file name"):
                await c.sandbox.put_file(name, [])
        with pytest.raises(FileExistsError):
            await c.sandbox.put_file("data", [])
        await c.sandbox.pass_file(opening(tmp_path / "mine"))
        frame = {"t": "load", "id": 1, "name": "context", "form": "text", "descriptor": True}
        await c.sandbox.send(json.dumps(frame).encode() + b"\n")
        assert (await c.frame()).get("error") is None
        assert await c.run("print(context)") == "passed\n"
        with pytest.raises(FileNotFoundError):
            await c.sandbox.pass_file(opening(tmp_path / "none"))


async def test_user_folder_is_written_and_stays(tmp_path: Path) -> None:
    async with PlainScope() as scope:
        async with client(scope, workdir=tmp_path) as c:
            assert await c.run("import os; open('made', 'w').write('x'); print(os.getcwd())") == f"{tmp_path}\n"
        assert (tmp_path / "made").read_text() == "x"


NEST = "import os\nfor i in range(1200): os.mkdir('d'); os.chdir('d')\nprint('made')"


@pytest.mark.parametrize(
    ("anyio_backend", "mode", "settings"),
    [
        ("asyncio", "pidns", {"isolation": "none"}),
        ("trio", "warden", {"max_file_size": None}),
        ("asyncio", "scope", {}),
    ],
)
async def test_folders_nested_deep_hurt_nobody(mode: str, settings: dict[str, Any], temporary: Path) -> None:
    async with PlainScope() as scope:
        environment = await mode_or_skip(scope, mode, **settings)
        async with client(scope, environment) as neighbour:
            template = scope.template._process._popen.pid
            async with client(scope, environment) as c:
                assert await c.run(NEST) == "made\n"
                folder = Path(c.sandbox._files)
            assert await neighbour.value("print(1)") == 1
            assert not folder.exists()
            async with client(scope, environment) as again:
                assert await again.value("print(1)") == 1
                assert scope.template._process._popen.pid == template
                await again.run(NEST)
    assert os.listdir(temporary) == []


async def test_a_forked_child_of_the_host_does_not_hold_up_the_end(temporary: Path) -> None:
    child = 0
    async with PlainScope(long_lived=True) as scope:
        async with client(scope) as c:
            # It has a copy of every descriptor that is open now.
            child = await anyio.to_thread.run_sync(fork_and_stay)
            assert await c.value("print(1)") == 1
        process = scope.template._process
        began = anyio.current_time()
    try:
        assert anyio.current_time() - began < STOP_LIMIT / 2
        assert process._popen.returncode == 0  # it ended, it was not killed
        assert os.listdir(temporary) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def fork_and_stay() -> int:
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        while True:
            signal.pause()
    return pid


# ---- ending ----------------------------------------------------------------------------------------------------------


async def test_interrupt_stops_a_cell_and_keeps_its_variables(no_leaks: None) -> None:
    async with PlainScope() as scope, client(scope) as c:
        await c.begin("keep = 41\nopen('started', 'w')\nwhile True: pass")
        cpu = c.sandbox.cpu_seconds()
        await until(lambda: c.sandbox.cpu_seconds() > cpu)
        with anyio.fail_after(CAP):
            c.sandbox.interrupt()
            assert (await c.frame())["error"]["type"] == "KeyboardInterrupt"
        assert await c.value("print(keep + 1)") == 42


@everywhere
async def test_whatever_ends_a_worker_its_daemons_end(mode: str, tag: str) -> None:
    async with PlainScope() as scope:
        environment = await mode_or_skip(scope, mode)
        async with client(scope, environment) as neighbour:
            other = tag + "9"
            await neighbour.run(DAEMONS.format(tag=other))
            for code, status in (("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), (None, -9)):
                async with client(scope, environment) as c:
                    await c.run(DAEMONS.format(tag=tag))
                    await until(lambda: len(marked(tag + "\0")) == 3)
                    if code is not None:
                        await c.begin(code)
                    else:
                        await c.begin("while True: pass")
                        c.sandbox.kill()
                    with anyio.fail_after(CAP):
                        *_, last = await c.until_end()
                    # The end of the channel is the signal: nothing may be left when it comes.
                    assert marked(tag + "\0") == []
                    assert (last["t"], last["status"]) == ("exited", status)
                    folders = [p for p in scope.template._process.home.iterdir() if len(p.name) == 16]
                    kept = neighbour.sandbox._files
                    assert [p for p in folders if os.fspath(p) != kept and any(p.iterdir())] == []
            await until(lambda: len(marked(other)) == 3)
        assert marked(other) == []


@everywhere
async def test_a_cell_that_ends_its_channel_ends_with_it(mode: str, tag: str) -> None:
    hang_up = (
        "import os, socket, stat\nfor n in map(int, os.listdir('/proc/self/fd')):\n"
        "    if os.path.exists(f'/proc/self/fd/{n}') and stat.S_ISSOCK(os.fstat(n).st_mode):\n"
        "        end = socket.socket(fileno=n); end.shutdown(socket.SHUT_WR); end.detach()\nwhile True: pass"
    )
    async with PlainScope() as scope:
        environment = await mode_or_skip(scope, mode, isolation="none")  # confined it may not even try
        async with client(scope, environment) as c:
            await c.run(DAEMONS.format(tag=tag))
            await until(lambda: len(marked(tag)) == 3)
            worker = pid_of(c)
            await c.begin(hang_up)
            with anyio.fail_after(CAP):
                await c.until_end()
                await c.sandbox.aclose()
        assert marked(tag) == []
        assert not os.path.exists(f"/proc/{worker}")
        async with client(scope, LocalEnvironment(_mode=mode)) as c:
            assert "PermissionError" in str(await c.attempt(hang_up.replace("while True: pass", "")))


@everywhere
async def test_closing_ends_what_forks_without_end(mode: str, tag: str) -> None:
    async with PlainScope() as scope:
        environment = await mode_or_skip(scope, mode)
        async with client(scope, environment) as c:
            await c.run(DAEMONS.format(tag=tag))
            if mode != "walk":  # there it is a race, and reported as such
                await c.run(COMETS)
            with anyio.fail_after(CAP):
                await c.sandbox.aclose()
        assert marked(tag) == []
        await until(lambda: children_of(scope.template._process._popen.pid) == [])


async def test_closing_under_a_waiting_task(no_leaks: None) -> None:
    async with PlainScope() as scope, client(scope) as c, anyio.create_task_group() as group:
        ended = anyio.Event()

        async def wait() -> None:
            with pytest.raises(anyio.EndOfStream):
                await c.sandbox.receive()
            ended.set()

        group.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        with anyio.fail_after(CAP):
            await c.sandbox.aclose()
            await ended.wait()


async def test_closing_is_done_though_cancelled(no_leaks: None, tag: str) -> None:
    async with PlainScope() as scope:
        sandbox = await LocalEnvironment().open(scope)
        c = await Client(sandbox).start()
        await c.run(DAEMONS.format(tag=tag))
        with anyio.CancelScope() as cancelled:
            cancelled.cancel()
            await sandbox.aclose()
        assert marked(tag) == []
        assert not scope.template._sandboxes


VICTIM = """
import os, sys, json, tempfile, anyio
sys.path.insert(0, {tests!r})
tempfile.tempdir = {tmp!r}
from local_support import PlainScope, client, DAEMONS, COMETS
from asyncrlm.environments.local import LocalEnvironment
async def main():
    async with PlainScope() as scope, client(scope, _mode={mode!r}) as a, client(scope, _mode={mode!r}) as c:
        await a.run(DAEMONS.format(tag={tag!r}))
        await c.run(DAEMONS.format(tag={tag!r}))
        if {mode!r} != "walk":
            await c.run(COMETS)
        await c.begin("while True: pass")
        if os.fork() == 0:  # it holds every descriptor of the host: no end of file will come
            import signal
            signal.alarm(30)
            signal.pause()
        print(json.dumps([scope.template._process._popen.pid, scope.template.facts.mode]), flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("mode", ["pidns", "scope", "walk"])
async def test_the_host_is_killed(mode: str, tag: str, temporary: Path) -> None:
    code = VICTIM.format(tests=str(Path(__file__).parent), tmp=str(temporary), mode=mode, tag=tag)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as host:
        try:
            template, got = json.loads(host.stdout.readline())
            assert got == mode or pytest.skip(f"this machine gives {got}")
            await until(lambda: len(marked(tag + "\0")) == 6)
            host.kill()
            host.wait()
            await until(lambda: not marked(tag + "\0") and not os.listdir(temporary))
            await until(lambda: not os.path.exists(f"/proc/{template}"))
        finally:
            os.killpg(host.pid, signal.SIGKILL)


@everywhere
async def test_the_template_is_killed(mode: str, tag: str, temporary: Path) -> None:
    async with PlainScope() as scope:
        environment = await mode_or_skip(scope, mode)
        async with client(scope, environment) as c:
            await c.run(DAEMONS.format(tag=tag))
            os.kill(scope.template._process._popen.pid, signal.SIGKILL)
            with anyio.fail_after(CAP):
                await c.until_end()
                await until(lambda: not marked(tag))
                async with client(scope, environment) as again:
                    assert await again.value("print(1)") == 1
        assert len(os.listdir(temporary)) == 1
    assert os.listdir(temporary) == []


@everywhere
async def test_a_warden_is_killed(mode: str, tag: str) -> None:
    async with PlainScope() as scope:
        environment = await mode_or_skip(scope, mode)
        async with client(scope, environment) as neighbour, client(scope, environment) as c:
            await c.run(DAEMONS.format(tag=tag))
            if (warden := parent_of(pid_of(c))) == scope.template._process._popen.pid:
                warden = first_beside(pid_of(c))
            os.kill(warden, signal.SIGKILL)
            with anyio.fail_after(CAP):
                *_, last = await c.until_end()
            assert (last["reason"], last["status"]) in (("its warden was killed", None), ("", -9))
            assert not marked(tag)
            assert not os.path.exists(c.sandbox._files) or not os.listdir(c.sandbox._files)
            assert await neighbour.value("print(1)") == 1


def first_beside(worker: int) -> int:
    """The first process of the pid namespace that this worker is in."""
    inside = os.readlink(f"/proc/{worker}/ns/pid")
    [first] = [
        pid for pid in children_of(parent_of(worker)) if pid != worker and os.readlink(f"/proc/{pid}/ns/pid") == inside
    ]
    return first


async def test_a_start_cancelled_at_any_instant_leaves_nothing(no_leaks: None, temporary: Path) -> None:
    async with PlainScope(long_lived=True) as scope:
        async with client(scope):
            facts = scope.template.facts
            each = 2 if facts.mode == "pidns" and not facts.userns else 1  # processes of the template's own a worker
        for i in range(25):
            with anyio.move_on_after(i * 4e-4):
                async with client(scope):
                    pass
        spares = sum(map(len, scope.template._spares.values()))
        assert len(scope.template._sandboxes) == spares <= SPARES
        await until(lambda: len(children_of(scope.template._process._popen.pid)) == spares * each)
    assert os.listdir(temporary) == []


async def test_a_template_whose_start_is_cancelled_leaves_nothing(no_leaks: None, temporary: Path) -> None:
    for delay in (0, 0.005, 0.05, 0.12):
        with anyio.move_on_after(delay):
            async with PlainScope() as scope, client(scope):
                pass
        assert os.listdir(temporary) == []
