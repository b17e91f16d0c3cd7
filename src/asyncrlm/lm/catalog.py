"""Context windows and prices of well-known models, as plain data. What is not listed is unknown, never guessed."""

from __future__ import annotations

from typing import NamedTuple

from ..ledger import Price

AS_OF = "2026-11"
"""When the table was last brought up to date. Prices change: `price=` in `backend_kwargs` overrides."""


class Entry(NamedTuple):
    """One line of the table."""

    vendor: str
    name: str
    window: int
    """Tokens of input at most."""
    input: float
    """USD per million tokens, as are the next two; the list price of a short request."""
    cached: float | None
    output: float


_CACHE_WRITE = {"anthropic": (1.25, 2.0)}
"""What input that goes into the vendor's cache for five minutes costs, and for an hour, in prices of other input."""

_TABLE = (
    Entry("openai", "gpt-6-astra", 922_000, 10.0, 1.0, 50.0),
    Entry("openai", "gpt-6.1-sol", 922_000, 2.0, 0.1, 10.0),
    Entry("openai", "gpt-6-sol", 922_000, 2.0, 0.2, 10.0),
    Entry("openai", "gpt-6.1-terra", 922_000, 1.0, 0.05, 5.0),
    Entry("openai", "gpt-6-luna", 922_000, 0.1, 0.01, 0.5),
    Entry("openai", "gpt-5.6-sol", 922_000, 4.0, 0.4, 20.0),
    Entry("openai", "gpt-5.6-terra", 922_000, 2.0, 0.2, 12.0),
    Entry("openai", "gpt-5.6-luna", 922_000, 0.2, 0.02, 1.2),
    Entry("openai", "gpt-5.5", 1_050_000, 5.0, 0.5, 30.0),
    Entry("openai", "gpt-5.5-pro", 1_050_000, 30.0, None, 180.0),
    Entry("openai", "gpt-5.4", 1_050_000, 2.5, 0.25, 15.0),
    Entry("openai", "gpt-5.4-pro", 1_050_000, 30.0, None, 180.0),
    Entry("openai", "gpt-5.4-mini", 272_000, 0.75, 0.075, 4.5),
    Entry("openai", "gpt-5.4-nano", 272_000, 0.2, 0.02, 1.25),
    Entry("openai", "gpt-5.2", 272_000, 1.75, 0.175, 14.0),
    Entry("openai", "gpt-5.2-pro", 272_000, 21.0, None, 168.0),
    Entry("openai", "gpt-5.1", 272_000, 1.25, 0.125, 10.0),
    Entry("openai", "gpt-5", 272_000, 1.25, 0.125, 10.0),
    Entry("openai", "gpt-5-mini", 272_000, 0.25, 0.025, 2.0),
    Entry("openai", "gpt-5-nano", 272_000, 0.05, 0.005, 0.4),
    Entry("openai", "gpt-5-pro", 400_000, 15.0, None, 120.0),
    Entry("openai", "gpt-4.1", 1_047_576, 2.0, 0.5, 8.0),
    Entry("openai", "gpt-4.1-mini", 1_047_576, 0.4, 0.1, 1.6),
    Entry("openai", "gpt-4.1-nano", 1_047_576, 0.1, 0.025, 0.4),
    Entry("openai", "gpt-4o", 128_000, 2.5, 1.25, 10.0),
    Entry("openai", "gpt-4o-mini", 128_000, 0.15, 0.075, 0.6),
    Entry("openai", "o1", 200_000, 15.0, 7.5, 60.0),
    Entry("openai", "o3", 200_000, 2.0, 0.5, 8.0),
    Entry("openai", "o3-mini", 200_000, 1.1, 0.55, 4.4),
    Entry("openai", "o3-pro", 200_000, 20.0, None, 80.0),
    Entry("openai", "o4-mini", 200_000, 1.1, 0.275, 4.4),
    Entry("anthropic", "claude-opus-5-5", 1_000_000, 4.0, 0.2, 20.0),
    Entry("anthropic", "claude-opus-5", 1_000_000, 5.0, 0.5, 25.0),
    Entry("anthropic", "claude-opus-4-8", 1_000_000, 5.0, 0.5, 25.0),
    Entry("anthropic", "claude-opus-4-7", 1_000_000, 5.0, 0.5, 25.0),
    Entry("anthropic", "claude-opus-4-6", 1_000_000, 5.0, 0.5, 25.0),
    Entry("anthropic", "claude-opus-4-5", 200_000, 5.0, 0.5, 25.0),
    Entry("anthropic", "claude-sonnet-5-5", 1_000_000, 2.0, 0.1, 10.0),
    Entry("anthropic", "claude-sonnet-5", 1_000_000, 2.0, 0.2, 10.0),
    Entry("anthropic", "claude-sonnet-4-6", 1_000_000, 3.0, 0.3, 15.0),
    Entry("anthropic", "claude-sonnet-4-5", 200_000, 3.0, 0.3, 15.0),
    Entry("anthropic", "claude-haiku-5-5", 1_000_000, 0.1, 0.01, 0.5),
    Entry("anthropic", "claude-haiku-4-5", 200_000, 1.0, 0.1, 5.0),
    Entry("google", "gemini-4-argon", 1_048_576, 2.0, 0.1, 10.0),
    Entry("google", "gemini-4-hydrogen", 1_048_576, 1.5, 0.075, 7.5),
    Entry("google", "gemini-3.8-flash", 1_048_576, 0.75, 0.075, 3.75),
    Entry("google", "gemini-3.5-flash", 1_048_576, 1.5, 0.15, 9.0),
    Entry("google", "gemini-3.5-flash-lite", 1_048_576, 0.3, 0.03, 2.5),
    Entry("google", "gemini-2.5-pro", 1_048_576, 1.25, 0.125, 10.0),
    Entry("google", "gemini-2.5-flash", 1_048_576, 0.3, 0.03, 2.5),
    Entry("google", "gemini-2.5-flash-lite", 1_048_576, 0.1, 0.01, 0.4),
    Entry("deepseek", "deepseek-v4-pro", 1_000_000, 1.32, 0.044, 3.96),
    Entry("deepseek", "deepseek-v4-flash", 1_000_000, 0.3, 0.006, 1.2),
    Entry("deepseek", "deepseek-v3.2", 163_840, 0.28, 0.028, 0.4),
    Entry("mistralai", "mistral-large-4", 1_048_576, 0.7, 0.07, 2.1),
    Entry("mistralai", "mistral-large-3", 262_144, 0.5, 0.05, 1.5),
    Entry("mistralai", "mistral-medium-3-5", 262_144, 1.5, 0.15, 7.5),
    Entry("moonshotai", "kimi-k3", 1_048_576, 3.0, 0.3, 15.0),
    Entry("moonshotai", "kimi-k2.6", 262_144, 0.95, 0.16, 4.0),
    Entry("x-ai", "grok-4.7", 500_000, 2.0, 0.5, 6.0),
    Entry("x-ai", "grok-4.6", 500_000, 2.0, 0.5, 6.0),
    Entry("x-ai", "grok-4.3", 1_000_000, 1.25, 0.2, 2.5),
    Entry("z-ai", "glm-5.3", 1_000_000, 1.4, 0.26, 4.4),
    Entry("z-ai", "glm-5.3-flash", 1_048_576, 0.15, 0.03, 0.5),
    Entry("z-ai", "glm-5", 200_000, 1.0, 0.2, 3.2),
    Entry("z-ai", "glm-4.7", 200_000, 0.6, 0.11, 2.2),
)


