"""Server-sent events, however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrlm.lm.http import sse
from asyncrlm.lm.http.sse import EventLines


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1).map(str.encode)),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.data(),
)
def test_events_come_out_whole_whatever_the_chunks(texts: list[bytes], end: bytes, data: st.DataObject) -> None:
    stream = b"".join(b": ping" + end + b"event: x" + end + b"data: " + text + end + end for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    lines, events = EventLines(), list[bytes]()
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        events += lines.feed(stream[start:stop])
    assert [*events, *lines.end()] == texts


def test_data_over_several_lines_and_a_missing_last_blank_line() -> None:
    lines = EventLines()
    assert lines.feed(b"data: a\ndata:b\nid: 5\n\ndata: c") == [b"a\nb"]
    assert lines.end() == [b"c"]
    assert lines.end() == []


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT", 100)
    lines = EventLines()
    assert lines.feed(b"data: 0123456789\n" * 8) == []
    with pytest.raises(ValueError, match="more than 100 bytes"):
        lines.feed(b"data: 0123456789\n" * 3)
