"""Sandboxes made ahead, with none behind them."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asyncrlm.environments.remote_pool import Pool

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # as pools are


class Spare:
    def __init__(self) -> None:
        self.closed = False

    async def aclose(self) -> None:
        self.closed = True
        raise OSError("no engine")


async def test_one_whose_taker_is_cancelled_is_ended() -> None:
    made: list[Any] = []
    asked = anyio.Event()

    async def make() -> Any:
        made.append(Spare())
        return made[-1]

    async def is_fresh(_: Any) -> bool:
        asked.set()
        return await anyio.sleep_forever()

    async with Pool(1, make, is_fresh) as pool:
        async with anyio.create_task_group() as group:
            group.start_soon(pool.take)
            await asked.wait()
            group.cancel_scope.cancel()
        assert [one.closed for one in made] == [True]


async def test_those_that_can_not_be_ended_are_in_nobodys_way() -> None:
    made: list[Any] = []

    async def make() -> Any:
        made.append(Spare())
        return made[-1]

    async def is_fresh(_: Any) -> bool:
        return False

    async with Pool(2, make, is_fresh) as pool:
        assert await pool.take() is made[2]
        await pool._make_missing(2)
    assert [one.closed for one in made] == [True, True, False, True, True]