def _segments(name: str) -> tuple[str, ...]:
    # Routers write "claude-opus-4.5" where the vendor writes "claude-opus-4-5".
    return tuple(name.replace(".", "-").split("-"))


_BY_NAME = {_segments(entry.name): entry for entry in _TABLE}
_LONGEST = max(map(len, _BY_NAME))


def find(model: str) -> Entry | None:
    """The entry of `model`: "name", "vendor/name", or either followed by a release date or number, or by "latest".

    The name is compared segment by segment, so "gpt-5-pro" is never taken for "gpt-5", nor "my-gpt-5" for "gpt-5".
    """
    vendor, _, name = model.lower().rpartition("/")
    segments = _segments(name)
    for length in range(min(len(segments), _LONGEST), 0, -1):
        entry = _BY_NAME.get(segments[:length])
        if entry is not None:
            return entry if vendor in ("", entry.vendor) and _is_release(segments[length:]) else None
    return None


def _is_release(segments: tuple[str, ...]) -> bool:
    # One or two digits may be part of another model's name ("claude-opus-4-5", "grok-4.20"): those don't begin a date.
    if not segments or segments == ("latest",):
        return True
    return len(segments[0]) >= 3 and all(segment.isdecimal() for segment in segments)


def window(model: str) -> int | None:
    """Tokens of input that `model` takes at most, or None if that is not known."""
    entry = find(model)
    return None if entry is None else entry.window


def price(model: str) -> Price | None:
    """What `model` costs, or None if that is not known."""
    entry = find(model)
    if entry is None:
        return None
    writes = [round(factor * entry.input, 6) for factor in _CACHE_WRITE.get(entry.vendor, ())]
    return Price(entry.input, entry.cached, entry.output, *writes)
