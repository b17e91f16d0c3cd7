"""What one call may be given beside its prompt, for type checkers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from ..ledger import LimitsMode
from ..repl.web import Web
from .settings import OnLimit, OnSubcallError


class Others(TypedDict, total=False):
    """All but the form of the answer, which overloads take by itself."""

    max_depth: int
    max_iterations: int
    max_budget: float | None
    max_timeout: float | None
    max_tokens: int | None
    max_errors: int | None
    max_subcalls: int | None
    max_concurrent_subcalls: int
    max_concurrent_requests: int
    limits: LimitsMode
    on_limit: OnLimit
    on_subcall_error: OnSubcallError
    subcall_timeout: float | None
    tool_timeout: float | None
    sampling_args: Mapping[str, Any] | None
    custom_tools: Mapping[str, Any] | None
    tenant: str | None
    lazy: bool
    """Whether a text file stays a file in cells, whatever its size."""
    web: Web
    """How a prompt that is a URL is fetched."""


class Overrides(Others, total=False):
    """For one call alone; what is left out is as the constructor was told."""

    response_format: Any
    """A type, or a JSON schema: what the answer must be."""
