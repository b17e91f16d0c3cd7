"""From a model's reply to the cells it asks to run.

Where a fenced block ends is decided by what Python itself would read: a fence inside a string belongs to the string, a
row of backticks anywhere else can't be Python and closes the block. So the text is read by a small lexer that knows
strings, comments and brackets, never by `compile`: compiling model text here would cost the event loop time it does not
have, and would print the model's SyntaxWarnings on the caller's terminal. Whether a cell compiles is found out where it
runs. All of it is linear in the length of the reply, whatever the reply holds.
"""

from __future__ import annotations

import re
import textwrap
from bisect import bisect_left
from typing import Literal, TypeAlias

from msgspec import Struct

RUNNABLE_TAGS = frozenset({"repl", "python", "py", "python3"})
"""Labels, in any case, of the fenced blocks that are run."""

_INDENT = r"[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?"
_OPENER_LINE = rf"(?P<indent>{_INDENT})(?P<fence>`{{3,}}|~{{3,}})[ \t]*(?P<info>[^\n]*)"
_TAG = r"<(?P<slash>/?)think(?:ing)?>"
_OUTSIDE = re.compile(rf"(?<!`){_TAG}|^{_OPENER_LINE}", re.IGNORECASE | re.MULTILINE)
_OPENER_HERE = re.compile(_OPENER_LINE)
_THINKING_END = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_BARE_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*$", re.MULTILINE)
_LABEL = re.compile(r"\{?[ \t]*\.?([A-Za-z0-9_+#-]*)")
_ONE_LINE_LABEL = re.compile(r"[A-Za-z0-9]++[ \t]++")

_LINE_IN_CODE = re.compile(
    r"[ \t]*(?:(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^\n]*)|(?P<unthink></think(?:ing)?>)[ \t]*)(?=\n|\Z)",
    re.IGNORECASE,
)
_CODE_TOKEN = re.compile(r"#[^\n]*+|\"\"\"|'''|[\"']|[(\[{]|[)\]}]|\n|(?<!`)`{3,}+(?=[ \t]*(?:\n|\Z))")
_STRING_REST = {
    '"""': re.compile(r'(?:[^\\"]++|\\.|"(?!""))*+"""', re.DOTALL),
    "'''": re.compile(r"(?:[^\\']++|\\.|'(?!''))*+'''", re.DOTALL),
    '"': re.compile(r'(?:[^\\"\n]++|\\.)*+(?:"|(?=\n))', re.DOTALL),
    "'": re.compile(r"(?:[^\\'\n]++|\\.)*+(?:'|(?=\n))", re.DOTALL),
}
_DANGLING = re.compile(
    r"(?:[-+*/%&|^~<>@=:\\]|(?<!\.\.)\.|\b(?:and|or|not|in|is|if|elif|else|for|while|import|from|lambda|def|class|with|as"
    r"|await|del|async|assert|global|nonlocal|try|except|finally))\Z"
)

_SUBMISSION_BY_NAME = re.compile(r"\bFINAL(?:_VAR)?\s*\(")
_REPL_NAMES = re.compile(
    r"\banswer\s*\[|\ba?(?:ll|r)m?m_query(?:_batched)?\s*\(|\bSHOW_VARS\s*\(|\bFINAL(?:_VAR)?\s*\("
)
_STATEMENT_LINE = re.compile(
    r"\s*(?:import \w|from [\w.]+ import |(?:async )?def \w+\(|class \w+.*:$|for .{1,200}? in .+:|while .+:"
    r"|if .+:$|elif .+:$|else:$|try:$|except.*:$|with .+:$|return\b|print\(|[\w.\[\]\"', ]++[-+*/|&]?=(?!=)\s*\S"
    r"|(?:await )?[\w.]+\(.*\)$|@\w)"
)
_CODE_LINE = re.compile(r"\s*(?:#.*|[)\]}]++[,)\]}.\w(]*+|[\"'].*[\"'],?|[\w.]+,|pass|break|continue|\"\"\".*|'''.*)$")
_REPL_FENCE = re.compile(r"^[ \t]*[`~]{3,}[ \t]*repl\b", re.IGNORECASE | re.MULTILINE)
_FENCES = ("```", "~~~")
_MOST_OF_A_LINE = 2_000
_INSPECTION = re.compile(r"^print\s*\(|\bcontext\b", re.MULTILINE)

Problem: TypeAlias = Literal["cut_block", "by_name", "no_label", "other_label", "only_thought", "no_block"]
"""What is wrong with a reply, by the name of the text of `Prompts` that says it."""


