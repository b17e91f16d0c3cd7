"""Models for tests, yours and ours: `ScriptedLM` inside the process, and fake servers, real ones on loopback.

The servers need the `testing` extra: `pip install "asyncrlm[testing]"`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .scripted import ScriptedLM

if TYPE_CHECKING:
    from .fake_anthropic import FakeAnthropicServer
    from .fake_gemini import FakeGeminiServer
    from .fake_openai import FakeOpenAIServer
    from .server import FakeReply, FakeRequest, FakeServer

__all__ = [
    "FakeAnthropicServer",
    "FakeGeminiServer",
    "FakeOpenAIServer",
    "FakeReply",
    "FakeRequest",
    "FakeServer",
    "ScriptedLM",
]

_OF_THE_SERVERS = {
    "FakeAnthropicServer": "fake_anthropic",
    "FakeGeminiServer": "fake_gemini",
    "FakeOpenAIServer": "fake_openai",
    "FakeReply": "server",
    "FakeRequest": "server",
    "FakeServer": "server",
}
"""Name → module: they need h11, which an installation without the extra may lack."""


def __getattr__(name: str) -> Any:
    if name in _OF_THE_SERVERS:
        return getattr(importlib.import_module(f".{_OF_THE_SERVERS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
