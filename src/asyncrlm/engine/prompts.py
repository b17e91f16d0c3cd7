"""What the engine says to a model: the texts of `texts.py` filled in with what is so in this run.

Everything returned can be encoded as UTF-8: a lone surrogate, as a cell may print one, becomes U+FFFD.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..clipping import clip
from ..lm.http.replies import whole_text as clean
from .texts import DEFAULT_PROMPTS, Prompts, fill

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..repl.context import Kind
    from .parsing import ParsedReply

__all__ = [
    "DEFAULT_PROMPTS",
    "CellReport",
    "Prompts",
    "cells_message",
    "clean",
    "closing_message",
    "compacted_message",
    "context_message",
    "conversation_message",
    "empty_answer_message",
    "misfit_message",
    "problem_message",
    "shape_message",
    "sign",
    "system_prompt",
    "turn_message",
    "turns_used",
]

OUTPUT_LIMIT = 20_000
"""Characters of output that a model reads per turn, all cells of the turn together."""

ERROR_LIMIT = 8_000
"""Characters of each traceback, which is kept in full beside whatever was cut from the output."""

VARIABLES_LIMIT = 2_000
"""Characters of the line that lists variables."""

TOOLS_SLOT = "{custom_tools_section}"

_CHARACTERS_PER_TOKEN = 3


class _CellError(Protocol):
    @property
    def traceback(self) -> str: ...
    @property
    def interrupted(self) -> bool: ...


class CellReport(Protocol):
    """What `cells_message` needs to know of one cell."""

    @property
    def stdout(self) -> str: ...
    @property
    def stderr(self) -> str: ...
    @property
    def error(self) -> _CellError | None: ...
    @property
    def variables(self) -> Mapping[str, str]: ...
    @property
    def subcalls(self) -> int: ...
    @property
    def failures(self) -> Mapping[str, int]: ...
    @property
    def lost(self) -> str | None: ...
    @property
    def lost_before(self) -> str | None: ...


def system_prompt(
    prompts: Prompts = DEFAULT_PROMPTS,
    *,
    custom: str | None = None,
    orchestrator: bool = True,
    has_children: bool = False,
    tools: str = "",
    sub_models: Sequence[tuple[str, int | None]] = (),
    environment: str = "local",
    output_limit: int = OUTPUT_LIMIT,
) -> str:
    """The system message of a run.

    Args:
        prompts: The templates.
        custom: Replaces the whole template. Tools stand where it has `{custom_tools_section}`, else at its end; with
            that slot its doubled braces become single ones, as prompts written for `str.format` have them.
        orchestrator: Append advice on how to divide the work.
        has_children: Whether `rlm_query` starts a child here, or behaves like `llm_query`.
        tools: Description of the user's tools, empty if there are none.
        sub_models: Name and window in tokens (None: unknown) of each model a cell can ask, the default first.
        environment: Where cells run.
        output_limit: Characters of output shown per turn.
    """
    section = fill(prompts.tools, tools=tools) if tools.strip() else ""
    if custom:
        text = _custom(custom, section)
    else:
        text = fill(
            prompts.system,
            environment=environment,
            output_limit=f"{output_limit:,}",
            children=prompts.children if has_children else prompts.no_children,
            sub_models="\n".join(_model_line(prompts, i, *model) for i, model in enumerate(sub_models)),
            custom_tools_section=section,
        )
    if orchestrator and prompts.orchestrator:
        text = f"{text.rstrip()}\n\n{prompts.orchestrator}"
    return clean(text)


def _custom(custom: str, section: str) -> str:
    if TOOLS_SLOT not in custom:
        return f"{custom.rstrip()}\n{section}" if section else custom
    parts = [part.replace("{{", "{").replace("}}", "}") for part in custom.split(TOOLS_SLOT)]
    return section.join(parts)


def _model_line(prompts: Prompts, index: int, name: str, window: int | None) -> str:
    size = prompts.no_window
    if window is not None:
        size = fill(prompts.window, tokens=window, characters=window * _CHARACTERS_PER_TOKEN)
    return fill(prompts.sub_model if index else prompts.default_model, name=name, window=size)


_NAMES = {
    "record": "fields",
    "tuple": "items",
    "table": "columns",
    "file": "file",
    "text": "file",
    "binary": "file",
    "documents": "files",
    "texts": "files",
}
"""Kind of context → what its names are, where they are no keys."""


def context_message(
    prompts: Prompts = DEFAULT_PROMPTS,
    *,
    kind: Kind,
    size: int,
    items: int | None = None,
    type_name: str = "",
    first: Sequence[str] = (),
    root_prompt: str | None = None,
) -> str:
    """What the context is, and what is asked.

    Args:
        prompts: The templates.
        kind: As of `ContextInfo`.
        size: Characters of text; bytes of bytes or of files.
        items: Number of items, fields or files.
        type_name: Its class, where the kind does not say it.
        first: Its first keys, its fields, or the first names of files.
        root_prompt: The question, where it was given apart from the context.
    """
    template: str = getattr(prompts, f"context_{'value' if kind == 'number' else kind}")
    what = fill(template, type=type_name, size=size, count=items or 0)
    names = ""
    if first:
        rest = ", …" if items is not None and items > len(first) else ""
        names = fill(getattr(prompts, f"names_{_NAMES.get(kind, 'keys')}"), names=", ".join(first) + rest)
    question = _question(prompts, root_prompt) or prompts.no_question
    return clean(fill(prompts.context, what=what, names=names, question=question))


def conversation_message(prompts: Prompts = DEFAULT_PROMPTS, *, number: int, lost: str | None = None) -> str:
    """What is in the REPL from earlier completions of a conversation; "" in the first.

    Args:
        prompts: The templates.
        number: How many there were.
        lost: What became of the process their cells ran in, if it is gone.
    """
    if not number:
        return ""
    kept = prompts.variables_kept if lost is None else fill(prompts.variables_lost, reason=lost.rstrip("."))
    return clean(
        fill(
            prompts.conversation,
            number=str(number + 1),
            index=str(number),
            contexts=_numbered(prompts, "context", number),
            histories=_numbered(prompts, "history", number),
            variables=kept,
        )
    )


def compacted_message(prompts: Prompts = DEFAULT_PROMPTS, *, count: int) -> str:
    """What follows a summary: where all of it is. `count` says how often there was one."""
    return clean(fill(prompts.compacted, count=count))


def _numbered(prompts: Prompts, name: str, count: int) -> str:
    if count == 1:
        return f"`{name}_0`"
    return fill(prompts.several, first=f"{name}_0", last=f"{name}_{count - 1}")


def _question(prompts: Prompts, root_prompt: str | None) -> str:
    return fill(prompts.question, root_prompt=root_prompt) if root_prompt and root_prompt.strip() else ""


def turn_message(prompts: Prompts = DEFAULT_PROMPTS, *, turn: int, max_turns: int) -> str:
    """The line that ends each user message: which turn, from 1, of how many."""
    template = prompts.turn
    if turn >= max_turns:
        template = prompts.only_turn if turn == 1 else prompts.last_turn
    elif turn == 1:
        template = prompts.first_turn
    return clean(fill(template, turn=str(turn), max_turns=str(max_turns)))


def problem_message(prompts: Prompts, parsed: ParsedReply, ending: str) -> str | None:
    """What is wrong with a reply that has some text; None if nothing is.

    Args:
        prompts: The templates.
        parsed: What it asks to run.
        ending: As of `LMReply`.
    """
    cut_off = _broken_off(prompts, ending)
    template = None if parsed.problem is None else getattr(prompts, parsed.problem)
    said = template and fill(template, label=parsed.label, submit=prompts.submit_hint)
    return f"{cut_off} {said}" if cut_off and said else cut_off or said


def empty_message(prompts: Prompts, ending: str) -> str:
    """What is said to a reply without text, which ended as `ending` says: all of it may have been thoughts."""
    return " ".join(filter(None, (_broken_off(prompts, ending), prompts.empty_reply)))


def _broken_off(prompts: Prompts, ending: str) -> str | None:
    return {"cut": prompts.cut_off, "refused": prompts.refused, "broken": prompts.broken}.get(ending)


def sign(prompts: Prompts, ending: str) -> str:
    """What stands at the end of a sub-call's reply that ended so; "" if it is whole."""
    return {"cut": prompts.sign_cut, "refused": prompts.sign_refused, "broken": prompts.sign_broken}.get(ending, "")


