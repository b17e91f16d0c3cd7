"""Ten thousand calls: the connections stay few and the memory flat."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

import anyio
import pytest
from lm_backends import BACKENDS, Backend, whole
from lm_serving import ask

from asyncrlm import Pacer
from asyncrlm.ledger import Ledger
from asyncrlm.testing import FakeReply

from .pacing_support import send

if TYPE_CHECKING:
    from asyncrlm.lm.base import LMClient
    from asyncrlm.testing import FakeRequest

pytestmark = [pytest.mark.anyio, pytest.mark.soak]

WIDTH = 32
ROUND = 2_000
ROUNDS = 5
KEPT = 1.0
"""Blocks of memory that may stay behind for each call; a request or a reply that is kept is dozens."""


def answer(request: FakeRequest) -> FakeReply:
    number = int(request.text)
    if number % 50 == 0:
        return FakeReply.fault(500)
    return FakeReply(request.text, headers={"x-request-id": str(number)})


async def asked(pacer: Pacer, client: LMClient, ledger: Ledger, number: int) -> bool:
    """Whether the reply is right: every other call goes through the pacer, every fifth is streamed."""
    if number % 50 == 0:
        with pytest.raises(Exception, match="500"):
            await client.acomplete(ask(str(number)))
        return True
    if number % 2 == 0:
        return (await send(pacer, client, str(number), ledger=ledger)).text == str(number)
    return (await whole(client, ask(str(number)), "streamed" if number % 5 == 0 else "whole")).text == str(number)


CASES = [
    pytest.param(loop, backend, id=f"{loop}-{backend.name}")
    for backend in BACKENDS
    if backend.name in ("openai", "anthropic", "gemini")
    for loop in ("asyncio", "trio")[: 2 if backend.name == "openai" else 1]
]


@pytest.mark.parametrize(("anyio_backend", "backend"), CASES)
async def test_ten_thousand_calls_leave_nothing_behind(backend: Backend) -> None:
    pacer, ledger, right = Pacer(), Ledger(), 0
    blocks: list[int] = []
    async with backend.serving(answer) as (server, client):

        async def worker(numbers: list[int]) -> None:
            nonlocal right
            while numbers:
                is_right = await asked(pacer, client, ledger, numbers.pop())
                right += is_right

        for turn in range(ROUNDS):
            numbers = list(range(turn * ROUND, (turn + 1) * ROUND))
            with anyio.fail_after(120):
                async with anyio.create_task_group() as tasks:
                    for _ in range(WIDTH):
                        tasks.start_soon(worker, numbers)
            server.requests.clear()
            gc.collect()
            blocks.append(sys.getallocatedblocks())
        assert right == ROUNDS * ROUND
        assert server.connections <= 2 * WIDTH
        assert server.open_connections <= WIDTH
    with anyio.fail_after(10):
        while server.open_connections:
            await anyio.sleep(0.005)
    assert (blocks[-1] - blocks[0]) / (ROUND * (ROUNDS - 1)) < KEPT, blocks
