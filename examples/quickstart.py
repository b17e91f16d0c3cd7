"""A question about a text far longer than any window, without a key: `python examples/quickstart.py`."""

from __future__ import annotations

import anyio

from asyncrlm import AsyncRLM


def long_text() -> str:
    """A million characters with one sentence that matters."""
    lines = [f"Shelf {number} of the archive holds nothing of note." for number in range(20_000)]
    lines.insert(13_000, "The spare key hangs behind the kitchen clock.")
    return "\n".join(lines)


async def main() -> None:
    # The offline backend is no language model; with OPENAI_API_KEY set, "openai/gpt-5.4-mini" asks a real one.
    async with AsyncRLM(backend="offline", verbose=True) as rlm:
        completion = await rlm.acompletion(long_text(), "Where does the spare key hang?")
    print(completion.response or f"no answer: {completion.error}")
    print(f"{completion.usage_summary.total_calls} model calls in {completion.execution_time:.2f} s")


if __name__ == "__main__":
    anyio.run(main)