class ParsedReply(Struct, frozen=True):
    """What a reply asks to run."""

    cells: list[str]
    """Source of each runnable block, in order, its fence's indentation removed."""
    problem: Problem | None = None
    """What the model must be told because something it wrote did not run; None if all is well."""
    label: str = ""
    """The last label that is none of `RUNNABLE_TAGS`."""
    unclosed: bool = False
    """The last cell had no closing fence: it may have been cut off, though it does not look so."""


class _Block(Struct, frozen=True):
    """One fenced block: the text between its fences and where reading goes on."""

    body: str
    end: int
    closed: bool = True
    complete: bool = True
    """False if the text stops inside a string, a bracket or an expression."""
    ends_thinking: bool = False


def parse_reply(text: str, *, cut_off: bool = False) -> ParsedReply:
    """The runnable blocks of `text`, in order.

    Runnable is what stands in a fence of three or more backticks or tildes labelled `repl`, `python` or `py`, outside
    `<think>` and `<thinking>`. An unclosed last block counts unless it stops in the middle of a statement, or the reply
    is known to be `cut_off`: half a cell may look whole.
    """
    text = text.replace("\r\n", "\n")
    cells: list[str] = []
    ignored_label: str | None = None
    thought = dropped = unclosed = False
    fences = _BareFences(text)
    lexer = _Lexer(text, fences)
    pos, after_thinking = 0, False
    while True:
        found = _OPENER_HERE.match(text, pos) if after_thinking else None
        found = found or _OUTSIDE.search(text, pos)
        after_thinking = False
        if found is None:
            break
        if not found["fence"]:
            thought = after_thinking = True
            if found["slash"]:
                # A template may have opened the thinking for the model: all that came before was thought.
                cells.clear()
                pos = found.end()
                continue
            end = _THINKING_END.search(text, found.end())
            if end is None:
                break
            pos = end.end()
            continue
        label = _label(found["info"])
        runnable = label in RUNNABLE_TAGS
        if "`" in found["info"] and found["fence"][0] == "`":
            if runnable and (code := _one_line_cell(found["info"], found["fence"])):
                cells.append(code)
            pos = found.end()
            continue
        if not runnable:
            ignored_label = label
            closing = fences.closing(found.end(), found["fence"])
            pos = closing.end() if closing else found.end()
            continue
        block = lexer.block(found.end() + 1, found["fence"])
        pos = block.end
        if block.ends_thinking:
            cells.clear()
            thought = True
            continue
        if not block.complete or (cut_off and not block.closed):
            dropped = True
        elif block.body.strip():
            cells.append(_dedent(block.body, len(found["indent"])))
            unclosed = not block.closed
    problem = _problem(text, cells, ignored_label, thought=thought, dropped=dropped)
    return ParsedReply(cells, problem, ignored_label or "", unclosed)


def _label(info: str) -> str:
    found = _LABEL.match(info)
    return found[1].lower() if found else ""


def _one_line_cell(info: str, fence: str) -> str:
    """The code of a block that begins and ends in one line; "" if that is none."""
    label, line = _ONE_LINE_LABEL.match(info), info.rstrip(" \t")
    body = line.rstrip("`")
    if label is None or len(line) - len(body) < len(fence):
        return ""
    return body[label.end() :].rstrip(" \t")


class _BareFences:
    """The lines of a text that hold nothing but a fence; finds the one that closes a block by what CommonMark says."""

    def __init__(self, text: str) -> None:
        self._starts: list[int] = []
        self._found: list[re.Match[str]] = []
        self._longest_from: list[dict[str, int]] = []
        """By index: the longest fence of each character from here on, so that a hopeless search ends at once."""
        for bare in _BARE_FENCE.finditer(text):
            self._starts.append(bare.start())
            self._found.append(bare)
        longest: dict[str, int] = {}
        for bare in reversed(self._found):
            longest = longest | {bare[1][0]: max(len(bare[1]), longest.get(bare[1][0], 0))}
            self._longest_from.append(longest)
        self._longest_from.reverse()

    def closing(self, start: int, fence: str) -> re.Match[str] | None:
        """The first line from `start` on that closes a block opened with `fence`."""
        index = bisect_left(self._starts, start)
        if index == len(self._starts) or self._longest_from[index].get(fence[0], 0) < len(fence):
            return None
        while (bare := self._found[index])[1][0] != fence[0] or len(bare[1]) < len(fence):
            index += 1
        return bare


