"""Models for the cases: a root that replies by script, sub-models that reply by rule. All keep what they were sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio

from asyncrlm.lm.base import LMReply, LMRequest, LMUsage
from asyncrlm.testing import ScriptedLM

Rule = Callable[[str], str]
"""Text of a plain prompt → the reply; may raise."""

Plan = Callable[[str, int], str]
"""All the text of a request and the number of its turn, from 1 → the reply."""

QUESTION = "What does the root want to know?"
"""The `root_prompt` of runs with children, which have none: so a model tells them apart."""

FINISHED = "NO_ANSWER"
"""What a script replies once it has run out."""

USAGE = LMUsage(input_tokens=10, output_tokens=5)


class Recorder(ScriptedLM):
    """A scripted model that others can wait for."""

    def __init__(self, replies: Callable[[LMRequest], Any], **settings: Any) -> None:
        super().__init__(replies, **({"usage": USAGE} | settings))
        self._changed = anyio.Event()

    @property
    def asked(self) -> int:
        """How many requests it got."""
        return len(self.calls)

    async def wait_for_calls(self, count: int) -> None:
        """Until `count` requests have been sent, however they ended."""
        while self.asked < count:
            await self._changed.wait()

    async def acomplete(self, request: LMRequest) -> LMReply:
        try:
            return await super().acomplete(request)
        finally:
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class ScriptedRoot(Recorder):
    """Replies `turns` one after another, whatever it is asked. A turn may be an exception, which is raised.

    Child runs may be given to the root's model too. With `child`, a run whose question is not `QUESTION` is played by
    that plan; `own` has the requests of the root run only.
    """

    def __init__(self, turns: Sequence[str | Exception], *, child: Plan | None = None, **settings: Any) -> None:
        super().__init__(self._next, **({"model": "root-model"} | settings))
        self._turns = list(turns)
        self._child = child
        self.own: list[LMRequest] = []

    def _next(self, request: LMRequest) -> str | Exception:
        if self._child is not None and QUESTION not in whole(request):
            return self._child(whole(request), turn_of(request))
        self.own.append(request)
        return self._turns[len(self.own) - 1] if len(self.own) <= len(self._turns) else FINISHED

    def seen(self, turn: int) -> str:
        """What the model was newly told before its reply of that number: all after its last reply."""
        return newest(self.own[turn - 1])


class PlannedRoot(Recorder):
    """A root for any number of runs at once: the turn is how often it has replied in that conversation."""

    def __init__(self, plan: Plan, **settings: Any) -> None:
        super().__init__(lambda r: plan(whole(r), turn_of(r)), **({"model": "root-model"} | settings))


class SubModel(Recorder):
    """Replies to sub-calls by `rule`; where `child` is given, it also plays the root of child runs, by turn.

    `delay` is seconds per plain prompt. While `hold` is set and not released, plain prompts wait.
    """

    def __init__(
        self,
        rule: Rule | None = None,
        *,
        child: Plan | None = None,
        delay: float = 0.0,
        hold: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(self._reply, **({"model": "sub-model"} | settings))
        self._rule = rule
        self.child = child
        self._delay = delay
        self.release = anyio.Event()
        if not hold:
            self.release.set()
        self.plain: list[str] = []

    async def _reply(self, request: LMRequest) -> str:
        self._notify()
        if is_conversation(request):
            assert self.child is not None, "a child run was started where none was expected"
            return self.child(whole(request), turn_of(request))
        prompt = request.messages[-1].content
        self.plain.append(prompt)
        assert self._rule is not None, f"a sub-call was made where none was expected: {prompt!r}"
        await self.release.wait()
        await anyio.sleep(self._delay)
        return self._rule(prompt)


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
