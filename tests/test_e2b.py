"""E2B's environment: its real SDK on the wire, against a server of ours. The service itself was not reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, Repl, SandboxLost

from .helpers import cell, scripted, submit
from .local_support import until
from .remote_support import echo

pytest.importorskip("e2b", reason="needs pip install 'asyncrlm[e2b]', in an environment without prime's")
pytest.importorskip("uvicorn", reason="the server of these tests needs uvicorn")

from .fakes.e2b_server import KEY, E2BServer

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[E2BServer]:
    with E2BServer() as server:
        for name, value in {"API_KEY": KEY, "API_URL": server.url, "SANDBOX_URL": server.url}.items():
            monkeypatch.setenv(f"E2B_{name}", value)
        yield server
        assert server.unknown == []
        assert not server.boxes
        assert len(server.made) == len(server.destroyed)
        deadline = time.monotonic() + 10
        while any(process.returncode is None for process in server.envd.processes.values()):
            assert time.monotonic() < deadline, "commands of destroyed sandboxes are still running"
            time.sleep(0.01)


def repl(lm: Callable[..., Any] = echo, context: Any = None, **settings: Any) -> Repl:
    given = {} if context is None else {"context": context}
    return Repl(environment="e2b", environment_kwargs=settings, lm=lm, **given)


async def test_cells_with_sub_calls_state_and_unicode(server: E2BServer) -> None:
    with anyio.fail_after(30):
        async with repl(template="mine", metadata={"team": "a"}, envs={"A": "1"}) as r:
            result = await r.execute(
                "import os\nx = llm_query_batched([str(i) for i in range(500)])\n"
                "print(x[499], 'é\\x01\\x01\\x01', os.environ['A'])"
            )
            assert result.stdout == "re: 499 é\x01\x01\x01 1\n", result
            for number in range(20):
                assert (await r.execute(f"print(x[{number}])")).stdout == f"re: {number}\n"
            with_report = r.report
    [made] = server.made
    assert made["templateID"] == "mine"
    assert made["metadata"]["team"] == "a"
    assert made["metadata"]["made-by"] == "asyncrlm"
    assert made["allow_internet_access"] is False
    assert with_report is not None
    assert with_report.environment == "e2b"


async def test_a_run_with_a_large_context(server: E2BServer) -> None:
    root = scripted(cell("print(len(context))"), submit("str(len(context)) + llm_query('a')"))
    with anyio.fail_after(30):
        completion = await AsyncRLM(root, other_backends=[echo], environment="e2b").acompletion("long " * 1_000_000)
    assert completion.response == "5000000re: a"


async def test_ten_at_once_are_ten_sandboxes(server: E2BServer) -> None:
    async def use(number: int) -> None:
        async with repl() as r:
            assert (await r.execute(f"print(llm_query('{number}'))")).stdout == f"re: {number}\n"

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(use, number)
    assert len({made["metadata"]["asyncrlm"] for made in server.made}) == 10


async def test_a_stream_that_drops_ends_that_sandbox(server: E2BServer) -> None:
    async def drop(messages: list[dict[str, str]]) -> str:
        server.drop_streams()
        return await anyio.sleep_forever()

    with anyio.fail_after(30):
        async with repl(drop) as r:
            result = await r.execute("llm_query('x')")
            assert "the stream was dropped" in (result.error or "") + result.stderr
            assert (await r.execute("print(1)")).stdout == "1\n"


async def test_an_interrupt_keeps_the_namespace(server: E2BServer) -> None:
    with anyio.fail_after(30):
        async with repl(cell_timeout=0.3) as r:
            result = await r.execute("x = 5\nwhile True: pass")
            assert "cell_timeout" in (result.error or "")
            assert (await r.execute("print(x)")).stdout == "5\n"


async def test_a_worker_that_ends_is_replaced(server: E2BServer) -> None:
    with anyio.fail_after(30):
        async with repl() as r:
            result = await r.execute("import os\nos._exit(3)")
            assert "exited with code 3" in (result.error or "") + result.stderr
            assert (await r.execute("print(1)")).stdout == "1\n"


async def test_a_sandbox_that_dies_in_mid_cell_says_so(server: E2BServer) -> None:
    async def die(messages: list[dict[str, str]]) -> str:
        server.end_processes()
        return await anyio.sleep_forever()

    with anyio.fail_after(30):
        async with repl(die) as r:
            result = await r.execute("llm_query('x')")
            assert "E2B: its keeper ended" in (result.error or "") + result.stderr


async def test_its_lifetime_is_renewed(server: E2BServer) -> None:
    async def wait(messages: list[dict[str, str]]) -> str:
        await until(lambda: server.renewed)
        return "renewed"

    with anyio.fail_after(30):
        async with repl(wait, timeout=1) as r:
            assert (await r.execute("print(llm_query('x'))")).stdout == "renewed\n"


@pytest.mark.parametrize("status", [429, 500, 400])
async def test_a_refusal_is_told_in_its_words(server: E2BServer, status: int) -> None:
    server.refusal = status, "the quota is used up"
    with anyio.fail_after(30), pytest.raises(SandboxLost, match=r"quota is used up|Rate limit"):
        async with repl() as r:
            await r.execute("1")


async def test_credentials(server: E2BServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "1" * 40)
    with anyio.fail_after(30), pytest.raises(ConfigurationError, match="E2B_API_KEY"):
        async with repl() as r:
            await r.execute("1")
    monkeypatch.delenv("E2B_API_KEY")
    with anyio.fail_after(30), pytest.raises(ConfigurationError, match="E2B_API_KEY"):
        async with repl() as r:
            await r.execute("1")


async def test_cancelled_while_it_is_made_it_is_destroyed(server: E2BServer) -> None:
    server.slow = 0.5
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:

            async def use() -> None:
                async with repl() as r:
                    await r.execute("1")

            group.start_soon(use)
            await anyio.to_thread.run_sync(server.creating.wait, 10)
            group.cancel_scope.cancel()
    assert len(server.destroyed) == 1


async def test_cancelled_in_a_cell_it_is_destroyed(server: E2BServer) -> None:
    async def cancel(messages: list[dict[str, str]]) -> str:
        group.cancel_scope.cancel()
        return await anyio.sleep_forever()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group, repl(cancel) as r:
            await r.execute("llm_query('x')")
    assert len(server.destroyed) == 1


async def test_a_sandbox_of_the_users_stays(server: E2BServer) -> None:
    server.boxes["mine"] = {}
    with anyio.fail_after(30):
        async with repl(sandbox_id="mine") as r:
            assert (await r.execute("print(1)")).stdout == "1\n"
    assert list(server.boxes) == ["mine"]
    server.boxes.clear()


def test_trio_is_refused(server: E2BServer) -> None:
    async def use() -> None:
        async with repl() as r:
            await r.execute("1")

    with pytest.raises(ConfigurationError, match="asyncio only"):
        anyio.run(use, backend="trio")
