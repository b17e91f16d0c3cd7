"""An extractive reader: picks, word for word, the sentences of a passage that fit a question. No model, only counting.

A sentence is scored by the question's words it holds, each weighted by how rare it is in the passage; names and numbers
count more, neighbouring sentences lend a little of what they hold, and words that stand together in the question should
stand together in the sentence. One pass over the text: about 0.5 s for 1 MB.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import pairwise

from msgspec import Struct

NOT_FOUND = "NOT FOUND"

_IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+(?:['\u2019][^\W_{_IDEOGRAPHS}]+)?")
_SENTENCE_END = re.compile(
    r"\n[ \t]*\n\s*"  # a blank line
    r"|(?<=[.!?])[\"')\]\u201d\u2019]*\s+(?=[\"'(\[\u201c\u2018]*[A-Z0-9])"  # the end of a sentence
    r"|(?<=[\u3002\uff01\uff1f])\s*"
    r"|(?<=[^\w\s])[ \t]*\n[ \t]*(?=[^a-z\s])"  # a line that ends in punctuation before one that starts afresh
    r"|\n[ \t]*(?=[-*•#|>\[{<]|\d+[.):]|\d\d|\w+(?: \d+)?[:=])"  # a list item, heading, row, or record of a log
)
_ABBREVIATION = re.compile(
    r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|etc|e\.g|i\.e|cf|No|Fig|Vol|Inc|Ltd|Co)\.[\"')\]]*$"
)
_LONGEST_SENTENCE = 800
_LEAST_SCORE = 0.4

_STOP = (
    "a about according all also am an and answer any are as at be because been being but by can context "
    "could did do document does doing each else few following for from get give had happen happens has "
    "have having he her here hers him his how i if in into is it its itself just like make may me mean "
    "means might more most much must my no nor not of off on once only or other our out over own passage "
    "please question quote same say says she should so some such tell text than that the their them then "
    "there these they this those through to too under until up us use very was we were what when where "
    "which while who whom whose why will with would you your "
)
_STOP_WORDS = frozenset(_STOP.split())
_SUFFIXES = (
    ("ational", "ate"), ("ization", "ize"), ("isation", "ize"), ("fulness", "ful"), ("ations", "ate"),
    ("ation", "ate"), ("ments", "ment"), ("ingly", ""), ("edly", ""), ("ness", ""), ("sses", "ss"), ("ions", ""),
    ("ies", "y"), ("ied", "y"), ("ing", ""), ("ion", ""), ("ers", ""), ("ed", ""), ("ly", ""), ("er", ""), ("es", ""),
    ("s", ""), ("e", ""),
)  # fmt: skip

_VERBS = (
    "become became|begin began begun|bite bit bitten|blow blew blown|break broke broken|bring brought|build built|"
    "burn burnt|buy bought|catch caught|choose chose chosen|come came|deal dealt|dig dug|draw drew drawn|"
    "drink drank drunk|drive drove driven|eat ate eaten|fall fell fallen|feed fed|feel felt|fight fought|find found|"
    "fly flew flown|forget forgot forgotten|freeze froze frozen|go went gone|grow grew grown|hang hung|hear heard|"
    "hide hid hidden|hold held|keep kept|know knew known|lead led|leave left|lend lent|lose lost|meet met|pay paid|"
    "ride rode ridden|ring rang rung|rise rose risen|run ran|see saw seen|sell sold|send sent|shake shook shaken|"
    "shine shone|shoot shot|sing sang sung|sink sank sunk|sit sat|sleep slept|speak spoke spoken|spend spent|"
    "stand stood|steal stole stolen|strike struck|swear swore sworn|swim swam swum|take took taken|teach taught|"
    "tear tore torn|think thought|throw threw thrown|understand understood|wake woke woken|wear wore worn|win won|"
    "write wrote written"
)
_IRREGULAR = {form: verb.split()[0] for verb in _VERBS.split("|") for form in verb.split()[1:]}
"""A question says "did … sit", its answer "sat"."""

_NUMBER = re.compile(r"\d")
_KINDS = (
    (
        re.compile(r"\b(?:when|what (?:year|date|time|day))\b", re.I),
        re.compile(r"\b\d{1,4}\b|(?:Jan|Feb|Ma[ry]|Apr|Ju[nl])"),
    ),
    (re.compile(r"\bhow (?:many|much|long|old|far|often|large|big)\b", re.I), _NUMBER),
    (re.compile(r"\bwho(?:se|m)?\b", re.I), re.compile(r"(?<=[\w,;] )[A-Z][a-z]+")),
)
_DEFINITION = re.compile(r"^\W*what(?:'s| is| are| was| were)\b|\bdefin", re.I)
_VERB_OF_DEFINITION = re.compile(
    r"^.{0,60}?\b(?:is|are|was|were|means?|refers? to|denotes?|consists? of)\b", re.I | re.S
)


class Found(Struct, frozen=True):
    """What a passage has for a question."""

    sentences: list[str]
    """In the order of the passage; empty if nothing fits."""
    score: float
    """Share of the question, from 0 to about 1.5, that the best of them covers."""

    @property
    def text(self) -> str:
        return " ".join(self.sentences) if self.sentences else NOT_FOUND


def stem(word: str) -> str:
    """A crude stem: the same for most forms of one word."""
    word = _IRREGULAR.get(word, word)
    for ending, instead in _SUFFIXES:
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            word = word[: -len(ending)] + instead
            break
    if len(word) > 4 and word.endswith("e"):
        word = word[:-1]
    return word[:-1] if len(word) > 3 and word[-1] == word[-2] else word


def sentences(text: str) -> list[str]:
    """The sentences of `text`, white space within them made single spaces; list items and table rows are sentences."""
    found: list[str] = []
    pending = ""
    start = 0
    for end in (*(m.end() for m in _SENTENCE_END.finditer(text)), len(text)):
        piece = " ".join(text[start:end].split())
        paragraph_ends = text[max(start, end - 80) : end].count("\n") > 1
        start = end
        if not piece:
            continue
        pending = f"{pending} {piece}" if pending else piece
        if paragraph_ends or len(pending) > _LONGEST_SENTENCE or not _ABBREVIATION.search(pending[-12:]):
            found.extend(_cut(pending))
            pending = ""
    return found + (_cut(pending) if pending else [])


def _cut(sentence: str) -> list[str]:
    if len(sentence) <= _LONGEST_SENTENCE:
        return [sentence]
    return [sentence[i : i + _LONGEST_SENTENCE] for i in range(0, len(sentence), _LONGEST_SENTENCE)]


class _Stems:
    """Words to stems, remembered for one text."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, text: str) -> list[str]:
        known = self._known
        stems: list[str] = []
        for word in _WORD.findall(text.lower()):
            if (found := known.get(word)) is None:
                found = known[word] = stem(word.partition("'")[0].partition("\u2019")[0])
            stems.append(found)
        return stems


