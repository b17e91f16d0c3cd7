"""`Text`: what it has of str means what it means there, and its file is read only where it is looked at."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncrlm.repl import shelf
from asyncrlm.repl.files import HostFile
from asyncrlm.repl.shelf import CharacterIndex, FileError
from asyncrlm.repl.worker import characters, clues, lazytext, searching
from asyncrlm.repl.worker.lazytext import Source, Text

alphabet = st.sampled_from("ab \n\r\té€😀")
texts = st.text(alphabet, max_size=80)
parts = st.text(alphabet, max_size=3)
places = st.none() | st.integers(-90, 90)


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Iterator[None]:
    """Blocks, windows and bounds of a few bytes, so that short texts meet all of them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (characters, lazytext, shelf):
            patch.setattr(module, "BLOCK", 7)
        patch.setattr(lazytext, "WINDOW", 11)
        patch.setattr(lazytext, "NEAR", 3)
        patch.setattr(lazytext, "SMALL", -1)
        patch.setattr(searching, "_AHEAD", 5)
        patch.setattr(clues, "_FIRST", 3)
        patch.setattr(clues, "_MOST", 13)
        patch.setattr(shelf, "STEP", 14)
        yield


def refused(*_: Any) -> Any:
    raise RuntimeError("a forked process asks nobody")


def lazy(text: str, ask: Any = refused) -> Text:
    fd, path = _temporary()
    os.write(fd, text.encode())
    os.unlink(path)
    return Text(Source(fd, "file", len(text.encode())), ask)


def _temporary() -> tuple[int, str]:
    import tempfile

    return tempfile.mkstemp()


@settings(max_examples=300, deadline=None)
@given(texts, places, places, st.none() | st.integers(-4, 4).filter(bool))
def test_slices(text: str, start: int | None, stop: int | None, step: int | None) -> None:
    assert lazy(text)[start:stop:step] == text[start:stop:step]
    assert lazy(text)[start:stop] == text[start:stop]


@settings(max_examples=100, deadline=None)
@given(texts, st.integers(-90, 90))
def test_items_and_length(text: str, at: int) -> None:
    mine = lazy(text)
    assert (len(mine), mine.nbytes, bool(mine)) == (len(text), len(text.encode()), bool(text))
    try:
        wanted: Any = text[at]
    except IndexError:
        with pytest.raises(IndexError, match="out of range"):
            _ = mine[at]
    else:
        assert mine[at] == wanted
    assert (str(mine), mine == text, mine == text + "x", mine == mine) == (text, True, False, True)


@settings(max_examples=300, deadline=None)
@given(texts, parts, places, places)
def test_finding(text: str, part: str, start: int | None, end: int | None) -> None:
    mine = lazy(text)
    assert (part in mine) == (part in text)
    assert mine.find(part) == text.find(part)
    assert mine.rfind(part) == text.rfind(part)
    assert mine.count(part) == text.count(part)
    assert mine.startswith(part) == text.startswith(part)
    assert mine.endswith(part) == text.endswith(part)
    assert mine.startswith((part, "b")) == text.startswith((part, "b"))
    assert mine.endswith((part, "b")) == text.endswith((part, "b"))
    if part:  # of an empty one beyond the end str has its own idea
        assert mine.find(part, start or 0, end) == text.find(part, start or 0, end)
        assert mine.rfind(part, start or 0, end) == text.rfind(part, start or 0, end)


@settings(max_examples=200, deadline=None)
@given(texts)
def test_lines(text: str) -> None:
    lines = list(lazy(text))
    assert "".join(lines) == text
    assert all(line.index("\n") == len(line) - 1 for line in lines[:-1])
    assert all(lines)


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(1, 20), st.integers(0, 19), st.none() | st.text(alphabet, min_size=1, max_size=2))
def test_chunks(text: str, size: int, overlap: int, on: str | None) -> None:
    if overlap >= size:
        with pytest.raises(ValueError, match="overlap"):
            next(lazy(text).chunks(size, overlap))
        return
    chunks = list(lazy(text).chunks(size, overlap, on=on))
    assert "".join([*chunks[:1], *(chunk[overlap:] for chunk in chunks[1:])]) == text
    assert all(0 < len(chunk) <= size for chunk in chunks)
    for before, after in itertools.pairwise(chunks):
        assert not overlap or before.endswith(after[:overlap])
        if on is None:
            assert len(before) == size
        else:
            assert before.endswith(on) or before.rfind(on, overlap) + len(on) <= overlap or len(before) == size


