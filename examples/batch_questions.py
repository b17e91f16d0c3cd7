"""Many questions about one document at once, each with limits of its own: `python batch_questions.py [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio

from asyncrlm import AsyncRLM, RLMError

LOGBOOK = "\n".join(
    [f"Day {day}: wind from the west, {day % 9 + 1} knots, nothing to report." for day in range(5_000)]
    + [
        "The captain of the ship was Ada Brandt.",
        "The cargo of the voyage was four hundred barrels of lamp oil.",
        "The harbour where the voyage ended was Bergen.",
    ]
)

QUESTIONS = [
    "Who was the captain of the ship?",
    "What was the cargo of the voyage?",
    "In which harbour did the voyage end?",
]


async def ask_all(document: str | Path, questions: list[str]) -> list[str]:
    """The answers, in the order of the questions."""
    answers = [""] * len(questions)

    async with AsyncRLM(backend="offline", max_timeout=60) as rlm, anyio.create_task_group() as tasks:

        async def ask(slot: int) -> None:
            try:
                completion = await rlm.acompletion(document, questions[slot], max_subcalls=500, tags={"slot": slot})
                # Out of turns, a run that found nothing says why in `error`.
                answers[slot] = completion.response or f"no answer: {completion.error}"
            except RLMError as error:
                # One question that meets a limit does not cost the others their answers.
                answers[slot] = f"no answer: {error}"

        for slot in range(len(questions)):
            tasks.start_soon(ask, slot)
    return answers


async def main() -> None:
    document = Path(sys.argv[1]) if len(sys.argv) > 1 else LOGBOOK
    for question, answer in zip(QUESTIONS, await ask_all(document, QUESTIONS), strict=True):
        print(f"{question}\n  {answer}")


if __name__ == "__main__":
    anyio.run(main)
