"""What a model is to the engine: messages in; text, reasoning, finish reason and usage out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from msgspec import Struct, field

from ..types import RateHints


class Message(Struct, frozen=True):
    """One message of a conversation; encodes as the OpenAI chat form."""

    role: str
    content: str


class LMRequest(Struct, frozen=True, kw_only=True):
    """One request to a model."""

    messages: tuple[Message, ...]
    sampling_args: dict[str, Any] = field(default_factory=dict[str, Any])
    """Named as the caller named them; a client maps them to its provider's names, never drops them."""
    output_cap: int | None = None
    """Most output tokens of this one reply, set by the engine where a hard limit needs it. The client sends it under
    its provider's name unless `sampling_args` already sets a lower one."""

    def input_bytes(self) -> int:
        """UTF-8 bytes of all message texts: what input tokens are estimated from before the call."""
        return sum(len(m.content.encode("utf-8", "surrogatepass")) + 16 for m in self.messages)


class LMUsage(Struct, frozen=True, kw_only=True):
    """What a provider said one reply used. None means that it did not say."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    cost: float | None = None
    """USD, where the provider itself reports it."""


class LMReply(Struct, frozen=True, kw_only=True):
    """One reply of a model."""

    text: str
    reasoning: str | None = None
    finish_reason: str | None = None
    usage: LMUsage = LMUsage()
    model: str | None = None
    """The name the provider answered with, where it did; of several fallbacks it says which one answered."""
    charged_before: int = 0
    """How many earlier tries of the same request, by other models, failed and may have been paid for."""
    rate: RateHints | None = None
    """What the provider said of its rate limits, where it did: clients fill it in, the pacer reads it."""
    cached: bool = False
    """True if nothing was asked: the reply comes from a cache or a recording."""
    waited: float = 0.0
    """Seconds the request waited before it was sent: for its turn, for a rate limit, for the ledger, between attempts.
    The engine's to fill in."""


class LMClient(ABC):
    """A model that can be asked. Immutable in use: any number of calls at once, on one event loop.

    A client only sends and classifies: one attempt per `acomplete`, failures as `LMError` with `kind`, `retryable`
    and `retry_after` filled in. Waiting, retrying, gating and accounting belong to the engine.
    """

    model: str
    """The name this client is known by in routing, usage and prices."""

    @property
    def account(self) -> str:
        """Calls with equal `account` share rate limits. No secret in clear: it shows up in logs."""
        return f"{type(self).__name__}:{self.model}"

    @property
    def needs_price(self) -> bool:
        """False for clients that never cost money (offline): `max_budget` then needs no price."""
        return True

    @abstractmethod
    async def acomplete(self, request: LMRequest) -> LMReply:
        """Send `request` once.

        Raises:
            LMError: with `kind`, `status`, `retryable` and `retry_after`.
        """

    async def aclose(self) -> None:
        """Release connections. Closing twice is fine."""
