"""What every remote sandbox stands on, over processes on this machine; see `remote_support.py`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, SandboxLost
from asyncrlm.environments.remote import asyncio_only, imported
from asyncrlm.environments.remote_boot import command
from asyncrlm.environments.remote_sandbox import KILL_GRACE
from asyncrlm.repl.resources import ResourceScope

from .helpers import cell, scripted, submit
from .local_support import DAEMONS, marked, until
from .remote_support import Dropping, Endless, Lease, Plain, Quick, Refused, Slow, SlowStart, Text, echo, remote, repl

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]
KINDS = pytest.mark.parametrize("kind", [Plain, Text])


@KINDS
async def test_cells_with_batches_of_sub_calls_and_output_in_order(kind: type[Plain], tmp_path: Path) -> None:
    with anyio.fail_after(20):
        async with repl(remote(kind, scratch=str(tmp_path))) as r:
            result = await r.execute(
                "import os, sys, subprocess\nprint('a')\nos.write(1, b'b\\n')\nsubprocess.run(['echo', 'c'])\n"
                "print('err', file=sys.stderr)\nx = llm_query_batched([str(i) for i in range(500)])\nprint(x[499], 'é')"
            )
            assert (result.stdout, result.stderr) == ("a\nb\nc\nre: 499 é\n", "err\n")
            for number in range(20):
                assert (await r.execute(f"print({number}, x[{number}])")).stdout == f"{number} re: {number}\n"
    [machine] = Plain.made
    assert machine.running
    assert machine.destroyed == 1
    assert list(tmp_path.iterdir()) == []


@KINDS
async def test_a_flood_of_output_stays_where_it_was_printed(kind: type[Plain]) -> None:
    with anyio.fail_after(20):
        async with repl(remote(kind, max_output=1000)) as r:
            result = await r.execute("print('x' * 20_000_000 + 'end')")
            assert "[... 19,999,004 bytes left out ...]" in result.stdout
            assert result.stdout.endswith("xend\n")
            assert (await r.execute("print('next')")).stdout == "next\n"


async def test_contexts_of_a_hundred_megabytes() -> None:
    context = "0123456789" * 10_000_000
    with anyio.fail_after(30):
        async with repl(remote(), context=context) as r:
            began = time.monotonic()
            assert (await r.execute("print(len(context), context[-5:])")).stdout == "100000000 56789\n"
            assert time.monotonic() - began < 10


async def test_files_of_any_content_over_a_stream_of_text() -> None:
    context = {"bytes": bytes(range(256)) * 5000, "text": "\ud800é\0" * 300_000}
    with anyio.fail_after(30):
        async with repl(remote(Text), context=context) as r:
            result = await r.execute(
                "print(context['bytes'] == bytes(range(256)) * 5000, context['text'] == '\\ud800é\\0' * 300_000)"
            )
            assert result.stdout == "True True\n"


@pytest.mark.parametrize("isolation", ["auto", "none"])
async def test_an_interrupt_keeps_the_namespace(isolation: str) -> None:
    with anyio.fail_after(20):
        async with repl(remote(cell_timeout=0.2, isolation=isolation)) as r:
            for loop in ("while True: pass", "import time; time.sleep(60)", "while True: print('flood' * 1000)"):
                result = await r.execute(f"x = 5\n{loop}")
                assert "cell_timeout" in (result.error or "")
            assert (await r.execute("print(x)")).stdout == "5\n"
    assert len(Plain.made) == 1


async def test_a_stubborn_cell_is_killed_with_all_it_started_and_what_it_printed_is_told(tmp_path: Path) -> None:
    code = DAEMONS.format(tag="86399.25") + (
        "print('before', flush=True)\nsum(range(10**13))  # in C, where no signal is looked at"
    )
    with anyio.fail_after(30):
        async with repl(remote(cell_timeout=0.3, scratch=str(tmp_path), isolation="none")) as r:
            result = await r.execute(code)
            assert "did not stop when it was interrupted" in (result.error or "") + result.stderr
            assert result.stdout == "before\n"
            assert (await r.execute("print(1)")).stdout == "1\n"
            await until(lambda: not marked("86399.25"))
    assert [machine.destroyed for machine in Plain.made] == [1, 1]
    assert list(tmp_path.iterdir()) == []


async def test_a_worker_that_ends_is_told_of_and_replaced() -> None:
    with anyio.fail_after(20):
        async with repl(remote()) as r:
            result = await r.execute("import os\nprint('last words', flush=True)\nos._exit(3)")
            assert "exited with code 3" in (result.error or "") + result.stderr
            assert result.stdout == "last words\n"
            assert (await r.execute("print(1)")).stdout == "1\n"


async def test_what_a_killed_keeper_left_is_swept_by_the_next(tmp_path: Path) -> None:
    with anyio.fail_after(10):
        async with repl(remote(scratch=str(tmp_path), isolation="none")) as neighbour:
            async with repl(remote(scratch=str(tmp_path), isolation="none")) as r:
                kill = "import os, signal\nopen('data', 'w').write('x')\nos.kill(os.getppid(), signal.SIGKILL)"
                await r.execute(kill)
            assert len(list(tmp_path.iterdir())) >= 2
            await neighbour.execute("open('mine', 'w').close()")
            async with repl(remote(scratch=str(tmp_path), isolation="none")):
                assert len(list(tmp_path.iterdir())) == 2
                assert (await neighbour.execute("import os; print(os.listdir())")).stdout == "['mine']\n"
    assert not list(tmp_path.iterdir())


async def test_a_cell_that_kills_its_keeper_loses_its_sandbox_and_no_more() -> None:
    with anyio.fail_after(20):
        async with repl(remote(isolation="none")) as r:
            kill = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nwhile True: pass"
            result = await r.execute(kill)
            lost = (result.error or "") + result.stderr
            assert "keeper ended with status -9" in lost
            assert (await r.execute("print(1)")).stdout == "1\n"


async def test_a_stream_that_drops_in_mid_cell_says_what_the_vendor_says() -> None:
    with anyio.fail_after(20):
        async with repl(remote(Dropping)) as r:
            result = await r.execute("llm_query('drop now')")
            assert "the vendor took it away" in (result.error or "") + result.stderr


async def test_a_stream_that_never_ends_holds_nobody_up() -> None:
    with anyio.fail_after(KILL_GRACE):
        async with repl(remote(Endless)) as r:
            result = await r.execute("import os\nos._exit(3)")
            assert "exited with code 3" in (result.error or "") + result.stderr
            assert (await r.execute("print(1)")).stdout == "1\n"


async def test_a_lease_that_can_not_be_renewed_ends_the_sandbox() -> None:
    async def starve(messages: list[dict[str, str]]) -> str:
        Plain.made[0].stage.set()
        return await anyio.sleep_forever()

    with anyio.fail_after(20):
        async with repl(remote(Lease), starve) as r:
            result = await r.execute("llm_query('x')")
            assert "no credit left" in (result.error or "") + result.stderr


@pytest.mark.parametrize("kind", [Slow, SlowStart])
async def test_cancelled_while_it_is_made_or_started_it_is_destroyed(kind: type[Plain], tmp_path: Path) -> None:
    environment = remote(kind, scratch=str(tmp_path))
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:

            async def use() -> None:
                async with repl(environment) as r:
                    await r.execute("1")

            group.start_soon(use)
            await until(lambda: Plain.made)
            await Plain.made[0].stage.wait()
            group.cancel_scope.cancel()
    assert Plain.made[0].destroyed == 1
    assert list(tmp_path.iterdir()) == []


async def test_cancelled_in_a_cell_it_is_destroyed(tmp_path: Path) -> None:
    async def cancel(messages: list[dict[str, str]]) -> str:
        group.cancel_scope.cancel()
        return await anyio.sleep_forever()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group, repl(remote(scratch=str(tmp_path)), cancel) as r:
            await r.execute("llm_query('x')")
    assert Plain.made[0].destroyed == 1
    assert list(tmp_path.iterdir()) == []


async def test_a_machine_with_a_quicker_way_for_files(tmp_path: Path) -> None:
    with anyio.fail_after(20):
        async with repl(remote(Quick, scratch=str(tmp_path)), context="é" * 1_000_000) as r:
            assert (await r.execute("print(len(context))")).stdout == "1000000\n"
    assert Plain.made[0].stage.is_set()


async def test_a_sandbox_can_be_booted_ahead_of_its_use() -> None:
    async with ResourceScope() as scope:
        environment = remote()
        machine = environment.machine(scope)
        await machine.start(command(sys.executable))
        sandbox = environment.sandbox(machine, scope)
        with anyio.fail_after(10):
            await sandbox.boot()
            assert b"ready" in await sandbox.receive()
        await sandbox.aclose()
        await sandbox.aclose()
        assert sandbox.closed


async def test_a_sandbox_that_takes_too_long_is_lost() -> None:
    from msgspec.structs import replace

    with anyio.fail_after(20), pytest.raises(SandboxLost, match=r"not there within 0\.05 s"):
        async with repl(replace(remote(Slow), start_timeout=0.05)) as r:
            await r.execute("1")
    assert Plain.made[0].destroyed == 1


async def test_a_keeper_that_says_nothing_is_waited_for_as_long_as_is_set() -> None:
    from msgspec.structs import replace

    class Mute(Plain):
        async def receive(self) -> bytes:
            return await anyio.sleep_forever()

    with anyio.fail_after(20), pytest.raises(SandboxLost, match=r"not ready within 0\.5 s"):
        async with repl(replace(remote(Mute), start_timeout=0.5)) as r:
            await r.execute("1")


async def test_a_sandbox_that_is_refused_says_why() -> None:
    with anyio.fail_after(20), pytest.raises(SandboxLost, match=r"here sandbox could not be had: .*quota") as caught:
        async with repl(remote(Refused)) as r:
            await r.execute("1")
    cause = caught.value.__cause__
    assert cause is not None
    assert cause.__notes__ == ["and what was there of the sandbox could not be destroyed: OSError: no way; ValueError"]


async def test_an_interpreter_that_is_not_there() -> None:
    from msgspec.structs import replace

    with anyio.fail_after(20), pytest.raises(ConfigurationError, match="no-python"):
        async with repl(replace(remote(), python="/no-python")) as r:
            await r.execute("1")


async def test_nothing_is_left_when_the_host_is_gone(tmp_path: Path) -> None:
    with anyio.fail_after(20):
        async with repl(remote(scratch=str(tmp_path), isolation="none")) as r:
            await r.execute(DAEMONS.format(tag="86399.5"))
            assert marked("86399.5")
            machine = Plain.made[0]
            assert machine._socket is not None
            anyio.notify_closing(machine._socket)
            machine._socket.close()
            await until(lambda: not marked("86399.5") and not list(tmp_path.iterdir()))


HOSTILE = """
import os, socket
for fd in map(int, os.listdir('/proc/self/fd')):
    try:
        end = socket.socket(fileno=os.dup(fd))
    except OSError:
        continue
    os.write(end.fileno(), {data!r})
