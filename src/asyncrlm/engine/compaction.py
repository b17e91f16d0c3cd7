"""A history that nears its model's window is summarised by that model; all of it stays in the REPL as `history`."""

from __future__ import annotations

import time
from typing import Any, Protocol

from ..caught import described, is_own
from ..clipping import clip
from ..errors import LMError, RLMError
from ..lm.base import LMReply, LMRequest, Message, text_size
from ..repl.session import Session
from . import prompts as words
from .history import History
from .settings import Ask, Compactor, Configuration

_BYTES_PER_TOKEN = 3
"""For what no reply has counted yet: few, so that a history is found too long rather than too late."""
_LEAST_PART = 500
"""Characters kept of each message at least, where a history must be cut to be summarised at all."""


class Aside(Protocol):
    """A run, as what it does beside its turns knows it."""

    async def ask_aside(self, request: LMRequest) -> LMReply:
        """Send a request that is no turn's own, under the limits of the run."""
        ...

    def compacted(self, before: int, after: int, summary: str, seconds: float) -> None:
        """Hear of a summary that stands in the place of a history: tokens before and after, and how long it took."""
        ...


class Compaction:
    """Of one run.

    Args:
        configuration: Says what makes the summary, and when.
        history: What is compacted.
        run: Whose it is.
        window: Tokens that the model reads and writes in one request.
        name: What the REPL knows the whole history by, besides `history`.
    """

    def __init__(self, configuration: Configuration, history: History, run: Aside, *, window: int, name: str) -> None:
        self._compactor = configuration.compactor or by_summary(configuration.prompts.compaction)
        self._prompts = configuration.prompts
        self._most = int(window * configuration.compaction_threshold)
        self._window = window
        self._history = history
        self._run = run
        self._name = name
        self._count = 0
        self._counted: tuple[int, int] | None = None
        self._replies_at_last = 0

    def replied(self, request: LMRequest, reply: LMReply) -> None:
        """Take note of what the provider counted."""
        usage = reply.usage
        if usage.input_tokens is not None and usage.output_tokens is not None and not reply.cached:
            self._counted = usage.input_tokens + usage.output_tokens, request.input_bytes() + text_size(reply.text)

    @property
    def tokens(self) -> int:
        """Of the next request, about: what the last reply counted, and an estimate of what came since."""
        size = self._history.request().input_bytes()
        tokens, counted = self._counted or (0, 0)
        return tokens + max(0, size - counted) // _BYTES_PER_TOKEN

    @property
    def is_due(self) -> bool:
        return self.can_help and self.tokens >= self._most

    @property
    def can_help(self) -> bool:
        """Whether anything has been said since the last time, or at all."""
        return self._history.replies > self._replies_at_last

    async def bind(self, session: Session) -> None:
        """Have all messages so far in the REPL."""
        await session.load(self._name, self._history.transcript(), also="history")

    async def compact(self, session: Session) -> None:
        """Put a summary in the place of all that follows the prologue.

        Raises:
            LimitError: if there is no room for the request.
            LMError: if the model can't be asked.
            SandboxLost: if `history` can't be bound.
        """
        began, before = time.perf_counter(), self.tokens
        summary = (await self._summary()).strip()
        self._replies_at_last = self._history.replies  # nothing is tried twice before there is something new
        if not summary:
            return
        self._count += 1
        self._history.compact(summary)
        self._history.user(words.compacted_message(self._prompts, count=self._count))
        self._counted = None
        await self.bind(session)
        self._run.compacted(before, self.tokens, summary, time.perf_counter() - began)

    async def _summary(self) -> str:
        messages = self._history.request().messages

        async def ask(asked: list[dict[str, str]]) -> str:
            request = LMRequest(messages=tuple(Message(each["role"], each["content"]) for each in asked))
            return (await self._run.ask_aside(request)).text

        try:
            return await self._made(_plain(messages), ask)
        except LMError as error:
            if error.kind != "too_long":
                raise
        most = max(_LEAST_PART, self._window * _BYTES_PER_TOKEN // 2 // len(messages))
        shorter = [Message(each.role, clip(each.content, most, self._prompts.left_out)) for each in messages[2:]]
        return await self._made(_plain((*messages[:2], *shorter)), ask)

    async def _made(self, messages: list[dict[str, str]], ask: Ask) -> str:
        """What the compactor, which may be the caller's, makes of them."""
        try:
            summary: Any = await self._compactor(messages, ask)
        except RLMError:
            raise
        except BaseException as error:
            if not is_own(error):
                raise
            raise LMError(f"the function given as compaction raised {described(error)}", kind="other") from error
        if not isinstance(summary, str):
            kind = type(summary).__name__
            raise LMError(f"the function given as compaction returned {kind}, not a str", kind="other")
        return summary


def _plain(messages: tuple[Message, ...]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def by_summary(request: str) -> Compactor:
    """The compactor that has the root model summarise its own history; `request` is what it is told to do."""

    async def summarise(messages: list[dict[str, str]], ask: Ask) -> str:
        *earlier, last = messages
        if last["role"] != "user":
            return await ask([*messages, {"role": "user", "content": request}])
        return await ask([*earlier, {"role": "user", "content": f"{last['content']}\n\n{request}"}])

    return summarise