def turns_used(prompts: Prompts = DEFAULT_PROMPTS, *, most: int) -> str:
    """That a run had `most` turns and has none left, for `closing_message`."""
    return prompts.only_turn_used if most == 1 else fill(prompts.turns_used, max_turns=most)


def cells_message(
    prompts: Prompts = DEFAULT_PROMPTS,
    outcomes: Sequence[CellReport] = (),
    *,
    problem: str | None = None,
    skipped: int = 0,
    unclosed: bool = False,
    output_limit: int = OUTPUT_LIMIT,
) -> str:
    """What a turn's cells did, for the model to read; empty if there is nothing to say.

    Args:
        prompts: The templates.
        outcomes: Each cell that ran, in order.
        problem: What `problem_message` says of the reply.
        skipped: How many further cells of the reply were not run: the last that ran lost the worker, or its answer was
            refused.
        unclosed: The last cell had no closing fence; said only if that cell raised a SyntaxError.
        output_limit: Characters of standard output and error shown, all cells together. Tracebacks come on top.
    """
    several = len(outcomes) + skipped > 1
    limits = _shares([len(o.stdout) + len(o.stderr) for o in outcomes], output_limit)
    parts: list[str] = []
    for number, (outcome, limit) in enumerate(zip(outcomes, limits, strict=True), start=1):
        head = fill(prompts.cell, number=str(number)) + "\n" if several else ""
        parts.append(head + "\n\n".join(_cell_parts(prompts, outcome, limit)))
    if outcomes:
        last = outcomes[-1]
        if unclosed and last.error and "SyntaxError" in last.error.traceback:
            parts.append(prompts.unclosed)
        if names := _variables_line(prompts, last):
            parts.append(fill(prompts.variables, names=names))
    if skipped:
        reason = prompts.skipped_lost if outcomes and outcomes[-1].lost else prompts.skipped_refused
        parts.append(fill(prompts.skipped, count=skipped, reason=reason))
    if problem:
        parts.append(problem)
    return clean("\n\n".join(parts))


