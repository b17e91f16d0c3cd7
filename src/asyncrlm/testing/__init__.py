"""Models for tests, yours and ours: `ScriptedLM` inside the process, and fake servers, real ones on loopback.

`EnvironmentConformance` has the checks that an environment of your own should pass. It and the servers need the
`testing` extra: `pip install "asyncrlm[testing]"`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .scripted import ScriptedLM

if TYPE_CHECKING:
    from .conformance import EnvironmentConformance
    from .fake_anthropic import FakeAnthropicServer
    from .fake_gemini import FakeGeminiServer
    from .fake_openai import FakeOpenAIServer
    from .server import FakeReply, FakeRequest, FakeServer

__all__ = [
    "EnvironmentConformance",
    "FakeAnthropicServer",
    "FakeGeminiServer",
    "FakeOpenAIServer",
    "FakeReply",
    "FakeRequest",
    "FakeServer",
    "ScriptedLM",
]

_LATER = {
    "EnvironmentConformance": "conformance",
    "FakeAnthropicServer": "fake_anthropic",
    "FakeGeminiServer": "fake_gemini",
    "FakeOpenAIServer": "fake_openai",
    "FakeReply": "server",
    "FakeRequest": "server",
    "FakeServer": "server",
}
"""Name → module. The servers need h11, which an installation without the extra may lack."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
