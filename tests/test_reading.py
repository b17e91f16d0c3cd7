"""JSON read in pieces: the same values as any other parser, or an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlm.repl import reading
from asyncrlm.repl.reading import Stopped, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4).filter(str.isprintable), inner,
                                                                max_size=6),
    max_leaves=40,
)  # fmt: skip


def never() -> bool:
    return False


@given(VALUES, st.integers(14, 40), st.sampled_from([None, (",", ":")]))
@settings(max_examples=100, deadline=None)
def test_any_value_is_read_whatever_the_pieces(value: Any, piece: int, separators: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE", piece)
        assert read_json(json.dumps(value, separators=separators).encode(), never) == value


@given(VALUES, st.integers(0, 200), st.sampled_from(list(b'[]{}",:\\0n x')), st.integers(14, 40))
@settings(max_examples=100, deadline=None)
def test_what_is_no_json_is_an_error(value: Any, at: int, byte: int, piece: int) -> None:
    line = bytearray(json.dumps([value, value], separators=(",", ":")).encode())
    line[at % len(line)] = byte
    try:
        expected = json.loads(line)
    except ValueError:
        expected = ValueError
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE", piece)
        try:
            read = read_json(line, never)
        except ValueError:  # also of a lone surrogate, and of a character that should be an escape
            return
    assert read == expected


@pytest.mark.parametrize(
    "line", [b"", b"[1,]", b'{"a":1,}', b"[1 2]", b"[1", b'["', b'"\\ud83d"', b"{1:2}", b"1 2", b"[" * 9999, b"nan"]
)
def test_these_are_none(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- any of them
        read_json(line, never)


def test_brackets_in_texts_are_no_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_CONTAINERS", 10)
    assert read_json(json.dumps(["[{" * 100] * 8).encode(), never) == ["[{" * 100] * 8
    with pytest.raises(ValueError, match="lists and dicts"):
        read_json(b"[" + b"[]," * 20 + b"0]", never)


def test_it_ends_as_soon_as_nobody_wants_to_know() -> None:
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        return asked > 5

    with pytest.raises(Stopped):
        read_json(b"[" + b"0," * 10_000_000 + b"0]", stopped)
    assert asked == 6
