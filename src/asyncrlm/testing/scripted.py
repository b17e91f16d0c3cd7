"""A model that answers by script, inside the process."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from ..errors import LMError
from ..lm.base import LMClient, LMReply, LMRequest, LMUsage

Answer = str | LMReply | BaseException
Scripted = Answer | Callable[[LMRequest], Answer | Awaitable[Answer]]


class ScriptedLM(LMClient):
    """An `LMClient` whose replies you write. No network, no key, no cost.

        lm = ScriptedLM(["```repl\\nprint(len(context))\\n```", '```repl\\nanswer["content"] = "42"\\n...```'])
        rlm = AsyncRLM(backend=lm)
        ...
        assert len(lm.calls) == 2 and "42" in lm.prompts[1]

    A function answers requests as they come, in any order and number:

        lm = ScriptedLM(lambda request: request.messages[-1].content.upper(), latency=0.2)

    Args:
        replies: The replies in order, or one function (plain or async) of the `LMRequest` that gives a reply. A reply
            is a str, an `LMReply` (with usage, reasoning, finish reason), an exception, which is raised, or a function
            that gives one of these.
        model: The name it is known by.
        latency: Seconds each call takes, or a function of the request that says it. Slept with `anyio.sleep`, so a
            test clock may skip it.
        usage: What replies without a usage of their own say they used: an `LMUsage`; "counted", a quarter of the
            characters; or None, they don't say.
        needs_price: True makes it count as a model that costs money.

    Attributes:
        calls: Every request so far, in the order they arrived.
        in_flight: Calls being answered now.
        max_in_flight: The most there were at once.

    Raises:
        LMError: of kind "other", from `acomplete`, when the script has no reply left.
    """

    def __init__(
        self,
        replies: Iterable[Scripted] | Callable[[LMRequest], Any],
        *,
        model: str = "scripted",
        latency: float | Callable[[LMRequest], float] = 0.0,
        usage: LMUsage | str | None = "counted",
        needs_price: bool = False,
    ) -> None:
        if isinstance(replies, str):
            raise TypeError("replies must be a list of replies or a function, not one str")
        if isinstance(usage, str) and usage != "counted":
            raise ValueError(f'usage must be an LMUsage, "counted" or None, not {usage!r}')
        self.model = model
        self.calls: list[LMRequest] = []
        self.in_flight = 0
        self.max_in_flight = 0
        self._function = replies if callable(replies) else None
        self._script: Sequence[Scripted] = () if callable(replies) else tuple(replies)
        self._latency = latency
        self._usage_given = usage
        self._needs_price = needs_price

    @property
    def needs_price(self) -> bool:
        return self._needs_price

    @property
    def prompts(self) -> list[str]:
        """The text of the last message of each call."""
        return [call.messages[-1].content if call.messages else "" for call in self.calls]

    @property
    def remaining(self) -> int:
        """Replies of the script not given yet; 0 with a function."""
        return max(0, len(self._script) - len(self.calls))

    async def acomplete(self, request: LMRequest) -> LMReply:
        # First of all, so that a call that is cancelled before it began leaves no trace.
        await anyio.lowlevel.checkpoint()
        turn = len(self.calls)
        self.calls.append(request)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            seconds = self._latency(request) if callable(self._latency) else self._latency
            if seconds > 0:
                await anyio.sleep(seconds)
            return self._as_reply(request, await self._answer(turn, request))
        finally:
            self.in_flight -= 1

    async def _answer(self, turn: int, request: LMRequest) -> Any:
        if self._function is not None:
            answer: Any = self._function
        elif turn < len(self._script):
            answer = self._script[turn]
        else:
            raise LMError(
                f"the script of {self.model!r} has {_replies(len(self._script))} and this is call {turn + 1}; its last "
                f"message begins {self.prompts[turn][:200]!r}",
                kind="other",
            )
        if callable(answer):
            answer = answer(request)
        if inspect.isawaitable(answer):
            answer = await answer
        return answer

    def _as_reply(self, request: LMRequest, answer: Any) -> LMReply:
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, LMReply):
            return answer
        if not isinstance(answer, str):
            raise TypeError(
                f"the script of {self.model!r} gave {type(answer).__name__}: not a str, LMReply or exception"
            )
        return LMReply(text=answer, finish_reason="stop", usage=self._usage(request, answer), model=self.model)

    def _usage(self, request: LMRequest, text: str) -> LMUsage:
        given = self._usage_given
        if isinstance(given, LMUsage):
            return given
        if given is None:
            return LMUsage()
        asked = sum(len(message.content) for message in request.messages)
        return LMUsage(input_tokens=-(-asked // 4), output_tokens=-(-len(text) // 4))

    def __repr__(self) -> str:
        of = "" if self._function is not None else f" of {len(self._script)}"
        return f"<ScriptedLM {self.model} {len(self.calls)}{of} calls>"


def _replies(count: int) -> str:
    return "1 reply" if count == 1 else f"{count} replies"
