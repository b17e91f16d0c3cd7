"""Which event loop runs here, where anyio has no word for what differs."""

from __future__ import annotations

import sys
from typing import Any


def on_trio() -> bool:
    """Whether the calling task is trio's; else it is asyncio's."""
    trio: Any = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_task())