class _Question:
    """The content words of a question, in order, and what kind of thing it asks for."""

    def __init__(self, text: str, stems: _Stems) -> None:
        words = _WORD.findall(text)
        kept = [
            (i, w)
            for i, w in enumerate(words)
            if w.lower() not in _STOP_WORDS and (len(w) > 1 or w.isdigit() or not w.isascii())
        ]
        self.terms: dict[str, float] = {}
        """Stem → weight: names and numbers weigh more."""
        for index, word in kept:
            named = _NUMBER.search(word) or (index > 0 and word[0].isupper())
            for term in stems.of(word):
                self.terms[term] = max(self.terms.get(term, 0.0), 1.6 if named else 1.0)
        order = [stems.of(word)[0] for _, word in kept]
        self.pairs = frozenset(pairwise(order))
        self.wanted = [kind for asks, kind in _KINDS if asks.search(text)]
        self.defines = bool(_DEFINITION.search(text))
        self.words = frozenset(stems.of(text))


def read(question: str, passage: str, *, most: int = 3) -> Found:
    """The sentences of `passage` that fit `question` best, at most `most`; none if too little of it is covered."""
    stems = _Stems()
    asked = _Question(question, stems)
    texts = sentences(passage)
    if not asked.terms or not texts:
        return Found([], 0.0)
    stemmed = [stems.of(text) for text in texts]
    held = [asked.terms.keys() & words for words in map(frozenset, stemmed)]
    # A sentence said many times is one sentence: else it would make its own words common, and so worth nothing.
    once = dict(zip(texts, held, strict=True))
    in_sentences = Counter(term for terms in once.values() for term in terms)
    weight = {term: w * (0.4 + math.log(1 + len(once) / (1 + in_sentences[term]))) for term, w in asked.terms.items()}
    whole = sum(weight.values())
    scores: list[tuple[float, int]] = []
    nothing: set[str] = set()
    for index, terms in enumerate(held):
        if terms and not _repeats(texts[index], stemmed[index], asked):
            near = (held[index - 1] if index else nothing) | (held[index + 1] if index + 1 < len(held) else nothing)
            scores.append((_score(texts[index], stemmed[index], terms, near, asked, weight, whole), index))
    if not scores:
        return Found([], 0.0)
    scores.sort(key=lambda s: (-s[0], s[1]))
    best = scores[0][0]
    own = held[scores[0][1]]
    if best < _LEAST_SCORE or (len(own) < 2 and len(asked.terms) > 2 and sum(weight[t] for t in own) < 0.5 * whole):
        return Found([], best)
    chosen: list[int] = []
    for score, index in scores:
        if len(chosen) == most or score < 0.8 * best:
            break
        if not any(texts[index] in texts[c] or texts[c] in texts[index] for c in chosen):
            chosen.append(index)
    return Found([texts[i] for i in sorted(chosen)], best)