class _Lexer:
    """Finds the ends of runnable blocks in one text."""

    def __init__(self, text: str, fences: _BareFences) -> None:
        self._text = text
        self._fences = fences
        self._false_starts = 0
        """Blocks whose strings never ended, each of which may have cost a read to the end of the text."""

    def block(self, start: int, fence: str) -> _Block:
        """The block whose body begins at `start`, after the line that opened it with `fence`."""
        text = self._text
        if self._false_starts < 16:
            found = self._read(start, fence)
            if found.complete or found.closed:
                return found
            self._false_starts += 1
        else:
            found = self._cut_off(start)
        # A string that never ends swallows every fence after it. Take the first one: the cell then fails with a
        # SyntaxError that names the string, and the blocks after it are still seen.
        bare = self._fences.closing(start, fence)
        return found if bare is None else _Block(text[start : bare.start()], bare.end())

    def _read(self, start: int, fence: str) -> _Block:
        text = self._text
        pos, depth, line_start = start, 0, True
        last = ""
        """The last code before `pos` that is neither string, comment nor bracket."""
        while True:
            if line_start and (end := self._line_that_ends(pos, fence)):
                return _Block(text[start:pos], *end)
            token = _CODE_TOKEN.search(text, pos)
            if token is None:
                break
            what = token[0]
            last = text[pos : token.start()].rstrip() or last
            pos, line_start = token.end(), what == "\n"
            if what[0] == "`":
                if len(what) >= len(fence):
                    return _Block(text[start : token.start()], token.end())
            elif rest := _STRING_REST.get(what):
                string = rest.match(text, pos)
                if string is None:
                    return self._cut_off(start)
                pos, last = string.end(), ""
            elif what in "([{":
                depth += 1
            elif what in ")]}":
                depth, last = max(0, depth - 1), ""
        last = text[pos:].rstrip() or last
        complete = depth == 0 and not _DANGLING.search(last[-12:])
        return _Block(text[start:], len(text), closed=False, complete=complete)

    def _cut_off(self, start: int) -> _Block:
        return _Block(self._text[start:], len(self._text), closed=False, complete=False)

    def _line_that_ends(self, pos: int, fence: str) -> tuple[int, bool, bool, bool] | None:
        """(end, closed, complete, ends_thinking) if the line at `pos`, which is code, ends the block."""
        line = _LINE_IN_CODE.match(self._text, pos)
        if line is None:
            return None
        if line["unthink"]:
            return line.end(), True, True, True
        if line["fence"][0] != fence[0]:
            return None
        if not line["info"]:
            return (line.end(), True, True, False) if len(line["fence"]) >= len(fence) else None
        # The next block begins before this one was closed.
        return (pos, True, True, False) if _label(line["info"]) in RUNNABLE_TAGS else None


def _dedent(body: str, indent: int) -> str:
    """`body` without the indentation of its fence, or that of its own first line where the whole block shares it."""
    lines = body.split("\n")
    first = next(line for line in lines if line.strip())
    margin = min(indent, len(first) - len(first.lstrip(" \t")))
    if margin:
        lines = [line[min(margin, len(line) - len(line.lstrip(" \t"))) :] for line in lines]
    code = "\n".join(lines).rstrip("\n")
    return textwrap.dedent(code) if first[margin : margin + 1].isspace() else code


def _problem(text: str, cells: list[str], ignored: str | None, *, thought: bool, dropped: bool) -> Problem | None:
    if dropped:
        return "cut_block"
    if cells:
        return None
    if _SUBMISSION_BY_NAME.search(text):
        return "by_name"
    if ignored is not None:
        return "other_label" if ignored else "no_label"
    return "only_thought" if thought else "no_block"


def looks_like_code(text: str) -> bool:
    """Whether a reply that had to be an answer is a program instead.

    An answer may well contain code, in a fence among prose. A program is a `repl` block, a cell that uses the names of
    the REPL, a block alone that prints or reads `context`, or a text that is nothing but code.
    """
    cells = parse_reply(text).cells
    if any(_REPL_NAMES.search(cell) for cell in cells) or _REPL_FENCE.search(text):
        return True
    if cells:
        whole = text.strip()
        only_a_block = len(whole) >= 6 and whole.startswith(_FENCES) and whole.endswith(_FENCES)
        return only_a_block and any(_INSPECTION.search(cell) for cell in cells)
    return _is_bare_code(text)


def _is_bare_code(text: str) -> bool:
    lines = [line[:_MOST_OF_A_LINE] for line in text.split("\n") if line.strip()][:200]
    statements = sum(bool(_STATEMENT_LINE.match(line)) for line in lines)
    rest = sum(bool(_CODE_LINE.match(line)) for line in lines if not _STATEMENT_LINE.match(line))
    return (
        statements > 0 and statements + rest >= 0.9 * len(lines) and (len(lines) > 1 or bool(_REPL_NAMES.search(text)))
    )
