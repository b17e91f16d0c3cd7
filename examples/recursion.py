"""Child runs: `python examples/recursion.py`.

At `max_depth=2` each `rlm_query` is a run of its own, with its own worker, and all children of a batch run in parallel.
The root model here is a function with a fixed reply that hands each chapter to a child; the children run on the offline
backend. The trajectory shows who did what.
"""

from __future__ import annotations

from typing import Any

import anyio

from asyncrlm import AsyncRLM, RLMLogger

BOOK = {
    f"chapter {number}": f"In chapter {number} the guest drinks {drink}. " + "It rains all the while. " * 500
    for number, drink in enumerate(["tea", "coffee", "milk", "rum"], start=1)
}

ROOT = """```repl
names = sorted(context)
prompts = [f"What does the guest drink?\\n\\n{context[name]}" for name in names]
drinks = rlm_query_batched(prompts, model="offline")
answer["content"] = {name: drink for name, drink in zip(names, drinks)}
answer["ready"] = True
```"""


async def planner(messages: list[dict[str, Any]]) -> str:
    return ROOT


async def main() -> None:
    rlm = AsyncRLM(planner, other_backends=["offline"], max_depth=2, logger=RLMLogger(), max_timeout=120)
    completion = await rlm.acompletion(BOOK, "What does the guest drink in each chapter?")
    print(completion.response or f"no answer: {completion.error}")
    assert completion.metadata is not None
    (block,) = completion.metadata["iterations"][0]["code_blocks"]
    for call in block["result"]["rlm_calls"]:
        child = call["metadata"]
        print(f"child on {child['run_metadata']['root_model']}: {len(child['iterations'])} turns")


if __name__ == "__main__":
    anyio.run(main)
