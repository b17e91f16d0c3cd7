"""A model behind a real HTTP server on loopback, whose replies a function of the test decides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from asyncrlm.testing import FakeOpenAIServer, FakeReply, FakeRequest


class Asked:
    """One request as it came over the wire."""

    def __init__(self, request: FakeRequest) -> None:
        self.body: dict[str, Any] = request.body
        self.headers = request.headers
        self.messages: list[dict[str, str]] = request.body["messages"]

    @property
    def is_conversation(self) -> bool:
        """Whether this is a turn of a run, not a sub-call with one plain prompt."""
        return self.messages[0]["role"] == "system"

    @property
    def turn(self) -> int:
        """Number of the turn asked for, from 1."""
        return 1 + sum(m["role"] == "assistant" for m in self.messages)

    @property
    def text(self) -> str:
        return "\n\n".join(m["content"] for m in self.messages)

    @property
    def newest(self) -> str:
        """The text after the model's own last reply."""
        last = max((i for i, m in enumerate(self.messages) if m["role"] == "assistant"), default=-1)
        return "\n\n".join(m["content"] for m in self.messages[last + 1 :])


Answer = str | FakeReply
HTTPPlan = Callable[[Asked], Answer]


class Serving:
    """The server's address, and all it was asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[Asked] = []
        self.problems: list[str] = []
        """What the plan itself raised; such a request is answered with status 400, so that the run ends soon."""


@asynccontextmanager
async def serving(plan: HTTPPlan) -> AsyncIterator[Serving]:
    """Serve `plan` for the time of the block."""

    def answer(request: FakeRequest) -> Answer:
        asked = Asked(request)
        served.asked.append(asked)
        try:
            return plan(asked)
        except Exception as problem:
            served.problems.append(repr(problem))
            return FakeReply.fault(400, repr(problem))

    async with FakeOpenAIServer(answer) as server:
        served = Serving(server.base_url)
        yield served
