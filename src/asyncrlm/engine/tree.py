"""What a root run and its descendants share: one ledger, one gate, the listeners, the clients in use."""

from __future__ import annotations

import inspect
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import anyio
import msgspec

from ..caught import described, is_own
from ..errors import LimitError, LMError, TimeoutExceededError
from ..events import Event, LimitReached, ListenerFailed, RequestWaiting, UsageSettled
from ..ledger import Ledger, Need, Settlement
from ..lm.base import LMReply, LMRequest
from ..lm.clients import ClientSpec
from ..lm.pacing import Gate
from ..lm.pacing.fair import flow_of
from ..lm.pacing.fallback import priced
from ..observe.log import get_logger
from ..repl.resources import ResourceScope
from .call import Call, Watching
from .checks import Checks
from .door import ModelDoor

Stamp: TypeAlias = Callable[[], dict[str, Any]]
"""The fields that every event of one run has, as of now."""


class Tree:
    """One root call and all below it. Passed down by argument, never found."""

    def __init__(self, call: Call, scope: ResourceScope, watching: Watching) -> None:
        limits = call.limits
        configuration = call.configuration
        self.configuration = configuration
        self.limits = limits
        self.scope = scope
        self.run_id = call.run_id
        self.sampling_args = call.sampling_args
        self.show_values = watching.keeps_trajectory
        self.router = configuration.router
        self.checks = Checks(scope.threads)
        self.gate = Gate(limits.max_concurrent_requests)
        self.started = anyio.current_time()
        self.deadline = self.started + limits.max_timeout if limits.max_timeout is not None else float("inf")
        self.ledger = Ledger(
            max_budget=limits.max_budget,
            max_tokens=limits.max_tokens,
            max_subcalls=limits.max_subcalls,
            mode=limits.limits,
            on_settle=self._settled,
        )
        self.tool_counts: Counter[tuple[int, str]] = Counter()
        """Calls of each tool so far; `ToolDesk` counts them."""
        self.limit: LimitError | None = None
        """The first limit of the ledger that any run of the tree met. Once set, the tree is ending."""
        self._listeners = list(watching.listeners)
        self._child_gates: dict[int, Gate] = {}
        self.door = ModelDoor(
            scope,
            run_id=self.run_id,
            gate=self.gate,
            ledger=self.ledger,
            flow=flow_of(self.run_id, call.tenant),
            deadline=self.deadline,
            pacer=configuration.pacer,
            replies=configuration.replies,
        )

    # ---- listeners ----

    @property
    def watched(self) -> bool:
        """Whether anybody listens: events that nobody hears are not made."""
        return bool(self._listeners)

    def emit(self, event: Event) -> None:
        """Tell every listener. One that raises is told of to the others and dropped."""
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except BaseException as error:  # a listener is the user's code; its failure is an event
                if not is_own(error):
                    raise
                if listener in self._listeners:
                    self._listeners.remove(listener)
                self.emit(self.listener_failed(listener, error))

    def listener_failed(self, listener: Any, error: BaseException) -> ListenerFailed:
        name = getattr(listener, "__qualname__", type(listener).__qualname__)
        if not self.watched:
            get_logger().warning(
                "asyncrlm: your callback raised, the run goes on",
                callback=name,
                error=described(error),
            )
        return ListenerFailed(run_id=self.run_id, time=time.time(), listener=name, error=described(error))

    def callback_failed(self, function: Any, error: BaseException, stamp: Stamp) -> None:
        self.emit(msgspec.structs.replace(self.listener_failed(function, error), **stamp()))

    async def callback(self, function: Callable[..., Any] | None, *arguments: Any, stamp: Stamp) -> None:
        """Call a callback of the user's; what it raises is an event of the run it was called for, not a failed run."""
        if function is None:
            return
        try:
            outcome = function(*arguments)
            if inspect.isawaitable(outcome):
                await outcome
        except BaseException as error:
            if not is_own(error):
                raise
            self.callback_failed(function, error, stamp)

    def _settled(self, settlement: Settlement) -> None:
        if self.watched:
            self.emit(
                UsageSettled(
                    run_id=self.run_id,
                    time=time.time(),
                    model=settlement.model,
                    input_tokens=settlement.input_tokens,
                    output_tokens=settlement.output_tokens,
                    cached_tokens=settlement.cached_tokens,
                    reasoning_tokens=settlement.reasoning_tokens,
                    cost=settlement.cost,
                    estimated=settlement.estimated,
                )
            )

    # ---- limits ----

    def meet(self, error: LimitError) -> None:
        """Remember the first limit that was met; the tree ends with it unless an answer is ready."""
        if self.limit is None:
            self.limit = error
            if self.watched:
                self.emit(
                    LimitReached(run_id=self.run_id, time=time.time(), limit=type(error).__name__, reason=str(error))
                )

    def time_is_up(self) -> TimeoutExceededError:
        """The deadline was met."""
        elapsed = anyio.current_time() - self.started
        timeout = self.limits.max_timeout
        error = TimeoutExceededError(elapsed, elapsed if timeout is None else timeout)
        self.meet(error)
        return error

    def child_gate(self, depth: int) -> Gate:
        """Live children at `depth`: one gate a depth, so that a parent never holds what its children need."""
        return self._child_gates.setdefault(depth, Gate(self.limits.max_concurrent_subcalls))

    def left(self) -> dict[str, Any]:
        """What `SHOW_LIMITS()` tells a cell; None where there is no limit."""
        seconds = self.deadline - anyio.current_time()
        return {**self.ledger.left(), "seconds": None if seconds == float("inf") else round(max(0.0, seconds), 3)}

    # ---- asking ----

    async def ask(
        self,
        spec: ClientSpec,
        request: LMRequest,
        *,
        stamp: Stamp,
        closing: bool = False,
        place: str = "",
        seconds: float | None = None,
    ) -> LMReply:
        """Send one request, gated, paid for and retried; or have the reply from where replies are kept.

        `place` says where in its run it comes from: a recording tells equal requests apart by it. `seconds` is how long
        it may take.

        Raises:
            LimitError: if the ledger has no room for it.
            LMError: if the model could not be asked; kind "too_long" before anything is sent.
        """

        def waiting(attempt: int, delay: float, error: LMError) -> None:
            if self.watched:
                self.emit(
                    RequestWaiting(
                        **stamp(),
                        model=spec.model,
                        attempt=attempt,
                        delay=delay,
                        reason=str(error),
                    )
                )

        try:
            reply = await self.door.ask(spec, request, closing=closing, place=place, seconds=seconds, on_wait=waiting)
        except LimitError as error:
            self.meet(error)
            raise
        return priced(reply, spec.price) if self.watched else reply

    def hold_back(self, spec: ClientSpec, request: LMRequest, output_tokens: int, *, growth: int) -> None:
        """Keep room in the ledger for one last request like this one, longer by `growth` bytes."""
        self.ledger.hold_back(
            Need(
                model=spec.model,
                input_bytes=request.input_bytes() + spec.argument_bytes(request.sampling_args) + growth,
                output_cap=output_tokens,
                price=spec.price,
                models=len(spec.each),
                closing=True,
            )
        )
