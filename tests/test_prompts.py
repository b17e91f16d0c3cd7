"""What models are told: only what is so, all that matters, and never text that can't be sent."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec import Struct, field, structs

from asyncrlm.engine.prompts import (
    DEFAULT_PROMPTS,
    ERROR_LIMIT,
    OUTPUT_LIMIT,
    VARIABLES_LIMIT,
    cells_message,
    clean,
    closing_message,
    context_message,
    empty_answer_message,
    system_prompt,
    turn_message,
)
from asyncrlm.repl.messages import CellError

NAMES = [
    "context", "answer", "llm_query", "llm_query_batched", "rlm_query", "rlm_query_batched", "allm_query",
    "allm_query_batched", "arlm_query", "arlm_query_batched", "SHOW_VARS", "SHOW_LIMITS", "FailedReply",
]  # fmt: skip

LOST = "All variables are gone; `context` is loaded again. Don't repeat what caused it."


class Outcome(Struct, kw_only=True):
    stdout: str = ""
    stderr: str = ""
    error: CellError | None = None
    variables: dict[str, str] = field(default_factory=dict)
    subcalls: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    lost: str | None = None
    lost_before: str | None = None


# ---- system ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_children", [True, False])
def test_the_system_prompt_names_what_a_cell_can_use(has_children: bool) -> None:
    text = system_prompt(has_children=has_children)
    assert all(f"`{name}" in text for name in NAMES)
    assert 'answer["content"]' in text
    assert 'answer["ready"] = True' in text
    assert "```repl" in text
    assert ("A child gets a REPL of its own" in text) is has_children
    assert ("behave like `llm_query`" in text) is not has_children
    assert len(text.split()) <= 900
    assert not re.search(r"\{\w+\}", text), "a placeholder was not filled"


def test_the_system_prompt_says_the_real_sizes() -> None:
    text = system_prompt(sub_models=[("small", 32_000), ("big", None)], output_limit=12_345, environment="docker")
    assert "small (asked when you give no `model`): 32,000 tokens, about 96,000 characters" in text
    assert 'model="big"`: window not known' in text
    assert "12,345 characters" in text
    assert "docker environment" in text


def test_tools_are_described_as_they_are() -> None:
    tools = "- `find(x: dict = {}) -> {sub_models}`: {children} {0} %s"
    assert tools in system_prompt(tools=tools)
    assert "More names" not in system_prompt(tools=" ")


@pytest.mark.parametrize("orchestrator", [True, False])
@pytest.mark.parametrize("custom", [None, "", "Just answer."])
def test_orchestrator(custom: str | None, orchestrator: bool) -> None:
    text = system_prompt(custom=custom, orchestrator=orchestrator)
    assert (DEFAULT_PROMPTS.orchestrator in text) is orchestrator
    assert text.startswith(custom or "You answer questions")


@pytest.mark.parametrize(
    ("custom", "tools", "expected"),
    [
        ('Reply as {"a": {}} {0} {name}', "", 'Reply as {"a": {}} {0} {name}'),
        ("Do {{it}}.", "TOOL {x}", "Do {{it}}.\n\n## More names in the REPL\nTOOL {x}\n"),
        ("{{a}} {custom_tools_section} {b}", "", "{a}  {b}"),
        ("{{a}}{custom_tools_section}", "T {{y}}", "{a}\n## More names in the REPL\nT {{y}}\n"),
    ],
)
def test_custom_prompts_have_no_format_traps(custom: str, tools: str, expected: str) -> None:
    assert system_prompt(custom=custom, tools=tools, orchestrator=False) == expected


def test_templates_can_be_replaced() -> None:
    prompts = structs.replace(
        DEFAULT_PROMPTS, system="{sub_models} {unknown} {} {children}", no_children="-", turn="{turn}/{"
    )
    assert system_prompt(prompts, orchestrator=False) == " {unknown} {} -"
    assert turn_message(prompts, turn=2, max_turns=9) == "2/{"


# ---- context and turns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"kind": "str", "size": 1_234_567}, "a str, 1,234,567 characters."),
        ({"kind": "file", "size": 10}, "a str, 10 bytes as a file."),
        ({"kind": "bytes", "size": 10}, "a bytes object, 10 bytes."),
        ({"kind": "list", "size": 10, "items": 3_000}, "a list, 3,000 items, 10 characters of text in all."),
        ({"kind": "value", "type_name": "UUID", "size": 1}, "of type UUID, 1 character."),
        ({"kind": "binary", "size": 10, "first": ["'a'"]}, "10 bytes. It is the file: 'a'."),
        ({"kind": "number", "type_name": "int", "size": 3}, "of type int, 3 characters."),
        ({"kind": "set", "type_name": "frozenset", "size": 3, "items": 1}, "a frozenset, 1 item, 3 characters"),
        (
            {"kind": "record", "type_name": "Person", "size": 3, "items": 2, "first": ["'name'", "'age'"]},
            "(a dict whose keys are attributes too), 2 fields, 3 characters of text in all. Its fields: 'name', 'age'.",
        ),
        ({"kind": "dict", "size": 3, "items": 9, "first": ["'a'", "5"]}, "text in all. Its first keys: 'a', 5, …."),
        ({"kind": "file", "size": 10, "first": ["'a.txt'"]}, "10 bytes as a file. It is the file: 'a.txt'."),
        (
            {"kind": "documents", "size": 10, "items": 2, "first": ["'a.md'", "'b/c.md'"]},
            "2 files, 10 bytes as files. Names: 'a.md', 'b/c.md'.",
        ),
    ],
)
def test_context_message(kwargs: dict[str, Any], says: str) -> None:
    asked = context_message(**kwargs, root_prompt="What is {size}?\nReally?")
    assert says in asked
    assert asked.endswith("\n\nAnswer this:\nWhat is {size}?\nReally?")
    for nothing in (None, "", " "):
        message = context_message(**kwargs, root_prompt=nothing)
        assert says in message
        assert message.endswith("What is asked stands in it.")


@pytest.mark.parametrize(
    ("turn", "of", "says"),
    [
        (1, 5, "inspect it before you answer"),
        (2, 5, "Turn 2 of 5."),
        (5, 5, "the last one. Submit now"),
        (1, 1, "the only one"),
        (6, 5, "the last one"),
    ],
)
def test_turn_message(turn: int, of: int, says: str) -> None:
    message = turn_message(turn=turn, max_turns=of)
    assert says in message
    assert message.startswith(f"Turn {turn} of {of}")


def test_last_words() -> None:
    message = closing_message(reason="budget exceeded: {x}.", root_prompt="Why {reason}?")
    assert "This run ends here: budget exceeded: {x}. No more code is run." in message
    assert "plain text" in message
    assert message.endswith("Why {reason}?")
    assert "Answer this" not in closing_message(reason="time is up")
    assert 'answer["content"] is empty' in empty_answer_message()


# ---- cells -----------------------------------------------------------------------------------------------------------


def test_one_cell() -> None:
    assert cells_message(outcomes=[Outcome(stdout="a\n b {x}\n", variables={"n": "int", "s": "str"})]) == (
        "a\n b {x}\n\nVariables: n (int), s (str)"
    )


def test_output_is_verbatim() -> None:
    printed = "```repl\nanswer\n```\n  {stdout} zażółć 你好 🎉"
    assert cells_message(outcomes=[Outcome(stdout=printed)]) == printed


def test_several_cells_and_all_that_can_happen() -> None:
    error = CellError(type="KeyError", traceback="Traceback\nKeyError: 'k'\n")
    stopped = CellError(type="KeyboardInterrupt", traceback="stopped after 2 s", interrupted=True)
    message = cells_message(
        outcomes=[
            Outcome(stdout="one", stderr="warned\n", subcalls=1_000, failures={"too_long": 7, "rate_limit": 30}),
            Outcome(error=error, variables={"old": "int"}),
            Outcome(error=stopped, lost="memory limit reached", variables={"x": "int"}),
        ],
        problem="PROBLEM",
        skipped=2,
    )
    assert message == "\n\n".join(
        [
            "[Cell 1]\none",
            "Standard error:\nwarned",
            "37 of 1,000 sub-calls failed (rate limit 30, too long 7).",
            "[Cell 2]\nThe cell raised:\nTraceback\nKeyError: 'k'",
            "[Cell 3]\nThe cell was stopped:\nstopped after 2 s",
            "The Python process was lost: memory limit reached. " + LOST,
            "Variables: x (int)",
            "2 later blocks of your reply did not run, because the worker was lost.",
            "PROBLEM",
        ]
    )


def test_small_things() -> None:
    assert cells_message() == ""
    assert cells_message(problem="P") == "P"
    assert cells_message(outcomes=[Outcome(stdout="\n")]) == "(The cell ran and printed nothing.)"
    assert "did not run" not in cells_message(outcomes=[Outcome()])
    one = cells_message(outcomes=[Outcome(lost="It was killed.")], skipped=1)
    assert "lost: It was killed. All" in one
    fresh = cells_message(outcomes=[Outcome(lost_before="it had gone.")])
    assert fresh == "Before this cell, it had gone.\n\n(The cell ran and printed nothing.)"
    assert "1 later block of your reply did not run, because the worker was lost." in one


def test_the_error_survives_a_flood() -> None:
    error = CellError(type="E", traceback="Traceback " + "y" * 4_000 + " E: the end")
    flood = "HEAD" + "x" * 10**6 + "TAIL"
    message = cells_message(outcomes=[Outcome(stdout=flood, stderr="STDERR", error=error)])
    assert all(part in message for part in ("HEAD", "TAIL", "STDERR", error.traceback, "characters left out"))
    assert len(message) < OUTPUT_LIMIT + ERROR_LIMIT + 500


def test_cells_share_the_limit_of_a_turn() -> None:
    outcomes = [Outcome(stdout="s" * 100), *(Outcome(stdout=f"<{i}>" + "x" * 10**5 + f"</{i}>") for i in range(9))]
    message = cells_message(outcomes=outcomes, output_limit=10_000)
    assert "s" * 100 in message
    assert all(f"<{i}>" in message and f"</{i}>" in message for i in range(9))
    assert 9_800 < len(message) < 11_500


def test_long_tracebacks_and_many_variables_are_bounded() -> None:
    error = CellError(type="E", traceback="HEAD" + "y" * 10**5 + "E: last")
    variables = {f"name_{i}": "int" for i in range(1_000)}
    message = cells_message(outcomes=[Outcome(error=error, variables=variables)])
    assert "HEAD" in message
    assert "E: last" in message
    assert "name_999 (int)" in message
    assert re.search(r"Variables: \d+ older ones, name_", message)
    assert len(message) < ERROR_LIMIT + VARIABLES_LIMIT + 500


def test_an_unclosed_block_is_named_only_if_it_did_not_compile() -> None:
    syntax = CellError(type="SyntaxError", traceback="SyntaxError: '(' was never closed")
    other = CellError(type="ValueError", traceback="ValueError: x")
    assert "no closing fence" in cells_message(outcomes=[Outcome(error=syntax)], unclosed=True)
    assert "no closing fence" not in cells_message(outcomes=[Outcome(error=syntax)])
    assert "no closing fence" not in cells_message(outcomes=[Outcome(error=other)], unclosed=True)
    assert "no closing fence" not in cells_message(outcomes=[Outcome()], unclosed=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("icon \ud83d end", "icon \ufffd end"), ("\ud83d\ude00", "😀"), ("\udce9", "\ufffd"), ("plain ✓", "plain ✓")],
)
def test_everything_said_is_valid_utf8(text: str, expected: str) -> None:
    assert clean(text) == expected
    outcome = Outcome(stdout=text, stderr=text, variables={"v": text}, lost=text, failures={text: 1})
    for message in (
        cells_message(outcomes=[outcome], problem=text),
        system_prompt(custom=text, tools=text),
        context_message(kind="value", type_name=text, size=1, root_prompt=text),
        closing_message(reason=text, root_prompt=text),
    ):
        assert expected in message
        message.encode()
