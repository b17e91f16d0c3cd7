"""`backend="offline"`: no model at all. Pure Python, deterministic, never touches a network, costs nothing.

As root it writes the cells of `cells.py`, one step a turn, as far as the turns allow. As sub-model it is the
extractive reader of `reader.py`. It keeps no state: which step comes next is read off the conversation.
It quotes; it does not understand. Use it to see a run work, in tests and in examples.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

import anyio.lowlevel
import anyio.to_thread

from ..base import LMClient, LMReply, LMUsage
from . import cells
from .reader import NOT_FOUND, read, summarize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..base import LMRequest, Message

ABOUT = (
    "This is asyncrlm's offline reader, not a language model: it can only quote the sentences of a passage that fit a "
    "question. Give it a question and a passage."
)
"""What a prompt without a passage gets."""

_CHARACTERS_PER_TOKEN = 4
_LONG = 20_000
"""Characters from which on reading is done in a worker thread, so that the event loop is not held up."""

_SHORTEST_PASSAGE = 200
"""Characters from which on a system message is taken for a passage, where the user's has none."""

_TURN = re.compile(r"\bTurn (\d+) of (\d+)")
_ASKED = re.compile(r"\bAnswer this:\n(.*?)(?=\n\nTurn \d+ of \d+|\Z)", re.DOTALL)
_REPL_MARK = re.compile(r"```repl|\banswer\[[\"']ready[\"']\]")
_STEP = re.compile(r"^# Step (\d)", re.MULTILINE)
_FAILED = re.compile(r"^The cell (?:raised|was stopped)|^Traceback \(most recent|variables are gone", re.MULTILINE)
_CLOSING = re.compile(r"^This run ends here: .*\bNo more code is run\.", re.MULTILINE)

_QUESTION_LABEL = re.compile(
    r"^[ \t#*]*(?:question|query|q|task)[ \t*]*:[ \t*]*(\S.*(?:(?<![?:])\n(?!\s*\n|\w+:).*)*)", re.I | re.M
)
_PASSAGE_LABEL = re.compile(
    r"^[ \t#*<]*(?:passage|text|context|document|excerpt|chunk|content|article|data|section)s?[^\n:>]{0,40}[:>][ \t*]*",
    re.I | re.M,
)
_SUMMARY = re.compile(
    r"\b(?:summar|condense|shorten|gist|main (?:points?|ideas?)|key (?:points?|facts?)|overview)", re.I
)
_QUESTION_SENTENCE = re.compile(r"[^.!?\n](?:[^.!?\n]|\.(?!\s)){2,400}\?")


