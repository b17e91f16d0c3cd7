"""`ResourceScope`: entered once, shared, left in reverse whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from asyncrlm.errors import LMError
from asyncrlm.repl.resources import ResourceScope

pytestmark = pytest.mark.anyio


def resource(
    log: list[str], name: str, *, fails: str = "", gate: anyio.Event | None = None
) -> Callable[[], AbstractAsyncContextManager[str]]:
    @asynccontextmanager
    async def manager() -> AsyncIterator[str]:
        log.append(f"+{name}")
        if gate is not None:
            await gate.wait()
        if fails == "enter":
            raise OSError(name)
        yield name
        await anyio.lowlevel.checkpoint()
        log.append(f"-{name}")
        if fails == "exit":
            raise OSError(name)

    return manager


async def test_first_asker_enters_and_all_share() -> None:
    log: list[str] = []
    gate = anyio.Event()
    got: list[str] = []

    async def ask(scope: ResourceScope) -> None:
        got.append(await scope.shared("a", resource(log, "a", gate=gate)))

    with anyio.fail_after(10):
        async with ResourceScope(long_lived=True) as scope:
            assert scope.long_lived
            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(ask, scope)
                await anyio.wait_all_tasks_blocked()
                gate.set()
            assert await scope.shared("b", resource(log, "b")) == "b"
        assert got == ["a"] * 5
        assert log == ["+a", "+b", "-b", "-a"]
        with pytest.raises(anyio.ClosedResourceError):
            await scope.shared("a", resource(log, "a"))
        await scope.aclose()


async def test_a_failure_is_shared_and_the_next_tries_anew() -> None:
    log: list[str] = []
    gate = anyio.Event()
    failed: list[str] = []

    async def ask(scope: ResourceScope) -> None:
        try:
            await scope.shared("a", resource(log, "a", fails="enter", gate=gate))
        except OSError as error:
            failed.append(str(error))

    with anyio.fail_after(10):
        async with ResourceScope() as scope:
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(ask, scope)
                await anyio.wait_all_tasks_blocked()
                gate.set()
            assert failed == ["a"] * 3
            assert log == ["+a"]
            assert await scope.shared("a", resource(log, "a")) == "a"


class Picky(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


@pytest.mark.parametrize("error", [Picky(code=5), LMError("no", kind="quota")])
async def test_those_who_wait_get_the_error_itself(error: Exception) -> None:
    gate = anyio.Event()
    got: list[Exception] = []

    @asynccontextmanager
    async def fails() -> AsyncIterator[None]:
        await gate.wait()
        raise error
        yield

    async def ask(scope: ResourceScope) -> None:
        try:
            await scope.shared("a", fails)
        except Exception as caught:
            got.append(caught)

    with anyio.fail_after(10):
        async with ResourceScope() as scope, anyio.create_task_group() as group:
            group.start_soon(ask, scope)
            group.start_soon(ask, scope)
            await anyio.wait_all_tasks_blocked()
            gate.set()
    assert [(type(one), str(one)) for one in got] == [(type(error), str(error))] * 2
    assert (got[0] is got[1]) is isinstance(error, Picky)


async def test_if_the_first_is_cancelled_the_next_enters() -> None:
    log: list[str] = []
    gate = anyio.Event()
    got: list[str] = []

    async def ask(scope: ResourceScope, cancel: anyio.CancelScope) -> None:
        with cancel:
            got.append(await scope.shared("a", resource(log, "a", gate=gate)))

    with anyio.fail_after(10):
        async with ResourceScope() as scope, anyio.create_task_group() as group:
            first = anyio.CancelScope()
            group.start_soon(ask, scope, first)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(ask, scope, anyio.CancelScope())
            await anyio.wait_all_tasks_blocked()
            first.cancel()
            await anyio.wait_all_tasks_blocked()
            gate.set()
    assert got == ["a"]
    assert log == ["+a", "+a", "-a"]


@pytest.mark.parametrize("failing", [("b",), ("a", "c")])
async def test_all_are_left_even_if_some_fail_or_all_is_cancelled(failing: tuple[str, ...]) -> None:
    log: list[str] = []
    scope = ResourceScope()
    for name in "abc":
        await scope.shared(name, resource(log, name, fails="exit" if name in failing else ""))
    caught: list[Exception] = []
    with anyio.fail_after(10), anyio.CancelScope() as cancelled:
        cancelled.cancel()
        try:
            await scope.aclose()
        except Exception as error:
            caught.append(error)
    assert log == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert isinstance(caught[0], OSError if len(failing) == 1 else ExceptionGroup)


async def test_what_is_entered_while_the_scope_closes_is_left() -> None:
    log: list[str] = []
    gate = anyio.Event()
    scope = ResourceScope()

    async def ask() -> None:
        with pytest.raises(anyio.ClosedResourceError):
            await scope.shared("a", resource(log, "a", gate=gate))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            await scope.aclose()
            gate.set()
    assert log == ["+a", "-a"]


async def test_what_fails_while_the_scope_closes_says_why() -> None:
    gate, scope = anyio.Event(), ResourceScope()
    errors: list[BaseException] = []

    async def ask() -> None:
        try:
            await scope.shared("a", resource([], "a", fails="enter", gate=gate))
        except Exception as error:
            errors.append(error)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            await scope.aclose()
            gate.set()
    assert [type(error) for error in errors] == [OSError]


async def test_a_resource_that_hangs_is_given_up_after_the_grace() -> None:
    @asynccontextmanager
    async def hanging() -> AsyncIterator[None]:
        yield
        await anyio.sleep_forever()

    log: list[str] = []
    with anyio.fail_after(10):
        async with ResourceScope(grace=0.05) as scope:
            await scope.shared("a", resource(log, "a"))
            await scope.shared("hanging", hanging)
    assert log == ["+a", "-a"]
