"""Sending through a pacer, a clock that jumps, and a server with limits."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import anyio
import trio.testing

from asyncrlm import LMError
from asyncrlm.ledger import Ledger, Need
from asyncrlm.lm.base import LMClient, LMReply, LMRequest, Message
from asyncrlm.lm.pacing.fair import Flow
from asyncrlm.lm.pacing.fallback import Member
from asyncrlm.lm.pacing.gate import Gate
from asyncrlm.lm.pacing.limits import rate_hints
from asyncrlm.lm.pacing.pacer import account_of
from asyncrlm.lm.pacing.retrying import DEFAULT_ATTEMPTS, load
from asyncrlm.lm.pacing.sending import Way, sent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncrlm import Pacer

NO_FLOW: Flow = (None, None)
NEED = Need(model="m", input_bytes=300, output_cap=100, price=None)


async def send(pacer: Pacer, client: LMClient, asked: str | LMRequest = "x", **changes: Any) -> LMReply:
    request = LMRequest(messages=(Message("user", asked),)) if isinstance(asked, str) else asked
    arguments: dict[str, Any] = {
        "gate": Gate(10_000),
        "ledger": Ledger(),
        "flow": NO_FLOW,
        "deadline": math.inf,
        "on_wait": None,
        "attempts": DEFAULT_ATTEMPTS,
    } | changes
    need = arguments.pop("need", NEED)
    way = Way(Member(client, account_of(pacer)), need)
    return await sent([way], request, cap=arguments["ledger"].output_cap(need), **arguments)


async def all_at_once(count: int, one: Callable[[int], Awaitable[Any]]) -> None:
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(one, number)


def on_a_jumping_clock(main: Callable[[], Awaitable[None]]) -> None:
    load()  # in a thread it would be, for which this clock does not wait
    anyio.run(main, backend="trio", backend_options={"clock": trio.testing.MockClock(autojump_threshold=0)})


class Limited:
    """A server's limits: `at_once` in flight, `quota` in each period that begins with its first request."""

    def __init__(self, at_once: int, quota: int, period: float) -> None:
        self.at_once, self.quota, self.period = at_once, quota, period
        self.in_flight = self.wasted = self.used = 0
        self.ends = 0.0

    def admit(self) -> float | None:
        """None, or seconds until there is room (0: as soon as another request is done)."""
        now = anyio.current_time()
        if now >= self.ends:
            self.ends, self.used = now + self.period, 0
        if self.in_flight >= self.at_once:
            self.wasted += 1
            return 0.0
        if self.used >= self.quota:
            self.wasted += 1
            return self.ends - now
        self.used += 1
        return None

    @property
    def headers(self) -> dict[str, str]:
        return {
            "x-ratelimit-limit-requests": str(self.quota),
            "x-ratelimit-remaining-requests": str(self.quota - self.used),
            "x-ratelimit-reset-requests": f"{self.ends - anyio.current_time():.3f}s",
        }


class LimitedLM(LMClient):
    """A model behind such limits, 20 ms away, that thinks for about a second."""

    model = "m"

    def __init__(self, limited: Limited, *, tells: bool, waits: float | None = None) -> None:
        self.limited = limited
        self.tells = tells
        self.waits = waits
        """The Retry-After of each refusal, true or not: 0 for none; None for a true one."""

    async def acomplete(self, request: LMRequest) -> LMReply:
        await anyio.sleep(random.uniform(0.01, 0.03))
        wait = self.limited.admit()
        rate = rate_hints(self.limited.headers) if self.tells else None
        if wait is not None:
            await anyio.sleep(0.02)
            wait = wait if self.waits is None else self.waits
            raise LMError("429", kind="rate_limit", retryable=True, retry_after=wait or None, rate=rate)
        self.limited.in_flight += 1
        try:
            await anyio.sleep(random.uniform(0.5, 1.5))
        finally:
            self.limited.in_flight -= 1
        await anyio.sleep(0.02)
        return LMReply(text=request.messages[0].content.upper(), rate=rate)
