"""Serves the calls of one cell: a task per call, replies as they finish, one reply for each."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Literal, Protocol, TypeVar, cast

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
from msgspec import Struct, field

from ..caught import said
from ..errors import LimitError, LMError, ProtocolError, RLMError
from .channel import Channel
from .clock import CellClock
from .framing import LARGE, MOST_OF_A_NAME, encode_frame
from .messages import Call, Cancel, Reply
from .question import asked_for
from .raised import innermost
from .room import Room
from .shelf import PASSED
from .tool_desk import ToolDesk, ToolFailure
from .tools import HostTools
from .worker import codec

T = TypeVar("T")

PERMANENT = frozenset({"authentication", "permission", "unknown_model", "not_found", "quota"})
"""Kinds of failure that asking again does not mend."""
ENOUGH = 3
"""The same permanent failure so many times in a cell raises in it, whatever `on_subcall_error` says."""
MOST_REFUSALS = 5_000
"""A cell that goes on to ask so many times after a limit was met is ended: it takes no refusal, and its run is over."""
MOST_TASKS = 2_048
"""Calls of one model or tool served at once, unless more requests may be in flight. What a worker may have
unanswered beyond waits as frames, which are much smaller: every garbage collection walks all that a task holds."""
SLICE = 4_096
"""Calls dropped in a row before other tasks get their turn."""


class SubCall(Struct, frozen=True):
    """A cell asks a model (`llm`) or a child run (`rlm`)."""

    kind: Literal["llm", "rlm"]
    prompt: str | list[dict[str, Any]]
    """A text, or messages with "role" and "content"."""
    model: str | None
    schema: Any
    group: int | None
    """Calls of one batch share it."""
    id: int = 0
    """Which of the worker's calls it is."""


class Services(Protocol):
    """What answers the sub-calls of cells."""

    async def llm(self, call: SubCall) -> str:
        """Ask a model. An error becomes the reply: `LMError` with its kind, `LimitError`, or any other."""
        ...

    async def rlm(self, call: SubCall) -> str:
        """Start a child run and return its answer; errors as for `llm`."""
        ...

    def limits(self) -> dict[str, Any]:
        """What `SHOW_LIMITS()` tells."""
        ...

    def width(self) -> int:
        """Requests that may be in flight at once."""
        ...


class ToolRecord(Struct, frozen=True):
    """One call of a host callable."""

    name: str
    error: str | None
    """Class and text of the exception, if it raised."""
    result_bytes: int
    """Of what it returned, as JSON; 0 if it raised."""
    seconds: float
    args: list[Any] = field(default_factory=list[Any])
    """In the codec's form, as is `kwargs`."""
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


class _Cancellable(Protocol):
    def cancel(self) -> None: ...


class _Lane:
    """The calls of one model or tool: those that wait for it don't keep others from theirs."""

    __slots__ = ("tasks", "waiting")

    def __init__(self) -> None:
        self.tasks = 0
        self.waiting: OrderedDict[int, Call] = OrderedDict()  # those that have no task yet, in order


