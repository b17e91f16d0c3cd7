"""The offline model: as root it finds answers by running cells, as sub-model it quotes; always the same way."""

from __future__ import annotations

import contextlib
import io
import time
import traceback
from pydoc_data import topics
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncrlm.engine.parsing import parse_reply
from asyncrlm.engine.prompts import closing_message, context_message, system_prompt, turn_message
from asyncrlm.lm.base import LMRequest, Message
from asyncrlm.lm.offline.client import ABOUT, OfflineLM, reply_to, split_prompt
from asyncrlm.lm.offline.reader import NOT_FOUND, read, sentences, stem, summarize
from asyncrlm.repl.context import describe

if TYPE_CHECKING:
    from collections.abc import Callable

MANUAL = "\n\n".join(topics.topics.values())
"""Some 0.5 MB of Python's own language reference."""

STORY = """Ada Lovelace was born in London on 10 December 1815. She was the daughter of Lord Byron.

Her mother, Annabella, made her study mathematics. At 17 she met Charles Babbage,
who showed her a part of his Difference Engine. The machine weighed about 4,000 kilograms.

In 1843 she translated an article by Luigi Menabrea. Dr. King said "It is long." Her notes are three times as long
as the article. Where did she get the time? She died of cancer in 1852."""


# ---- the reader ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("When was Ada Lovelace born?", "Ada Lovelace was born in London on 10 December 1815."),
        ("Whose daughter was she?", "She was the daughter of Lord Byron."),
        ("How much did the machine weigh?", "The machine weighed about 4,000 kilograms."),
        ("Who translated an article?", "In 1843 she translated an article by Luigi Menabrea."),
        ("What happened in 1852?", "She died of cancer in 1852."),
        ("Which dragons live in Antarctica?", NOT_FOUND),
        ("What is it?", NOT_FOUND),
    ],
)
def test_reading(question: str, expected: str) -> None:
    assert read(question, STORY, most=1).text == expected


def test_a_sentence_wrapped_over_lines_is_one() -> None:
    found = sentences(STORY)
    assert "At 17 she met Charles Babbage, who showed her a part of his Difference Engine." in found
    assert 'Dr. King said "It is long."' in found
    assert sentences("") == []
    assert sentences("# Head\n- one\n- two.\n\nid=1, ok;\nid=2, bad;") == [
        "# Head",
        "- one",
        "- two.",
        "id=1, ok;",
        "id=2, bad;",
    ]
    log = [
        "2026-01-02 10:00 login user=bob",
        "2026-01-02 10:05 logout user=ann",
        "[x] odd",
        "level=3 ok",
        "Line 7: end",
    ]
    assert sentences("\n".join(log)) == log
    assert [len(s) for s in sentences("x" * 2_000)] == [800, 800, 400]
    assert sentences("今日は雨です。明日は晴れです。") == ["今日は雨です。", "明日は晴れです。"]


@pytest.mark.parametrize("times", [1, 2, 10, 1_000])
@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ("Where did the cat sit?", "The cat sat on the mat."),
        ("Where does the spare key hang?", "The spare key hangs behind the kitchen clock."),
        # Words of the question that the passage does not have must not outweigh those it has.
        ("What did the cat drop?", "The cat let a mouse fall."),
    ],
)
@pytest.mark.parametrize("other", ["", " It rained."])
def test_a_sentence_said_many_times_is_found(question: str, sentence: str, times: int, other: str) -> None:
    assert read(question, " ".join([sentence + other] * times)).text == sentence
    rows = "\n".join(f"{number}. {sentence}{other}" for number in range(times))
    assert sentence in read(question, rows).text


def test_what_is_said_everywhere_is_no_answer_to_another_question() -> None:
    shelves = "\n".join(f"Shelf {number} of the archive holds nothing of note." for number in range(1_000))
    assert read("Who founded the archive?", shelves).text == NOT_FOUND


def test_the_question_itself_is_no_answer() -> None:
    passage = "What is the code of the door? Nobody knew. The code of the door is 99."
    assert read("What is the code of the door?", passage, most=1).text == "The code of the door is 99."
    assert read("What is the code?", "What is the code?").text == NOT_FOUND
    assert read("明日は?", "今日は雨です。明日は晴れです。", most=1).text == "明日は晴れです。"


