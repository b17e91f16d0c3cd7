"""Cases about vendors' sandboxes, by their own SDKs on servers of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import psutil
import pytest

from asyncrlm import Repl

from .cases import covers
from .vendors import SDK_WARNINGS, Vendor, vendor

if TYPE_CHECKING:
    pass

__all__ = ["vendor"]

pytestmark = [pytest.mark.anyio, *SDK_WARNINGS, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

HOSTILE = ["a\\", '"""', "'''", "a\x00b", "a\r\nb", '""" + str(1/0) + """', "{x} %s \\N{DASH}", "\ud800"]


@covers("X13", "X14", "Z05")
async def test_text_arrives_as_it_is_and_nothing_listens(vendor: Vendor) -> None:
    listening: list[Any] = []

    async def look(messages: list[dict[str, str]]) -> str:
        for process in psutil.Process().children(recursive=True):
            longest = max(map(len, process.cmdline()), default=0)
            assert longest < 128 * 1024
            listening.extend(c for c in process.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN)
        return messages[-1]["content"]

    with anyio.fail_after(30):
        async with Repl(environment=vendor.name, lm=look, context=[*HOSTILE, "y" * 1_000_000]) as repl:
            result = await repl.execute(f"print(context[:-1] == {HOSTILE!r}, len(llm_query(context[-1])))")
    assert (result.stdout, result.error) == ("True 1000000\n", None)
    assert listening == []
