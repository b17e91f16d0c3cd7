"""`AsyncRLM`: configuration plus an engine scope. Text in, text out, as of any model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Self, Unpack, overload

from .chat import Chat
from .engine.completions import Completions, Streaming
from .engine.configure import configure
from .engine.doors import behind_door
from .engine.overrides import Others, Overrides
from .engine.prompts import Prompts
from .engine.settings import (
    DEFAULT_BACKEND,
    DEFAULT_CACHE_SIZE,
    DEFAULT_COMPACTION_THRESHOLD_PCT,
    DEFAULT_MAX_CONCURRENT_REQUESTS,
    DEFAULT_MAX_CONCURRENT_SUBCALLS,
    DEFAULT_MAX_DEPTH,
    DEFAULT_MAX_ITERATIONS,
    DEFAULT_SUBCALL_TIMEOUT,
    DEFAULT_TOOL_TIMEOUT,
    Compactor,
    OnLimit,
    OnSubcallError,
)
from .ledger import LimitsMode
from .lm.clients import Backend
from .lm.pacing import Pacer
from .mcp.server import MCPServer
from .repl.approval import ApprovalRequest
from .repl.sandbox import Environment
from .types import Parsed, RLMChatCompletion

_ELSEWHERE = {
    "completion": "`await rlm.acompletion(…)`",
    "stream": "`async with rlm.astream(…) as events`",
    "close": "`await rlm.aclose()`",
}
"""What the blocking face has → what there is here."""


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
        environment: Where cells run: "local", "ipython", "docker", "modal", "daytona", "e2b", "prime", or an
            `Environment`.
        environment_kwargs: The environment's settings.
        max_depth: How deep runs nest; 0 asks the model without a REPL.
        max_iterations: Turns of one run.
        persistent: Whether completions keep one REPL between them, as of a `session()` that lasts as long as the block
            of `async with`, which is then needed. They wait for one another.
        compaction: Whether a history that nears the root model's window is summarised by that model, of children too;
            all messages up to the last summary stay in the REPL as `history`. Or what makes the summary:
            `async def f(messages, ask) -> str`, where `await ask(messages)` asks the root model under the run's limits.
        compaction_threshold_pct: Share of the window at which it is done.
        custom_system_prompt: Replaces the system prompt; `{custom_tools_section}` marks where tools are described.
        prompts: All that the engine itself says to models, as data, errors aside:
            `msgspec.structs.replace(Prompts(), turn="Step {turn}.")`.
        orchestrator: Whether the system prompt advises to delegate to sub-models.
        user_prologue: Said to the root model before its first turn.
        custom_tools: Name → value or callable, or → `{"tool": value, "description": text}`, for cells; an entry may
            have `timeout` and `max_calls` (in one completion) too.
        custom_sub_tools: The same for children; None means those of the root, `{}` none.
        mcp_servers: Servers whose tools are functions in cells, each an `MCPServer` or a dict with its fields; for the
            root, and for children unless `custom_sub_tools` are given.
        approve: Is given an `ApprovalRequest` before each cell and tool call; returns None, or why it is refused.
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
        tool_timeout: Seconds one call of a tool may take; None for no limit.
        pacer: Limits of the models' account: a `Pacer`, or model name → `Pacer`. Several `AsyncRLM` may share one.
        tenant: Runs of one tenant share its turns at an account; without one, each run has turns of its own.
        cache: A folder: calls equal to one that was answered before, or is under way, cost nothing.
        cache_size: Bytes that the replies there may take at most, or a str such as "2GB"; those that were not used for
            longest go. None for no end.
        record: A folder: all replies are kept in it.
        replay: A folder that was recorded: models are not asked, a call that is not in it ends the run.
        logger: An `RLMLogger`.
        verbose: Print progress lines on standard error.
        on_subcall_start: Called with `(depth, model, prompt_preview)`; as the next three, plain or async.
        on_subcall_complete: Called with `(depth, model, seconds, error_or_None)`.
        on_iteration_start: Called with `(depth, turn)`.
        on_iteration_complete: Called with `(depth, turn, seconds)`.

    Raises:
        ConfigurationError: for whatever is wrong, naming what is right.
    """

    def __init__(
        self,
        backend: Backend = DEFAULT_BACKEND,
        backend_kwargs: Mapping[str, Any] | None = None,
        environment: str | Environment = "local",
        environment_kwargs: Mapping[str, Any] | None = None,
        *more: Never,
        other_backends: Sequence[Backend] | None = None,
        other_backend_kwargs: Sequence[Mapping[str, Any]] | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        sub_sampling_args: Mapping[str, Any] | None = None,
        max_depth: int = DEFAULT_MAX_DEPTH,
        max_iterations: int = DEFAULT_MAX_ITERATIONS,
        custom_system_prompt: str | None = None,
        prompts: Prompts | None = None,
        orchestrator: bool = True,
        user_prologue: str | None = None,
        persistent: bool = False,
        compaction: bool | Compactor = False,
        compaction_threshold_pct: float = DEFAULT_COMPACTION_THRESHOLD_PCT,
        custom_tools: Mapping[str, Any] | None = None,
        custom_sub_tools: Mapping[str, Any] | None = None,
        mcp_servers: Sequence[MCPServer | Mapping[str, Any]] | None = None,
        approve: Callable[[ApprovalRequest], Any] | None = None,
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
        tool_timeout: float | None = DEFAULT_TOOL_TIMEOUT,
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
        """The arguments are told of in the docstring of the class."""
        given = {name: value for name, value in locals().items() if name not in {"self", "more", "unknown"}}
        self._given = _Arguments(given)
        self._completions = Completions(configure(nameless=more, unknown=unknown, **given), tuple(given))
        self._entered = 0

    def __repr__(self) -> str:
        configuration = self._completions.configuration
        models = ", ".join(spec.model for spec in configuration.router.specs)
        state = "open" if self._completions.is_open else "idle"
        return f"<{type(self).__name__} {models} in {configuration.environment.name!r}, {state}>"

    def __del__(self) -> None:
        if getattr(self, "_entered", 0):
            told = f"unclosed {self!r}: leave its `async with` block, or `await` its `aclose()`"
            warnings.warn(told, ResourceWarning, source=self, stacklevel=2)

    if not TYPE_CHECKING:  # for whoever takes it for an `RLM`; type checkers know better by themselves

        def __getattr__(self, name: str) -> Never:
            instead = _ELSEWHERE.get(name)
            more = "" if instead is None else f": use {instead}, or an RLM, which blocks"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{more}")

        def __enter__(self) -> Never:
            raise TypeError("an AsyncRLM is entered with `async with`, an RLM with `with`")

        def __exit__(self, *_: object) -> None: ...

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self._given.by_name)

    # ---- the scope ----

    async def __aenter__(self) -> Self:
        await self._completions.__aenter__()
        self._entered += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered = max(0, self._entered - 1)
        await self._completions.__aexit__(kind, error, traceback)

    async def aclose(self) -> None:
        """Leave the scope that `async with` entered. Closing twice is fine; running calls end their own leases.

        With `persistent` it ends the REPL, and the completion in it; the `async with` block still has to be left.
        """
        self._entered = max(0, self._entered - 1)
        await self._completions.aclose()

    # ---- asking ----

    @overload
    async def acompletion(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        response_format: type[Parsed],
        tags: dict[str, Any] | None = None,
        **others: Unpack[Others],
    ) -> RLMChatCompletion[Parsed]: ...
    @overload
    async def acompletion(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        tags: dict[str, Any] | None = None,
        **overrides: Unpack[Overrides],
    ) -> RLMChatCompletion: ...
    async def acompletion(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        tags: dict[str, Any] | None = None,
        **overrides: Unpack[Overrides],
    ) -> RLMChatCompletion:
        """One run: `prompt` becomes `context` in the REPL, `root_prompt` is what the root model is asked about it.

        Args:
            prompt: Plain data, records, files and folders, web pages, streams or tables; "Contexts" in README.md says
                what each is in a cell.
            root_prompt: The question.
            tags: Kept with the result and in the log.
            **overrides: For this call alone: limits, `sampling_args`, `custom_tools`, `tenant`, `web`;
                `lazy=True`, files and folders of the prompt stay files in cells, whatever their size; or
                `response_format`, what the answer must be: a type that msgspec or pydantic can handle, a JSON schema,
                or OpenAI's own form of one. `parsed` of the result is then its value, `response` its JSON.

        Raises:
            ConfigurationError: if the call itself is wrong.
            LimitError: when a limit of the tree is met (`on_limit="raise"`).
            LMError: when the root model can't be asked; of kind "schema" when no answer of it fits `response_format`.
            SandboxLost: when cells can't be run.
        """
        completions = self._completions
        call = completions.prepare(overrides)
        return await behind_door(lambda: completions.complete(call, prompt, root_prompt, tags))

    @overload
    def astream(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        response_format: type[Parsed],
        tags: dict[str, Any] | None = None,
        **others: Unpack[Others],
    ) -> Streaming[Parsed]: ...
    @overload
    def astream(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        tags: dict[str, Any] | None = None,
        **overrides: Unpack[Overrides],
    ) -> Streaming: ...
    def astream(
        self,
        prompt: Any,
        root_prompt: str | None = None,
        *,
        tags: dict[str, Any] | None = None,
        **overrides: Unpack[Overrides],
    ) -> Streaming:
        """The same run as its events, in order: `async with rlm.astream(…) as events: async for event in events: …`.

        The run is cancelled when the block is left before its end. After the last event `events.result` is set; a run
        that fails raises from the iteration. The run never waits for its reader: events that were not taken stay in
        memory, prompts and replies with them.
        """
        completions = self._completions
        return Streaming(lambda: completions.stream(completions.prepare(overrides), prompt, root_prompt, tags))

    def session(self) -> Chat:
        """A conversation: `async with rlm.session() as chat: await chat.acompletion(…)` keeps one REPL."""
        return Chat(self._completions, self._completions.conversation())

    @property
    def persistent(self) -> bool:
        """Whether completions keep one REPL between them."""
        return self._completions.configuration.persistent


def completions_of(rlm: AsyncRLM) -> Completions:
    """What the blocking face runs its calls with."""
    return rlm._completions  # pyright: ignore[reportPrivateUsage]


class _Arguments:
    """A constructor's arguments, kept for pickling. They may hold keys: nothing prints them by accident."""

    __slots__ = ("by_name",)

    def __init__(self, by_name: dict[str, Any]) -> None:
        self.by_name = by_name

    def __repr__(self) -> str:
        return f"<{len(self.by_name)} arguments>"


def _unpickled(cls: type[AsyncRLM], given: dict[str, Any]) -> AsyncRLM:
    return cls(**given)
