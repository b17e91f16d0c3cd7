"""`AsyncRLM`: configuration plus an engine scope. Text in, text out, as of any model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Never, Self

import anyio

from .chat import Chat
from .engine.call import Call
from .engine.configure import check_call, check_overrides, configure
from .engine.conversation import Conversation
from .engine.groups import one_error
from .engine.run import Run
from .engine.scope import EngineScope
from .engine.settings import (
    DEFAULT_BACKEND,
    DEFAULT_CACHE_SIZE,
    DEFAULT_COMPACTION_THRESHOLD_PCT,
    DEFAULT_MAX_CONCURRENT_REQUESTS,
    DEFAULT_MAX_CONCURRENT_SUBCALLS,
    DEFAULT_MAX_DEPTH,
    DEFAULT_MAX_ITERATIONS,
    DEFAULT_SUBCALL_TIMEOUT,
    LimitsMode,
    OnLimit,
    OnSubcallError,
)
from .engine.tree import Tree
from .errors import ConfigurationError, RLMError
from .events import Event, Listener
from .lm.pacing import Pacer
from .repl.sandbox import Environment
from .types import RLMChatCompletion

Backend = Any
"""A backend's name, "provider/model", an `LMClient`, an `async def f(messages) -> str`, or a list of these."""


class AsyncRLM:
    """A Recursive Language Model: to its caller one more model.

    An instance is configuration; it holds no state of a run and serves any number of concurrent calls. With
    `async with`, HTTP clients, the worker template and warm workers live until `aclose`; without, from the first
    concurrent call to the last.

    Args:
        backend: The root model's family, "provider/model", an `LMClient`, a coroutine function
            `async def f(messages) -> str`, "offline", or a list of these (the next is tried when one is down).
        backend_kwargs: For the root model's client: `model_name`, `api_key`, `base_url`, `price`, `context_window` and
            what the vendor's SDK takes.
        other_backends: Models for sub-calls: the first for cells of the root, the next for cells one level deeper, …;
            `llm_query(..., model=name)` picks one by name.
        other_backend_kwargs: One dict for each of `other_backends`.
        sampling_args: Sent with every request to the root model (temperature, max_tokens, …), under the names given.
        sub_sampling_args: The same for sub-calls.
        environment: Where cells run: "local" or an `Environment`.
        environment_kwargs: The environment's settings.
        max_depth: How deep runs nest; 0 asks the model without a REPL.
        max_iterations: Turns of one run.
        persistent: Whether completions keep one REPL between them, as of a `session()` that lasts as long as the block
            of `async with`, which is then needed. They wait for one another.
        custom_system_prompt: Replaces the system prompt; `{custom_tools_section}` marks where tools are described.
        orchestrator: Whether the system prompt advises to delegate to sub-models.
        user_prologue: Said to the root model before its first turn.
        custom_tools: Name → value or callable, or → `{"tool": value, "description": text}`, for cells.
        custom_sub_tools: The same for children; None means those of the root, `{}` none.
        max_budget: USD, whole tree. Every model's price must then be known.
        max_timeout: Seconds, whole tree.
        max_tokens: Input and output tokens, whole tree.
        max_errors: Turns in a row with a cell that raised.
        max_subcalls: LM calls made by cells, whole tree.
        max_concurrent_subcalls: Live children per depth of a tree.
        max_concurrent_requests: LM requests in flight per tree.
        limits: "soft" goes over a limit by at most the calls in flight, "hard" never.
        on_limit: "raise" the limit's error, or "answer": one last turn from what there is.
        on_subcall_error: "return" a `FailedReply` to the cell or "raise" a `SubcallError` in it.
        subcall_timeout: Seconds one `llm_query` may take, retries included; None for no limit.
        pacer: Limits of the models' account: a `Pacer`, or model name → `Pacer`. Several `AsyncRLM` may share one.
        tenant: Runs of one tenant share its turns at an account; without one, each run has turns of its own.
        cache: A folder: calls equal to one that was answered before, or is under way, cost nothing.
        cache_size: Bytes that the replies there may take at most, or a str such as "2GB"; those that were not used for
            longest go. None for no end.
        record: A folder: all replies are kept in it.
        replay: A folder that was recorded: models are not asked, a call that is not in it ends the run.
        logger: An `RLMLogger`.
        verbose: Print progress lines on standard error.
        on_subcall_start, on_subcall_complete, on_iteration_start, on_iteration_complete: Callbacks, plain or async.

    Raises:
        ConfigurationError: for whatever is wrong, naming what is right.
    """

    def __init__(
        self,
        backend: Backend = DEFAULT_BACKEND,
        *,
        backend_kwargs: Mapping[str, Any] | None = None,
        other_backends: Sequence[Backend] | None = None,
        other_backend_kwargs: Sequence[Mapping[str, Any]] | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        sub_sampling_args: Mapping[str, Any] | None = None,
        environment: str | Environment = "local",
        environment_kwargs: Mapping[str, Any] | None = None,
        max_depth: int = DEFAULT_MAX_DEPTH,
        max_iterations: int = DEFAULT_MAX_ITERATIONS,
        custom_system_prompt: str | None = None,
        orchestrator: bool = True,
        user_prologue: str | None = None,
        persistent: bool = False,
        compaction: bool = False,
        compaction_threshold_pct: float = DEFAULT_COMPACTION_THRESHOLD_PCT,
        custom_tools: Mapping[str, Any] | None = None,
        custom_sub_tools: Mapping[str, Any] | None = None,
        max_budget: float | None = None,
        max_timeout: float | None = None,
        max_tokens: int | None = None,
        max_errors: int | None = None,
        max_subcalls: int | None = None,
        max_concurrent_subcalls: int = DEFAULT_MAX_CONCURRENT_SUBCALLS,
        max_concurrent_requests: int = DEFAULT_MAX_CONCURRENT_REQUESTS,
        limits: LimitsMode = "soft",
        on_limit: OnLimit = "raise",
        on_subcall_error: OnSubcallError = "return",
        subcall_timeout: float | None = DEFAULT_SUBCALL_TIMEOUT,
        pacer: Pacer | Mapping[str, Pacer] | None = None,
        tenant: str | None = None,
        cache: str | Path | None = None,
        cache_size: int | str | None = DEFAULT_CACHE_SIZE,
        record: str | Path | None = None,
        replay: str | Path | None = None,
        logger: Any = None,
        verbose: bool = False,
        on_subcall_start: Callable[..., Any] | None = None,
        on_subcall_complete: Callable[..., Any] | None = None,
        on_iteration_start: Callable[..., Any] | None = None,
        on_iteration_complete: Callable[..., Any] | None = None,
        **unknown: Never,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in {"self", "unknown"}}
        self._given = _Arguments(given)
        self._configuration = configure(unknown=unknown, **given)
        self._engine = EngineScope()
        self._entered = 0
        self._implicit: Conversation | None = None  # of `persistent`, while entered

    def __repr__(self) -> str:
        models = ", ".join(spec.model for spec in self._configuration.router.specs)
        state = "open" if self._engine.is_open else "idle"
        return f"<{type(self).__name__} {models} in {self._configuration.environment.name!r}, {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self._given.by_name)

    # ---- the scope ----

    async def __aenter__(self) -> Self:
        if self._implicit is not None:
            raise ConfigurationError(
                "this AsyncRLM is entered already: with persistent=True one `async with` at a time owns its REPL; use "
                "rlm.session() for more conversations"
            )
        await self._engine.acquire(long_lived=True)
        self._entered += 1
        if self._configuration.persistent:
            self._implicit = Conversation(self._engine, self._configuration)
            try:
                await self._implicit.__aenter__()
            except BaseException:
                self._implicit = None
                await self.aclose()
                raise
        return self

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
        """Leave the scope that `async with` entered. Closing twice is fine; running calls end their own leases.

        With `persistent` it ends the REPL, and the completion in it; the `async with` block still has to be left.
        """
        if self._implicit is not None:
            await self._implicit.aclose()
        if self._entered:
            self._entered -= 1
            await self._engine.release()

    def forget(self) -> None:
        """Leave what is open to the process this one was forked from; internal, for the blocking face."""
        self._implicit = None
        self._engine = EngineScope()
        self._entered = 0

    # ---- asking ----

    async def acompletion(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        tags: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> RLMChatCompletion:
        """One run: `prompt` becomes `context` in the REPL, `root_prompt` is what the root model is asked about it.

        Args:
            prompt: A str, bytes, dict, list, or a `pathlib.Path` to a text file.
            root_prompt: The question.
            tags: Kept with the result and in the log.
            **overrides: For this call alone: limits, `sampling_args`, `custom_tools`, `tenant`, or `response_format`,
                what the answer must be: a type that msgspec or pydantic can handle, a JSON schema, or OpenAI's own
                form of one. `parsed` of the result is then its value, `response` its JSON.

        Raises:
            ConfigurationError: if the call itself is wrong.
            LimitError: when a limit of the tree is met (`on_limit="raise"`).
            LMError: when the root model can't be asked; of kind "schema" when no answer of it fits `response_format`.
            SandboxLost: when cells can't be run.
        """
        return await self.complete(self.prepare(overrides), prompt, root_prompt, tags)

    @asynccontextmanager
    async def astream(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        tags: dict[str, Any] | None = None,
        **overrides: Any,
    ) -> AsyncGenerator[EventStream]:
        """The same run as its events, in order: `async with rlm.astream(…) as events: async for event in events: …`.

        The run is cancelled when the block is left before its end. After the last event `events.result` is set; a run
        that fails raises from the iteration.
        """
        async with self.stream_of(self.prepare(overrides), prompt, root_prompt, tags) as events:
            yield events

    def session(self) -> Chat:
        """A conversation: `async with rlm.session() as chat: await chat.acompletion(…)` keeps one REPL."""
        return Chat(self, Conversation(self._engine, self._configuration))

    @property
    def persistent(self) -> bool:
        """Whether completions keep one REPL between them."""
        return self._configuration.persistent

    def prepare(self, overrides: Mapping[str, Any]) -> Call:
        """The call that `complete` runs; internal, for the blocking face and the streams.

        Raises:
            ConfigurationError: for an override that is unknown or wrong.
        """
        return Call(self._configuration, check_overrides(overrides, self._given.by_name))

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
        """Run one prepared call; internal, as `prepare`."""
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
        if self._configuration.persistent and self._implicit is None:
            raise ConfigurationError(
                "persistent=True keeps a REPL, which must be closed at some time: use `async with AsyncRLM(…) as rlm`, "
                "or `async with rlm.session() as chat`"
            )
        return self._implicit

    @asynccontextmanager
    async def stream_of(
        self,
        call: Call,
        prompt: Any,
        root_prompt: str | None,
        tags: dict[str, Any] | None,
        *,
        conversation: Conversation | None = None,
    ) -> AsyncGenerator[EventStream]:
        """One prepared call as its events; internal, as `prepare`."""
        send, receive = anyio.create_memory_object_stream[Event](float("inf"))
        stream = EventStream(receive)

        async def run() -> None:
            with send:
                try:
                    stream.result = await self.complete(
                        call, prompt, root_prompt, tags, send.send_nowait, conversation=conversation
                    )
                except RLMError as error:
                    stream.error = error

        with one_error():
            async with receive, anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                try:
                    yield stream
                finally:
                    tasks.cancel_scope.cancel()


class EventStream:
    """The events of one run. `result` is set once the last of them was taken."""

    def __init__(self, events: AsyncIterator[Event]) -> None:
        self._events = events
        self.result: RLMChatCompletion | None = None
        self.error: RLMError | None = None

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            return await anext(self._events)
        except StopAsyncIteration:
            if self.error is not None:
                raise self.error from None
            raise


class _Arguments:
    """A constructor's arguments, kept for pickling. They may hold keys: nothing prints them by accident."""

    __slots__ = ("by_name",)

    def __init__(self, by_name: dict[str, Any]) -> None:
        self.by_name = by_name

    def __repr__(self) -> str:
        return f"<{len(self.by_name)} arguments>"


def _unpickled(cls: type[AsyncRLM], given: dict[str, Any]) -> AsyncRLM:
    return cls(**given)
