"""The limits of an account as its owner gives them, and what a reply must have."""

from __future__ import annotations

import difflib
from functools import partial
from typing import TYPE_CHECKING, Any, Never

import anyio.lowlevel

from ...errors import ConfigurationError, LMError
from .account import Account, Limits

if TYPE_CHECKING:
    from ..base import LMReply

_OTHER_NAMES = {
    **dict.fromkeys(("rpm", "max_rpm", "requests"), "requests_per_minute"),
    **dict.fromkeys(("tpm", "max_tpm", "tokens"), "tokens_per_minute"),
    **dict.fromkeys(("concurrency", "max_concurrency", "max_concurrent_requests", "limit"), "max_concurrent"),
}
"""What others call it → the argument that it is here."""


class Pacer:
    """Paces the requests of one account: how many at once, how many a minute, how many tokens a minute.

    Without limits of yours it learns the server's: it reads the rate limits in its replies, stops while a Retry-After
    says so, narrows when a request is refused for a rate limit and widens again with success. Runs take turns.

    All that is sent to one account (provider, address and key) and model from one event loop goes through one of them,
    whichever `AsyncRLM` sends it. Pass `pacer=` to split an account's limits among several, to share one among several
    accounts, or to set limits: the one passed is used as it is, on one event loop at a time.

    Args:
        max_concurrent: Requests in flight at most. None: as many as the process has files for, at most 2,000.
        requests_per_minute: Requests started in any minute at most.
        tokens_per_minute: Tokens in any minute at most, input and output; estimated before a request, then corrected by
            its reply.
        name: For messages and `repr`.

    Raises:
        ConfigurationError: if a limit is not a positive number, or for an argument that there is not.
    """

    def __init__(
        self,
        *,
        max_concurrent: int | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        name: str = "",
        **unknown: Never,
    ) -> None:
        for wrong in unknown:
            known = ("max_concurrent", "requests_per_minute", "tokens_per_minute", "name")
            right = _OTHER_NAMES.get(wrong) or next(iter(difflib.get_close_matches(wrong, known, 1)), None)
            meant = f" (did you mean {right!r}?)" if right else ""
            raise ConfigurationError(f"Pacer takes no {wrong!r}{meant}; known: {', '.join(known)}", argument=wrong)
        given = Limits(
            max_concurrent=max_concurrent, requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute
        )
        for limit, value in given.items():
            if value is not None and not (isinstance(value, int) and value > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigurationError(f"{limit} must be a positive whole number or None, not {value!r}")
        self.name = name
        self._new = partial(Account, **given, name=name)
        """An account of which nothing is known: nothing sent, nothing learnt."""
        self._account = self._new()
        self._loop: object = None

    def _bound(self) -> Account:
        loop = anyio.lowlevel.current_token()
        if self._loop is not None and self._loop != loop:
            if self.in_flight or self.waiting:
                raise ConfigurationError("this pacer is in use on another event loop: make one for each")
            self._account = self._new()
        self._loop = loop
        return self._account

    @property
    def in_flight(self) -> int:
        """Requests sent and not answered yet, or about to be sent."""
        return self._account.in_flight

    @property
    def waiting(self) -> int:
        """Requests waiting for their turn."""
        return self._account.waiting

    @property
    def width(self) -> int:
        """How many requests may be in flight now."""
        return self._account.pace.width

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (self._new.keywords,)

    def __repr__(self) -> str:
        return f"<Pacer {self._account}>"


def account_of(pacer: Pacer) -> Account:
    """Who gives its permits on the running event loop; what was learnt on another one is forgotten.

    Raises:
        ConfigurationError: if it is in use on another one.
    """
    return pacer._bound()  # pyright: ignore[reportPrivateUsage]


def reply_text(reply: LMReply) -> str:
    """The text of a reply that must have one.

    Raises:
        LMError: of kind "refusal" or "empty". The reply was paid for and settled already.
    """
    if reply.text.strip():
        return reply.text
    if reply.finish_reason == "refusal":
        raise LMError(f"the model refused: {reply.reasoning or 'it gave no reason'}", kind="refusal")
    if reply.finish_reason == "length":
        why = "it ran into its output limit" + (" while still thinking" if reply.reasoning else "")
    elif reply.reasoning:
        why = "it has thoughts but no text"
    else:
        why = f"finish reason: {reply.finish_reason or 'not given'}"
    raise LMError(f"the model's reply is empty ({why})", kind="empty")


def _unpickled(given: dict[str, Any]) -> Pacer:
    return Pacer(**given)
