"""The cells that the offline model writes as root: inspect, split and ask in parallel, combine and submit.

They are ordinary model code and run where any model's code runs. Each step leaves its results in variables that the
next one uses. `@question@` stands for the question as a Python literal, empty if it is to be found in the context.
"""

from __future__ import annotations

LOOK = '''\
# Step 1: look
def as_text(value):
    """The text of any context."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    if hasattr(value, "items"):  # a dict, or documents with names
        return "\\n\\n".join(f"{key}: {as_text(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return "\\n\\n".join(as_text(item) for item in value)
    return str(value)


text = as_text(context)
print(f"{type(context).__name__}, {len(text):,} characters, {text.count(chr(10)) + 1:,} lines")
print("begins:", text[:300])
print("ends:", text[-300:])
'''

ASK = '''\
# Step 2: split and ask
import re

question = @question@
SIZE, OVERLAP, MOST = 6_000, 400, 200


def find_question(text):
    """The question that stands at the head or at the end of a text."""
    edges = text[:3_000].splitlines()[:12] + text[-3_000:].splitlines()[-12:]
    lines = [line.strip() for line in edges if line.strip()]
    for line in lines:
        if line.lower().startswith(("question:", "q:", "task:")) and line.partition(":")[2].strip():
            return line.partition(":")[2].strip()
    asked = [line for line in lines if "?" in line]
    if asked:
        sentences = re.split(r"(?<=[.!?])\\s+", min(asked, key=len))
        return next(s for s in sentences if "?" in s)[-500:]
    return ""


def pieces(text):
    """Overlapping parts of `text` of at most SIZE characters, cut between paragraphs, lines or words if possible."""
    start = 0
    while True:
        end = start + SIZE
        if end >= len(text):
            yield text[start:]
            return
        for boundary in ("\\n\\n", "\\n", ". ", " "):
            cut = text.rfind(boundary, start + SIZE // 2, end)
            if cut != -1:
                end = cut + len(boundary)
                break
        yield text[start:end]
        overlap = text[max(end - OVERLAP, start + 1):end]
        begin = re.search(r"\\n|[.!?] |$", overlap).end()
        start = end - len(overlap) + begin


def ask_all(prompts):
    """The reply to each prompt; one that failed begins with "Error:", as a FailedReply does."""
    try:
        return list(llm_query_batched(prompts))
    except Exception as problem:
        print("the batch failed:", problem)
        return [f"Error: {problem}"] * len(prompts)


def useful(replies):
    """What the replies found, each thing once."""
    found = [reply.strip() for reply in replies if not reply.startswith("Error:") and "NOT FOUND" not in reply]
    return [reply for reply in dict.fromkeys(found) if reply]


question = question or find_question(text)
parts = [part for part in pieces(text) if part.strip()]
room = MOST
left = SHOW_LIMITS()
if isinstance(left, dict) and isinstance(left.get("calls"), int):
    room = max(1, min(MOST, left["calls"] - 1))
if len(parts) > room:
    # Too many to ask all: keep those that hold most of the question's longer words, in the order of the text.
    words = {word for word in re.findall(r"\\w+", question.lower()) if len(word) > 3}
    ranked = sorted(range(len(parts)), key=lambda i: -sum(word[:6] in parts[i].lower() for word in words))
    parts = [parts[i] for i in sorted(ranked[:room])]
ORDER = "From the passage below, copy the sentences that answer the question word for word, or reply NOT FOUND."
SUMMARY = "Summarise the passage below in three sentences."
if question:
    prompts = [f"{ORDER}\\n\\nQuestion: {question}\\n\\nPassage:\\n{part}" for part in parts]
else:
    prompts = [f"{SUMMARY}\\n\\nPassage:\\n{part}" for part in parts]
replies = ask_all(prompts)
failed = [reply for reply in replies if reply.startswith("Error:")]
found = useful(replies)
print(f"question: {question!r}")
print(f"{len(parts):,} parts asked, {len(failed):,} failed, {len(found):,} with something useful")
for reply in found[:5]:
    print("-", reply[:200])
'''

COMBINE = """\
# Step 3: combine and submit
joined = "\\n\\n".join(found)
while len(found) > 1:
    # Ask again over what was found, in as few prompts as fit, until one reply is left or nothing gets shorter.
    rounds = [part for part in pieces(joined) if part.strip()]
    if question:
        again = [f"{ORDER}\\n\\nQuestion: {question}\\n\\nPassage:\\n{part}" for part in rounds]
    else:
        again = [f"{SUMMARY}\\n\\nPassage:\\n{part}" for part in rounds]
    kept = useful(ask_all(again))
    if not kept or len("\\n\\n".join(kept)) >= len(joined):
        found = (kept or found)[:3]
        break
    found, joined = kept, "\\n\\n".join(kept)
if found:
    final = "\\n\\n".join(found)
elif failed:
    final = f"No answer: {len(failed):,} of {len(parts):,} sub-calls failed, the first with: {failed[0]}"
else:
    final = "The context holds nothing that answers this."
answer["content"] = final
answer["ready"] = True
"""

GIVE_UP = """\
# Step 4: give up
answer["content"] = "No answer: the offline model's cells failed. " + @reason@
answer["ready"] = True
"""


def filled(code: str, **values: str) -> str:
    """`code` with each `@name@` replaced by its value as a literal."""
    for name, value in values.items():
        code = code.replace(f"@{name}@", repr(value))
    return code
