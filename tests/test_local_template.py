"""The template that the runs of a scope share: workers kept ahead, descriptors shared fairly, homes swept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import psutil
import pytest
from local_support import CAP, MODES, Client, PlainScope, client, marked, mode_or_skip, opening, until

from asyncrlm import AsyncRLM, Repl
from asyncrlm.environments import local_sandbox, local_template
from asyncrlm.environments.local import LocalEnvironment
from asyncrlm.environments.local_process import Process, sweep_homes
from asyncrlm.environments.local_template import SPARES
from asyncrlm.errors import ConfigurationError, SandboxLost
from asyncrlm.repl.resources import ResourceScope
from asyncrlm.testing import ScriptedLM

from .helpers import scripted, submit

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def descriptors() -> Iterator[Any]:
    """Sets how many descriptors this process may open beyond those it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(more: int) -> None:
        taken = {int(name) for name in os.listdir("/proc/self/fd")}
        free = [n for n in range(len(taken) + more + 2) if n not in taken]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[more - 1] + 1, hard))

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- the shared template ---------------------------------------------------------------------------------------------


async def test_workers_kept_ahead_are_used_and_replaced(no_leaks: None) -> None:
    async with PlainScope(long_lived=True) as scope, client(scope) as c:
        [spares] = scope.template._spares.values()
        assert spares
        while len(spares) < SPARES:  # a few more with each that ends
            async with client(scope):
                pass
        first, second = spares[0], spares[1]
        async with client(scope) as taken:
            assert taken.sandbox is first
            assert await taken.value("print(1)") == 1
        assert len(spares) == SPARES
        await until(lambda: second.is_fresh() and second._pidfd >= 0)
        second.kill()
        await until(lambda: not second.is_fresh())
        async with client(scope) as taken:
            assert taken.sandbox is not second
            assert await taken.value("print(2)") == 2
        async with client(scope, max_output=10) as other:
            assert other.sandbox not in spares
        assert await c.value("print(3)") == 3


async def test_a_pool_is_there_before_its_first_run(no_leaks: None) -> None:
    size, got = 20, set[Any]()

    async def run(scope: PlainScope) -> None:
        async with client(scope, LocalEnvironment(pool_size=size)) as c:
            got.add(c.sandbox)
            assert await c.value("print(1)") == 1
            await all_in.wait()

    all_in = anyio.Event()
    async with PlainScope(long_lived=True) as scope:
        async with anyio.create_task_group() as group:
            for _ in range(size):
                group.start_soon(run, scope)
            await until(lambda: len(got) == size)
            # Together they have waited for one pool, and taken all of it.
            assert len(scope.template._sandboxes) == size
            assert sum(map(len, scope.template._spares.values())) == 0
            all_in.set()
        async with client(scope, LocalEnvironment(pool_size=size)) as c:
            assert c.sandbox not in got
        spares = [sandbox for spares in scope.template._spares.values() for sandbox in spares]
        assert spares
        assert not got & set(spares)


async def test_a_pool_can_be_made_ready_before_any_run(no_leaks: None) -> None:
    place = LocalEnvironment(pool_size=3)
    async with PlainScope(long_lived=True) as scope:
        await place.prepare(scope)
        there = set(scope.template._sandboxes)
        assert len(there) >= 3
        async with client(scope, place) as c:
            assert c.sandbox in there


async def test_without_a_pool_no_worker_is_kept_ahead(no_leaks: None) -> None:
    async with PlainScope(long_lived=True) as scope, client(scope, LocalEnvironment(pool_size=0)) as c:
        assert await c.value("print(1)") == 1
        assert list(scope.template._sandboxes) == [c.sandbox]


async def test_a_pool_whose_start_is_cancelled_is_of_use_and_leaves_nothing(no_leaks: None) -> None:
    async with PlainScope(long_lived=True) as scope:
        async with client(scope):
            pass  # the template is there
        for i in range(10):
            with anyio.move_on_after(i * 2e-3):
                async with client(scope, LocalEnvironment(pool_size=8 + i, max_output=100 + i)):
                    pass
        async with client(scope, LocalEnvironment(pool_size=8, max_output=100)) as c:
            assert await c.value("print(1)") == 1


