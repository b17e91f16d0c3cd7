"""What a contender must give to be measured, and the table of contenders."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

Model = Callable[[list[dict[str, str]]], Awaitable[str]]


@dataclass(frozen=True)
class Options:
    """The settings a scenario asks an engine for; None leaves the engine's default."""

    max_iterations: int = 8
    max_concurrent_requests: int | None = None
    max_concurrent_subcalls: int | None = None
    children: bool = False
    cell_timeout: float | None = None
    at_once: int | None = None
    """Completions that will begin together: a service that knows its load has workers ready for them."""
    cache: Path | None = None
    """Where replies are kept."""
    model: Model | None = None
    """Asked instead of the server."""


class Unsupported(Exception):
    """The engine has nothing like what the scenario asks for."""


class Engine(ABC):
    """An implementation of Recursive Language Models, with the names its cells use."""

    package: str
    import_statement: str

    @abstractmethod
    def open(self, base_url: str, options: Options) -> AbstractAsyncContextManager[Complete]:
        """An instance, set up as a user would who makes many completions.

        Raises:
            Unsupported: on entering.
        """

    def cell(self, code: str) -> str:
        """The reply of the root model that has `code` run; the server reads the turn from the comment in it."""
        return f"```repl\n#T=@@TURN@@;\n{code}\n```"

    def query(self, prompt: str) -> str:
        return f"llm_query({prompt})"

    def batch(self, prompts: str) -> str:
        return f"llm_query_batched({prompts})"

    def children(self, prompts: str) -> str:
        return f"rlm_query_batched({prompts})"

    def submit(self, expression: str) -> str:
        return self.cell(f'answer["content"] = {expression}\nanswer["ready"] = True')


Complete = Callable[[str | Path, str], Awaitable[str]]
"""(context, question) → answer."""

Ask = Callable[[list[dict[str, str]]], Awaitable[str]]
"""Messages → text of the reply."""


class Bare(ABC):
    """A client with nothing around it."""

    package: str
    import_statement: str

    @abstractmethod
    def open(self, base_url: str, width: int) -> AbstractAsyncContextManager[Ask]:
        """A client that is good for `width` requests at once."""


class Plain:
    """No model and no request: what Python itself takes for the same work."""

    package = ""
    import_statement = "pass"


Contender = Engine | Bare | Plain

CONTENDERS = {
    "asyncrlm": "adapters.asyncrlm_engine:AsyncRLMEngine",
    "openai": "adapters.openai_bare:OpenAIBare",
    "aiohttp": "adapters.aiohttp_bare:AiohttpBare",
    "plain": "adapters.base:Plain",
    "rlms": "adapters.rlms_engine:RlmsEngine",
}


def contender(name: str) -> Contender:
    module, _, attribute = CONTENDERS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)()
