"""The door to models where replies are kept: one from disk, one of an equal call under way, or one that is sent for."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import msgspec

from ...errors import LMError, RLMError
from ...observe.log import get_logger
from ..base import LMReply, LMRequest
from .asked import Asked, CacheSettings, Call, CutOff, Seen

if TYPE_CHECKING:
    from ...ledger import Settlement
    from .store import ReplyStore

T = TypeVar("T")


class _Flight:
    """A call under way. `done` is set once it is over; neither reply nor error: others must ask for themselves."""

    __slots__ = ("done", "error", "reply")

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.reply: LMReply | None = None
        self.error: LMError | None = None


class ReplyCache:
    """The replies in one folder, for one event loop."""

    def __init__(self, settings: CacheSettings, store: ReplyStore, limiter: anyio.CapacityLimiter) -> None:
        self.mode = settings.mode
        self._folder = settings.folder
        self._store = store
        self._limiter = limiter  # of one: the store is one connection
        self._flights: dict[bytes, _Flight] = {}
        self._unnamed: set[tuple[str, str]] = set()
        """Models of which was said that their replies are not kept."""

    async def answer(
        self,
        asked: Asked,
        request: LMRequest,
        send: Callable[[], Awaitable[LMReply]],
        seen: Seen,
        place: str = "",
        bill: list[Settlement] | None = None,
    ) -> LMReply:
        """The reply to `request`: one from disk is marked `cached`.

        Args:
            asked: What identifies the request.
            request: What is asked.
            send: Asks the model.
            seen: Which calls the tree has made; kept here.
            place: Where in its run the call comes from. Equal calls of a recording are told apart by it where it is the
                same as then, else by their order.
            bill: What `send` was booked as, for a recording. A replay puts in what was then.

        Raises:
            LMError: as `send` raises it, or did when it was recorded; of kind "replay_miss" if it was not recorded.
        """
        bill = [] if bill is None else bill
        if self.mode == "cache":
            return await self._shared(asked.key, send) if self._has_name(asked) else await send()
        key = asked.key
        if self.mode == "record":
            return await self._recorded(Call(key, seen.next(key), seen.run, place, asked, request), send, bill)
        try:
            taken = await self._run(self._store.take, key, place, seen)
            difference = "" if taken else await self._run(self._store.difference, asked, request, seen)
        except OSError as error:
            raise LMError(f"the recording can't be read: {error}", kind="replay_miss") from error
        if taken is None:
            raise LMError(f"this call is not in the recording in {self._folder}: {difference}", kind="replay_miss")
        outcome, booked = taken
        bill += booked
        while isinstance(outcome, CutOff):
            await anyio.sleep_forever()  # whoever gave it up then will do so again
        if isinstance(outcome, LMError):
            raise outcome
        return outcome

    def _has_name(self, asked: Asked) -> bool:
        if asked.where is None and (asked.backend, asked.model) not in self._unnamed:
            self._unnamed.add((asked.backend, asked.model))
            get_logger().warning(
                "replies of this model are not cached: it can't be told from others like it; "
                'backend_kwargs={"cache_key": ...} names it',
                model=asked.model,
                backend=asked.backend,
            )
        return asked.where is not None

    async def _shared(self, key: bytes, send: Callable[[], Awaitable[LMReply]]) -> LMReply:
        while (flight := self._flights.get(key)) is not None:
            await flight.done.wait()
            if flight.reply is not None:
                return _free(flight.reply)
            if flight.error is not None:
                raise copy.copy(flight.error) from flight.error  # each run writes its own account into it
        flight = self._flights[key] = _Flight()
        try:
            kept = await self._had(key)
            if kept is not None:
                flight.reply = kept
                return _free(kept)
            flight.reply = await send()
            flight.done.set()  # nobody waits for the disk
            if flight.reply.text.strip():
                await self._keep(self._store.cache, key, flight.reply)
            return flight.reply
        except LMError as error:
            if not error.retryable:  # else it may be of this caller alone: its deadline, its turn at the account
                flight.error = error
            raise
        finally:
            flight.done.set()
            if self._flights.get(key) is flight:
                del self._flights[key]

    async def _had(self, key: bytes) -> LMReply | None:
        try:
            return await self._run(self._store.get, key)
        except OSError as error:
            get_logger().warning("a cached reply can't be read; it is asked for again", error=str(error))
            return None

    async def _recorded(
        self, call: Call, send: Callable[[], Awaitable[LMReply]], bill: Sequence[Settlement]
    ) -> LMReply:
        outcome: LMReply | LMError | CutOff | None = None
        try:
            outcome = await send()
            return outcome
        except LMError as error:
            outcome = error
            raise
        except anyio.get_cancelled_exc_class():
            outcome = CutOff()
            raise
        finally:
            if outcome is not None:
                await self._keep(self._store.put, call, outcome, tuple(bill))

    async def _keep(self, put: Callable[..., None], *arguments: Any) -> None:
        try:
            with anyio.CancelScope(shield=True):  # it was paid for
                await self._run(put, *arguments)
        except OSError as error:
            if self.mode == "record":
                raise RLMError(f"can't record in {self._folder}: {error}") from error
            get_logger().warning("a reply could not be kept", folder=str(self._folder), error=str(error))

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._limiter)


def _free(reply: LMReply) -> LMReply:
    """The same reply, had for nothing."""
    usage = msgspec.structs.replace(reply.usage, cost=0.0)
    return msgspec.structs.replace(reply, usage=usage, cached=True, rate=None, waited=0.0, retries=0)


@asynccontextmanager
async def open_cache(settings: CacheSettings) -> AsyncGenerator[ReplyCache]:
    """The replies of a folder.

    Raises:
        ConfigurationError: if it can't be used.
    """
    from .store import ReplyStore  # noqa: PLC0415 - SQLite is loaded where it is used

    limiter = anyio.CapacityLimiter(1)

    def opened() -> ReplyStore:
        return ReplyStore(settings.folder, writes=settings.mode != "replay", max_bytes=settings.max_bytes)

    store = await anyio.to_thread.run_sync(opened, limiter=limiter)
    try:
        yield ReplyCache(settings, store, limiter)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(store.close, limiter=limiter)
