"""The async-first engine for Recursive Language Models.

    from asyncrlm import AsyncRLM

    rlm = AsyncRLM("openai/gpt-5-mini")
    completion = await rlm.acompletion(text, "What changed between the two versions?")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .engine.repl import Repl as Repl
    from .environments import Environment as Environment
    from .environments.local import LocalEnvironment as LocalEnvironment
    from .errors import (
        BudgetExceededError as BudgetExceededError,
        CancellationError as CancellationError,
        ConfigurationError as ConfigurationError,
        ErrorThresholdExceededError as ErrorThresholdExceededError,
        LimitError as LimitError,
        LMError as LMError,
        ProtocolError as ProtocolError,
        RLMError as RLMError,
        SandboxLost as SandboxLost,
        SubcallLimitExceededError as SubcallLimitExceededError,
        TimeoutExceededError as TimeoutExceededError,
        TokenLimitExceededError as TokenLimitExceededError,
    )
    from .lm.base import (
        LMClient as LMClient,
        LMReply as LMReply,
        LMRequest as LMRequest,
        LMUsage as LMUsage,
        Message as Message,
    )
    from .observe.jsonl import RLMLogger as RLMLogger
    from .rlm import AsyncRLM as AsyncRLM
    from .sync import RLM as RLM
    from .types import (
        CodeBlock as CodeBlock,
        ModelUsageSummary as ModelUsageSummary,
        REPLResult as REPLResult,
        RLMChatCompletion as RLMChatCompletion,
        RLMIteration as RLMIteration,
        UsageSummary as UsageSummary,
    )

_HOMES = {
    "AsyncRLM": "rlm",
    "RLM": "sync",
    "Repl": "engine.repl",
    "RLMLogger": "observe.jsonl",
    "Environment": "environments",
    "LocalEnvironment": "environments.local",
    "RLMChatCompletion": "types",
    "UsageSummary": "types",
    "ModelUsageSummary": "types",
    "REPLResult": "types",
    "CodeBlock": "types",
    "RLMIteration": "types",
    "LMClient": "lm.base",
    "LMRequest": "lm.base",
    "LMReply": "lm.base",
    "LMUsage": "lm.base",
    "Message": "lm.base",
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

__all__ = [
    "RLM",
    "AsyncRLM",
    "BudgetExceededError",
    "CancellationError",
    "CodeBlock",
    "ConfigurationError",
    "Environment",
    "ErrorThresholdExceededError",
    "LMClient",
    "LMError",
    "LMReply",
    "LMRequest",
    "LMUsage",
    "LimitError",
    "LocalEnvironment",
    "Message",
    "ModelUsageSummary",
    "ProtocolError",
    "REPLResult",
    "RLMChatCompletion",
    "RLMError",
    "RLMIteration",
    "RLMLogger",
    "Repl",
    "SandboxLost",
    "SubcallLimitExceededError",
    "TimeoutExceededError",
    "TokenLimitExceededError",
    "UsageSummary",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load a name's module when the name is first used: importing the package costs next to nothing."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