def _repeats(text: str, stemmed: list[str], asked: _Question) -> bool:
    """Whether a sentence is only the question again."""
    return text.rstrip("\"')]\u201d\u2019 ").endswith("?") and len(frozenset(stemmed) - asked.words) <= 0.3 * len(
        stemmed
    )


def _score(
    text: str,
    stemmed: list[str],
    terms: set[str],
    near: set[str],
    asked: _Question,
    weight: dict[str, float],
    whole: float,
) -> float:
    covered = sum(weight[t] for t in terms) / whole
    lent = 0.25 * sum(weight[t] for t in near - terms) / whole
    pairs = sum(pair in asked.pairs for pair in pairwise(stemmed))
    score = covered + lent + 0.08 * min(pairs, 4)
    if asked.wanted and all(kind.search(text) for kind in asked.wanted):
        score *= 1.15
    if (
        asked.defines
        and (verb := _VERB_OF_DEFINITION.search(text))
        and any(stem(w) in terms for w in _WORD.findall(verb[0].lower()))
    ):
        score *= 1.15
    # A very short sentence is a heading, a very long one has the words by chance.
    length = len(stemmed)
    return score * (0.7 if length < 5 else 1.0) * (1.0 if length <= 40 else (40 / length) ** 0.35)


def summarize(passage: str, *, most: int = 3) -> Found:
    """The `most` sentences that hold most of what the passage often speaks of."""
    stems = _Stems()
    texts = sentences(passage)
    stemmed = [[s for s in stems.of(t) if s not in _STOP_WORDS and len(s) > 2] for t in texts]
    often = Counter(s for words in stemmed for s in frozenset(words))
    scores = [
        (sum(math.log(1 + often[s]) for s in frozenset(words)) / (8 + len(words)), -index)
        for index, words in enumerate(stemmed)
        if len(words) > 3
    ]
    chosen = sorted(-index for _, index in sorted(scores, reverse=True)[:most])
    return Found([texts[i] for i in chosen] or texts[:1], 1.0 if chosen else 0.0)
