"""All that the engine itself says to models is in `Prompts`: with marks in its place, nothing else of ours is left."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import anyio
import msgspec
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, LMError, LMReply, LMUsage, Prompts, Repl
from asyncrlm.engine.prompts import cells_message, context_message
from asyncrlm.lm.base import LMRequest
from asyncrlm.repl.context import Kind
from asyncrlm.repl.outcome import CellOutcome
from asyncrlm.repl.tools import HostTools, Tool
from asyncrlm.testing import ScriptedLM

from .helpers import cell, scripted, submit

asynchronous = pytest.mark.parametrize("anyio_backend", ["asyncio"])  # what is said has nothing to do with the loop

FIELDS = set(Prompts.__struct_fields__)
OTHER_FIELDS = re.compile(
    r"\{(?:children|sub_models|custom_tools_section|window|what|names|question|contexts|histories|variables|reason|how"
    r"|submit)\}"
)
"""Placeholders for what other fields say; what the rest stand for is data, and errors."""
ERRORS = {"lost", "lost_before", "variables_lost"}
MARKS = Prompts(
    **{
        name: f"«{name}»" + ("" if name in ERRORS else " ".join(OTHER_FIELDS.findall(text)))
        for name, text in msgspec.structs.asdict(Prompts()).items()
    }
)


class Row(NamedTuple):
    a: int


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WINDOW = 2_000


def marks(messages: Sequence[str]) -> set[str]:
    """The fields that were said; nothing else was."""
    said: set[str] = set()
    for message in messages:
        said.update(re.findall(r"«(\w+)»", message))
        rest = re.sub(r"«\w+»|`(?:context|history)_0`|\b\w+ \(\w+\)|'[\w.]+'", "", message)  # and names of the caller's
        assert not re.search(r"[^\W\d_]", rest), message
    return said


def heard(*models: ScriptedLM) -> set[str]:
    """The fields that models were told, or that stand for what they said."""
    messages = [message for model in models for call in model.calls for message in call.messages]
    return marks([m.content for m in messages if m.role != "assistant" or m.content.startswith("«")])


def half(reason: str) -> LMReply:
    return LMReply(text="7", finish_reason=reason, usage=LMUsage(input_tokens=1, output_tokens=1))


async def replies_and_cells() -> set[str]:
    def subcall(request: LMRequest) -> LMReply | str:
        reply = {"1": half("length"), "2": half("refusal"), "3": half("error")}.get(request.messages[-1].content)
        if reply is None:
            raise LMError("no", kind="bad_request")
        return reply

    root = scripted(
        "7",
        "FINAL(7)",
        "```json\n7\n```",
        "```\n7\n```",
        "<think>\n```repl\n7\n```",
        "```repl\nx = [",
        "```repl\nx = = 7",
        "",
        half("length"),
        half("refusal"),
        half("error"),
        cell("print(7)") + "\n" + cell("import sys\nprint(7, file=sys.stderr)"),
        cell("pass"),
        cell("1 / 0"),
        cell("print('7' * 30_000)"),
        cell("for i in range(900): globals()[f'name_{i}'] = i"),
        cell("while True: pass"),
        cell("for each in '123': print(llm_query(each))\nx = llm_query('4')"),
        cell("import os\nos._exit(1)") + "\n" + cell("7"),
        cell('answer["ready"] = True'),
        submit("7") + "\n" + cell("7"),
        submit("{'a': 7}"),
    )
    rlm = AsyncRLM(
        root,
        other_backends=[ScriptedLM(subcall), ScriptedLM(subcall, model="other")],
        other_backend_kwargs=[{"context_window": 90_000}, {}],
        environment_kwargs={"cell_timeout": 0.5},
        custom_tools={"tool": 7},
        prompts=MARKS,
    )
    assert (await rlm.acompletion("CTX", "QUESTION", response_format=SCHEMA)).parsed == {"a": 7}
    return heard(root)


async def ends() -> set[str]:
    only, last = scripted("7", "7"), scripted("7", "7", "7", '{"a": 7}')
    await AsyncRLM(only, prompts=MARKS, max_iterations=1, max_depth=2, orchestrator=False).acompletion("CTX")
    await AsyncRLM(last, prompts=MARKS, max_iterations=3).acompletion("CTX", response_format=SCHEMA)
    text = scripted("7", '{"a": 7}')
    await AsyncRLM(text, prompts=MARKS, max_depth=0).acompletion("7", response_format=SCHEMA)
    return heard(only, last, text)


async def conversations() -> set[str]:
    dying = cell('import os\nanswer["content"] = "7"\nanswer["ready"] = True\nos._exit(1)')
    root = scripted(submit("'7'"), submit("'7'"), dying, submit("'7'"))
    async with AsyncRLM(root, prompts=MARKS) as rlm, rlm.session() as chat:
        for _ in range(4):
            await chat.acompletion("CTX")
    return heard(root)


async def compactions() -> set[str]:
    def reply(request: LMRequest) -> str:
        told = request.messages[-1].content
        return "7" * 99 if "«compaction»" in told else submit("'7'") if "«compacted»" in told else "7" * 9_000

    root = ScriptedLM(reply)
    rlm = AsyncRLM(root, backend_kwargs={"context_window": WINDOW}, compaction=True, prompts=MARKS)
    assert (await rlm.acompletion("CTX")).response == "7"
    return heard(root)


async def contexts(folder: Path) -> set[str]:
    (folder / "a.txt").write_text("7")
    root = ScriptedLM(lambda request: submit("'7'"))
    values = ["7", b"7", 7, uuid.uuid4(), {"a": 7}, [7], Row(7), {7}, folder, folder / "a.txt"]
    async with AsyncRLM(root, prompts=MARKS) as rlm:
        for value in [*values, msgspec.defstruct("Record", [("a", int)])(7)]:
            for lazy in (False, True) if isinstance(value, Path) else (False,):
                await rlm.acompletion(value, lazy=lazy)
    return heard(root)


def said_elsewhere() -> set[str]:
    """What takes another library, a server, a file of more than 256 MB, or a worker that dies between two cells."""
    tool = Tool(name="tool", kind="value", value=7, text="7", untrusted=True)
    return marks(
        [
            HostTools().joined([tool]).describe(MARKS.untrusted),
            context_message(MARKS, kind="binary", size=1),
            context_message(MARKS, kind="table", size=1, items=1, type_name="Frame", first=["7"]),
            cells_message(MARKS, [CellOutcome(lost_before="it ended")]),
        ]
    )


@pytest.mark.anyio
@asynchronous
async def test_nothing_is_said_to_a_model_that_is_not_in_prompts(tmp_path: Path) -> None:
    with anyio.fail_after(20):
        said = await replies_and_cells() | await ends() | await conversations() | await compactions()
        said |= await contexts(tmp_path) | said_elsewhere()
    assert said == FIELDS


def test_each_kind_of_context_has_its_words() -> None:
    for kind in get_args(Kind):
        message = context_message(MARKS, kind=kind, size=1, items=1, first=["7"])
        assert {"context", "no_question"} < marks([message]), kind


@pytest.mark.anyio
@asynchronous
async def test_a_repl_takes_prompts_too() -> None:
    sub = scripted("7", '{"a": 7}', half("length"))
    with anyio.fail_after(10):
        async with Repl(lm=sub, prompts=MARKS) as repl:
            schema = f"llm_query('7', schema={SCHEMA!r})"
            assert (await repl.execute(f"print({schema}, llm_query('7'))")).stdout == '{"a": 7} 7«sign_cut»\n'
    assert heard(sub) == {"shape", "shape_in_text", "misfit_in_text"}
    with pytest.raises(ConfigurationError, match="prompts must be a Prompts"):
        Repl(prompts="Be brief")  # type: ignore[arg-type]
