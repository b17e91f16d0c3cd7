"""Cases from public bug reports whose outcome `expect` states, each run as reported, on the local environment."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrlm.lm.base import LMRequest, Message

from .cases import CASES, covers, scripted
from .cases.expect import Evidence, failures
from .cases.models import ScriptedRoot, SubModel, newest
from .cases.runs import RULES, run, run_case

pytestmark = pytest.mark.anyio

JUDGED = [case.id for case in CASES.values() if case.expect is not None]
ON_TRIO_TOO = ["P15", "F07", "F12", "S03", "S10", "S11", "S15", "O04", "U02", "N02"]

SETTINGS: dict[str, dict[str, Any]] = {
    "U01": {"on_subcall_error": "raise"},  # by default a failure is a typed text, which the test below checks
}


@pytest.mark.parametrize(
    ("anyio_backend", "id"),
    [("asyncio", i) for i in JUDGED] + [("trio", i) for i in ON_TRIO_TOO],
    ids=lambda value: value,
)
@covers(*JUDGED)
async def test_case(id: str) -> None:
    with anyio.fail_after(10):
        outcome = await run_case(id, **SETTINGS.get(id, {}))
    assert failures(CASES[id].expect or {}, outcome) == []
    assert failures({"alternate": True, "ends_user": True, "no_empty_assistant": True}, outcome) == []


@covers("U01")
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_failed_subcall_is_no_plain_text_by_default() -> None:
    turn = scripted(CASES["U01"])[0].replace("isinstance(r, str)", "not isinstance(r, FailedReply)")
    with anyio.fail_after(10):
        outcome = await run([turn], sub=SubModel(RULES[CASES["U01"].sub_answers or ""]))
    assert outcome.answer == "text0|FAILED|text2"


@covers("U03")
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("prompt", ["", " \n"])
async def test_an_empty_prompt_is_a_clear_error(prompt: str) -> None:
    turn = f"```repl\ntry:\n    llm_query({prompt!r})\nexcept ValueError as e:\n    print('refused:', e)\n```"
    with anyio.fail_after(10):
        outcome = await run([turn, '```repl\nanswer.update(content="ok", ready=True)\n```'])
    assert "refused:" in outcome.root.seen(2)
    assert "empty" in outcome.root.seen(2)


def test_every_case_is_tested() -> None:
    tested: set[str] = set()
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if "@covers(" not in path.read_text("utf-8"):
            continue
        module = importlib.import_module(f".{path.stem}", __package__)
        for name, value in vars(module).items():
            if name.startswith("test_"):
                tested.update(getattr(value, "covers", ()))
    assert len(CASES) == 123
    assert tested == CASES.keys()


@pytest.mark.parametrize(
    "expect",
    [
        {"answer_equals": "other"},
        {"answer_json": {"k": 2}},
        {"answer_not_contains": "k"},
        {"seen_contains": [2, "absent"]},
        {"seen_contains": [9, ""]},
        {"seen_not_contains": [2, "newer"]},
        {"seen_regex": [2, "^absent$"]},
        {"seen_max": [2, 3]},
        {"seen_utf8": 3},
        {"root_calls": 2},
        {"sub_calls": 1},
        {"wall_max": 0.5},
        {"alternate": True},
        {"ends_user": True},
        {"no_empty_assistant": True},
        {"all": [{"root_calls": 3}, {"root_calls": 2}]},
        {"any": [{"root_calls": 1}, {"root_calls": 2}]},
    ],
    ids=str,
)
def test_every_word_of_expect_can_fail(expect: dict[str, Any]) -> None:
    def request(*texts: tuple[str, str]) -> LMRequest:
        return LMRequest(messages=tuple(Message(role, text) for role, text in texts))

    root = ScriptedRoot([])
    root.own = [
        request(("system", "s"), ("user", "u")),
        request(("system", "s"), ("user", "u"), ("assistant", " "), ("user", "newer")),
        request(("system", "s"), ("assistant", "a"), ("user", "\ud800"), ("user", "again"), ("assistant", "b")),
    ]
    root.seen = lambda turn: newest(root.own[turn - 1]) or "\ud800"  # type: ignore[method-assign]
    assert failures(expect, Evidence('{"k": 1}', root, SubModel(), 1.0))
