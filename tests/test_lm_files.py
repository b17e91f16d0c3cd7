"""Few files for many accounts: all connections of an event loop share what the process may have open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from asyncrlm.lm.base import LMClient, LMRequest, Message
from asyncrlm.lm.clients import client_spec
from asyncrlm.lm.pacing.files import PoolFiles
from asyncrlm.testing import FakeOpenAIServer, FakeRequest

from .helpers import submit

pytestmark = pytest.mark.anyio

MANY = """
import json, resource, sys
import anyio
from asyncrlm import AsyncRLM

async def main(url, accounts):
    answers = []

    async def one(number):
        kwargs = {"base_url": url, "model_name": "m", "api_key": f"{number}" * 20}
        # Not entered: no workers are started ahead, which take files of their own.
        answers.append((await AsyncRLM("vllm", backend_kwargs=kwargs).acompletion("CTX", "q")).response)

    async with anyio.create_task_group() as tasks:
        for number in range(accounts):
            tasks.start_soon(one, number)
    print(json.dumps(answers))

resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
anyio.run(main, sys.argv[1], 6, backend=sys.argv[2])
"""


@pytest.mark.soak
async def test_many_accounts_in_a_process_of_few_files_lose_nothing(anyio_backend_name: str) -> None:
    batch = submit("str(llm_query_batched(['s'] * 100).count('ok'))")

    async def answer(request: FakeRequest) -> str:
        if request.text != "s":
            return batch
        await anyio.sleep(0.1)
        return "ok"

    async with FakeOpenAIServer(answer) as server:
        command = [sys.executable, "-c", MANY, server.base_url, anyio_backend_name]
        done: Any = await anyio.to_thread.run_sync(
            lambda: subprocess.run(command, capture_output=True, check=False, timeout=60, env=os.environ, text=True)
        )
        assert done.returncode == 0, done.stderr
        answers = json.loads(done.stdout)
    assert answers == ["100"] * 6
    assert server.max_in_flight <= 55  # a quarter of them, and what the server has not quite finished with


async def test_all_pools_of_a_loop_count_together_and_none_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrlm.lm.pacing.files.open_files_share", lambda most: 4)
    one, two = PoolFiles(), PoolFiles()
    for _ in range(3):
        assert await one.acquire() == 0
        assert not one.crowded  # alone it keeps all its connections
    for _ in range(3):
        one.release(keeps=True)
    await two.acquire()
    assert not two.crowded
    await two.acquire()
    assert two.crowded  # three are kept by the other one
    await two.acquire()
    await two.acquire()
    with anyio.move_on_after(0.01) as waiting:
        await one.acquire()
    assert waiting.cancelled_caught
    for _ in range(4):
        two.release(keeps=False)
    one.close()
    for _ in range(4):
        await two.acquire()
        assert not two.crowded


async def test_what_an_idle_pool_has_closed_by_itself_counts_no_more(
    monkeypatch: pytest.MonkeyPatch, anyio_backend_name: str
) -> None:
    now = 1_000.0
    monkeypatch.setattr("asyncrlm.lm.pacing.files.open_files_share", lambda most: 2)
    monkeypatch.setattr("asyncrlm.lm.pacing.files.monotonic", lambda: now)
    async with FakeOpenAIServer(lambda request: "ok") as server, AsyncExitStack() as stack:

        async def account(key: str) -> LMClient:
            kwargs = {"base_url": server.base_url, "model_name": "m", "api_key": key}
            return await stack.enter_async_context(client_spec("vllm", kwargs).open())

        request = LMRequest(messages=(Message("user", "x"),))
        await (await account("one")).acomplete(request)
        await (await account("two")).acomplete(request)
        three = await account("three")
        await three.acomplete(request)
        now += 66
        await three.acomplete(request)
        told = [request.headers.get("connection") for request in server.requests]
    # httpx2, which serves trio, closes nothing before the pool's next request.
    last = told[0] if anyio_backend_name == "asyncio" else "close"
    assert told == [told[0], told[0], "close", last]


async def test_a_connection_is_closed_where_others_need_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrlm.lm.pacing.files.open_files_share", lambda most: 2)
    async with FakeOpenAIServer(lambda request: "ok") as server, AsyncExitStack() as stack:
        for number in range(4):
            kwargs = {"base_url": server.base_url, "model_name": "m", "api_key": f"key-{number}"}
            client = await stack.enter_async_context(client_spec("vllm", kwargs).open())
            for _ in range(2):
                await client.acomplete(LMRequest(messages=(Message("user", "x"),)))
        told = [request.headers.get("connection") for request in server.requests]
        assert told == [*[told[0]] * 4, *["close"] * 4]
        assert server.connections == 2 + 4
