"""Both ends of a stream that breaks; see `repl/worker/resumed.py`."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncrlm.environments.remote_resumed import ResumedMachine
from asyncrlm.repl.worker.resumed import PIECE, WINDOW, Link


@pytest.mark.parametrize("seed", range(40))
def test_wherever_it_breaks_nothing_is_lost_and_nothing_comes_twice(seed: int) -> None:
    """The host's messages arrive whole, late, twice or not at all; what the keeper writes is cut at any byte."""
    chance = random.Random(seed)
    host, keeper = Link(), Link()
    asked = [chance.randbytes(chance.randrange(1, 9000)) for _ in range(60)]
    told = bytearray(chance.randbytes(300_000))
    wanted = bytes(told), b"".join(asked)
    heard, taken = bytearray(), bytearray()
    raw = bytearray()
    late: list[bytes] = []

    def give(message: bytes) -> None:
        taken.extend(keeper.feed(message))
        keeper.taken = keeper.got
        if keeper.resumed:
            keeper.resumed = False
            raw[:] = b"".join(keeper.again())

    while asked or bytes(heard) != wanted[0] or bytes(taken) != wanted[1]:
        if asked:
            message = host.wrap(asked.pop(0))
            if chance.random() < 0.8:
                give(message)
            else:
                late.append(message)
        if late and chance.random() < 0.3:
            give(chance.choice(late))
        keeper.fill(raw, told)
        part = bytes(raw[: chance.randrange(1, 20_000)])
        del raw[: len(part)]
        if chance.random() < 0.2 or not (part or asked):
            part = part[: chance.randrange(len(part) + 1)]
            heard += host.feed(part)
            host.expect()
            late.append(host.request())
            assert host.feed(bytes(raw[:1000])) == b""  # of the new stream, before the keeper goes on
            del raw[:1000]
            give(late[-1])
        else:
            heard += host.feed(part)
        host.taken = host.got
        assert not host.missed
        if host.resumed:
            host.resumed = False
            for message in host.again():
                give(message)
    assert (bytes(heard), bytes(taken)) == wanted


def test_what_is_not_taken_is_kept_up_to_a_window() -> None:
    host, keeper = Link(), Link()
    raw, told = bytearray(), bytearray(3 * WINDOW)
    heard = 0
    while told:
        keeper.fill(raw, told)
        heard += len(host.feed(bytes(raw)))
        raw.clear()
        assert len(keeper.kept) <= WINDOW
        if keeper.full:
            assert host.got == heard
            host.taken = host.got
            assert host.owes
            keeper.feed(host.wrap(b""))
            assert not host.owes
            assert keeper.kept == b""
    assert heard == 3 * WINDOW


@pytest.mark.parametrize(
    "noise",
    [
        b"x" * 1000,
        b"0 0 x\n",
        b"1\n",
        b"0 0 -5\n",
        b"0 0 999999999\n",
        b"0 0 0 1\n",
        b"0 0 0 x word\n",
        b"0 0 0 1 two words\n",
        b"0 0 0\n" * 10_000,
    ],
)
def test_what_is_no_such_stream_is_told_without_loss_of_what_came_before(noise: bytes) -> None:
    host, keeper = Link(most_useless=100), Link()
    assert host.feed(keeper.wrap(b"heard") + noise) == b"heard"
    assert host.unclear
    host.expect()
    keeper.wrap(b" more")
    keeper.feed(host.request())
    assert host.feed(b"".join(keeper.again())) == b" more"
    assert not host.unclear


def test_whoever_is_asked_says_what_it_took_and_no_more() -> None:
    host, keeper = Link(), Link()
    keeper.feed(host.wrap(b"data"))
    keeper.taken = keeper.got
    assert not keeper.owes
    keeper.feed(host.wrap(b""))
    assert keeper.owes
    host.feed(keeper.wrap(b""))
    assert (host.kept, host.owes, keeper.owes) == (b"", False, False)


def test_what_did_not_come_is_missed() -> None:
    host, keeper = Link(), Link()
    keeper.wrap(b"lost")
    assert host.feed(keeper.wrap(b"more")) == b""
    assert host.missed
    host.expect()
    keeper.feed(host.request())
    assert host.feed(b"".join(keeper.again())) == b"lostmore"
    assert not host.missed


@pytest.mark.anyio
async def test_a_keeper_that_heeds_no_window_has_to_wait() -> None:
    """What a vendor's machine adds is not asked here."""
    heard: Any = type("Heard", (ResumedMachine,), dict.fromkeys(ResumedMachine.__abstractmethods__))
    machine, said = heard(SimpleNamespace(sandbox_name="a"), None), 0

    async def flood() -> None:
        nonlocal said
        for at in range(0, 4 * WINDOW, PIECE):
            await machine.pass_on(b"%d 0 %d\n" % (at, PIECE) + bytes(PIECE))
            said = at + PIECE

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(flood)
            await anyio.wait_all_tasks_blocked()
            assert said == 2 * WINDOW
            while said < 4 * WINDOW:
                await machine.receive()
    await machine.destroy()
