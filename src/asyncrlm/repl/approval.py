"""What a caller is asked before a model's cell or tool call happens."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field


class ApprovalRequest(Struct, frozen=True, kw_only=True):
    """What a model is about to do. `approve=` gets one, and says whether it may."""

    kind: Literal["cell", "tool"]
    run_id: str = ""
    depth: int = 0
    code: str = ""
    """Of a cell."""
    name: str = ""
    """Of a tool; "thing.function" where an object's function is called."""
    args: list[Any] = field(default_factory=list[Any])
    """Of a tool: copies of what it will be called with."""
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