def test_all_that_fits_equally_well_is_quoted_once_in_order() -> None:
    passage = "The red key opens the gate. Noise here. The blue key opens the gate. The red key opens the gate."
    assert read("Which key opens the gate?", passage).sentences == [
        "The red key opens the gate.",
        "The blue key opens the gate.",
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("evaluated", "evaluates"), ("evaluation", "evaluate"), ("values", "value"), ("classes", "class"),
        ("running", "run"), ("cities", "city"), ("stopped", "stop"),
    ],
)  # fmt: skip
def test_stems(one: str, other: str) -> None:
    assert stem(one) == stem(other)


def test_a_summary_takes_what_is_spoken_of_most() -> None:
    passage = "Bees make honey from nectar. It was cold that day. Honey of bees keeps for years. Yes. He slept badly."
    assert summarize(passage, most=2).sentences == ["Bees make honey from nectar.", "Honey of bees keeps for years."]
    assert summarize("Too short.").sentences == ["Too short."]
    assert summarize("").text == NOT_FOUND


def test_reading_is_fast() -> None:
    """2 s for 1 MB are promised; CPU time counts, so that neighbours on the machine don't."""
    text = (MANUAL * 3)[:1_000_000]
    before = time.process_time()
    assert "Default parameter values are evaluated" in read("How are default parameter values evaluated?", text).text
    assert time.process_time() - before < 2


@pytest.mark.parametrize(
    "nasty", ["." * 100_000, "\n " * 50_000, "a. " * 30_000, "'" * 100_000, "A " * 50_000, "-\n" * 50_000]
)
def test_reading_is_linear(nasty: str) -> None:
    before = time.process_time()
    read("What is a dot?", nasty)
    summarize(nasty)
    split_prompt(nasty)
    assert time.process_time() - before < 3


# ---- prompts to the sub-model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        "Copy the answer or say NOT FOUND.\n\nQuestion: When was Ada born?\n\nPassage:\n{}",
        "Answer from the text. When was Ada born?\n\nText: {}",
        "When was Ada born?\n\n{}",
        "{}\n\nWhen was Ada born?",
        "Context:\n{}\n\nQuestion: When was Ada born?",
        "Question: When was Ada born?\n{}",
        "Use this document.\n<document>\n{}\n</document>\n\nQ: When was Ada born?",
        "When was Ada born?\n{}",
    ],
)
def test_question_and_passage_are_told_apart(prompt: str) -> None:
    question, passage = split_prompt(prompt.format(STORY))
    assert question == "When was Ada born?"
    assert "daughter of Lord Byron" in passage
    assert "10 December 1815" in reply_to([Message("user", prompt.format(STORY))])


def test_one_line_prompts() -> None:
    line = "Who was she? " + STORY.replace("\n", " ")
    assert split_prompt(line)[0] == "Who was she?"
    assert reply_to([Message("user", "Summarise: " + STORY.replace("\n", " "))]) == summarize(STORY).text


@pytest.mark.parametrize("prompt", ["Hello", "What is 2 + 2?", "", "Question: Who?", "\n\n"])
def test_a_prompt_without_passage_is_told_what_this_is(prompt: str) -> None:
    assert reply_to([Message("user", prompt)]) == ABOUT


def test_summaries() -> None:
    for prompt in ("Summarise the passage below.\n\nPassage:\n", "Give me the main points.\n\n", "Summarize:\n\n"):
        reply = reply_to([Message("user", prompt + STORY)])
        assert reply == summarize(STORY).text
        assert len(sentences(reply)) == 3


def test_a_system_message_of_a_cell_does_not_make_it_a_root() -> None:
    messages = [Message("system", "You are terse."), Message("user", f"When was Ada born?\n\n{STORY}")]
    assert "10 December 1815" in reply_to(messages)


