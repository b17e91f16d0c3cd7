"""`rlm.session()`: completions that keep one REPL between them."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, Self, Unpack, overload

from .engine.completions import Completions, Streaming
from .engine.conversation import Conversation
from .engine.doors import behind_door
from .engine.overrides import Others, Overrides
from .types import Parsed, RLMChatCompletion


class Chat:
    """Completions in one REPL: `async with rlm.session() as chat: await chat.acompletion(…)`.

    What cells have bound stays for the next completion. Cells find the prompt of the n-th one as `context_n`, its
    messages, whatever it came to, as `history_n`, counted from 0; `context` is the current prompt, `history` the
    messages of the last completion. Each completion has its own limits and its own ledger. It may fail, run out of time
    or be cancelled: what was there before it stays, unless its cell can't be interrupted and has to be killed with the
    worker. Then contexts and histories are loaded again, and the next model is told that variables are lost.

    Completions wait for one another in the order they were asked for (`max_timeout` begins with their turn); sessions
    of one instance run side by side. A tool or callback of a completion must not ask its own session: it would wait for
    itself. Prompts are copied; one given as a `Path` is read again for each new worker. Enter and leave it in one task.
    """

    def __init__(self, completions: Completions, conversation: Conversation) -> None:
        self._completions = completions
        self._conversation = conversation

    async def __aenter__(self) -> Self:
        await self._conversation.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._conversation.__aexit__(kind, error, traceback)

    async def aclose(self) -> None:
        """End the REPL before the block ends; closing twice is fine.

        A completion that runs or waits in another task raises `ConfigurationError`, and so does each later one.
        """
        await self._conversation.aclose()

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
        """The next completion; arguments, limits and errors as of `AsyncRLM.acompletion`.

        Raises:
            ConfigurationError: if the session is not open, is closed meanwhile, or belongs to another event loop.
        """
        completions, conversation = self._completions, self._conversation
        call = completions.prepare(overrides)
        return await behind_door(
            lambda: completions.complete(call, prompt, root_prompt, tags, conversation=conversation)
        )

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
        """The next completion as its events, as of `AsyncRLM.astream`."""
        completions, conversation = self._completions, self._conversation
        return Streaming(
            lambda: completions.stream(
                completions.prepare(overrides), prompt, root_prompt, tags, conversation=conversation
            )
        )

    def __repr__(self) -> str:
        return f"<Chat {self._conversation.state}, {self._conversation.number} completions>"

    def __del__(self) -> None:
        conversation = getattr(self, "_conversation", None)
        if conversation is not None and conversation.state == "open":
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