async def test_sandboxes_left_open_are_closed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    together = anyio.Event()
    waiting = 0

    async def wait_for_end(_: Any) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == 3:
            together.set()
        await together.wait()

    async with PlainScope() as scope:
        for _ in range(3):
            await LocalEnvironment().open(scope)
        monkeypatch.setattr(local_sandbox, "GRACE", 4.0)
        monkeypatch.setattr(local_sandbox.LocalSandbox, "_wait_for_end", wait_for_end)
        began = anyio.current_time()
    assert anyio.current_time() - began < 4.0  # each alone would have waited as long


async def test_a_grace_ends_the_stopping_of_a_template_that_hangs() -> None:
    scope = ResourceScope(grace=0.5)
    await (await LocalEnvironment().open(scope)).aclose()
    [entry] = scope._entries.values()
    process = entry.value._process
    os.kill(process._popen.pid, signal.SIGSTOP)
    began = anyio.current_time()
    await scope.aclose()
    assert anyio.current_time() - began < CAP / 2  # by itself it waits longer
    assert process._popen.wait(CAP) == -signal.SIGKILL


async def test_a_worker_whose_folder_cannot_be_made_leaves_the_template_up(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    async with PlainScope() as scope, client(scope) as c:
        pid = scope.template._process._popen.pid
        (scope.template._process.home / "taken").write_text("a file where a folder is wanted")
        with monkeypatch.context() as patch:
            patch.setattr(local_template.secrets, "token_hex", lambda _size: "taken")
            failed = await LocalEnvironment().open(scope)
        with anyio.fail_after(CAP):
            [frame] = await Client(failed).until_end()
        await failed.aclose()
        assert frame["t"] == "exited"
        assert "could not be started" in frame["reason"]
        async with client(scope) as after:
            assert await after.value("print(1)") == 1
        assert await c.value("print(2)") == 2
        assert scope.template._process._popen.pid == pid


async def test_more_runs_than_descriptors_queue(no_leaks: None) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, hard))
    try:
        async with PlainScope(depth=0) as scope:
            most, finished = 0, 0

            async def run() -> None:
                nonlocal most, finished
                async with client(scope) as c:
                    most = max(most, len(scope.template._sandboxes))
                    assert await c.value("print(1)") == 1
                    finished += 1

            with anyio.fail_after(3 * CAP):
                async with anyio.create_task_group() as group:
                    for _ in range(30):
                        group.start_soon(run)
            assert finished == 30
            assert most <= scope.template._most - scope.template._most // 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Depth:
    def __init__(self, scope: PlainScope, depth: int) -> None:
        self.shared, self.depth = scope.shared, depth


async def test_parents_that_wait_leave_room_for_their_children() -> None:
    async with PlainScope(depth=0) as scope:
        async with client(scope):
            pass
        scope.template._most = 8
        leaves = 0

        async def run(depth: int) -> None:
            nonlocal leaves
            async with client(Depth(scope, depth)):
                if depth == 4:
                    leaves += 1
                    return
                async with anyio.create_task_group() as group:
                    for _ in range(2 if depth == 1 else 1):
                        group.start_soon(run, depth + 1)

        with anyio.fail_after(3 * CAP):
            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(run, 0)
        assert leaves == 10


LOW = """
import anyio, asyncrlm
async def main():
    async with asyncrlm.Repl() as repl:
        print((await repl.execute("import subprocess; print(subprocess.check_output(['echo', 'ran']))")).stdout)
anyio.run(main)
"""


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_few_descriptors_will_do() -> None:
    command = ["/bin/sh", "-c", 'ulimit -n 64; exec "$@"', "sh", sys.executable, "-c", LOW]
    with anyio.fail_after(CAP):
        done = await anyio.run_process(command, check=False)
    assert b"ran" in done.stdout, done.stderr.decode()


