"""The async-first engine for Recursive Language Models.

from asyncrlm import AsyncRLM

async with AsyncRLM("openai/gpt-5.4-mini") as rlm:
    completion = await rlm.acompletion(text, "What changed between the two versions?")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import environments as environments
    from . import errors as errors
    from . import events as events
    from . import testing as testing
    from .blocking import BlockingChat as BlockingChat
    from .blocking import BlockingEventStream as BlockingEventStream
    from .blocking import BlockingStreaming as BlockingStreaming
    from .chat import Chat as Chat
    from .engine.completions import EventStream as EventStream
    from .engine.completions import Streaming as Streaming
    from .engine.repl import Repl as Repl
    from .engine.texts import Prompts as Prompts
    from .environments import Environment as Environment
    from .environments import Printed as Printed
    from .environments import Report as Report
    from .environments import Sandbox as Sandbox
    from .environments import Scope as Scope
    from .environments import Settings as Settings
    from .environments.local import LocalEnvironment as LocalEnvironment
    from .environments.machine import Machine as Machine
    from .environments.remote import Confinement as Confinement
    from .environments.remote import RemoteEnvironment as RemoteEnvironment
    from .errors import (
        BudgetExceededError as BudgetExceededError,
    )
    from .errors import (
        CancellationError as CancellationError,
    )
    from .errors import (
        ConfigurationError as ConfigurationError,
    )
    from .errors import (
        ErrorThresholdExceededError as ErrorThresholdExceededError,
    )
    from .errors import (
        LimitError as LimitError,
    )
    from .errors import (
        LMError as LMError,
    )
    from .errors import (
        ProtocolError as ProtocolError,
    )
    from .errors import (
        RLMError as RLMError,
    )
    from .errors import (
        SandboxLost as SandboxLost,
    )
    from .errors import (
        SubcallLimitExceededError as SubcallLimitExceededError,
    )
    from .errors import (
        TimeoutExceededError as TimeoutExceededError,
    )
    from .errors import (
        TokenLimitExceededError as TokenLimitExceededError,
    )
    from .lm.base import (
        LMClient as LMClient,
    )
    from .lm.base import (
        LMReply as LMReply,
    )
    from .lm.base import (
        LMRequest as LMRequest,
    )
    from .lm.base import (
        LMUsage as LMUsage,
    )
    from .lm.base import (
        Message as Message,
    )
    from .lm.pacing import Pacer as Pacer
    from .mcp.server import MCPServer as MCPServer
    from .observe.jsonl import RLMLogger as RLMLogger
    from .repl.approval import ApprovalRequest as ApprovalRequest
    from .repl.web import Web as Web
    from .rlm import AsyncRLM as AsyncRLM
    from .sync import RLM as RLM
    from .types import (
        ModelUsageSummary as ModelUsageSummary,
    )
    from .types import (
        REPLResult as REPLResult,
    )
    from .types import (
        RLMChatCompletion as RLMChatCompletion,
    )
    from .types import (
        UsageSummary as UsageSummary,
    )

_HOMES = {
    "AsyncRLM": "rlm",
    "RLM": "sync",
    "Repl": "engine.repl",
    "Chat": "chat",
    "BlockingChat": "blocking",
    "BlockingEventStream": "blocking",
    "BlockingStreaming": "blocking",
    "EventStream": "engine.completions",
    "Streaming": "engine.completions",
    "Prompts": "engine.texts",
    "ApprovalRequest": "repl.approval",
    "MCPServer": "mcp.server",
    "RLMLogger": "observe.jsonl",
    "Environment": "environments",
    "LocalEnvironment": "environments.local",
    "RemoteEnvironment": "environments.remote",
    "Machine": "environments.machine",
    "Confinement": "environments.remote",
    "Sandbox": "environments",
    "Scope": "environments",
    "Settings": "environments",
    "Report": "environments",
    "Printed": "environments",
    "RLMChatCompletion": "types",
    "UsageSummary": "types",
    "ModelUsageSummary": "types",
    "REPLResult": "types",
    "LMClient": "lm.base",
    "LMRequest": "lm.base",
    "LMReply": "lm.base",
    "LMUsage": "lm.base",
    "Message": "lm.base",
    "Pacer": "lm.pacing",
    "Web": "repl.web",
    "RLMError": "errors",
    "ConfigurationError": "errors",
    "LimitError": "errors",
    "BudgetExceededError": "errors",
    "TimeoutExceededError": "errors",
    "TokenLimitExceededError": "errors",
    "SubcallLimitExceededError": "errors",
    "ErrorThresholdExceededError": "errors",
    "CancellationError": "errors",
    "SandboxLost": "errors",
    "ProtocolError": "errors",
    "LMError": "errors",
}

_MODULES = frozenset({"environments", "errors", "events", "testing"})
"""Public modules, loaded when they are first used."""

__all__ = [
    "RLM",
    "ApprovalRequest",
    "AsyncRLM",
    "BlockingChat",
    "BlockingEventStream",
    "BlockingStreaming",
    "BudgetExceededError",
    "CancellationError",
    "Chat",
    "ConfigurationError",
    "Confinement",
    "Environment",
    "ErrorThresholdExceededError",
    "EventStream",
    "LMClient",
    "LMError",
    "LMReply",
    "LMRequest",
    "LMUsage",
    "LimitError",
    "LocalEnvironment",
    "MCPServer",
    "Machine",
    "Message",
    "ModelUsageSummary",
    "Pacer",
    "Printed",
    "Prompts",
    "ProtocolError",
    "REPLResult",
    "RLMChatCompletion",
    "RLMError",
    "RLMLogger",
    "RemoteEnvironment",
    "Repl",
    "Report",
    "Sandbox",
    "SandboxLost",
    "Scope",
    "Settings",
    "Streaming",
    "SubcallLimitExceededError",
    "TimeoutExceededError",
    "TokenLimitExceededError",
    "UsageSummary",
    "Web",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load a name's module when the name is first used: importing the package costs next to nothing."""
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
