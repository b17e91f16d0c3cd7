"""The loop, from the door to the answer, with scripted models and the real local environment."""

from __future__ import annotations

import anyio
import pytest

from asyncrlm import AsyncRLM, LMError, LMReply, RLMChatCompletion, SubcallLimitExceededError
from asyncrlm.testing import ScriptedLM

from .helpers import cell, echo, scripted, submit, told

pytestmark = pytest.mark.anyio


async def ask(root: ScriptedLM, prompt: object = "CTX", question: str | None = None, **settings: object):
    sub = settings.pop("sub", None)
    others = {"other_backends": [sub]} if sub is not None else {}
    with anyio.fail_after(30):
        return await AsyncRLM(root, **others, **settings).acompletion(prompt, question)  # type: ignore[arg-type]


async def test_answers_from_the_context(no_leaks: None) -> None:
    root = scripted(cell("print(len(context))"), submit("context.upper()"))
    completion = await ask(root, "hello", "shout it")
    assert completion.response == "HELLO"
    assert completion.stop_reason == "answer"
    assert completion.root_model == root.model
    assert "shout it" in root.calls[0].messages[1].content
    assert "hello" not in root.calls[0].messages[1].content
    assert "5" in told(root, 2)


async def test_roles_alternate_after_the_system_message() -> None:
    root = scripted("no code here", cell("1/0"), cell("x = 1"), submit("x"))
    await ask(root)
    for request in root.calls:
        roles = [m.role for m in request.messages]
        assert roles[0] == "system"
        assert roles[1:] == ["user", "assistant"] * (len(roles) // 2 - 1) + ["user"]


async def test_history_only_grows_at_its_end() -> None:
    root = scripted(cell("x = 1"), cell("y = 2"), submit("x + y"))
    await ask(root)
    for before, after in zip(root.calls, root.calls[1:], strict=False):
        assert after.messages[: len(before.messages)] == before.messages


async def test_sub_calls_run_in_parallel() -> None:
    arrived = 0
    everybody = anyio.Event()

    async def sub(messages: list[dict[str, str]]) -> str:
        nonlocal arrived
        arrived += 1
        if arrived == 20:
            everybody.set()
        await everybody.wait()
        return messages[-1]["content"]

    root = scripted(submit("','.join(llm_query_batched([str(i) for i in range(20)]))"))
    completion = await ask(root, sub=sub)
    assert completion.response == ",".join(map(str, range(20)))


async def test_one_failure_fails_one_slot_and_is_counted() -> None:
    def reply(request: object) -> str:
        text = request.messages[-1].content  # type: ignore[attr-defined]
        if text == "2":
            raise LMError("too long for me", kind="too_long")
        return text

    root = scripted(cell("r = llm_query_batched([str(i) for i in range(4)])\nprint(r)"), submit("str(r[2].kind)"))
    completion = await ask(root, sub=ScriptedLM(reply))
    assert completion.response == "too_long"
    assert "1 of 4 sub-calls failed (too long 1)" in told(root, 2)
    assert "'0', '1', 'Error:" in told(root, 2)


async def test_unknown_model_is_told_and_never_replaced() -> None:
    root = scripted(cell("print(llm_query('x', model='nobody'))"), submit("'done'"))
    await ask(root, sub=echo(model="known"))
    assert "nobody" in told(root, 2)
    assert "known" in told(root, 2)


async def test_too_long_sub_call_is_caught_before_it_is_sent() -> None:
    sub = echo(model="small")
    rlm = AsyncRLM(
        scripted(cell("r = llm_query('x' * 100_000)\nprint(r)"), submit("'done'")),
        other_backends=[sub],
        other_backend_kwargs=[{"context_window": 1000}],
    )
    completion = await rlm.acompletion("CTX")
    assert completion.response == "done"
    assert sub.calls == []


async def test_empty_replies_are_bounded_and_never_sent_back() -> None:
    root = scripted("", " \n", submit("'ok'"))
    completion = await ask(root)
    assert completion.response == "ok"
    assert all(m.content.strip() for request in root.calls for m in request.messages)
    with pytest.raises(LMError) as caught:
        await ask(scripted("", "", "", "", ""))
    assert caught.value.kind == "empty"


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("length", "length limit"),
        ("refusal", "broken off"),
        ("error", "failure of the server"),
        ("MALFORMED_RESPONSE", "failure of the server"),
        ("what is new", "not executed"),
    ],
)
async def test_half_a_cell_that_looks_whole_does_not_run(reason: str, says: str) -> None:
    half = cell("print('first')") + "\n```repl\nanswer.update(content='half', ready=True)\n"
    root = scripted(LMReply(text=half, finish_reason=reason), submit("'whole'"))
    assert (await ask(root)).response == "whole"
    assert "first" in told(root, 2)
    assert "not executed" in told(root, 2)
    assert says in told(root, 2)


