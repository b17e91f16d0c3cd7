"""Head and tail of a text."""

from __future__ import annotations

import pytest

from asyncrlm.clipping import clip


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("abc", 3, "abc"),
        ("", 0, ""),
        ("a" * 6 + "b" * 2_000 + "c" * 5, 11, "a" * 6 + "\n[... 2,000 of 2,011 characters left out ...]\n" + "c" * 5),
        ("abc", 1, "a\n[... 2 of 3 characters left out ...]\n"),
        ("abc", 0, "\n[... 3 of 3 characters left out ...]\n"),
    ],
)
def test_head_and_tail_are_kept_and_the_rest_is_counted(text: str, limit: int, expected: str) -> None:
    assert clip(text, limit) == expected
