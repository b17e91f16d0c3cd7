"""The turns of one run: its root model is asked, its cells are run, and both are told of."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable

import anyio.to_thread
import msgspec

from ..clipping import clip
from ..lm.base import LMReply, LMRequest
from ..lm.clients import ClientSpec
from ..repl.outcome import unrunnable
from ..repl.session import CellOutcome, Session
from .approval import Approval
from .compaction import Compaction
from .conversation import FIRST_HISTORY
from .groups import beside
from .history import History
from .parsing import ParsedReply, parse_reply
from .settings import CLOSING_TOKENS, MAX_REFUSAL
from .telling import Telling
from .tree import Tree

_READ_HERE = 100_000
"""Characters of a reply that are read at once."""


class Turns:
    """What a run does in its turns, the last one too. Which turn comes next is for others to decide."""

    def __init__(
        self,
        tree: Tree,
        root: ClientSpec,
        telling: Telling,
        *,
        path: str,
        approval: Approval | None = None,
    ) -> None:
        self.root = root
        self.history = History(tree.configuration.prompts)
        self.number = 0
        """Of the turn under way, from 1; 0 before the first."""
        self.last_text = ""
        """The newest reply that was not empty."""
        self.cut_off = ""
        """Why the newest reply is not whole, or is none; "" if it is."""
        self.last_error: str | None = None
        """What the newest cell that failed raised, or what became of its worker."""
        self.final: str | None = None
        """The reply of a turn after the last: no message follows it."""
        self._meanwhile: Callable[[], Awaitable[None]] | None = None
        self._hear_out = False
        self._tree = tree
        self._telling = telling
        self._path = path
        self._approval = approval
        self._cells = 0
        self._asides = 0
        self._began = 0.0
        self.compaction: Compaction | None = None

    def compacts(self, session: Session, name: str) -> None:
        """Have the history compacted where it nears the window; `name` is what the REPL then has all of it by."""
        configuration, window = self._tree.configuration, self.root.window
        if configuration.compactor is None or window is None:
            return
        self.compaction = Compaction(configuration, self.history, self, window=window, name=name)
        if name == FIRST_HISTORY and self._meanwhile is not None:  # later ones find that of an earlier completion
            self._meanwhile = functools.partial(_both, self._meanwhile, self.compaction.bind, session)

    def meanwhile(self, work: Callable[[], Awaitable[None]], *, hear_out: bool) -> None:
        """Have `work` done while the next request is in flight, and before its reply is used.

        Where that request fails, `work` is cancelled, or heard out, and done again beside the request that follows.
        """
        self._meanwhile, self._hear_out = work, hear_out

    def begin(self) -> int:
        """The next turn; returns its number."""
        self.number += 1
        self._began = time.perf_counter()
        self._telling.turn_started(self.number)
        return self.number

    def end(self) -> float:
        """The turn is over; returns the seconds it took."""
        seconds = time.perf_counter() - self._began
        self._telling.turn_finished(self.number, seconds)
        return seconds

    def transcript(self) -> list[dict[str, str]]:
        """All messages so far, the model's last one among them."""
        messages = self.history.transcript()
        return messages if self.final is None else [*messages, {"role": "assistant", "content": self.final}]

    async def ask(self, *, closing: bool = False) -> LMReply:
        """Show the root model the history and take its reply.

        Args:
            closing: Whether the request may use what the ledger holds back for the last one, and is as short.

        Raises:
            LimitError: if the ledger has no room for it.
            LMError: if the model could not be asked.
            Exception: what went wrong with the work that `meanwhile` was told of.
        """
        cap = CLOSING_TOKENS if closing else None
        request = self.history.request(sampling_args=self._tree.sampling_args, output_cap=cap)
        if self._meanwhile is None:
            return await self._ask(request, closing=closing)
        ask = functools.partial(self._ask, request, closing=closing)
        reply = await beside(self._meanwhile, ask, hear_out=self._hear_out)
        self._meanwhile = None
        return reply

    async def _ask(self, request: LMRequest, *, closing: bool) -> LMReply:
        tree = self._tree
        began = time.perf_counter()
        place = f"{self._path}{self.number}t"
        reply = await tree.ask(self.root, request, stamp=self._telling.stamp, closing=closing, place=place)
        if reply.text.strip():
            self.last_text = reply.text
        self.cut_off = _broken_off(reply)
        if self.compaction is not None:
            self.compaction.replied(request, reply)
        if tree.watched:
            seconds = time.perf_counter() - began
            self._telling.model_replied(self.number, self.root.model, self.history.news(), reply, seconds)
        return reply

    async def ask_aside(self, request: LMRequest) -> LMReply:
        """Send a request that is no turn's own, under the limits of the run.

        Raises:
            LimitError: if the ledger has no room for it.
            LMError: if the model could not be asked.
        """
        self._asides += 1
        request = msgspec.structs.replace(request, sampling_args=self._tree.sampling_args)
        place = f"{self._path}{self.number}t{self._asides}"
        return await self._tree.ask(self.root, request, stamp=self._telling.stamp, place=place)

    def compacted(self, before: int, after: int, summary: str, seconds: float) -> None:
        """A summary stands in the place of the history."""
        self._telling.history_compacted(self.number, before, after, summary, seconds)

    async def parsed(self, reply: LMReply) -> ParsedReply:
        """What a reply asks to run; a long one is not read on the event loop."""
        if len(reply.text) <= _READ_HERE:
            return parse_reply(reply.text, cut_off=reply.cut_off)
        read = functools.partial(parse_reply, reply.text, cut_off=reply.cut_off)
        return await anyio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=self._tree.scope.threads)

    async def run_cell(self, session: Session, code: str) -> CellOutcome:
        """Run one cell of a reply, if it may be run."""
        self._cells += 1
        self._telling.cell_started(self.number, self._cells, code)
        refused = None if self._approval is None else await self._approval.refused(code)
        outcome = refused or unrunnable(code) or await session.execute(code)
        error = outcome.lost
        if outcome.error is not None:
            error = outcome.error.text
        self.last_error = error or self.last_error
        self._telling.cell_finished(self.number, self._cells, outcome, error)
        return outcome


async def _both(first: Callable[[], Awaitable[None]], then: Callable[[Session], Awaitable[None]], to: Session) -> None:
    await first()
    await then(to)


def _broken_off(reply: LMReply) -> str:
    if reply.finish_reason == "length":
        return "the last reply was cut off at its length: raise max_tokens in sampling_args"
    if reply.ending == "broken":
        return f"the model's server broke off the last reply (finish reason: {reply.finish_reason})"
    if reply.finish_reason != "refusal":
        return ""
    why = "" if reply.text.strip() else clip((reply.reasoning or "").strip(), MAX_REFUSAL)
    return f"the model refused: {why}" if why else "the model refused, or a filter of its provider did"