PATTERNS = [
    r"a", r"b+", r"a.b", r"(?P<x>a)|(b)", r"^.", r".$", r"(?m)^a", r"(?m)b$", r"\s+", r"\b", r"(?<=a)b", r"a(?!b)", r"",
    r"é|€", r"[^a]", r"(?i)A", r"\w\W", r"\Aa", r"b\Z", r"(a)?b",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(texts, st.sampled_from(PATTERNS))
def test_regular_expressions(text: str, pattern: str) -> None:
    wanted = list(re.finditer(pattern, text))
    if any(match.end() - match.start() > 12 for match in wanted):
        return
    found = list(lazy(text).finditer(pattern, longest=20))
    assert [match.span() for match in found] == [match.span() for match in wanted]
    for mine, match in zip(found, wanted, strict=True):
        assert (mine.group(), mine.groups(), mine.groupdict()) == (match.group(), match.groups(), match.groupdict())
        assert [mine.span(n) for n in range(match.re.groups + 1)] == [match.span(n) for n in range(match.re.groups + 1)]
        assert (mine[0], mine.start(), mine.end(), mine.lastgroup) == (match[0], *match.span(), match.lastgroup)
    first = lazy(text).search(re.compile(pattern), longest=20)
    assert (first is None) == (not wanted)


CLUES = [
    r"ab", r"b+a b", r"(?i)AB", r"(?i)é.?B", r"ab|ba|€", r"(a|b)é", r"[ab]{1,3}€a?", r"(?i:A)b", r"(?=.b)a",
    r"(?<=x)ab", r"(?:ab){2}", r"a{2}b", r"(a)\1", r"(?s)a.{0,3}b.{0,2}€", r"(?m)^ab$", r"\bab", r"(é)?a(?(1)b|€)",
    r"(?x) a  b # c", r"[^a]{6}ab", r".{5}(?:A|€)",
    r"(?:a|(?i:B))€", r"a?", r"€é(?!x)", r"ab\Z", r"\Ax",
    r"[A-Z]{2}", r"[^x]{3}", r"[ab]+ ", r"[é€]{2}a?", r"(?i:[a-b]{2})€", r"(?i)a(?-i:[ab])", r"(?s).{3}b",
    r"(?:[ab]|€){2}", r"[AB][AB]{1,2}é", r"(?i)[^b]{2}b", r"(?i)[ab]{3}|B€", r"\w{3}\b", r"(?a:\w{2}) ", r"a{2,}",
]  # fmt: skip
gaps = st.builds(lambda fill, count: fill * count, st.sampled_from(["x", "é", "\n", "x😀"]), st.integers(0, 60))
sparse = st.lists(gaps | st.text(st.sampled_from("abAB é€"), max_size=5), max_size=9).map("".join)


@settings(max_examples=600, deadline=None)
@given(sparse, st.sampled_from(CLUES))
@example("x😀" * 40 + "ab", r"[^a]{6}ab")
def test_what_is_far_from_a_match_is_left_out(text: str, pattern: str) -> None:
    wanted = [(match.span(), match.groups()) for match in re.finditer(pattern, text)]
    found = lazy(text).finditer(pattern, longest=12)
    assert [(match.span(), match.groups()) for match in found] == wanted


ONE = [
    r"[A-F]",
    r"\d",
    r"(?i)[a-k]",
    r"(?i)[^s]",
    r"(?a)\S",
    r"(?a:\S)",
    r"\s",
    r"[^\x00-\x7f]",
    r"(?i:[\w-])",
    r"(?i)x(?-i:[k])",
]


def test_a_set_has_every_byte_of_its_characters() -> None:
    everything = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    letters = [f"(?i){re.escape(chr(code))}" for code in range(128)]
    for pattern in ONE + letters:
        compiled = re.compile(pattern)
        matched = "".join(compiled.findall(everything))
        for parts, table, _ in clues.known(pattern, compiled.flags).clues:
            seen = matched.encode()
            assert set(seen.translate(table)) <= set(parts[0]), pattern
    [known] = clues.known(r"[A-F]{3}\d{4}x*", re.UNICODE).clues[1:]
    assert (known.parts, known.table, known.before) == ((b"\1" * 3,), bytes(65 <= code < 71 for code in range(256)), 0)
    assert not clues.known(r"\w+.(?-i:k)|[^a]", re.UNICODE).clues


def test_nothing_need_be_known_of_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = clues.Clue((b"bb", b"cd"), None, clues.UNBOUNDED)
    assert clues.known(r"a+bb|cd(?i:E)", re.UNICODE) == ((wanted,), clues.UNBOUNDED)
    monkeypatch.setattr(clues, "_parser", refused)
    assert clues.known("ab", re.UNICODE) == ((), clues.UNBOUNDED)
    match = lazy("x" * 90 + "ab").search("ab", longest=5)
    assert match is not None
    assert match.span() == (90, 92)


def test_matches_and_their_bounds() -> None:
    text = lazy("x" * 50 + "key=1 value=22 " + "y" * 100)
    match = text.search(r"(?P<name>\w{3,5})=(\d+)", longest=16)
    assert match is not None
    assert (match["name"], match.group(1, 2), match.groups(), repr(match)[:16]) == (
        "xxkey",
        ("xxkey", "1"),
        ("xxkey", "1"),
        "<match of '(?P<n",
    )
    for group in (3, -1):
        with pytest.raises(IndexError, match="no such group"):
            match.group(group)
    with pytest.raises(ValueError, match="more than 10 characters; bound the pattern"):
        text.search("x+", longest=10)
    with pytest.raises(TypeError, match="pattern that is a str"):
        text.search(re.compile(b"x"))  # type: ignore[arg-type]
    absent = text.search(r"(q)?key")
    assert absent is not None
    assert (absent.span(1), absent.groups("-"), absent.groups()) == ((-1, -1), ("-",), (None,))


def test_what_a_text_is_not() -> None:
    text = lazy("ab")
    assert repr(text) == "<Text 'file', 2 bytes: 'ab'>"
    assert "\ud800" not in text
    assert text != "\ud800"
    assert (text.find("\ud800"), text.rfind("\ud800"), text.count("\ud800")) == (-1, -1, 0)
    with pytest.raises(ValueError, match="substring not found"):
        text.index("c")
    assert text.index("b") == 1
    with pytest.raises(TypeError, match="requires a str"):
        _ = 5 in text
    with pytest.raises(AttributeError, match="no 'upper'; it is no str: take a part"):
        text.upper()
    with pytest.raises(AttributeError, match=r"no 'nothing'$"):
        _ = text.nothing
    with pytest.raises(TypeError, match="can't be pickled"):
        text.__reduce__()
    with pytest.raises(ValueError, match="byte 0xff at position 1"):
        str(bad(b"a\xffb"))


def test_too_large_for_a_str(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytext, "LARGEST_STR", 1)
    with pytest.raises(ValueError, match="too large for one str"):
        str(lazy("ab"))


def bad(data: bytes) -> Text:
    fd, path = _temporary()
    os.write(fd, data)
    os.unlink(path)
    return Text(Source(fd, "file", len(data)), refused)


# ---- the index of the host -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(texts, places, places)
def test_the_host_counts_alike(text: str, start: int | None, stop: int | None) -> None:
    counted = characters.Counts(len(text.encode()))

    def ask(block: int, nbytes: int | None, character: int | None) -> tuple[bytes, str]:
        while not counted.reaches(nbytes, character):
            data = text.encode()[counted.nbytes : counted.nbytes + 7]
            counted.add(shelf.array("I", [characters.characters(data)]), counted.blocks)
        return counted.since(block).tobytes(), "little"

    assert lazy(text, ask)[start:stop] == text[start:stop]
    assert len(lazy(text, ask)) == len(text)


@pytest.mark.anyio
async def test_a_file_that_shrinks_while_it_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("x" * 100)
    index = CharacterIndex(HostFile(name="text", path=path, size=200))
    await index.build(anyio.CapacityLimiter(1))
    assert len(await index.since(0, 80, None)) > 0
    with pytest.raises(FileError, match="shorter than its 200 bytes"):
        await index.since(0, None, 150)
    gone = CharacterIndex(HostFile(name="text", path=tmp_path / "none", size=200))
    await gone.build(anyio.CapacityLimiter(1))
    with pytest.raises(FileError, match="No such file"):
        await gone.since(0, 1, None)