async def test_without_descriptors_the_sandbox_is_lost(no_leaks: None) -> None:
    async with PlainScope() as scope:
        async with client(scope):
            pass
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (4, hard))
        try:
            with pytest.raises(SandboxLost, match="ulimit"):
                await LocalEnvironment().open(scope)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_template_killed_while_it_starts_is_started_again(
    monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    hello, started = Process.hello, 0

    async def killed_at_first(process: Process) -> Any:
        nonlocal started
        started += 1
        if started == 1:
            process._popen.kill()
        return await hello(process)

    monkeypatch.setattr(Process, "hello", killed_at_first)
    answers: list[int] = []

    async def run(scope: PlainScope) -> None:
        async with client(scope) as c:
            answers.append(await c.value("print(1)"))

    async with PlainScope() as scope, anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(run, scope)
    assert (answers, started) == ([1] * 4, 2)


async def test_the_first_run_after_an_idle_template_was_killed_goes_well() -> None:
    async with AsyncRLM(scripted(submit("'here'"), submit("'there'"))) as rlm:
        assert (await rlm.acompletion("x")).response == "here"
        parent = f"\nPPid:\t{os.getpid()}\n"
        [template] = [p for p in marked("asyncrlm-template ") if parent in Path(f"/proc/{p}/status").read_text()]
        home = Path(f"/proc/{template}/cmdline").read_text().rstrip("\0").partition(" ")[2]
        os.kill(template, signal.SIGKILL)
        await until(lambda: not marked(home))
        assert (await rlm.acompletion("x")).response == "there"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("mode", MODES)
async def test_lists_of_processes_name_those_of_ours(mode: str) -> None:
    async with PlainScope() as scope:
        environment = await mode_or_skip(scope, mode)
        async with client(scope, environment) as c:
            home = str(scope.template._process.home)
            await until(lambda: len(_titles()) == 3)
            worker = await c.value("import json; print(json.dumps(open('/proc/self/cmdline').read()))")
            titles = _titles()
    assert sorted(titles) == ["asyncrlm-templa", "asyncrlm-warden", "asyncrlm-worker"]
    assert titles["asyncrlm-templa"] == f"asyncrlm-template {home}\0"
    assert titles["asyncrlm-warden"].startswith("asyncrlm-warden")
    assert titles["asyncrlm-worker"] == worker
    assert worker.startswith(f"asyncrlm-worker {home}/")


def _titles() -> dict[str, str]:
    """Short name → line of each living process below this one that has a name of ours."""
    below = psutil.Process().children(recursive=True)
    found: dict[str, str] = {}
    for process in below:
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{process.pid}/comm").read_text().strip()
            if name.startswith("asyncrlm-"):
                found[name] = Path(f"/proc/{process.pid}/cmdline").read_text()
    return found


async def test_a_worker_that_ends_before_any_cell_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, dying = LocalEnvironment.open, [True, False, True, True]

    async def opened(environment: LocalEnvironment, scope: Any) -> Any:
        sandbox = await real(environment, scope)
        if dying.pop(0):
            sandbox._channel.shutdown(socket.SHUT_RDWR)  # as if it had ended before it said a word
        return sandbox

    monkeypatch.setattr(LocalEnvironment, "open", opened)
    async with Repl() as repl:
        assert (await repl.execute("print(1)")).stdout == "1\n"
    with pytest.raises(SandboxLost):
        async with Repl() as repl:
            await repl.execute("print(2)")
    assert not dying


async def test_a_folder_that_holds_anything_is_no_other_workers(no_leaks: None) -> None:
    async with PlainScope() as scope:
        async with client(scope) as c:
            await c.sandbox.put_file("left", [b"x"])
            c.sandbox._given_files = False  # as if it had come from the worker
        async with client(scope) as after:
            assert after.sandbox._files == c.sandbox._files
            assert await after.value(f"import os, json; print(json.dumps(os.listdir({c.sandbox._files!r})))") == []


async def test_signals_to_the_hosts_group_reach_no_template() -> None:
    async with PlainScope() as scope, client(scope):
        assert os.getsid(scope.template._process._popen.pid) != os.getsid(0)


async def test_homes_of_the_dead_are_swept(temporary: Path) -> None:
    dead, living, foreign, making = (temporary / n for n in ("asyncrlm-1", "asyncrlm-2", "other", "asyncrlm-3"))
    for folder in (dead, living, foreign):
        folder.mkdir()
        (folder / "lock").touch()
    making.mkdir()
    lock = os.open(living / "lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        async with PlainScope() as scope, client(scope):
            assert not dead.exists()
            assert living.exists()
            assert foreign.exists()
            assert making.exists()
    finally:
        os.close(lock)


async def test_a_home_that_is_hard_to_remove_is_swept_and_stops_no_start(temporary: Path) -> None:
    home = temporary / "asyncrlm-1"
    home.mkdir()
    (home / "lock").touch()
    folder = os.open(home, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=folder)
        below = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    odd = temporary / "asyncrlm-2"
    odd.mkdir()
    (odd / "lock").mkdir()
    async with PlainScope() as scope, client(scope) as c:
        assert await c.value("print(1)") == 1
        assert not home.exists()


async def test_a_home_that_can_not_be_removed_is_tried_again(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = temporary / "asyncrlm-1"
    (home / "busy").mkdir(parents=True)
    (home / "lock").touch()
    real = os.rmdir

    def rmdir(path: Any, **options: Any) -> None:
        if "busy" in str(path) or ".gone" in str(path):
            raise OSError("it is in use")
        real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir)
        assert sweep_homes() == []
    assert (home / "lock").exists()
    assert sweep_homes() == [str(home)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
async def test_homes_of_others_are_left_alone(temporary: Path) -> None:
    home = temporary / "asyncrlm-1"
    home.mkdir()
    (home / "lock").touch()
    os.chown(home, 12345, 12345)
    assert sweep_homes() == []
    assert home.exists()


async def test_another_interpreter_brings_its_own_packages() -> None:
    bare = Path(sys.executable).resolve()
    if sys.prefix == sys.base_prefix:
        pytest.skip("not in a virtual environment")
    async with PlainScope() as scope, client(scope, python=bare) as c:
        prefix = await c.value("import sys, json; print(json.dumps([sys.prefix, sys.path]))")
        assert prefix[0] == sys.base_prefix
        assert not [p for p in prefix[1] if p.startswith(sys.prefix)]


@pytest.mark.parametrize(
    ("python", "error"),
    [("/nowhere/python", ConfigurationError), (__file__, ConfigurationError), ("/bin/false", SandboxLost)],
)
async def test_an_interpreter_that_does_not_start(
    python: str, error: type[Exception], no_leaks: None, temporary: Path
) -> None:
    async with PlainScope() as scope:
        with anyio.fail_after(CAP), pytest.raises(error):
            await LocalEnvironment(python=python).open(scope)
    assert os.listdir(temporary) == []


async def test_elsewhere_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    scope: Any = None
    with pytest.raises(ConfigurationError, match="win32"):
        await LocalEnvironment().open(scope)


# ---- under pressure --------------------------------------------------------------------------------------------------


async def fill(c: Client) -> None:
    """Fill the channel of a worker that does not read."""
    await c.begin("import time; open('started', 'w').close()\nwhile True: time.sleep(10)")
    while c.sandbox.send_nowait(b" " * 65536):
        await anyio.lowlevel.checkpoint()


async def test_a_full_channel_waits_and_breaks_with_its_worker(no_leaks: None) -> None:
    async with PlainScope() as scope, client(scope) as c, client(scope) as d:
        await fill(c)
        await fill(d)

        async def broken(call: Any, *args: Any) -> None:
            with pytest.raises(anyio.BrokenResourceError):
                await call(*args)

        with anyio.fail_after(CAP):
            async with anyio.create_task_group() as group:
                group.start_soon(broken, c.sandbox.send, b"x" * 1_000_000)
                group.start_soon(broken, d.sandbox.pass_file, opening(Path(__file__)))
                await anyio.lowlevel.checkpoint()
                c.sandbox.kill()
                await d.sandbox.aclose()


async def test_a_flood_leaves_the_loop_to_others(no_leaks: None) -> None:
    async with PlainScope() as scope, client(scope) as c:
        await c.begin(
            "import os\nfd = [int(n) for n in os.listdir('/proc/self/fd') if os.path.lexists(f'/proc/self/fd/{n}')"
            " and os.readlink(f'/proc/self/fd/{n}').startswith('socket')][0]\nos.set_blocking(fd, True)\n"
            "while True: os.write(fd, b' ' * 60000)"
        )
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await anyio.lowlevel.checkpoint()

        with anyio.fail_after(CAP):
            async with anyio.create_task_group() as group:
                group.start_soon(tick)
                for _ in range(200):
                    assert await c.sandbox.receive()
                group.cancel_scope.cancel()
            assert ticks > 3
            c.sandbox.kill()


async def test_a_file_being_put_is_given_up_when_closed(no_leaks: None) -> None:
    async with PlainScope() as scope, client(scope) as c:
        begun, go_on = threading.Event(), threading.Event()

        def chunks() -> Iterator[bytes]:
            begun.set()
            go_on.wait(CAP)
            yield b"x"

        async def put() -> None:
            with pytest.raises(anyio.BrokenResourceError):
                await c.sandbox.put_file("slow", chunks())

        async with anyio.create_task_group() as group:
            group.start_soon(put)
            await until(begun.is_set)
            await c.sandbox.aclose()
            go_on.set()


async def test_killed_before_it_is_known(no_leaks: None) -> None:
    async with PlainScope() as scope:
        for _ in range(3):
            sandbox = await LocalEnvironment().open(scope)
            sandbox.kill()
            with anyio.fail_after(CAP):
                *_, last = await Client(sandbox).until_end()
            assert last["t"] == "exited"
            await sandbox.aclose()
        assert not scope.template._sandboxes


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGKILL])
async def test_a_busy_template_is_waited_for_and_a_dead_one_replaced(number: int, no_leaks: None) -> None:
    async with PlainScope(depth=0) as scope:
        async with client(scope):
            pass
        process, outcomes = scope.template._process, []
        process.control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)  # room for few requests
        os.kill(process._popen.pid, signal.SIGSTOP)

        async def run() -> None:
            sandbox = await LocalEnvironment().open(scope)
            try:
                await Client(sandbox).start()
                outcomes.append("ready")
            except anyio.EndOfStream:  # its request was with the dead template already
                outcomes.append("lost")
            finally:
                await sandbox.aclose()

        with anyio.fail_after(2 * CAP):
            async with anyio.create_task_group() as group:
                for _ in range(16):
                    group.start_soon(run)
                await until(lambda: scope.template._sending.locked())
                os.kill(process._popen.pid, number)
        assert len(outcomes) == 16
        assert ("lost" in outcomes) == (number == signal.SIGKILL)
        assert "ready" in outcomes
        assert (scope.template._process is process) == (number == signal.SIGCONT)


