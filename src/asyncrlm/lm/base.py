"""What a model is to the engine: messages in; text, reasoning, finish reason and usage out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from numbers import Real
from typing import Any, ClassVar, Literal

from msgspec import Struct, field

from ..caught import described, is_own
from ..errors import ConfigurationError, LMError
from ..types import RateHints

WHOLE = frozenset({"stop", "tool_calls", "tool_use", "function_call"})
"""Finish reasons of a reply that is all there. Of one with any other word, an unknown one too, that is not known."""

BROKEN = frozenset(
    {
        *("error", "network_error", "insufficient_system_resource", "abort", "aborted", "cancelled", "timeout"),
        *("pause_turn", "pause_run", "compaction", "other", "malformed_response", "malformed_function_call"),
        *("unexpected_tool_call", "too_many_tool_calls", "missing_thought_signature"),
    }
)
"""Finish reasons of a reply that its server broke off, in the words of vLLM and SGLang, DeepSeek, Mistral, OpenRouter,
Zhipu, Anthropic and Gemini."""


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
        """UTF-8 bytes of all messages: what input tokens are estimated from before the call."""
        return sum(text_size(m.content) + text_size(m.role) + 16 for m in self.messages)


def text_size(text: str) -> int:
    """Bytes of `text` in UTF-8, lone surrogates included."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class LMUsage(Struct, frozen=True, kw_only=True):
    """What a provider said one reply used. None means that it did not say."""

    input_tokens: int | None = None
    """All input, what came from or went to a cache included."""
    output_tokens: int | None = None
    """What is billed as output, thoughts included."""
    cached_tokens: int | None = None
    """Of the input: read from the provider's cache."""
    cache_write_tokens: int | None = None
    """Of the input: written to the provider's cache, where that has a price of its own."""
    cache_write_1h_tokens: int | None = None
    """Of those: to be kept for an hour, which costs more."""
    reasoning_tokens: int | None = None
    """Of the output: thoughts."""
    cost: float | None = None
    """USD, where the provider itself reports it."""


class LMReply(Struct, frozen=True, kw_only=True):
    """One reply of a model."""

    text: str
    reasoning: str | None = None
    finish_reason: str | None = None
    """Why it ends there, alike for all providers: "stop", "length", "refusal", or else the provider's own word. None
    where it says nothing, which stands for "stop"."""
    usage: LMUsage = LMUsage()
    model: str | None = None
    """The name the provider answered with, where it did; of several fallbacks it says which one answered."""
    rate: RateHints | None = None
    """What the provider said of its rate limits, where it did: clients fill it in, the pacer reads it."""
    cached: bool = False
    """True if nothing was asked: the reply comes from a cache or a recording."""
    waited: float = 0.0
    """Seconds the request waited before it was sent: for its turn, for a rate limit, for the ledger, between attempts.
    The engine's to fill in."""
    retries: int = 0
    """How often the request was sent again after a failure that might pass. The engine's to fill in."""
    latency: float | None = None
    """Seconds from sending the request to having all of the reply, where a client measured them."""

    @property
    def cut_off(self) -> bool:
        """Whether the text may be only the beginning of the reply: never to be run as if whole."""
        return self.finish_reason is not None and self.finish_reason.lower() not in WHOLE

    @property
    def ending(self) -> Literal["whole", "cut", "refused", "broken", "unknown"]:
        """How the reply ends: of its own accord, at a limit of length, by a refusal or filter, by a failure of the
        server, or by something that there is no telling."""
        said = (self.finish_reason or "stop").lower()
        if said in WHOLE:
            return "whole"
        if said in ("length", "refusal"):
            return "cut" if said == "length" else "refused"
        return "broken" if said in BROKEN else "unknown"


class LMDelta(Struct, frozen=True, kw_only=True):
    """A piece of a reply while it is being written."""

    text: str = ""
    reasoning: str = ""
    reply: LMReply | None = None
    """The whole reply; only in the last piece, and always there."""


class LMClient(ABC):
    """A model that can be asked. Immutable in use: any number of calls at once, on one event loop.

    A client only sends and classifies: one attempt per `acomplete`, failures as `LMError` with `kind`, `retryable`
    and `retry_after` filled in. Waiting, retrying, gating and accounting belong to the engine.
    """

    model: str
    """The name this client is known by in routing, usage and prices."""

    cache_key: str | None = None
    """Names this client to a cache: those with an equal one give equal replies. None: its replies are not cached."""

    burst: ClassVar[int | None] = None
    """Requests that may start in one pass of the event loop; None for as many as open connections without holding it
    up. More for a client whose requests cost next to nothing to start."""

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

    async def astream(self, request: LMRequest) -> AsyncGenerator[LMDelta]:
        """Send `request` once and give the reply as it is being written.

        The texts of all deltas together are the reply's text. Who leaves early closes the generator
        (`contextlib.aclosing`). A client that can't stream gives the whole reply as one delta.

        Raises:
            LMError: as `acomplete`; `charged` when it breaks off in the middle.
        """
        reply = await self.acomplete(request)
        yield LMDelta(text=reply.text, reasoning=reply.reasoning or "", reply=reply)

    async def aclose(self) -> None:
        """Release connections. Closing twice is fine."""


async def one_reply(client: LMClient, request: LMRequest) -> LMReply:
    """What a client, which may be the caller's own, makes of a request.

    Raises:
        LMError: if it fails, whatever it raises, or if what it returns is no reply.
        ConfigurationError: if it is used wrongly, as it says itself.
    """
    try:
        reply: Any = await client.acomplete(request)
    except (LMError, ConfigurationError):
        raise
    except BaseException as error:
        if not is_own(error):
            raise
        raise LMError(f"{client.model} raised {described(error)}", kind="other", charged=True) from error
    if (problem := _problem(reply)) is not None:
        raise LMError(f"{client.model} returned {problem}", kind="bad_reply", charged=True)
    return reply


def _problem(reply: Any) -> str | None:
    """Why what a client returned is no reply; None if it is one. The constructor of replies checks no types."""
    if not isinstance(reply, LMReply):
        return f"{type(reply).__name__}, not an LMReply"
    usage: Any = reply.usage
    fields: dict[str, Any] = {"text": reply.text, "usage": usage}
    fields |= {name: getattr(reply, name) or "" for name in ("reasoning", "finish_reason", "model")}
    if isinstance(usage, LMUsage):
        fields |= {f"usage.{name}": getattr(usage, name) or 0 for name in usage.__struct_fields__}
    for name, value in fields.items():
        wanted = LMUsage if name == "usage" else Real if name.startswith("usage") else str
        if not isinstance(value, wanted):
            return f"an LMReply whose {name} is {type(value).__name__}, not {wanted.__name__}"
    return None
