"""Models for tests, yours and ours: `ScriptedLM` inside the process, `FakeOpenAIServer` as a real server on loopback.

The server needs the `testing` extra: `pip install "asyncrlm[testing]"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .scripted import ScriptedLM

if TYPE_CHECKING:
    from .fake_openai import FakeOpenAIServer, FakeReply, FakeRequest

__all__ = ["FakeOpenAIServer", "FakeReply", "FakeRequest", "ScriptedLM"]

_OF_THE_SERVER = frozenset({"FakeOpenAIServer", "FakeReply", "FakeRequest"})


def __getattr__(name: str) -> Any:
    if name in _OF_THE_SERVER:
        from . import fake_openai  # noqa: PLC0415 - needs h11, which an installation without the extra may lack

        return getattr(fake_openai, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