async def test_room_is_made_by_who_closes(no_leaks: None, descriptors: Any) -> None:
    async with PlainScope(depth=0) as scope, client(scope) as holder:
        descriptors(3)
        opened = anyio.Event()

        async def wait_for_room() -> None:
            async with client(scope) as c:
                assert await c.value("print(1)") == 1
                opened.set()

        with anyio.fail_after(CAP):
            async with anyio.create_task_group() as group:
                group.start_soon(wait_for_room)
                await anyio.wait_all_tasks_blocked()
                assert not opened.is_set()
                await holder.sandbox.aclose()
                await opened.wait()


@pytest.mark.parametrize("blocking", [False, True])
async def test_runs_whose_tools_ask_the_same_instance_leave_room_for_that(no_leaks: None, blocking: bool) -> None:
    model = ScriptedLM(lambda request: submit("ask('INNER')" if "OUTER" in request.messages[1].content else "'in'"))

    async def ask(question: str) -> str:
        return (await rlm.acompletion("x", root_prompt=question)).response

    def ask_blocking(question: str) -> str:
        return anyio.from_thread.run(ask, question)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 90, hard))
    try:
        answers: list[str] = []
        async with AsyncRLM(model, custom_tools={"ask": ask_blocking if blocking else ask}) as rlm:

            async def run() -> None:
                answers.append((await rlm.acompletion("x", root_prompt="OUTER")).response)

            with anyio.fail_after(3 * CAP):
                async with anyio.create_task_group() as group:
                    for _ in range(12):
                        group.start_soon(run)
        assert answers == ["in"] * 12
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("attributes", [{}, {"depth": 40}, {"depth": 0, "long_lived": True}])
async def test_nobody_waits_for_ever(
    attributes: dict[str, Any], no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_template, "PATIENCE", 0.02)
    async with PlainScope(**attributes) as scope, client(scope):
        scope.template._most = 3 if attributes.get("depth") != 0 else 6
        settings: Any = {"max_output": 1 << 16}  # other settings: the spares of the first are in the way
        with anyio.fail_after(CAP):
            async with client(scope, **settings), client(scope, **settings) as c:
                assert await c.value("print(1)") == 1


async def test_who_waits_long_for_room_is_told_why(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_template, "TOLD", 0.02)
    said: list[str] = []
    told = anyio.Event()

    def warn(text: str, *_: object, **__: object) -> None:
        said.append(text)
        told.set()

    monkeypatch.setattr(warnings, "warn", warn)
    async with PlainScope(depth=0) as scope, client(scope) as holder:
        scope.template._most = 2

        async def wait_for_room() -> None:
            async with client(scope):
                pass

        with anyio.fail_after(CAP):
            async with anyio.create_task_group() as group:
                group.start_soon(wait_for_room)
                await told.wait()
                await holder.sandbox.aclose()
    assert len(said) == 1
    assert "ulimit -n" in said[0]


async def test_what_was_not_closed_goes_with_the_scope(no_leaks: None, temporary: Path) -> None:
    async with PlainScope() as scope:
        await LocalEnvironment().open(scope)
    assert os.listdir(temporary) == []
