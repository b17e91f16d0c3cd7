"""A conversation: completions that follow one another in one REPL."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self

import anyio
from anyio.lowlevel import EventLoopToken, current_token

from ..errors import ConfigurationError
from ..repl.resources import DepthScope
from ..repl.session import Session, SubCall
from . import prompts as words
from .call import Call
from .doors import BehindDoor, behind_door
from .scope import EngineScope
from .settings import Configuration

FIRST_HISTORY = "history_0"
"""What the messages of the first completion are known by."""


class Conversation:
    """A session of the REPL, and what of each completion the later ones find there.

    To be entered and left by one task. Completions may come from any task of the same event loop; one runs at a time,
    the others wait in the order they came.
    """

    def __init__(self, engine: EngineScope, configuration: Configuration) -> None:
        self._engine = engine
        self._configuration = configuration
        self._state: Literal["new", "open", "closed"] = "new"
        self._loop: EventLoopToken | None = None
        self._turn = anyio.Lock()
        self._scopes: set[anyio.CancelScope] = set()  # of the completions under way and of those that wait
        self._held: BehindDoor[Session] | None = None
        self._session: Session | None = None
        self._number = 0
        self._running: int | None = None
        self._histories: dict[str, list[dict[str, str]]] = {}  # not loaded yet

    @property
    def state(self) -> Literal["new", "open", "closed"]:
        return self._state

    @property
    def number(self) -> int:
        """Completions that have begun so far."""
        return self._number

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise ConfigurationError("a session can be entered once; open another one")
        held = BehindDoor(self._opened())
        self._session = await held.__aenter__()
        self._held = held
        self._loop = current_token()
        self._state = "open"
        return self

    @asynccontextmanager
    async def _opened(self) -> AsyncGenerator[Session]:
        configuration = self._configuration
        async with (
            self._engine.lease() as scope,
            Session(
                configuration.environment,
                DepthScope(scope),
                _Nobody(),
                tools=configuration.tools,
                raise_errors=configuration.limits.on_subcall_error == "raise",
                outlives_calls=True,
            ) as session,
        ):
            yield session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._close()
        held, self._held = self._held, None
        return None if held is None else await held.__aexit__(kind, error, traceback)

    async def aclose(self) -> None:
        """End the REPL, and with it the completions that run or wait. Twice is fine; any task may do it."""
        if self._close() and self._session is not None:
            await behind_door(self._session.aclose)

    def _close(self) -> bool:
        """Whether it was open until now."""
        was, self._state = self._state, "closed"
        for scope in self._scopes if was == "open" else ():
            scope.cancel()
        return was == "open"

    def check(self) -> None:
        """Whether a completion can begin here.

        Raises:
            ConfigurationError: if not; the message says what to do.
        """
        if self._state == "new":
            raise ConfigurationError("this session is not open yet: use `async with rlm.session() as chat`")
        if self._state == "closed":
            raise ConfigurationError("this session is closed; open another one with rlm.session()")
        if self._loop != current_token():
            raise ConfigurationError("this session belongs to another event loop; open one with rlm.session() here")

    @asynccontextmanager
    async def turn(self, call: Call) -> AsyncGenerator[None]:
        """A completion's place in the queue, and its time in the REPL.

        Raises:
            ConfigurationError: if the conversation is closed before the block ends.
        """
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                async with self._turn:
                    yield
            finally:
                self._scopes.discard(scope)
        if scope.cancelled_caught:
            error = ConfigurationError("this session was closed before the completion ended")
            call.account(error)
            raise error

    # ---- what a run asks of it ----

    @property
    def session(self) -> Session:
        """Where the cells of the completion whose turn it is run."""
        self.check()
        if self._session is None:
            raise RuntimeError("the conversation was never entered")
        return self._session

    @property
    def history_name(self) -> str:
        """What the REPL knows the messages of the completion under way by."""
        return f"history_{self._running}"

    async def begin(
        self, prompt: Any, serve: Callable[[], Awaitable[None]]
    ) -> tuple[str, Callable[[], Awaitable[None]]]:
        """A completion begins.

        Args:
            prompt: Its context.
            serve: Has the REPL serve it.

        Returns:
            What its model is told of the earlier ones, and what loads all that its cells find. That may fail with a
            ConfigurationError or SandboxLost, and then the completion does not count.

        Raises:
            ConfigurationError: if the REPL can't serve it.
            SandboxLost: if no worker can be had.
        """
        session, number = self.session, self._number
        lost = None
        if number:  # the model is told whether the worker is still the one of before
            await serve()
            lost = session.take_loss()
        self._running = number

        async def load() -> None:
            if not number:
                await serve()
            for name, messages in list(self._histories.items()):
                await session.load(name, messages, also="history")
                del self._histories[name]
            await session.load(f"context_{number}", prompt, also="context")
            self._number = number + 1
            if not number:
                session.take_loss()

        return words.conversation_message(self._configuration.prompts, number=number, lost=lost), load

    def end(self, messages: list[dict[str, str]]) -> None:
        """The completion is over, however it ended; `messages` are what it came to."""
        if self._running is not None and self._running < self._number:
            self._histories[f"history_{self._running}"] = messages
        self._running = None


class _Nobody:
    """Answers sub-calls where no completion runs: there are none."""

    async def llm(self, call: SubCall) -> str:
        raise RuntimeError("no completion is under way")

    async def rlm(self, call: SubCall) -> str:
        return await self.llm(call)

    def limits(self) -> dict[str, Any]:
        return {}

    def width(self) -> int:
        return 1
