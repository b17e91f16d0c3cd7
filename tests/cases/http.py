"""A model behind a real HTTP server on loopback, whose replies a function of the test decides."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


@dataclass(frozen=True)
class Asked:
    """One request as it came over the wire."""

    body: dict[str, Any]
    headers: dict[str, str]
    path: str

    @property
    def messages(self) -> list[dict[str, str]]:
        return self.body["messages"]

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


@dataclass(frozen=True)
class Answer:
    """What to reply: a message, or with another `status` an error of that text."""

    text: str | None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = field(default_factory=lambda: USAGE)
    finish_reason: str = "stop"
    message: dict[str, Any] = field(default_factory=dict)
    """More fields of the message, such as `reasoning_content`."""
    delay: float = 0.0
    """Seconds before the reply."""


@dataclass
class Serving:
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What the plan itself raised."""


@asynccontextmanager
async def serving(plan: Callable[[Asked], Answer]) -> AsyncIterator[Serving]:
    """Serve `plan` for the time of the block."""
    raise NotImplementedError
    yield