async def test_half_a_cell_of_the_last_reply_does_not_run() -> None:
    half = "It is 7.\n```repl\nanswer.update(content='half', ready=True)\n"
    root = scripted(cell("x = 1"), LMReply(text=half, finish_reason="length"))
    assert (await ask(root, max_iterations=1)).response != "half"


async def test_reply_cut_by_its_length_is_reported() -> None:
    root = scripted(LMReply(text="```repl\nx = [1,\n", finish_reason="length"), submit("'ok'"))
    await ask(root)
    assert "cut" in told(root, 2)


async def test_depth_zero_asks_the_model_itself() -> None:
    completion = await ask(scripted("plain reply"), "hello", max_depth=0)
    assert isinstance(completion, RLMChatCompletion)
    assert (completion.response, completion.stop_reason) == ("plain reply", "text")
    assert completion.usage_summary.total_calls == 1


async def test_turns_used_up_is_said_and_code_is_no_answer() -> None:
    completion = await ask(scripted(cell("x = 1"), "x is one"), max_iterations=1)
    assert (completion.response, completion.stop_reason) == ("x is one", "max_iterations")
    completion = await ask(scripted(cell("x = 1"), submit("str(x)")), max_iterations=1)
    assert (completion.response, completion.stop_reason) == ("1", "max_iterations")


async def test_blocks_after_the_answer_do_not_run() -> None:
    sub = echo()
    completion = await ask(scripted(submit("'done'") + "\n\n" + cell("llm_query('never')")), sub=sub)
    assert completion.response == "done"
    assert sub.calls == []


async def test_empty_answer_is_refused() -> None:
    root = scripted(submit("''"), submit("'real'"))
    completion = await ask(root)
    assert completion.response == "real"
    assert "empty" in told(root, 2)


async def test_a_killed_worker_is_replaced_and_told() -> None:
    root = scripted(cell("x = 1\nimport os\nos._exit(3)"), submit("context + str('x' in globals())"))
    completion = await ask(root)
    assert completion.response == "CTXFalse"
    assert "lost" in told(root, 2)


async def test_answer_made_ready_before_the_worker_died_counts() -> None:
    root = scripted(cell('answer.update(content="kept", ready=True)\nimport os\nos.kill(os.getpid(), 9)'))
    assert (await ask(root)).response == "kept"


async def test_an_error_carries_what_the_caller_needs() -> None:
    root = scripted(cell("answer['content'] = 'half'\nllm_query('a')\nllm_query('b')"), submit("'never'"))
    with pytest.raises(SubcallLimitExceededError) as caught:
        await ask(root, sub=echo(), max_subcalls=1)
    assert caught.value.partial_answer == "half"
    assert caught.value.usage_summary is not None
    assert caught.value.usage_summary.total_calls == 2
    assert caught.value.run_id


@pytest.mark.parametrize(
    ("first", "partial"),
    [
        (cell("answer['content'] = 'draft'"), "draft"),
        (cell("answer['content'] = ['a', 7]"), '["a", 7]'),
        (cell("answer = {'content': 'rebound'}"), "rebound"),
        (cell("answer['content'] = 'x'\nanswer['content'] = ''"), None),
        ("I look first.\n" + cell("x = 1"), None),
        ("It is 7, I think.", "It is 7, I think."),
    ],
)
async def test_a_partial_answer_is_never_code(first: str, partial: str | None) -> None:
    with pytest.raises(LMError) as caught:
        await ask(scripted(first, LMError("down", kind="authentication")))
    assert caught.value.partial_answer == partial


async def test_one_instance_serves_many_at_once(no_leaks: None) -> None:
    def reply(request: object) -> str:
        return submit("context + llm_query('x')")

    rlm = AsyncRLM(ScriptedLM(reply), other_backends=[echo("")])
    answers: dict[int, str] = {}

    async def one(i: int) -> None:
        answers[i] = (await rlm.acompletion(f"ctx{i}")).response

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for i in range(12):
                tasks.start_soon(one, i)
    assert answers == {i: f"ctx{i}x" for i in range(12)}


async def test_stream_tells_the_run_and_its_result() -> None:
    rlm = AsyncRLM(scripted(cell("print(1)"), submit("'done'")))
    async with rlm.astream("CTX") as events:
        seen = [type(event).__name__ async for event in events]
    assert events.result is not None
    assert events.result.response == "done"
    assert seen[0] == "RunStarted"
    assert seen[-1] == "RunFinished"
    assert "CellFinished" in seen
