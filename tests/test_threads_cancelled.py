"""What a cancelled call leaves to its thread: nobody waits for work that may be long and owns nothing."""

from __future__ import annotations

import io
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from asyncrlm import AsyncRLM, Repl
from asyncrlm.engine import plain
from asyncrlm.environments import local_sandbox
from asyncrlm.lm.offline import client as offline
from asyncrlm.repl import shelf, tool_loading

from .cases.runs import nothing_left
from .helpers import scripted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


class Thing:
    def method(self) -> int:
        return 1


async def _repl(**arguments: Any) -> None:
    async with Repl(**arguments):
        pass


DOORS: dict[str, tuple[Any, str, Callable[[], Awaitable[Any]]]] = {
    "reading offline": (
        offline,
        "reply_to",
        lambda: AsyncRLM("offline", max_depth=0, backend_kwargs={"context_window": 10**9}).acompletion("x" * 10**6),
    ),
    "a plain prompt": (plain, "_as_text", lambda: AsyncRLM(scripted("ok"), max_depth=0).acompletion([1])),
    "a context": (shelf, "plan_load", lambda: _repl(context=[1])),
    "a tool": (tool_loading, "plan_tool", lambda: _repl(custom_tools={"thing": Thing()})),
}


class Blocked:
    """A function that a test finds blocked, until it lets it go."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        self.waited_for = False

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.entered.set()
        self.waited_for = not self.leave.wait(10)
        raise RuntimeError("nobody wants this")


async def cancelled_when(blocked: Blocked, door: Callable[[], Awaitable[Any]]) -> None:
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(door)
            await anyio.to_thread.run_sync(blocked.entered.wait, 10)
            group.cancel_scope.cancel()
    assert not blocked.waited_for
    blocked.leave.set()


@pytest.mark.parametrize("name", DOORS)
async def test_a_cancelled_call_does_not_wait_for_a_long_thread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, door = DOORS[name]
    blocked = Blocked()
    with nothing_left():
        monkeypatch.setattr(module, function, blocked)
        await cancelled_when(blocked, door)


async def test_a_cancelled_call_does_not_wait_for_a_pipe() -> None:
    blocked = Blocked()

    class Pipe(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            return blocked()

    with nothing_left():
        await cancelled_when(blocked, lambda: AsyncRLM(scripted("ok")).acompletion(Pipe()))


async def test_an_open_file_that_is_no_longer_wanted_is_put_back_where_it_was() -> None:
    reads: list[int] = []
    scope = anyio.CancelScope()
    put_back = threading.Event()

    class File(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            reads.append(self.tell())
            if len(reads) == 2:
                anyio.from_thread.run_sync(scope.cancel)
            return super().read(1)

        def seek(self, *position: Any) -> int:
            put_back.set()
            return super().seek(*position)

    file = File(b"0123456789")
    file.read()
    put_back.clear()
    with scope:
        await AsyncRLM(scripted("ok")).acompletion(file)
    assert scope.cancelled_caught
    await anyio.to_thread.run_sync(put_back.wait, 10)
    assert (file.tell(), len(reads) < 4) == (1, True)


async def test_a_cancelled_upload_ends_at_the_next_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    scope, pieces = anyio.CancelScope(), 0

    write = local_sandbox.LocalSandbox._write_file

    def written(self: Any, path: Path, chunks: Iterator[bytes]) -> str:
        def counted() -> Iterator[bytes]:
            nonlocal pieces
            for chunk in chunks:
                pieces += 1
                if pieces == 2:
                    anyio.from_thread.run_sync(scope.cancel)
                yield chunk

        return write(self, path, counted())

    monkeypatch.setattr(local_sandbox.LocalSandbox, "_write_file", written)
    with nothing_left():
        async with Repl() as repl:
            with scope:
                await repl.load("context_1", "x" * 50_000_000)
            assert scope.cancelled_caught
            assert pieces == 2
            assert (await repl.execute("print('up')")).stdout == "up\n"
    assert [path.name for path in tmp_path.rglob("*")] == []