# ---- the client ------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("passage", [STORY, MANUAL], ids=["short", "in a thread"])
async def test_client(passage: str) -> None:
    client = OfflineLM()
    assert (client.model, client.account, client.needs_price, repr(client)) == (
        "offline",
        "offline",
        False,
        "OfflineLM()",
    )
    prompt = f"What is Python called?\n\n{passage}"
    with anyio.fail_after(10):
        first = await client.acomplete(LMRequest(messages=(Message("user", prompt),)))
        second = await client.acomplete(LMRequest(messages=(Message("user", prompt),)))
        capped = await client.acomplete(LMRequest(messages=(Message("user", prompt),), output_cap=2))
    assert first == second
    assert first.usage.input_tokens == -(-len(prompt) // 4)
    assert first.usage.output_tokens == -(-len(first.text) // 4)
    assert first.finish_reason == "stop"
    assert (len(capped.text), capped.finish_reason, capped.usage.output_tokens) == (8, "length", 2)


# ---- the root --------------------------------------------------------------------------------------------------------


class FailedReply(str):
    __slots__ = ()


def offline_sub(prompt: str) -> str:
    return reply_to([Message("user", prompt)])


def run(
    context: Any,
    question: str | None,
    *,
    turns: int = 6,
    sub: Callable[[str], str] = offline_sub,
    calls_left: int | None = None,
    spoil: Callable[[int, dict[str, Any]], str | None] = lambda turn, namespace: None,
) -> tuple[Any, int, list[Message]]:
    """A bare loop around the offline root: (answer, turn it was submitted in, conversation)."""
    answer: dict[str, Any] = {"content": "", "ready": False}
    namespace: dict[str, Any] = {
        "context": context,
        "answer": answer,
        "llm_query_batched": lambda prompts: [sub(p) for p in prompts],
        "FailedReply": FailedReply,
        "SHOW_LIMITS": lambda: {"calls": calls_left},
    }
    first = context_message(kind=describe(context).kind, size=1, root_prompt=question)
    messages = [
        Message("system", system_prompt()),
        Message("user", f"{first}\n\n{turn_message(turn=1, max_turns=turns)}"),
    ]
    for turn in range(1, turns + 1):
        reply = reply_to(messages)
        parsed = parse_reply(reply)
        assert parsed.problem is None
        output = io.StringIO()
        error = ""
        for cell in parsed.cells:
            try:
                with contextlib.redirect_stdout(output):
                    exec(compile(cell, "<cell>", "exec"), namespace)
            except Exception:
                error = f"\n\nThe cell raised:\n{traceback.format_exc()}"
        if answer["ready"]:
            return answer["content"], turn, messages
        error = spoil(turn, namespace) or error
        seen = f"{output.getvalue()}{error}\n\n{turn_message(turn=turn + 1, max_turns=turns)}"
        messages += [Message("assistant", reply), Message("user", seen)]
    return None, turns, messages


@pytest.mark.parametrize("turns", [1, 2, 3, 9])
def test_root_finds_the_answer_in_a_long_text(turns: int) -> None:
    asked: list[str] = []

    def sub(prompt: str) -> str:
        asked.append(prompt)
        return offline_sub(prompt)

    content, turn, _ = run(MANUAL, "How are default parameter values evaluated?", turns=turns, sub=sub)
    assert "evaluated from left to right when the function definition is executed" in content
    assert turn == min(turns, 3)
    assert len(asked) > 50
    assert max(len(p) for p in asked) < 7_000


@pytest.mark.parametrize(
    ("context", "question", "expected"),
    [
        ("The door code is 99.", "What is the door code?", "The door code is 99."),
        (b"The door code is 99.\xff", "What is the door code?", "99"),
        ({"a": "Nothing.", "b": ["The secret number is 4711.", 3]}, "What is the secret number?", "4711"),
        ([{"role": "user", "content": "The secret number is 4711."}], "What is the secret number?", "4711"),
        (12345, "What is the number?", "nothing that answers"),
        ("", "What?", "nothing that answers"),
        ("x" * 20_000, "What is the code?", "nothing that answers"),
        (
            "What is the capital of Freedonia?\n\nFreedonia has hills. The capital of Freedonia is Fredville.",
            None,
            "Fredville",
        ),
        (
            "Freedonia has hills. Its capital is Fredville, by the sea.\nTask: name the capital",
            None,
            "Its capital is Fredville",
        ),
        (STORY.replace("?", "."), None, "Charles Babbage"),
    ],
)
def test_root_takes_any_context(context: Any, question: str | None, expected: str) -> None:
    content, turn, _ = run(context, question)
    assert expected in content
    assert turn == 3


def test_root_cuts_without_losing_a_sentence() -> None:
    needle = "The password of the vault is swordfish."
    for at in range(5_300, 6_300, 37):
        text = "Blah blah. " * (at // 11) + needle + " Blah blah." * 800
        assert run(text, "What is the password of the vault?", turns=1)[0] == needle


def test_root_keeps_to_the_calls_left() -> None:
    asked: list[str] = []

    def sub(prompt: str) -> str:
        asked.append(prompt)
        return offline_sub(prompt)

    content, _, _ = run(MANUAL, "How are default parameter values evaluated?", sub=sub, calls_left=9)
    assert "evaluated" in content
    assert len(asked) <= 9


def test_root_says_what_failed() -> None:
    def fails(prompt: str) -> str:
        return FailedReply("Error: rate limit")

    def raises(prompt: str) -> str:
        raise RuntimeError("no more calls")

    assert run("The code is 9.", "What is the code?", sub=fails)[0] == (
        "No answer: 1 of 1 sub-calls failed, the first with: Error: rate limit"
    )
    assert "no more calls" in run("The code is 9.", "What is the code?", sub=raises)[0]


def test_root_goes_on_when_a_combination_finds_nothing_shorter() -> None:
    content, _, _ = run(MANUAL[:60_000], "What is it?", sub=lambda prompt: f"reply {len(prompt)} {hash(prompt)}" * 50)
    assert content.startswith("reply")


@pytest.mark.parametrize("lost_at", [1, 2])
def test_root_starts_again_after_an_error_or_a_lost_worker(lost_at: int) -> None:
    def spoil(turn: int, namespace: dict[str, Any]) -> str | None:
        if turn != lost_at:
            return None
        for name in ("text", "found", "parts", "pieces"):
            namespace.pop(name, None)
        return "\n\nThe Python process was lost: killed. All variables are gone; `context` is loaded again."

    content, turn, _ = run("The door code is 99.", "What is the door code?", spoil=spoil)
    assert content == "The door code is 99."
    assert turn == lost_at + 1


def test_root_gives_up_when_it_fails_again() -> None:
    class Odd:
        def __str__(self) -> str:
            raise ValueError("no text in here")

    content, turn, _ = run(Odd(), "What?")
    assert "ValueError: no text in here" in content
    assert turn == 3


def test_root_gives_up_if_its_answer_is_not_taken() -> None:
    messages = run("The door code is 99.", "What is the door code?")[2]
    refused = [Message("assistant", reply_to(messages)), Message("user", f"No.\n\n{turn_message(turn=4, max_turns=6)}")]
    assert "# Step 4" in reply_to([*messages, *refused])


def test_root_answers_in_plain_text_at_the_end() -> None:
    """The last words come in a message that has the output of cells above, whatever it says of turns."""
    messages = run("The door code is 99. Turn 1 of 3.", "What is the door code?", turns=9)[2]
    seen = [m for m in messages if m.role == "user"][1].content
    closing = closing_message(reason="time is up", root_prompt="What is the door code?")
    last = [Message("assistant", "```repl\n# Step 2\n```"), Message("user", f"{seen}\n\n{closing}")]
    reply = reply_to([*messages[:4], *last])
    assert "The door code is 99." in reply
    assert parse_reply(reply).cells == []
    nothing = [messages[0], Message("user", "Answer this:\nWhy?"), Message("assistant", "x"), Message("user", closing)]
    assert "ended before anything was found" in reply_to(nothing)


def test_a_passage_may_stand_in_a_cells_system_message() -> None:
    messages = [Message("system", f"Use this text:\n\n{STORY}"), Message("user", "When was Ada born?")]
    assert "10 December 1815" in reply_to(messages)


def test_root_knows_a_run_by_its_turns_if_the_system_prompt_is_the_users_own() -> None:
    messages = [Message("system", "Be brief."), Message("user", "Answer this:\nWho?\n\nTurn 1 of 5.")]
    assert "# Step 1" in reply_to(messages)
