"""The events of one run, for who watches it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ..errors import RLMError
from ..events import Event
from ..types import RLMChatCompletion


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
