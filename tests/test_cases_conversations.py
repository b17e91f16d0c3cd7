"""Cases about completions that keep one REPL between them."""

from __future__ import annotations

import anyio
import pytest

from asyncrlm import AsyncRLM, LMError

from .cases import CASES, covers, scripted
from .cases.models import ScriptedRoot

pytestmark = pytest.mark.anyio


@covers("M01")
async def test_each_completion_begins_without_an_answer() -> None:
    root = ScriptedRoot(scripted(CASES["M01"]))
    async with AsyncRLM(root, persistent=True) as rlm:
        with anyio.fail_after(10):
            assert (await rlm.acompletion("doc A")).response == "first"
            assert (await rlm.acompletion("doc B")).response == "second"
    assert "state False ''" in root.seen(3)


@covers("M02")
async def test_context_is_the_current_prompt() -> None:
    async with AsyncRLM(ScriptedRoot(scripted(CASES["M02"])), persistent=True) as rlm:
        with anyio.fail_after(10):
            assert (await rlm.acompletion("doc A")).response == "doc A"
            assert (await rlm.acompletion("doc B")).response == "doc B"


@covers("M03")
async def test_a_completion_that_failed_leaves_its_variables_to_the_next() -> None:
    first, _, last = scripted(CASES["M03"])
    rlm = AsyncRLM(ScriptedRoot([first, RuntimeError("down"), last]), persistent=True)
    with anyio.fail_after(10):
        async with rlm:
            with pytest.raises(LMError, match="RuntimeError: down"):
                await rlm.acompletion("CTX")
            assert (await rlm.acompletion("CTX")).response == "9"
            await rlm.aclose()
        await rlm.aclose()
