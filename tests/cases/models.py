"""Models for the cases: a root that replies by script, sub-models that reply by rule. All keep what they were sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

from asyncrlm.lm.base import LMClient, LMReply, LMRequest, LMUsage

Rule = Callable[[str], str]
"""Text of a plain prompt → the reply; may raise."""

FINISHED = "NO_ANSWER"
"""What a script replies once it has run out."""


class Recorder(LMClient):
    """A model that keeps its requests and knows how many are in flight."""

    needs_price = False  # type: ignore[assignment]

    def __init__(self, model: str, usage: LMUsage | None = None) -> None:
        self.model = model
        self.usage = usage or LMUsage(input_tokens=10, output_tokens=5)
        self.requests: list[LMRequest] = []
        self.in_flight = 0
        self.peak = 0
        self.changed = anyio.Event()

    @property
    def calls(self) -> int:
        return len(self.requests)

    async def wait_for_calls(self, count: int) -> None:
        """Until `count` requests have been sent, however they ended."""
        while self.calls < count:
            await self.changed.wait()

    async def acomplete(self, request: LMRequest) -> LMReply:
        self.requests.append(request)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        self.changed.set()
        self.changed = anyio.Event()
        try:
            text = await self.reply(request, len(self.requests))
        finally:
            self.in_flight -= 1
        return LMReply(text=text, finish_reason="stop", usage=self.usage)

    async def reply(self, request: LMRequest, number: int) -> str:
        raise NotImplementedError


class ScriptedRoot(Recorder):
    """Replies `turns` one after another, whatever it is asked. A turn may be an exception, which is raised."""

    def __init__(self, turns: Sequence[str | Exception], *, usage: LMUsage | None = None) -> None:
        super().__init__("root-model", usage)
        self.turns = list(turns)

    async def reply(self, request: LMRequest, number: int) -> str:
        await anyio.lowlevel.checkpoint()
        turn = self.turns[number - 1] if number <= len(self.turns) else FINISHED
        if isinstance(turn, Exception):
            raise turn
        return turn

    def seen(self, turn: int) -> str:
        """What the model was newly told before its reply of that number: all after its last reply."""
        return newest(self.requests[turn - 1])


class PlannedRoot(Recorder):
    """A root for any number of runs at once: the turn is how often it has replied in that conversation."""

    def __init__(
        self, plan: Callable[[str, int], str], *, name: str = "root-model", usage: LMUsage | None = None
    ) -> None:
        super().__init__(name, usage)
        self.plan = plan

    async def reply(self, request: LMRequest, number: int) -> str:
        await anyio.lowlevel.checkpoint()
        return self.plan(whole(request), turn_of(request))


class SubModel(Recorder):
    """Replies to sub-calls by `rule`; where `child` is given, it also plays the root of child runs, by turn.

    `delay` is seconds per prompt, or a function of the prompt.
    """

    def __init__(
        self,
        rule: Rule | None = None,
        *,
        child: Callable[[str, int], str] | None = None,
        delay: float | Callable[[str], float] = 0.0,
        usage: LMUsage | None = None,
    ) -> None:
        super().__init__("sub-model", usage)
        self.rule = rule
        self.child = child
        self.delay = delay
        self.plain: list[str] = []

    async def reply(self, request: LMRequest, number: int) -> str:
        if is_conversation(request):
            assert self.child is not None, "a child run was started where none was expected"
            return self.child(whole(request), turn_of(request))
        prompt = request.messages[-1].content
        self.plain.append(prompt)
        assert self.rule is not None, f"a sub-call was made where none was expected: {prompt!r}"
        seconds = self.delay(prompt) if callable(self.delay) else self.delay
        await anyio.sleep(seconds)
        return self.rule(prompt)


class Held(SubModel):
    """A sub-model that replies only once `release` is set."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self.release = anyio.Event()

    async def reply(self, request: LMRequest, number: int) -> str:
        await self.release.wait()
        return await super().reply(request, number)


def is_conversation(request: LMRequest) -> bool:
    """Whether this is a turn of a run, not a sub-call with one plain prompt."""
    return request.messages[0].role == "system"


def turn_of(request: LMRequest) -> int:
    """Number of the turn asked for, from 1."""
    return 1 + sum(m.role == "assistant" for m in request.messages)


def whole(request: LMRequest) -> str:
    """All the text of a request."""
    return "\n\n".join(m.content for m in request.messages)


def newest(request: LMRequest) -> str:
    """The text after the model's own last reply."""
    last = max((i for i, m in enumerate(request.messages) if m.role == "assistant"), default=-1)
    return "\n\n".join(m.content for m in request.messages[last + 1 :])


def cell(code: str) -> str:
    """`code` as the model would write it."""
    return f"```repl\n{code}\n```"


def submit(expression: str) -> str:
    """A cell that submits the value of a Python expression."""
    return cell(f'answer["content"] = {expression}\nanswer["ready"] = True')


AsyncRule = Callable[[str], Awaitable[str]]