def _cell_parts(prompts: Prompts, outcome: CellReport, limit: int) -> list[str]:
    out_limit, err_limit = _shares([len(outcome.stdout), len(outcome.stderr)], limit)
    parts: list[str] = []
    if outcome.stdout.strip():
        parts.append(clip(outcome.stdout.rstrip("\n"), out_limit, prompts.left_out))
    if outcome.stderr.strip():
        parts.append(fill(prompts.stderr, text=clip(outcome.stderr.rstrip("\n"), err_limit, prompts.left_out)))
    if outcome.error is not None:
        template = prompts.interrupted if outcome.error.interrupted else prompts.error
        traceback = clip(outcome.error.traceback.rstrip("\n"), ERROR_LIMIT, prompts.left_out)
        parts.append(fill(template, traceback=traceback))
    if outcome.lost is not None:
        reason = outcome.lost.rstrip()
        parts.append(fill(prompts.lost, reason=reason if reason.endswith((".", "!")) else reason + "."))
    if not parts:
        parts.append(prompts.no_output)
    if outcome.lost_before is not None:
        parts.insert(0, fill(prompts.lost_before, reason=outcome.lost_before))
    if failed := sum(outcome.failures.values()):
        kinds = sorted(outcome.failures.items(), key=lambda item: (-item[1], item[0]))
        named = ", ".join(f"{kind.replace('_', ' ')} {count:,}" for kind, count in kinds if count)
        parts.append(fill(prompts.failures, failed=failed, total=outcome.subcalls, kinds=named))
    return parts


def _shares(wanted: Sequence[int], limit: int) -> list[int]:
    """How much of `limit` each gets: all it wants if that is less than a fair share, what it leaves goes to others."""
    shares = list(wanted)
    left, open_ = limit, len(wanted)
    for index in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        shares[index] = min(wanted[index], left // open_)
        left, open_ = left - shares[index], open_ - 1
    return shares


def _variables_line(prompts: Prompts, outcome: CellReport) -> str:
    """The newest variables that fit, newest last, and how many are not shown."""
    shown: list[str] = []
    length = 0
    for name, kind in reversed(list(outcome.variables.items())):
        item = f"{name} ({kind})"  # without values: those are only had where somebody watches
        length += len(item) + 2
        if length > VARIABLES_LIMIT:
            shown.append(fill(prompts.older, count=len(outcome.variables) - len(shown)))
            break
        shown.append(item)
    return ", ".join(reversed(shown))


def empty_answer_message(prompts: Prompts = DEFAULT_PROMPTS) -> str:
    """Said when `answer` was made ready without content."""
    return clean(prompts.empty_answer)


def closing_message(
    prompts: Prompts = DEFAULT_PROMPTS, *, reason: str, root_prompt: str | None = None, schema: str = ""
) -> str:
    """The request for a last reply, as text or JSON of `schema`, of a run that met a limit: `reason` says which."""
    shape = fill(prompts.closing_shape, schema=schema) if schema else ""
    return clean(fill(prompts.closing, reason=reason.rstrip("."), question=_question(prompts, root_prompt)) + shape)


def shape_message(prompts: Prompts = DEFAULT_PROMPTS, schema: str = "", *, in_cell: bool = True) -> str:
    """That the answer must fit a JSON schema, submitted in a cell or as the whole reply."""
    how = prompts.shape_in_cell if in_cell else prompts.shape_in_text
    return clean(fill(prompts.shape, how=how, schema=schema)).strip("\n")


def misfit_message(prompts: Prompts = DEFAULT_PROMPTS, problem: str = "", *, in_cell: bool = True) -> str:
    """Why an answer was refused."""
    return clean(fill(prompts.misfit if in_cell else prompts.misfit_in_text, problem=problem.rstrip(".")))