while True: pass
"""


@KINDS
@pytest.mark.parametrize(
    "data",
    [
        b"\xff\x01\x01\x01 no frame\n{}\n",
        b'{"t":"output","stream":1,"data":"!"}\n',
        b'{"t":"output","stream":1,"data":"","omitted":-5}\n',
        b'{"t":"ready","version":1,"python":"x"}\n',
        b'{"t":"done","cell":77}\n',
        b'{"t":"exited","status":0}\n{"t":"done","cell":1}\n',
    ],
)
async def test_hostile_frames_end_that_sandbox_and_nothing_else(kind: type[Plain], data: bytes) -> None:
    with anyio.fail_after(20):
        async with repl(remote(kind, cell_timeout=5.0)) as r:
            with pytest.raises(Exception, match="worker"):
                await r.execute(HOSTILE.format(data=data))
            assert (await r.execute("print(1)")).stdout == "1\n"


async def test_a_run_with_a_context_in_a_file_and_children() -> None:
    root = scripted(cell("print(len(context))"), submit("str(len(context)) + llm_query('a')"))
    with anyio.fail_after(20):
        completion = await AsyncRLM(root, other_backends=[echo], environment=remote()).acompletion("long " * 100_000)
    assert completion.response == "500000re: a"


async def test_what_is_in_force_is_reported() -> None:
    with anyio.fail_after(20):
        async with repl(remote()) as r:
            await r.execute("1")
            assert r.report is not None
            assert r.report.environment == "here"
            assert r.report.isolation["memory"] == "RLIMIT_DATA"
            assert "outliving" in r.report.isolation
            result = await r.execute("open('/etc/passwd')")
            refused = "PermissionError" in (result.error or "") + result.stderr
            assert refused is bool(r.report.isolation["read_outside"])


async def test_strict_wants_every_row_held() -> None:
    with anyio.fail_after(20), pytest.raises(ConfigurationError, match=r"strict.*fork_bomb, disk"):
        async with repl(remote(isolation="strict")) as r:
            await r.execute("1")
    assert Plain.made[0].destroyed == 1


def test_a_missing_sdk_says_how_to_install_it() -> None:
    with pytest.raises(ConfigurationError, match=r"pip install 'asyncrlm\[nowhere\]'"):
        imported("no_such_sdk", "nowhere")


def test_an_sdk_beside_one_that_it_can_not_share_a_place_with_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "clashing_sdk.py").write_text("from json import no_such_name")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=r"can't share a Python environment.*no_such_name"):
        imported("clashing_sdk", "prime")


async def test_sdks_of_asyncio_only(anyio_backend: Any) -> None:
    if anyio_backend == "asyncio":
        asyncio_only("x")
    else:
        with pytest.raises(ConfigurationError, match="asyncio only"):
            asyncio_only("x")
