"""Contexts are loaded while the first request to the root model is in flight."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, LMError, LMReply, RLMError, SandboxLost, TokenLimitExceededError
from asyncrlm.lm.base import LMUsage
from asyncrlm.testing import ScriptedLM

from .helpers import cell, scripted, submit
from .remote_support import Plain, remote

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]

LONG = "x" * 300_000
"""A text that goes into the sandbox as a file."""


class Held(Plain):
    """Takes no file before it may."""

    asked: ClassVar[anyio.Event]
    may: ClassVar[anyio.Event]
    cut: ClassVar[int]

    async def put_file(self, path: str, chunks: Iterable[bytes]) -> bool:
        self.asked.set()
        try:
            await self.may.wait()
        except BaseException:
            Held.cut += 1
            raise
        return False


class NoneLeft(Plain):
    """Can't be had."""

    async def create(self) -> None:
        raise RuntimeError("none is left")


@pytest.fixture
def held() -> Any:
    Held.asked, Held.may, Held.cut = anyio.Event(), anyio.Event(), 0
    return remote(Held)


async def test_the_model_is_asked_before_the_context_is_there(held: Any) -> None:
    seen: list[bool] = []

    async def first(_: Any) -> str:
        await Held.asked.wait()
        seen.append(Held.may.is_set())
        Held.may.set()
        return submit("len(context)")

    with anyio.fail_after(10):
        completion = await AsyncRLM(scripted(first), environment=held).acompletion(LONG)
    assert (completion.response, seen) == (str(len(LONG)), [False])


async def test_a_reply_waits_for_the_context(held: Any) -> None:
    root = scripted(submit("len(context)"))
    responses: list[str] = []

    async def ask() -> None:
        responses.append((await AsyncRLM(root, environment=held).acompletion(LONG)).response)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await Held.asked.wait()
            while not root.calls:
                await anyio.lowlevel.checkpoint()
            assert not responses
            Held.may.set()
    assert responses == [str(len(LONG))]


@pytest.mark.parametrize("how", ["not text", "no worker"])
async def test_a_context_that_can_not_be_loaded_ends_the_run_and_the_request(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"\xff\xfe" * 10)
    cancelled = False

    async def never(_: Any) -> str:
        nonlocal cancelled
        try:
            await anyio.sleep_forever()
        finally:
            cancelled = True
        return ""

    where: Any = remote(NoneLeft) if how == "no worker" else "local"
    with anyio.fail_after(10), pytest.raises(RLMError) as caught:
        await AsyncRLM(scripted(never), environment=where).acompletion(path if how == "not text" else "x")
    assert cancelled or how == "no worker"
    assert type(caught.value) is (ConfigurationError if how == "not text" else SandboxLost)
    assert ("prompt could not be loaded" if how == "not text" else "none is left") in str(caught.value)
    assert caught.value.usage_summary is not None
    assert not any(isinstance(each, BaseExceptionGroup) for each in (caught.value.__context__, caught.value.__cause__))


async def test_a_model_that_fails_does_not_wait_for_the_context(held: Any) -> None:
    async def fails(_: Any) -> Exception:
        await Held.asked.wait()
        return LMError("no such key", kind="auth")

    with anyio.fail_after(10), pytest.raises(LMError, match="no such key"):
        await AsyncRLM(scripted(fails), environment=held).acompletion(LONG)
    assert Held.cut == 1
    assert [machine.destroyed for machine in Plain.made] == [1]


async def test_a_caller_that_gives_up_ends_both(held: Any) -> None:
    ended = False

    async def never(_: Any) -> str:
        nonlocal ended
        try:
            await Held.asked.wait()
            scope.cancel()
            await anyio.sleep_forever()
        finally:
            ended = True
        return ""

    with anyio.fail_after(10), anyio.CancelScope() as scope:
        await AsyncRLM(scripted(never), environment=held).acompletion(LONG)
    assert scope.cancelled_caught
    assert ended
    assert Held.cut == 1
    assert [machine.destroyed for machine in Plain.made] == [1]


@pytest.mark.soak
async def test_a_last_turn_has_the_context_though_the_first_was_cut(held: Any) -> None:
    """The deadline of the loop passes while both are under way: the last turn loads it again."""

    async def never(_: Any) -> str:
        await Held.asked.wait()
        Held.may.set()
        return await anyio.sleep_forever()  # type: ignore[return-value]

    root = scripted(never, submit("len(context)"))
    with anyio.fail_after(20):
        completion = await AsyncRLM(root, environment=held, on_limit="answer").acompletion(LONG, max_timeout=4.0)
    assert (completion.response, completion.stop_reason) == (str(len(LONG)), "limit")


async def test_a_request_there_is_no_room_for_stops_the_loading_too(held: Any) -> None:
    with anyio.fail_after(10), pytest.raises(TokenLimitExceededError):
        await AsyncRLM(scripted("never said"), environment=held, max_tokens=1).acompletion(LONG)
    assert all(machine.destroyed == 1 for machine in Plain.made)


async def test_a_conversation_keeps_its_worker_whatever_becomes_of_the_request(held: Any) -> None:
    async def fails(_: Any) -> Exception:
        await Held.asked.wait()
        failed.set()
        return LMError("try again", kind="server")

    async def go_on() -> None:
        await failed.wait()
        Held.may.set()

    first = cell("kept = 1\nanswer.update(content='first', ready=True)")
    root = scripted(first, fails, submit("(kept, len(context), len(context_0), len(context_1))"))
    failed = anyio.Event()
    async with AsyncRLM(root, environment=held).session() as chat, anyio.create_task_group() as group:
        group.start_soon(go_on)
        with anyio.fail_after(10):
            assert (await chat.acompletion("zero")).response == "first"
            with pytest.raises(LMError, match="try again"):
                await chat.acompletion(LONG)
            assert (await chat.acompletion("two")).response == f"[1, 3, 4, {len(LONG)}]"
    assert Held.cut == 0


async def test_a_conversation_does_not_count_what_could_not_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"\xff")
    root = ScriptedLM(
        [
            LMReply(text=cell("kept = 1\n" + "answer.update(content='a', ready=True)"), usage=LMUsage()),
            "lost",
            submit("(kept, context, context_0, context_1, 'context_2' in globals())"),
        ]
    )
    async with AsyncRLM(root).session() as chat:
        with anyio.fail_after(10):
            await chat.acompletion("zero")
            with pytest.raises(ConfigurationError, match="could not be loaded"):
                await chat.acompletion(path)
            assert (await chat.acompletion("one")).response == '[1, "one", "zero", "one", false]'
