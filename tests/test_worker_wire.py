"""The wire as a state machine: threads, event loops and the main loop hand the reading over to one another."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlm.repl.worker.calls import Calls
from asyncrlm.repl.worker.wire import Wire, dump

CAP = 10.0
logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)  # it writes about tasks that a stop ended


class Closed(Exception):
    pass


class Bench:
    """A wire in this process, and a host thread that answers in random order, in random pieces."""

    def __init__(self, chance: random.Random, credit: int) -> None:
        self.chance = chance
        self.credit = credit
        self.host, near = socket.socketpair()
        self.host.settimeout(0.0005)
        self.wire = Wire(on_close=lambda: None)
        self.wire.attach(near.detach())
        self.wire.guard.thread = 0  # no signals here: every thread is like any other
        self.wire.credit = credit
        self.wire.open = True
        self.calls = Calls(self.wire)
        self.errors: list[BaseException] = []
        self.most = 0
        self.cancelled = 0
        self.quit = threading.Event()
        self.thread = threading.Thread(target=self._guard, args=(self._serve,))
        self.thread.start()

    def _guard(self, function: Any) -> None:
        try:
            function()
        except BaseException as error:
            self.errors.append(error)

    def _serve(self) -> None:
        buffer, owed = b"", {}
        while True:
            try:
                data = self.host.recv(self.chance.randrange(1, 5000))
                if not data:
                    return
                buffer += data
            except TimeoutError:
                if self.quit.is_set() and not owed:
                    return
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                frame = json.loads(line)
                if frame["t"] == "cancel":
                    self.cancelled += 1
                else:
                    assert frame["id"] not in owed
                    owed[frame["id"]] = (len(line) + 1, frame)
                    total = sum(size for size, _ in owed.values())
                    self.most = max(self.most, total)
                    assert total <= self.credit or len(owed) == 1
            ready = self.chance.sample(sorted(owed), self.chance.randrange(len(owed) + 1))
            out = b"\n" * self.chance.randrange(2)
            for number in ready:
                _, frame = owed.pop(number)
                out += json.dumps({"t": "reply", "id": number, "value": frame["prompt"]}).encode() + b"\n"
            while out:
                cut = self.chance.randrange(1, len(out) + 1)
                self.host.settimeout(CAP)
                self.host.sendall(out[:cut])
                self.host.settimeout(0.0005)
                out = out[cut:]

    def close(self) -> None:
        self.quit.set()
        self.thread.join(CAP)
        assert not self.thread.is_alive()
        self.host.close()
        self.wire.socket.close()
        for fd in (self.wire.kick_out, self.wire._kick_in):
            socket.os.close(fd)


def encode(prompt: str) -> str:
    return f'"kind":"llm","prompt":{dump(prompt)}'


# One step: ("call" | "acall", items, length of a prompt) or ("cancel", seconds, length)
steps = st.tuples(
    st.sampled_from(["call", "call", "acall", "gather", "cancel", "mixed"]),
    st.integers(1, 6),
    st.sampled_from([1, 100, 1500]),
)
workers = st.lists(st.lists(steps, min_size=1, max_size=5), min_size=1, max_size=6)


def play(bench: Bench, name: str, script: list[tuple[str, int, int]]) -> None:
    """Each call must get its own reply, whoever read it."""
    number = 0

    def prompts(count: int, size: int) -> list[str]:
        nonlocal number
        number += count
        return [f"{name}.{number - i}.".ljust(size, "x") for i in range(count)]

    def right(asked: list[str], replies: list[dict[str, Any]]) -> None:
        assert [reply["value"] for reply in replies] == asked

    async def acall(count: int, size: int) -> None:
        asked = prompts(count, size)
        right(asked, await bench.calls.acall(asked, encode))

    async def run() -> None:
        for kind, count, size in script:
            if kind == "acall":
                await acall(count, size)
            elif kind == "gather":
                await asyncio.gather(*[acall(1, size) for _ in range(count)])
            elif kind == "cancel":
                task = asyncio.create_task(acall(count, size))
                await asyncio.sleep(0.001 * (count % 3))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif kind == "mixed":
                task = asyncio.create_task(acall(count, size))
                await asyncio.sleep(0)
                asked = prompts(1, size)
                right(asked, bench.calls.call(asked, encode))
                await task
            else:
                asked = prompts(count, size)
                right(asked, bench.calls.call(asked, encode))

    if any(kind != "call" for kind, _, _ in script):
        asyncio.run(run())
    else:
        for _, count, size in script:
            asked = prompts(count, size)
            right(asked, bench.calls.call(asked, encode))


@settings(max_examples=60, deadline=None)
@given(workers, st.integers(0, 2**32), st.sampled_from([1000, 4000, 10**9]))
def test_every_call_gets_its_own_reply(scripts: list[list[tuple[str, int, int]]], seed: int, credit: int) -> None:
    bench = Bench(random.Random(seed), credit)
    threads = [
        threading.Thread(target=bench._guard, args=(lambda i=i, s=script: play(bench, str(i), s),), daemon=True)
        for i, script in enumerate(scripts)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + CAP
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a call was never answered"
    bench.close()
    assert not bench.errors, bench.errors
    wire = bench.wire
    assert (wire.leader, wire.followers, wire.calls, list(wire.hungry), wire.readers) == (None, {}, {}, [], {})


@settings(max_examples=40, deadline=None)
@given(workers, st.integers(0, 2**32), st.floats(0, 0.02))
def test_a_stop_ends_every_wait(scripts: list[list[tuple[str, int, int]]], seed: int, after: float) -> None:
    bench = Bench(random.Random(seed), 4000)
    outcomes: list[BaseException | None] = []

    def run(index: int, script: list[tuple[str, int, int]]) -> None:
        try:
            for _ in range(50):
                play(bench, str(index), script)
            outcomes.append(None)
        except BaseException as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(scripts)]
    for thread in threads:
        thread.start()
    time.sleep(after)  # at no particular moment
    bench.wire.guard.stopped = True
    bench.wire.stop()
    deadline = time.monotonic() + CAP
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a stopped call went on waiting"
    bench.close()
    for outcome in outcomes:
        assert outcome is None or isinstance(outcome, (KeyboardInterrupt, asyncio.CancelledError)), repr(outcome)
    assert not bench.errors, bench.errors


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_frames_arrive_in_any_pieces(size: int) -> None:
    host, near = socket.socketpair()
    wire = Wire(on_close=lambda: None)
    wire.attach(near.detach())
    frames = [{"t": "load", "id": i, "value": "x" * (i * 97 % 1000)} for i in range(50)]
    data = b"\n   \n" + b"".join(json.dumps(frame).encode() + b"  \n" for frame in frames)

    def send() -> None:
        for at in range(0, len(data), size):
            host.sendall(data[at : at + size])

    thread = threading.Thread(target=send)
    thread.start()
    assert [wire.next_frame() for _ in frames] == frames
    thread.join(CAP)
    host.close()
    wire.socket.close()
    for fd in (wire.kick_out, wire._kick_in):
        socket.os.close(fd)


def test_both_directions_full_at_once() -> None:
    """The host fills the channel while the worker writes: the worker takes replies meanwhile."""
    host, near = socket.socketpair()
    wire = Wire(on_close=lambda: None)
    wire.attach(near.detach())
    wire.guard.thread = 0
    wire.open = True
    flood = json.dumps({"t": "reply", "id": 10**9, "value": "x" * 10_000}).encode() + b"\n"
    total = len(json.dumps({"kind": "x"})) + 5_000_000
    received = 0

    def serve() -> None:
        nonlocal received
        host.sendall(flood * 500)  # blocks unless the worker reads
        while received < total:
            received += len(host.recv(1 << 16))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert wire.post(b"y" * total)
    thread.join(CAP)
    assert received == total
    host.close()
    wire.socket.close()
    for fd in (wire.kick_out, wire._kick_in):
        socket.os.close(fd)
