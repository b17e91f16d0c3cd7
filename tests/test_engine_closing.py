"""Ends without an answer: the last turn, what stands in for it where it fails, and the error of the limit else."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asyncrlm import (
    AsyncRLM,
    ErrorThresholdExceededError,
    LMError,
    LMReply,
    SandboxLost,
    SubcallLimitExceededError,
    TimeoutExceededError,
)
from asyncrlm.repl.session import Session
from asyncrlm.testing import ScriptedLM

from .helpers import cell, echo, scripted, submit, told

pytestmark = pytest.mark.anyio

PRINTED = "print('HEAD' + 'x' * 15_000 + 'TAIL')\n"
OVER = "llm_query('a')\nllm_query('b')\n"
"""Crosses `max_subcalls=1`."""


async def ended(root: ScriptedLM, **settings: Any) -> tuple[str, str]:
    settings = {"on_limit": "answer", "max_subcalls": 1} | settings
    with anyio.fail_after(20):
        completion = await AsyncRLM(root, other_backends=[echo()], **settings).acompletion("CTX", "WHAT?")
    return completion.response, completion.stop_reason


async def failed(root: ScriptedLM, kind: type[Exception] = SubcallLimitExceededError, **settings: Any) -> Any:
    with pytest.raises(kind) as caught:
        await ended(root, **settings)
    return caught.value


def shortened(root: ScriptedLM) -> None:
    """Its last request was one whose output is cut to head and tail, with the closing words whole."""
    last = root.calls[-1].messages[-1].content
    assert "HEAD" in last
    assert "characters left out" in last
    assert last.index("This run ends here") < 5_000
    assert last.endswith("WHAT?")


async def test_a_last_message_too_long_for_the_window_is_shortened() -> None:
    root = scripted(cell(PRINTED + OVER), "what I know")
    answer = await ended(root, backend_kwargs={"context_window": 3_500})
    assert answer == ("what I know", "limit")
    assert len(root.calls) == 2
    shortened(root)


async def test_a_last_message_that_the_model_refuses_is_shortened() -> None:
    root = scripted(cell(PRINTED + OVER), LMError("too long", kind="too_long"), "what I know")
    assert await ended(root) == ("what I know", "limit")
    shortened(root)


async def test_a_last_message_the_ledger_has_no_room_for_is_shortened() -> None:
    root = scripted(cell(PRINTED), "what I know")
    answer = await ended(root, max_subcalls=None, max_tokens=20_000, limits="hard")
    assert answer == ("what I know", "limit")
    shortened(root)


@pytest.mark.parametrize("on_limit", ["raise", "answer"])
async def test_the_last_turn_after_all_others_is_shortened_too(on_limit: str) -> None:
    root = scripted(cell(PRINTED), LMError("too long", kind="too_long"), "what I know")
    assert await ended(root, max_iterations=1, on_limit=on_limit) == ("what I know", "max_iterations")
    shortened(root)


GUESS = "It is probably 7.\n"
REFUSALS = {
    "too long": [LMError("too long", kind="too_long")] * 2,
    "down": [LMError("no", kind="authentication")],
    "empty": [" "],
    "code": [cell("x = 1")],
}
refused = pytest.mark.parametrize("replies", list(REFUSALS.values()), ids=list(REFUSALS))


@refused
async def test_a_last_turn_without_an_answer_leaves_the_best_text_so_far(replies: list[Any]) -> None:
    root = scripted(GUESS + cell(PRINTED + OVER), *replies)
    assert await ended(root) == ("It is probably 7.", "limit")
    assert len(root.calls) == 1 + len(replies)


@refused
async def test_with_nothing_to_give_the_limit_is_raised(replies: list[Any]) -> None:
    error = await failed(scripted(cell(PRINTED + OVER), *replies))
    assert (error.subcalls, error.limit) == (1, 1)
    assert isinstance(error.__cause__, LMError)
    assert error.partial_answer is None


async def test_a_last_turn_whose_place_is_lost_leaves_the_best_text_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    execute, cells = Session.execute, list[str]()

    async def once(self: Session, code: str) -> Any:
        cells.append(code)
        if len(cells) > 1:
            raise SandboxLost("no worker can be had")
        return await execute(self, code)

    monkeypatch.setattr(Session, "execute", once)
    assert await ended(scripted(GUESS + cell(OVER), cell("x = 1"))) == ("It is probably 7.", "limit")
    assert cells[1:] == ["x = 1"]
    cells.clear()
    error = await failed(scripted(cell(OVER), cell("x = 1")))
    assert isinstance(error.__cause__, SandboxLost)


@pytest.mark.parametrize(
    ("replies", "settings", "stop_reason", "says"),
    [
        ([cell(OVER), "what I know"], {}, "limit", "sub-call limit"),
        ([cell("x = llm_query('a')\nanswer.update(content=x, ready=True)\n" + OVER)], {}, "answer", "sub-call limit"),
        ([cell("1 / 0"), "what I know"], {"max_errors": 1}, "limit", "failed"),
        ([submit("'7'")], {}, "answer", None),
        ([cell("x = 1"), "what I know"], {"max_iterations": 1}, "max_iterations", None),
    ],
)
async def test_a_limit_leaves_its_trace_on_the_completion(
    replies: list[str], settings: dict[str, Any], stop_reason: str, says: str | None
) -> None:
    settings = {"on_limit": "answer", "max_subcalls": 1} | settings
    completion = await AsyncRLM(scripted(*replies), other_backends=[echo()], **settings).acompletion("CTX")
    assert completion.stop_reason == stop_reason
    if says is None:
        assert completion.limit_reached is None
    else:
        assert says in completion.to_dict()["limit_reached"]


@pytest.mark.parametrize(
    ("on_limit", "rather"),
    [("raise", ', or give on_limit="answer" for an answer from what there is by then'), ("answer", "")],
)
async def test_an_error_of_a_limit_says_the_ways_out(on_limit: str, rather: str) -> None:
    root = scripted(cell("1 / 0"), " ")
    error = await failed(root, ErrorThresholdExceededError, max_errors=1, on_limit=on_limit)
    why = "1 turn failed (threshold 1); the last with ZeroDivisionError: division by zero; raise max_errors"
    assert str(error) == why + rather


@pytest.mark.parametrize(
    ("elapsed", "timeout", "says"), [(0.0123, 0.01, "0.0123 s of 0.01 s"), (1234.5, 1200, "1,234 s of 1,200 s")]
)
def test_seconds_are_told_as_long_as_they_are(elapsed: float, timeout: float, says: str) -> None:
    assert str(TimeoutExceededError(elapsed, timeout)) == f"timeout exceeded: {says}"


async def test_after_all_turns_an_empty_reply_is_an_unfinished_run() -> None:
    settings = {"max_subcalls": None, "max_iterations": 1, "on_limit": "raise"}
    assert await ended(scripted(GUESS + cell("x = 1"), ""), **settings) == ("It is probably 7.", "max_iterations")
    assert await ended(scripted(cell("x = 1"), ""), **settings) == ("", "max_iterations")
    for code, why in (("x = 1", ""), ("1 / 0", "; last error: ZeroDivisionError: division by zero")):
        completion = await AsyncRLM(scripted(cell(code), ""), max_iterations=1).acompletion("CTX")
        assert (completion.response, completion.error) == ("", f"no answer after 1 turn and a last one{why}")
    assert (await AsyncRLM(scripted(submit("'7'"))).acompletion("CTX")).error is None
    error = await failed(scripted(cell("x = 1"), LMError("no", kind="authentication")), LMError, **settings)
    assert error.kind == "authentication"


DRAFT = cell('answer["content"] = "it is 7"')


@pytest.mark.parametrize("last", ["", cell("x = 1"), "```python\nprint(1)\n```"], ids=["empty", "cell", "python"])
async def test_an_answer_that_was_never_ready_is_the_last_resort(last: str) -> None:
    settings = {"max_subcalls": None, "max_iterations": 2, "on_limit": "raise"}
    assert await ended(scripted(DRAFT, GUESS + cell("x = 1"), last), **settings) == ("it is 7", "max_iterations")
    assert await ended(scripted(DRAFT, cell("x = 1"), "It is 8."), **settings) == ("It is 8.", "max_iterations")
    assert await ended(scripted(DRAFT + "\n" + cell(OVER), last)) == ("it is 7", "limit")
    blank = scripted(cell('answer["content"] = " "'), cell("x = 1"), last)
    completion = await AsyncRLM(blank, max_iterations=2).acompletion("CTX")
    assert (completion.response, completion.error) == ("", "no answer after 2 turns and a last one")


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (LMReply(text="```repl\nprint(1", finish_reason="length"), "the last reply was cut off at its length: raise"),
        (LMReply(text="```repl\nprint(1", finish_reason="abort"), "the model's server broke off the last reply"),
        (LMReply(text="", reasoning="I won't. " * 99, finish_reason="refusal"), "the model refused: I won't. I won't."),
        (LMReply(text="", finish_reason="refusal"), "the model refused, or a filter of its provider did"),
    ],
    ids=["length", "broken", "refusal", "filter"],
)
async def test_a_run_without_an_answer_says_what_became_of_its_replies(reply: LMReply, why: str) -> None:
    root = scripted(cell("1 / 0"), reply, reply)
    completion = await AsyncRLM(root, max_iterations=2).acompletion("CTX")
    assert completion.response == ""
    assert completion.error is not None
    assert completion.error.startswith(f"no answer after 2 turns and a last one; {why}")
    assert len(completion.error) < 500


async def test_a_child_that_gave_nothing_is_an_error_in_its_cell() -> None:
    root = scripted(cell("print(rlm_query('go'))"), cell("x = 1"), cell("y = 2"), "done")
    assert await ended(root, max_subcalls=None, max_depth=2, max_iterations=1) == ("done", "max_iterations")
    assert "Error: model 'scripted' gave no answer in its last turn: the only turn is used up" in told(root, 4)


async def test_after_all_turns_the_allowance_may_be_used() -> None:
    root = scripted(cell(PRINTED), "what I know")
    answer = await ended(root, max_subcalls=None, max_tokens=20_000, limits="hard", max_iterations=1)
    assert answer == ("what I know", "max_iterations")


async def hang(_request: Any) -> str:
    await anyio.sleep_forever()
    return ""


async def test_a_deadline_in_the_last_turn_leaves_the_best_text_so_far() -> None:
    settings = {"max_subcalls": None, "max_timeout": 1.0}
    assert await ended(scripted(GUESS + cell("x = 1"), hang, hang), **settings) == ("It is probably 7.", "limit")
    error = await failed(scripted(cell("x = 1"), hang, hang), TimeoutExceededError, **settings)
    assert error.timeout == 1.0


async def test_an_answer_made_in_a_last_turn_that_was_cut_counts() -> None:
    late = cell('answer.update(content="late", ready=True)\nwhile True: pass')
    settings = {"max_subcalls": None, "max_timeout": 1.0}
    assert await ended(scripted(cell("x = 1"), hang, late), **settings) == ("late", "limit")
    assert await ended(scripted(cell("x = 1"), submit("'now'")), **settings) == ("now", "answer")
