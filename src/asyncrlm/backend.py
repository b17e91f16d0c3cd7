"""Which event loop runs here, where anyio has no word for what differs."""

from __future__ import annotations

import sys
from typing import Any


def on_trio() -> bool:
    """Whether the calling task is trio's; else it is asyncio's."""
    trio: Any = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_task())


def is_cancelled_alone() -> bool:
    """Whether the calling task, one of asyncio's, was cancelled by `Task.cancel()`, of which no scope knows."""
    asyncio: Any = sys.modules["asyncio"]
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
