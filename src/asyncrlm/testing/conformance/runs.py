"""Checks of whole runs: conversations, histories that are compacted, typed answers, what is refused."""

from __future__ import annotations

from typing import Any

from ... import ApprovalRequest, AsyncRLM, Environment, LMError, LMRequest
from ..scripted import ScriptedLM
from .base import Conformance, cell, check, expect, same, submit


class Runs(Conformance):
    """Whole runs."""

    @check()
    async def test_a_conversation_keeps_its_repl(self, environment: Environment) -> None:
        large = "x" * 300_000
        look = "[kept, context, len(context_1), context_2, history_0[-1]['role'], history is history_1]"
        model = ScriptedLM(
            [cell("kept = [1]") + "\n" + submit("'first'"), LMError("refused"), cell("kept.append(2)"), submit(look)]
        )
        async with AsyncRLM(model, environment=environment).session() as chat:
            same((await chat.acompletion("zero")).response, "first", "the first answer")
            try:
                await chat.acompletion(large)
            except LMError:
                pass
            else:
                raise AssertionError("a model that failed was not told of")
            wanted = '[[1, 2], "two", 300000, "two", "assistant", true]'
            same((await chat.acompletion("two")).response, wanted, "what the third completion finds")

    @check()
    async def test_a_history_is_compacted(self, environment: Environment) -> None:
        turns = [cell("kept = 5\nprint('x' * 9_000)"), cell("print('y' * 9_000)")]
        turns += [submit("[kept, 'x' * 50 in str(history), 'y' * 50 in str(history)]")]
        summaries: list[str] = []

        def model(request: LMRequest) -> Any:
            if "Before it goes on, write down" in request.messages[-1].content:
                summaries.append("what was done so far")
                return summaries[-1]
            return turns.pop(0)

        rlm = AsyncRLM(
            ScriptedLM(model), environment=environment, compaction=True, backend_kwargs={"context_window": 6_000}
        )
        same((await rlm.acompletion("CTX")).response, "[5, true, true]", "variables and all of the history")
        expect(summaries, "a history beyond its window was not summarised")

    @check()
    async def test_an_answer_of_a_type(self, environment: Environment) -> None:
        model = ScriptedLM([submit("['one']"), submit("[len(context), 2]")])
        completion = await AsyncRLM(model, environment=environment).acompletion("four", response_format=list[int])
        same(completion.parsed, [4, 2], "the typed answer")
        same(len(model.calls), 2, "turns, of which a misfit costs one")

    @check()
    async def test_cells_and_calls_are_approved(self, environment: Environment) -> None:
        async def look(request: ApprovalRequest) -> str | None:
            if request.kind == "tool":
                return "no such calls today"
            return "not this" if "forbidden = 1" in request.code else None

        def tool() -> str:
            return "called"

        catch = "try:\n    tool()\nexcept Exception as error:\n    said = str(error)\n"
        model = ScriptedLM([cell("forbidden = 1"), cell(catch), submit("['forbidden' in globals(), said]")])
        rlm = AsyncRLM(model, environment=environment, approve=look, custom_tools={"tool": tool})
        response = (await rlm.acompletion("CTX")).response
        expect(response.startswith("[false, ") and "no such calls today" in response, f"got {response!r}")
        expect("not this" in model.prompts[1], "the model must read why a cell was refused")
