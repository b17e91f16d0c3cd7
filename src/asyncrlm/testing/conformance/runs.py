"""Checks of whole runs: conversations, histories that are compacted, typed answers, what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import anyio

from ... import ApprovalRequest, AsyncRLM, Environment, LMError, LMRequest, RemoteEnvironment
from ...events import ContextProgress, ToolCalled
from ..scripted import ScriptedLM
from .base import Conformance, cell, check, expect, same, submit


@dataclasses.dataclass
class _Found:
    size: int
    parts: list[int]


class Runs(Conformance):
    """Whole runs."""

    @check()
    async def test_a_conversation_keeps_its_repl(self, environment: Environment) -> None:
        large = "x" * 300_000
        look = "[kept, context, len(context_1), context_2, history_0[-1]['role'], history is history_1]"
        model = ScriptedLM(
            [cell("kept = [1]") + "\n" + submit("'first'"), LMError("refused"), cell("kept.append(2)"), submit(look)]
            + [cell("kept.append(context)"), submit("kept[2:]")] * 2
        )
        queued: list[str] = []
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

            async def ask() -> None:
                queued.append((await chat.acompletion("more")).response)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                tasks.start_soon(ask)
        same(queued, ['["more"]', '["more", "more"]'], "two completions at once, of which one must wait for the other")

    @check()
    async def test_a_persistent_engine_outlives_a_cancelled_completion(self, environment: Environment) -> None:
        async def begun() -> None:
            reached.set()

        reached = anyio.Event()
        endless = "kept.append(2)\nbegun()\nimport time\nwhile True: time.sleep(0.01)"
        look = "[kept, context, context_0, 'one' in str(history_0)]"
        model = ScriptedLM([cell("kept = [1]\nhistory_0 = 0") + "\n" + submit("0"), cell(endless), submit(look)])
        rlm = AsyncRLM(model, environment=environment, persistent=True, custom_tools={"begun": begun})
        async with rlm:
            await rlm.acompletion("first", "one")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(rlm.acompletion, "second")
                await reached.wait()
                tasks.cancel_scope.cancel()
            response = (await rlm.acompletion("third")).response
        same(response, '[[1, 2], "third", "first", true]', "what is there after a completion was cancelled")

    @check()
    async def test_histories_are_compacted(self, environment: Environment) -> None:
        look = "[kept, 'x' * 50 in str(history), 'y' * 50 in str(history)]"
        turns = [cell("kept = 5\nprint('x' * 9_000)"), cell("print('y' * 9_000)")]
        left = {"root": [*turns, submit(f"[{look}, rlm_query('part')]")], "child": [*turns, submit(look)]}
        summaries: list[str] = []

        def model(request: LMRequest) -> Any:
            who = "root" if "The question" in str(request.messages) else "child"
            if "Before it goes on, write down" in request.messages[-1].content:
                summaries.append(who)
                return "what was done so far"
            return left[who].pop(0)

        rlm = AsyncRLM(
            ScriptedLM(model),
            environment=environment,
            compaction=True,
            max_depth=2,
            backend_kwargs={"context_window": 6_000},
        )
        response = (await rlm.acompletion("CTX", "The question")).response
        same(response, '[[5, true, true], "[5, true, true]"]', "variables and all of the history")
        same(summaries, ["root", "child"], "histories beyond their windows that were summarised")

    @check()
    async def test_an_answer_of_a_type(self, environment: Environment) -> None:
        model = ScriptedLM([submit("{'size': 'one', 'parts': ()}"), submit("{'size': len(context), 'parts': [2, 3]}")])
        completion = await AsyncRLM(model, environment=environment).acompletion("four", response_format=_Found)
        same(completion.parsed, _Found(4, [2, 3]), "the typed answer, which the cell gave as an object")
        same(len(model.calls), 2, "turns, of which a misfit costs one")
        expect("Expected `int`, got `str` - at `$.size`" in model.prompts[1], "the model must read what does not fit")

    @check()
    async def test_a_context_is_told_of_on_its_way(self, environment: Environment) -> None:
        size = 3_000_000
        told: list[ContextProgress] = []
        rlm = AsyncRLM(ScriptedLM([submit("len(context)")]), environment=environment)
        async with rlm.astream("x" * size) as events:
            async for event in events:
                if isinstance(event, ContextProgress) and event.to == "sandbox":
                    told.append(event)
        same(events.result and events.result.response, str(size), "the characters that came")
        if not told and not isinstance(environment, RemoteEnvironment):
            return  # where files of this machine are handed over, nothing is on its way
        sent = [event.received for event in told]
        expect(sent and sent == sorted(sent), f"progress of an upload must be told, and grow; told were {sent}")
        same((sent[-1], told[-1].total), (size, size), "bytes that were sent in the end, and of how many")

    @check()
    async def test_cells_and_calls_are_approved(self, environment: Environment) -> None:
        async def look(request: ApprovalRequest) -> str | None:
            if request.kind == "tool":
                return "no such calls today"
            return "not this" if "forbidden = 1" in request.code else None

        def tool(number: int) -> int:
            return number

        catch = "try:\n    tool(5)\nexcept Exception as error:\n    said = str(error)\n"
        model = ScriptedLM([cell("forbidden = 1"), cell(catch), submit("['forbidden' in globals(), said]")])
        rlm = AsyncRLM(model, environment=environment, approve=look, custom_tools={"tool": tool})
        calls: list[ToolCalled] = []
        async with rlm.astream("CTX") as events:
            async for event in events:
                if isinstance(event, ToolCalled):
                    calls.append(event)
        response = events.result.response if events.result else ""
        expect(response.startswith("[false, ") and "no such calls today" in response, f"got {response!r}")
        same([(call.name, call.args) for call in calls], [("tool", [5])], "calls in the trajectory")
        expect("no such calls today" in (calls[0].error or ""), f"the trajectory must say what failed: {calls[0]}")
        expect("not this" in model.prompts[1], "the model must read why a cell was refused")