class OfflineLM(LMClient):
    """The client behind `backend="offline"`."""

    model = "offline"

    @property
    def account(self) -> str:
        return "offline"

    @property
    def needs_price(self) -> bool:
        return False

    async def acomplete(self, request: LMRequest) -> LMReply:
        """The next step of a run, or what a passage says to a question. Never fails."""
        messages = request.messages
        size = sum(len(m.content) for m in messages)
        answer = partial(reply_to, messages)
        if size >= _LONG:
            # A limiter to itself: the gate bounds how many there are, and anyio's own is the application's.
            text = await anyio.to_thread.run_sync(answer, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        else:
            await anyio.lowlevel.checkpoint()
            text = answer()
        finish_reason = "stop"
        if request.output_cap is not None and len(text) > request.output_cap * _CHARACTERS_PER_TOKEN:
            text = text[: request.output_cap * _CHARACTERS_PER_TOKEN]
            finish_reason = "length"
        usage = LMUsage(input_tokens=_tokens(size), output_tokens=_tokens(len(text)))
        return LMReply(text=text, finish_reason=finish_reason, usage=usage, model=self.model)

    def __repr__(self) -> str:
        return "OfflineLM()"


def _tokens(characters: int) -> int:
    return -(-characters // _CHARACTERS_PER_TOKEN)


def reply_to(messages: Sequence[Message]) -> str:
    """The offline model's reply to a conversation: a root's if the rules of the REPL come first, else a reader's."""
    if _is_run(messages):
        return _next_step(messages)
    prompt, system = (_joined(messages, role) for role in ("user", "system"))
    reply = _read_prompt(prompt)
    if reply == ABOUT and len(system) >= _SHORTEST_PASSAGE:
        return read(_question_in(prompt), system).text
    return reply


def _joined(messages: Sequence[Message], role: str) -> str:
    return "\n\n".join(m.content for m in messages if m.role == role)


def _is_run(messages: Sequence[Message]) -> bool:
    """A root or child has a system message that explains the REPL, or one of a caller's own and numbered turns."""
    system = _joined(messages, "system")
    if not system:
        return False
    return bool(_REPL_MARK.search(system)) or any(m.role == "user" and _TURN.search(m.content) for m in messages)


# ---- as root ---------------------------------------------------------------------------------------------------------


def _next_step(messages: Sequence[Message]) -> str:
    users = [m.content for m in messages if m.role == "user"]
    asked = _ASKED.search(users[0]) if users else None
    question = asked[1].strip() if asked else ""
    turns = [found for text in users[-1:] for found in _TURN.finditer(text)]
    if len(users) > 1 and (not turns or _CLOSING.search(users[-1])):
        return _close(question, users[1:])
    steps = [int(n) for m in messages if m.role == "assistant" for n in _STEP.findall(m.content)]
    failed = bool(steps) and bool(_FAILED.search(users[-1]))
    left = int(turns[-1][2]) - int(turns[-1][1]) if turns else 9
    ask = cells.filled(cells.ASK, question=question)
    all_steps = [cells.LOOK, ask, cells.COMBINE]
    if not steps:
        if left == 0:
            return _cell("There is one turn only: look, split, ask and submit at once.", *all_steps)
        return _cell("First I look at the context: its type, its size, how it begins and ends.", cells.LOOK)
    if failed and steps.count(1) < 2:
        return _cell("That did not work out. I do it all again in one go.", *all_steps)
    if failed or steps[-1] >= 3:
        reason = "Nothing was submitted before the turns ran out."
        if failed:
            reason = next((line for line in reversed(users[-1].splitlines()) if re.match(r"\w*Error\b", line)), "")
        return _cell("I give up.", cells.filled(cells.GIVE_UP, reason=reason))
    if steps[-1] == 1:
        plan = "I split the text into overlapping parts and ask a sub-model about all of them in parallel"
        if left == 0:
            return _cell(f"{plan}, then combine what they found.", ask, cells.COMBINE)
        return _cell(f"{plan}.", ask)
    return _cell("I combine what the parts gave and submit it.", cells.COMBINE)


def _cell(plan: str, *code: str) -> str:
    return f"{plan}\n\n```repl\n{chr(10).join(code)}```"


def _close(question: str, seen: Sequence[str]) -> str:
    """A last reply in plain text, from what earlier turns printed."""
    found = read(question, "\n\n".join(seen[:-1])) if question else summarize("\n\n".join(seen[:-1]))
    if not found.sentences:
        return "The run ended before anything was found that answers this."
    return found.text


# ---- as sub-model ----------------------------------------------------------------------------------------------------


def _read_prompt(prompt: str) -> str:
    question, passage = split_prompt(prompt)
    if not passage.strip():
        return ABOUT
    if question and not _SUMMARY.search(question):
        return read(question, passage).text
    return summarize(passage).text if question else NOT_FOUND


def split_prompt(prompt: str) -> tuple[str, str]:
    """The question, or the instruction, and the passage of a prompt; the passage is empty if there is none.

    Labels such as "Question:" and "Passage:" are taken at their word. Without them, the question is the first
    paragraph or else the last one, and the passage is the rest.
    """
    passage_at = _PASSAGE_LABEL.search(prompt)
    if passage_at is not None:
        before, passage = prompt[: passage_at.start()], prompt[passage_at.end() :]
        labelled = _QUESTION_LABEL.search(before)
        if labelled is None and (after := _last_label(passage)) is not None:
            return after[1].strip(), passage[: after.start()]
        instruction = labelled[1].strip() if labelled else before.strip()
        if instruction:
            return _question_in(instruction), passage
    labelled = _QUESTION_LABEL.search(prompt)
    if labelled is not None:
        return labelled[1].strip(), prompt[: labelled.start()] + "\n\n" + prompt[labelled.end() :]
    head, _, rest = prompt.strip().partition("\n")
    if not rest:
        head, rest = _first_sentence(head)
    elif not head.rstrip().endswith(("?", ":")):
        paragraphs = [p for p in re.split(r"\n[ \t]*\n", prompt) if p.strip()]
        first, last = paragraphs[0], paragraphs[-1]
        if len(paragraphs) > 1 and last.rstrip().endswith("?") and not _SUMMARY.search(first) and len(last) < 600:
            return _question_in(last), "\n\n".join(paragraphs[:-1])
        if len(paragraphs) > 1:
            head, rest = first, "\n\n".join(paragraphs[1:])
    return _question_in(head), rest


def _last_label(text: str) -> re.Match[str] | None:
    """A question that is labelled after the passage, near its end."""
    tail = max(0, len(text) - 2_000)
    return _QUESTION_LABEL.search(text, tail)


def _question_in(instruction: str) -> str:
    """The sentences with a question mark of a short instruction, or all of it."""
    asked = _QUESTION_SENTENCE.findall(instruction[:4_000])
    return " ".join(a.strip() for a in asked) if asked else instruction[:1_000].strip()


def _first_sentence(line: str) -> tuple[str, str]:
    """A one-line prompt's question and passage: "Summarise: …", "Who did it? …"."""
    found = re.match(r"[^:?]{3,200}[:?]\s+", line)
    if found is None or len(line) - found.end() < 40:
        return line, ""
    return found[0], line[found.end() :]