class Broker:
    """The calls of one cell.

    `group` owns the tasks; whoever owns the group cancels it when the cell is over, and then calls `finish`.
    """

    def __init__(
        self,
        group: anyio.abc.TaskGroup,
        channel: Channel,
        services: Services,
        tools: HostTools,
        clock: CellClock,
        *,
        desk: ToolDesk,
        room: Room,
        threads: anyio.CapacityLimiter,
        files: Callable[[Any, list[Any]], Awaitable[Any]] | None = None,
        retired: Collection[str] = (),
        hidden: Collection[str] = (),
        on_tool: Callable[[ToolRecord], None] | None = None,
    ) -> None:
        self.subcalls = 0
        """Calls of a model or a child so far."""
        self.failures: dict[str, int] = {}
        """Kind → how many of them failed that way."""
        self._group = group
        self._channel = channel
        self._services = services
        self._tools = tools
        self._clock = clock
        self._desk = desk
        self._room = room
        self._threads = threads
        self._files = files
        self._retired = retired
        self._hidden = hidden
        self._on_tool = on_tool
        # anyio before 4.14 gives no handle to a task; there each call has a cancel scope of its own.
        self._create_task: Callable[[Coroutine[Any, Any, None]], _Cancellable] | None
        self._create_task = getattr(group, "create_task", None)
        self._most_tasks = max(MOST_TASKS, 2 * services.width())
        self._lanes: dict[tuple[str, str | None], _Lane] = {}
        self._open: dict[int, _Cancellable | _Lane] = {}  # every call taken and not replied; its lane while it waits
        self._frames: dict[int, bytes] = {}  # of large replies about to be given
        self._unwanted: set[int] = set()  # those of `_open` that the cell no longer waits for
        self._newest = 0  # call taken
        self._asked_at_limit: int | None = None  # the newest call when the first was refused for a limit
        self._refusals = 0  # of calls made since
        self._over = False  # the cell is: what has no answer yet gets none
        self._answer = {"llm": self._answer_subcall, "rlm": self._answer_subcall, "tool": self._answer_tool}
        if files is not None:
            self._answer["file"] = self._answer_file

    def take(self, call: Call) -> None:
        """Start to serve a call. Does not wait.

        Raises:
            ProtocolError: if there is no such kind of call.
        """
        if call.kind == "limits":
            self._channel.reply(self._limits(call))
            return
        if call.kind not in self._answer:
            raise ProtocolError(f"the worker made a call of the unknown kind {call.kind[:40]!r}")
        if call.kind == "tool" and not self._is_tool(call.name):
            raise ProtocolError(f"the worker called the unknown tool {str(call.name)[:40]!r}")
        if call.model is not None and len(call.model) > MOST_OF_A_NAME:
            text = f"model= must be the name of a model; this one has {len(call.model):,} characters"
            self._channel.reply(Reply(id=call.id, error=text, kind="bad_request"))
            return
        if not self._open:
            self._clock.pause()
        self._newest = call.id
        of = (call.kind, call.model or call.name)
        lane = self._lanes.get(of) or self._lanes.setdefault(of, _Lane())
        if lane.tasks < self._most_tasks and not self._over:
            self._start(call, lane)
        else:
            self._open[call.id] = lane
            lane.waiting[call.id] = call

    def _is_tool(self, name: str | None) -> bool:
        return (name in self._tools.names and name not in self._hidden) or name in self._retired

    def cancel(self, frame: Cancel) -> None:
        """The cell no longer waits for this call."""
        task = self._open.get(frame.id)
        if isinstance(task, _Lane):
            del task.waiting[frame.id]
            self._settle(_cancelled(frame.id))
        elif task is not None and frame.id not in self._unwanted:
            self._unwanted.add(frame.id)
            task.cancel()

    async def finish(self) -> None:
        """Drop what the end of the cell cut off. To be called once the group is left."""
        self._over = True
        self._lanes.clear()
        numbers = sorted(self._open)
        for start in range(0, len(numbers), SLICE):
            self._channel.drop(numbers[start : start + SLICE])
            await anyio.lowlevel.cancel_shielded_checkpoint()
        self._open.clear()

    def _start(self, call: Call, lane: _Lane) -> None:
        lane.tasks += 1
        if self._create_task is not None:
            self._open[call.id] = self._create_task(self._serve(call, lane))
        else:
            scope = self._open[call.id] = anyio.CancelScope()
            self._group.start_soon(self._serve_within, scope, call, lane)

    async def _serve_within(self, scope: anyio.CancelScope, call: Call, lane: _Lane) -> None:
        with scope:
            await self._serve(call, lane)

    async def _serve(self, call: Call, lane: _Lane) -> None:
        reply = None
        began = time.perf_counter()
        try:
            reply = await self._answer[call.kind](call)
        except anyio.get_cancelled_exc_class():
            # asyncio's cancellation also comes out of awaiting a cancelled future. Here it would end the whole cell.
            if anyio.current_effective_deadline() == -math.inf:
                self._over = self._over or call.id not in self._unwanted  # else by the cell, this call alone
                raise
        finally:
            # Also when something that is neither an answer nor an error came out: the cell must not wait for ever.
            lane.tasks -= 1
            dead = reply is None and self._over
            reply = reply or _cancelled(call.id)
            size = 0 if dead else self._settle(reply)
            if lane.waiting and not self._over:
                self._start(lane.waiting.popitem(last=False)[1], lane)
            if call.kind == "tool":
                self._tool_served(call, reply, size, time.perf_counter() - began)

    async def _encoded(self, reply: Reply) -> Reply:
        """The reply; if it is large, its frame is made in a thread and kept for `_settle`."""
        frame = await self._channel.encode_large(reply)
        if frame is not None:
            self._frames[reply.id] = frame
        return reply

    def _settle(self, reply: Reply) -> int:
        del self._open[reply.id]
        self._unwanted.discard(reply.id)
        if not self._open:
            self._clock.resume()
        return self._channel.reply(reply, self._frames.pop(reply.id, None))

    def _limits(self, call: Call) -> Reply:
        try:
            return Reply(id=call.id, value=codec.encode(self._services.limits()))
        except Exception as error:  # noqa: BLE001 -- whatever the host's code raises is what the cell reads
            return Reply(id=call.id, error=describe_error(error), kind="other")

    # ---- models and children -----------------------------------------------------------------------------------------

    async def _answer_subcall(self, call: Call) -> Reply:
        self.subcalls += 1
        try:
            prompt, schema = call.prompt, call.schema
            if type(prompt) is not str or schema is not None:
                prompt, schema = await self._read(call, asked_for)
            kind = cast("Literal['llm', 'rlm']", call.kind)
            serve = self._services.llm if kind == "llm" else self._services.rlm
            text = await serve(SubCall(kind, prompt, call.model, schema, call.group, call.id))
            return await self._encoded(Reply(id=call.id, value=codec.encode(text)))
        except Exception as error:  # noqa: BLE001 -- a failed call fails its slot in the cell, nothing else
            return self._failed(call, error)

    async def _read(self, call: Call, read: Callable[[Call], T]) -> T:
        """What `read` makes of a call; one that came in a long frame is not read on the event loop."""
        if self._channel.size_of(call.id) <= LARGE:
            return read(call)
        return await anyio.to_thread.run_sync(read, call, abandon_on_cancel=True, limiter=self._threads)

    def _failed(self, call: Call, raised: Exception) -> Reply:
        error = innermost(raised)
        retryable = False
        if isinstance(error, LMError):
            kind, retryable = error.kind, error.retryable
        elif isinstance(error, LimitError):
            kind = "limit"
            self._refused(call)
        else:
            kind = "child" if call.kind == "rlm" else "other"
        times = self.failures[kind] = self.failures.get(kind, 0) + 1
        raises = kind in PERMANENT and times >= ENOUGH
        return Reply(id=call.id, error=describe_error(error), kind=kind, retryable=retryable, raises=raises)

    def _refused(self, call: Call) -> None:
        """A limit was met. What had been asked by then, and all but one of a batch, was not asked in spite of it."""
        if self._asked_at_limit is None:
            self._asked_at_limit = self._newest
        if call.id <= self._asked_at_limit or (call.group is not None and call.group != call.id):
            return
        self._refusals += 1
        if self._refusals >= MOST_REFUSALS:
            self._clock.end("refused")

    # ---- tools -------------------------------------------------------------------------------------------------------

    async def _answer_tool(self, call: Call) -> Reply:
        if call.name not in self._tools.names or call.name in self._hidden:
            gone = f"{call.name} was a tool of an earlier completion and is none of this one"
            return Reply(id=call.id, error=gone, kind="NameError", raises=True)
        asked = self._tools, call.name or "", call.args or [], call.kwargs or {}
        aside = self._threads if self._channel.size_of(call.id) > LARGE else None
        try:
            await self._desk.admit(*asked, aside=aside)
            async with self._room.place(asked[1]):
                value = await self._desk.call(*asked, aside=aside, threads=self._threads)
                return await self._encoded(Reply(id=call.id, value=value))
        except ToolFailure as failure:
            return Reply(id=call.id, error=str(failure), kind=failure.kind, args=failure.made_with, raises=True)

    def _tool_served(self, call: Call, reply: Reply, size: int, seconds: float) -> None:
        name = call.name or ""
        if reply.error is None:
            self._room.learn(name, size)
        if self._on_tool is not None:
            error = None if reply.error is None else f"{reply.kind}: {reply.error}"
            result = 0 if error is not None else max(0, size - len(encode_frame(Reply(id=reply.id, value=""))) + 2)
            self._on_tool(ToolRecord(name, error, result, seconds, call.args or [], call.kwargs or {}))

    # ---- files -------------------------------------------------------------------------------------------------------

    async def _answer_file(self, call: Call) -> Reply:
        try:
            if self._files is None:
                raise ValueError("there are no files")
            value = await self._files(call.name, codec.decode(call.args or []))
            if value is PASSED:
                return Reply(id=call.id, descriptor=True)
            return Reply(id=call.id, value=codec.encode(value))
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is the cell that asked
            return Reply(id=call.id, error=str(error), kind="file")


def _cancelled(number: int) -> Reply:
    return Reply(id=number, error="cancelled", kind="cancelled")


def describe_error(error: BaseException) -> str:
    """What a cell reads of an error of the host: its text, never its traceback."""
    text = (error.message if isinstance(error, LMError) else said(error)).strip()
    if isinstance(error, RLMError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
