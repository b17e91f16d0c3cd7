"""The one door to models: every request of a run, of its sub-calls, or of a `Repl` without a run goes through it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import anyio

from ..errors import LMError
from ..ledger import Ledger, Need, Settlement
from ..lm.base import LMReply, LMRequest
from ..lm.cache.asked import Asked, CacheSettings
from ..lm.cache.replies import Seen, open_cache
from ..lm.clients import ClientSpec
from ..lm.pacing import Gate, Pacer
from ..lm.pacing.sender import Sender
from ..repl.resources import ResourceScope
from .asking import fitting_bytes

if TYPE_CHECKING:
    from ..lm.pacing.fair import Flow
    from ..lm.pacing.retrying import OnWait

T = TypeVar("T")


class ModelDoor:
    """Has replies from where they are kept, else from the models, gated, paced and paid for.

    Args:
        scope: Where clients, pacers and kept replies are open.
        run_id: Under which a recording keeps the calls.
        gate: How many requests may be in flight.
        ledger: What they may cost.
        flow: Whose requests these are, where runs take turns at an account.
        deadline: When their time is up, on the event loop's clock.
        pacer: The caller's pacers.
        replies: Where replies are kept, if anywhere.
    """

    def __init__(
        self,
        scope: ResourceScope,
        *,
        run_id: str,
        gate: Gate,
        ledger: Ledger,
        flow: Flow,
        deadline: float = math.inf,
        pacer: Pacer | Mapping[str, Pacer] | None = None,
        replies: CacheSettings | None = None,
    ) -> None:
        self.ledger = ledger
        self._scope = scope
        self._replies = replies
        self.width = gate.limit
        """Requests that may be in flight at once."""
        self._sender = Sender(scope.shared, pacer, gate=gate, ledger=ledger, flow=flow, deadline=deadline)
        self._seen = Seen(run_id)
        self._missed: LMError | None = None
        """The first call that a recording did not have."""

    async def ask(
        self,
        spec: ClientSpec,
        request: LMRequest,
        *,
        closing: bool = False,
        place: str = "",
        seconds: float | None = None,
        on_wait: OnWait | None = None,
    ) -> LMReply:
        """The reply to one request.

        Args:
            spec: Whom to ask.
            request: What to ask.
            closing: Whether it is the last request of a run that met a limit.
            place: Where in its run it comes from: a recording tells equal requests apart by it.
            seconds: How long it may take, retries included.
            on_wait: Called before each back-off.

        Raises:
            LimitError: if the ledger has no room for it.
            LMError: if the model could not be asked; of kind "too_long" before anything is sent, "timeout" after
                `seconds`.
        """
        size = fitting_bytes(spec, request)
        need = Need(
            model=spec.model,
            input_bytes=size + spec.argument_bytes(request.sampling_args),
            output_cap=request.output_cap,
            price=spec.price,
            models=len(spec.each),
            closing=closing,
        )
        bill: list[Settlement] = []

        async def send() -> LMReply:
            return await self._sender.send(spec, request, need, on_wait=on_wait, bill=bill)

        settings = self._replies
        if settings is None:
            return await _within(seconds, send)
        if settings.mode == "record":  # a time-out is recorded, too: as what whoever asked has heard
            return await self._kept_or(lambda: _within(seconds, send), settings, spec, request, need, place, bill)
        return await _within(seconds, lambda: self._kept_or(send, settings, spec, request, need, place, bill))

    async def _kept_or(
        self,
        send: Callable[[], Awaitable[LMReply]],
        settings: CacheSettings,
        spec: ClientSpec,
        request: LMRequest,
        need: Need,
        place: str,
        bill: list[Settlement],
    ) -> LMReply:
        """The reply from where replies are kept, else from `send`."""
        replies = await self._scope.shared(settings, lambda: open_cache(settings))
        where = spec.where if settings.mode == "cache" else ""  # a recording is replayed without any server
        cap = self.ledger.output_cap(need)
        asked = Asked.of(spec.backend, spec.model, request, spec.asked_with, cap, where=where)
        if settings.mode != "replay":
            return await replies.answer(asked, request, send, self._seen, place, bill)
        # Booked as it was then, so that limits are met where they were.
        reservation = self.ledger.try_reserve(need) or await self.ledger.reserve(need)
        try:
            return await replies.answer(asked, request, send, self._seen, place, bill)
        except LMError as error:
            if error.kind == "replay_miss" and self._missed is None:
                self._missed = error
            raise
        finally:
            for settlement in bill:
                self.ledger.book(settlement)
            reservation.release()

    async def unless_missed(self, result: Awaitable[T]) -> T:
        """The result, or what was missing in the recording: a run that went on without it is not the recorded one.

        Raises:
            LMError: of kind "replay_miss".
        """
        try:
            outcome = await result
        except Exception as error:
            if self._missed is None or error is self._missed:
                raise
            raise self._missed from error
        if self._missed is not None:
            raise self._missed
        return outcome


async def _within(seconds: float | None, ask: Callable[[], Awaitable[LMReply]]) -> LMReply:
    if seconds is None:
        return await ask()
    with anyio.move_on_after(seconds):
        return await ask()
    raise LMError(f"no reply within {seconds:g} s (subcall_timeout)", kind="timeout", retryable=True)
