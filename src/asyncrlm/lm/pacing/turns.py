"""What a request needs of an account: leave to send, and somebody to tell what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ...errors import LMError
    from ..base import LMReply
    from .fair import Flow
    from .pace import Pace, Permit


class Turns(Protocol):
    """Who gives an account's permits; `Account` does."""

    pace: Pace

    def enter_nowait(self, tokens: int) -> Permit | None: ...
    def soon(self, tokens: int) -> bool: ...
    async def enter(
        self, flow: Flow, tokens: int, *, first: bool, deadline: float, elsewhere: bool = False
    ) -> Permit | None: ...
    def leave(self, permit: Permit) -> None: ...
    def answered(self, permit: Permit, reply: LMReply) -> None: ...
    def refused(self, permit: Permit, error: LMError) -> bool: ...
