"""What `RLM` hands out to threads: the events of a run, and conversations."""

from __future__ import annotations

import queue
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Never, Self, Unpack, overload

import anyio

from .engine.call import Call
from .engine.completions import Completions
from .engine.conversation import Conversation
from .engine.overrides import Others, Overrides
from .errors import CancellationError, ConfigurationError
from .events import AnyEvent
from .portal import Task
from .types import Parsed, RLMChatCompletion

Start = Callable[[Task[Any]], None]
"""Begin a task in the portal."""


def interrupted(call: Call) -> CancellationError:
    """The error of a run that Ctrl-C has ended."""
    error = CancellationError("interrupted by the keyboard; everything the run had started is gone")
    call.account(error)
    return error


def completed(start: Start, call: Call, run: Callable[[], Awaitable[RLMChatCompletion]]) -> RLMChatCompletion:
    """Wait for one prepared call.

    Raises:
        CancellationError: on Ctrl-C, or if another thread stopped it, once everything the run had started is gone.
    """
    task = Task(run)
    try:
        start(task)
        return task.result()
    except KeyboardInterrupt:
        task.stop()
        raise interrupted(call) from None
    except CancellationError as error:
        call.account(error)
        raise


class BlockingStreaming(AbstractContextManager["BlockingEventStream[Parsed]"], Generic[Parsed]):
    """A run that begins when it is entered, and is cancelled when it is left."""

    def __init__(self, make: Callable[[], BlockingEventStream[Parsed]]) -> None:
        self._make = make
        self._stream: BlockingEventStream[Parsed] | None = None

    def __enter__(self) -> BlockingEventStream[Parsed]:
        if self._stream is not None:
            raise ConfigurationError("a stream can be entered once")
        stream = self._stream = self._make()
        try:
            stream._begin()  # pyright: ignore[reportPrivateUsage]
        except BaseException:
            stream.close()
            raise
        return stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.close()

    if not TYPE_CHECKING:

        def __iter__(self) -> Never:
            raise TypeError("use `with rlm.stream(…) as events: for event in events: …`")


class BlockingEventStream(Generic[Parsed]):
    """The events of one run, for one thread. `result` is set once the last of them was taken."""

    def __init__(
        self,
        start: Start,
        completions: Completions,
        call: Call,
        *asked: Any,
        conversation: Conversation | None = None,
    ) -> None:
        self.result: RLMChatCompletion[Parsed] | None = None
        self._call = call
        self._ended = False
        # Events cross the threads one way, without a round trip each.
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()  # events, then None

        async def run() -> RLMChatCompletion[Parsed] | None:
            try:
                async with completions.stream(call, *asked, conversation=conversation) as events:
                    async for event in events:
                        self._events.put(event)
                    return events.result
            finally:
                self._events.put(None)

        self._start = start
        self._task = Task(run)

    def _begin(self) -> None:
        self._start(self._task)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AnyEvent:
        if self._ended:
            raise StopIteration
        if self._task.is_foreign:
            raise ConfigurationError("this stream belongs to the process it was begun in, not to one forked from it")
        try:
            event = self._events.get()
            if event is not None:
                return event
            self._ended = True
            self.result = self._task.result()
        except KeyboardInterrupt:
            self.close()
            raise interrupted(self._call) from None
        except CancellationError as error:
            self._call.account(error)
            raise
        raise StopIteration

    def close(self) -> None:
        """Cancel the run unless it has ended, and wait until everything it had started is gone."""
        self._ended = True
        self._task.stop()


class BlockingChat:
    """Completions in one REPL, for threads: `with rlm.session() as chat: chat.completion(…)`. See `Chat`."""

    def __init__(self, completions: Completions, hold: Callable[[Task[None]], Start]) -> None:
        self._completions = completions
        self._hold = hold
        self._holder: Task[None] | None = None
        self._start: Start | None = None
        self._conversation: Conversation | None = None  # as soon as it is open

    def __enter__(self) -> Self:
        if self._holder is not None:
            raise ConfigurationError("a session can be entered once; open another one")
        opened = threading.Event()

        async def hold() -> None:
            try:
                async with self._completions.conversation() as self._conversation:
                    opened.set()
                    await anyio.sleep_forever()
            finally:
                opened.set()

        self._holder = Task(hold)
        try:
            self._start = self._hold(self._holder)
            opened.wait()
        except BaseException:
            self._holder.stop()
            raise
        if self._conversation is None:
            self._holder.result()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the REPL and wait until it is gone; closing twice is fine.

        A completion that runs or waits in another thread raises `ConfigurationError`, and so does each later one.
        """
        if self._holder is not None:
            self._holder.stop()

    @overload
    def completion(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        response_format: type[Parsed],
        tags: dict[str, Any] | None = None,
        **others: Unpack[Others],
    ) -> RLMChatCompletion[Parsed]: ...
    @overload
    def completion(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        tags: dict[str, Any] | None = None,
        **overrides: Unpack[Overrides],
    ) -> RLMChatCompletion: ...
    def completion(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        tags: dict[str, Any] | None = None,
        **overrides: Unpack[Overrides],
    ) -> RLMChatCompletion:
        """The next completion; see `RLM.completion`.

        Raises:
            ConfigurationError: if the session is not open, or is closed meanwhile.
        """
        completions = self._completions
        call = completions.prepare(overrides)
        start, conversation = self._opened()
        return completed(
            start, call, lambda: completions.complete(call, prompt, root_prompt, tags, conversation=conversation)
        )

    @overload
    def stream(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        response_format: type[Parsed],
        tags: dict[str, Any] | None = None,
        **others: Unpack[Others],
    ) -> BlockingStreaming[Parsed]: ...
    @overload
    def stream(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        tags: dict[str, Any] | None = None,
        **overrides: Unpack[Overrides],
    ) -> BlockingStreaming: ...
    def stream(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        tags: dict[str, Any] | None = None,
        **overrides: Unpack[Overrides],
    ) -> BlockingStreaming:
        """The next completion as its events; see `RLM.stream`."""
        completions = self._completions
        call = completions.prepare(overrides)
        start, conversation = self._opened()
        return BlockingStreaming(
            lambda: BlockingEventStream(start, completions, call, prompt, root_prompt, tags, conversation=conversation)
        )

    def _opened(self) -> tuple[Start, Conversation]:
        if self._holder is None or self._start is None or self._conversation is None:
            raise ConfigurationError("this session is not open yet: use `with rlm.session() as chat`")
        if self._holder.is_foreign:
            raise ConfigurationError("this session belongs to the process it was opened in, not to one forked from it")
        return self._start, self._conversation

    def __repr__(self) -> str:
        conversation = self._conversation
        state, number = ("new", 0) if conversation is None else (conversation.state, conversation.number)
        return f"<BlockingChat {state}, {number} completions>"
