"""The messages of one run. They grow at the end, or are compacted, and roles alternate after the system message."""

from __future__ import annotations

from typing import Any

from ..clipping import clip
from ..lm.base import LMRequest, Message
from .texts import DEFAULT_PROMPTS, Prompts

_PROLOGUE = 2
"""Messages that are never left out: the system message, and what the context is and what is asked."""


class History:
    """What a root model is shown.

    Invariants: until it is compacted, `_messages` only grows, so that providers' prompt caches hit; `_said` is the user
    message that no reply has answered yet, and joins `_messages` together with its answer.
    """

    def __init__(self, prompts: Prompts = DEFAULT_PROMPTS) -> None:
        self._prompts = prompts
        self._messages: list[Message] = []
        self._said: list[str] = []
        self._told = 0
        self._left_out: list[Message] = []  # what summaries stand for, in its place after the prologue
        self.replies = 0
        """How often the model has replied."""

    def system(self, text: str) -> None:
        self._messages.append(Message("system", text))

    def user(self, text: str) -> None:
        """Add to the next user message."""
        if text:
            self._said.append(text)

    def assistant(self, text: str) -> None:
        """The reply to what the user said."""
        self._messages = [*self._pending(), Message("assistant", text if text.strip() else self._prompts.no_reply)]
        self._said = []
        self.replies += 1

    def compact(self, summary: str) -> None:
        """Leave out all but the system message and the prologue; the model's `summary` of it follows them."""
        before = self._pending()
        self._left_out += before[_PROLOGUE:]
        self._messages = [*before[:_PROLOGUE], Message("assistant", summary)]
        self._said = []
        self._told = _PROLOGUE

    def shorten(self, limit: int) -> bool:
        """Keep about `limit` characters, head and tail, of what the user said before the newest text of all.

        Returns:
            Whether there was that much.
        """
        *said, newest = self._said
        before = "\n\n".join(said)
        if len(before) <= limit:
            return False
        self._said = [clip(before, limit, self._prompts.left_out), newest]
        return True

    @property
    def last_reply(self) -> str:
        """The newest reply that was not empty; "" if there is none."""
        said = (message.content for message in reversed(self._messages) if message.role == "assistant")
        return next((text for text in said if text != self._prompts.no_reply), "")

    def request(self, *, sampling_args: dict[str, Any] | None = None, output_cap: int | None = None) -> LMRequest:
        """The request for the next reply."""
        return LMRequest(messages=tuple(self._pending()), sampling_args=sampling_args or {}, output_cap=output_cap)

    def transcript(self) -> list[dict[str, str]]:
        """All messages so far, those that summaries stand for included."""
        messages = self._pending()
        messages = [*messages[:_PROLOGUE], *self._left_out, *messages[_PROLOGUE:]]
        return [{"role": m.role, "content": m.content} for m in messages]

    def news(self) -> list[dict[str, str]]:
        """The messages added since the last call, for the trajectory."""
        pending = self._pending()
        new, self._told = pending[self._told :], len(pending)
        return [{"role": m.role, "content": m.content} for m in new]

    def _pending(self) -> list[Message]:
        return [*self._messages, Message("user", "\n\n".join(self._said))] if self._said else self._messages
