"""Tools of the host in a cell: `python examples/custom_tools.py`.

A callable runs in your process, with your objects and your keys; the cell only gets what it returns. A coroutine
function runs as a task, a plain one in a worker thread, so several calls of one cell run at once.

The model here is a function with fixed replies, so that the example needs no key; a real one reads the tools'
signatures and descriptions in its prompt.
"""

from __future__ import annotations

from typing import Any

import anyio

from asyncrlm import AsyncRLM

STOCK = {"lamp": 3, "rope": 0, "oil": 12}


async def in_stock(item: str) -> int:
    """How many of `item` are in stock."""
    await anyio.sleep(0.01)  # a database would be asked here
    return STOCK[item]


CELL = """```repl
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor() as pool:
    counts = list(pool.map(in_stock, context))
missing = [name for name, count in zip(context, counts) if count < minimum]
try:
    in_stock("anchor")
except Exception as error:
    print(type(error).__name__, error)
answer["content"] = f"to order: {', '.join(missing)}"
answer["ready"] = True
```"""


async def model(messages: list[dict[str, Any]]) -> str:
    return CELL


async def main() -> None:
    rlm = AsyncRLM(
        model,
        custom_tools={
            "in_stock": {"tool": in_stock, "description": "How many of an item are in stock."},
            "minimum": {"tool": 5, "description": "Below this we order."},
        },
    )
    completion = await rlm.acompletion(["lamp", "rope", "oil"], "What do we have to order?")
    print(completion.response or f"no answer: {completion.error}")


if __name__ == "__main__":
    anyio.run(main)
