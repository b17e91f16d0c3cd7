"""What `AsyncRLM`, `RLM` and conversations do alike: prepare a call, run it, hand out its events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Never, Self, cast

import anyio

from ..caught import is_own
from ..errors import ConfigurationError, RLMError
from ..events import AnyEvent, Event, Listener
from ..lm.pacing.sender import open_early
from ..repl.resources import ResourceScope
from ..types import Parsed, RLMChatCompletion
from .call import Call
from .configure import check_call, check_overrides
from .conversation import Conversation
from .doors import behind_door
from .groups import one_error
from .run import Run
from .scope import EngineScope
from .settings import Configuration
from .tree import Tree


class Completions:
    """A configuration and its engine scope, entered any number of times; holds no state of a run."""

    def __init__(self, configuration: Configuration, arguments: Sequence[str]) -> None:
        self.configuration = configuration
        self._arguments = arguments  # what the constructor takes, for messages
        self._engine = EngineScope()
        self._entered = 0
        self._implicit: Conversation | None = None  # of `persistent`, while entered

    @property
    def is_open(self) -> bool:
        return self._engine.is_open

    def conversation(self) -> Conversation:
        """A new one, not open yet."""
        return Conversation(self._engine, self.configuration)

    async def __aenter__(self) -> Self:
        if self._implicit is not None:
            raise ConfigurationError(
                "this AsyncRLM is entered already: with persistent=True one `async with` at a time owns its REPL; use "
                "rlm.session() for more conversations"
            )
        resources = await self._engine.acquire(long_lived=True)
        self._entered += 1
        try:
            await behind_door(lambda: self._begin(resources))
            if self.configuration.persistent:
                self._implicit = self.conversation()
                await self._implicit.__aenter__()
        except BaseException:
            self._implicit = None
            await self.aclose()
            raise
        return self

    async def _begin(self, resources: ResourceScope) -> None:
        replies = self.configuration.replies
        if replies is None or replies.mode != "replay":
            await open_early(self.configuration.router.specs, resources.shared, self.configuration.pacer)
        await self.configuration.environment.prepare(resources)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        implicit, self._implicit = self._implicit, None
        try:
            if implicit is not None:
                await implicit.__aexit__(kind, error, traceback)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Leave once; what is entered is kept open by the runs under way."""
        await behind_door(self._leave)

    async def _leave(self) -> None:
        try:
            if self._implicit is not None:
                await self._implicit.aclose()
        finally:
            if self._entered:
                self._entered -= 1
                await self._engine.release()

    def forget(self) -> None:
        """Leave what is open to the process this one was forked from."""
        self._implicit = None
        self._engine = EngineScope()
        self._entered = 0

    def prepare(self, overrides: Mapping[str, Any]) -> Call:
        """The call that `complete` runs.

        Raises:
            ConfigurationError: for an override that is unknown or wrong.
        """
        return Call(self.configuration, check_overrides(overrides, self._arguments))

    async def complete(
        self,
        call: Call,
        prompt: Any,
        root_prompt: str | None,
        tags: dict[str, Any] | None,
        listener: Listener | None = None,
        *,
        conversation: Conversation | None = None,
    ) -> RLMChatCompletion:
        """Run one prepared call, in a conversation if one is given."""
        check_call(root_prompt, tags)
        conversation = conversation or self._own_conversation()
        if conversation is not None:
            conversation.check()
        turn = nullcontext() if conversation is None else conversation.turn(call)
        with one_error():
            async with self._engine.lease() as scope, turn, call.watched(listener) as watching:
                tree = Tree(call, scope, watching)
                root = tree.router.root()
                run = Run(
                    tree,
                    prompt=prompt,
                    root=root,
                    root_prompt=root_prompt,
                    tags=tags,
                    shape=call.shape,
                    lazy=call.lazy,
                    web=call.web,
                    conversation=conversation,
                )
                call.begin(run, watching)
                try:
                    with one_error():
                        result = await tree.door.unless_missed(run.execute())
                except RLMError as error:
                    call.account(error)
                    raise
                return RLMChatCompletion(
                    root_model=root.model,
                    prompt=prompt,
                    response=result.response,
                    parsed=result.parsed,
                    usage_summary=tree.ledger.usage(),
                    execution_time=run.seconds,
                    metadata=watching.metadata(),
                    run_id=call.run_id,
                    stop_reason=result.stop_reason,
                    error=result.error,
                    limit_reached=result.limit if tree.limit is None else str(tree.limit),
                    tags=tags,
                )

    def _own_conversation(self) -> Conversation | None:
        """The one of `persistent`.

        Raises:
            ConfigurationError: if there is none yet.
        """
        if self.configuration.persistent and self._implicit is None:
            raise ConfigurationError(
                "persistent=True keeps a REPL, which must be closed at some time: use `async with AsyncRLM(…) as rlm`, "
                "or `async with rlm.session() as chat`"
            )
        return self._implicit

    @asynccontextmanager
    async def stream(
        self,
        call: Call,
        prompt: Any,
        root_prompt: str | None,
        tags: dict[str, Any] | None,
        *,
        conversation: Conversation | None = None,
    ) -> AsyncGenerator[EventStream]:
        """One prepared call as its events."""
        send, receive = anyio.create_memory_object_stream[Event](float("inf"))
        stream = EventStream(receive)

        async def run() -> None:
            with send:
                try:
                    stream.result = await self.complete(
                        call, prompt, root_prompt, tags, send.send_nowait, conversation=conversation
                    )
                except BaseException as error:
                    if not is_own(error):
                        raise
                    stream._error = error  # pyright: ignore[reportPrivateUsage]

        with one_error():
            async with receive, anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                try:
                    yield stream
                finally:
                    tasks.cancel_scope.cancel()


class Streaming(AbstractAsyncContextManager["EventStream[Parsed]"], Generic[Parsed]):
    """A run that begins when it is entered, and is cancelled when it is left."""

    def __init__(self, begin: Callable[[], AbstractAsyncContextManager[EventStream[Parsed]]]) -> None:
        self._begin = begin
        self._entered: AbstractAsyncContextManager[EventStream[Parsed]] | None = None

    async def __aenter__(self) -> EventStream[Parsed]:
        if self._entered is not None:
            raise ConfigurationError("a stream can be entered once")
        self._entered = self._begin()
        return await self._entered.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return None if self._entered is None else await self._entered.__aexit__(kind, error, traceback)

    if not TYPE_CHECKING:

        def __aiter__(self) -> Never:
            raise TypeError("use `async with rlm.astream(…) as events: async for event in events: …`")


class EventStream(Generic[Parsed]):
    """The events of one run. `result` is set once the last of them was taken."""

    def __init__(self, events: AsyncIterator[Event]) -> None:
        self._events = cast("AsyncIterator[AnyEvent]", events)
        self.result: RLMChatCompletion[Parsed] | None = None
        self._error: BaseException | None = None

    def __aiter__(self) -> AsyncIterator[AnyEvent]:
        return self

    async def __anext__(self) -> AnyEvent:
        try:
            return await anext(self._events)
        except StopAsyncIteration:
            if self._error is not None:
                raise self._error from None
            raise
