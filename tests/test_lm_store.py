"""The file that replies are kept in."""

from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

import pytest

from asyncrlm import ConfigurationError
from asyncrlm.lm.base import LMReply, LMRequest, Message
from asyncrlm.lm.cache.asked import Asked, Call, Seen
from asyncrlm.lm.cache.store import FILE_NAME, ReplyStore


def test_a_file_of_a_later_release_or_of_something_else_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigurationError, match="format 99"):
        ReplyStore(tmp_path, writes=True)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / FILE_NAME).write_text("no database at all, but a text that is long enough to be looked at\n" * 20)
    for writes in (True, False):
        with pytest.raises(ConfigurationError, match="can't be used"):
            ReplyStore(tmp_path / "x", writes=writes)
    with pytest.raises(ConfigurationError, match="nothing was recorded"):
        ReplyStore(tmp_path / "y", writes=False)


def _writes(folder: Path, process: int, count: int) -> None:
    store = ReplyStore(folder, writes=True)
    for number in range(count):
        store.cache(b"%d-%d" % (process, number), LMReply(text=f"{process}-{number}"))
        store.cache(b"same", LMReply(text="same"))
    store.close()


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_writes, args=(tmp_path, process, 50)) for process in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    store = ReplyStore(tmp_path, writes=False)
    for process in range(4):
        for number in range(50):
            kept = store.get(b"%d-%d" % (process, number))
            assert kept is not None
            assert kept.text == f"{process}-{number}"
    store.close()


def test_the_replies_that_were_not_used_for_longest_go_first(tmp_path: Path) -> None:
    reply = LMReply(text="x" * 1_000)
    store = ReplyStore(tmp_path, writes=True, max_bytes=20_000)
    for number in range(24):
        store.cache(b"%d" % number, reply)
        assert store.get(b"0") is not None
    kept = [number for number in range(24) if store.get(b"%d" % number) is not None]
    assert kept[0] == 0
    assert kept[1:] == list(range(24 - len(kept) + 1, 24))
    assert 10 <= len(kept) <= 15
    store.close()
    # What one process has used, another knows when it makes room.
    with_marks = ReplyStore(tmp_path, writes=True, max_bytes=20_000)
    assert with_marks.get(b"%d" % kept[1]) is not None
    with_marks.close()
    other = ReplyStore(tmp_path, writes=True, max_bytes=6_000)
    other.cache(b"new", reply)
    left = [number for number in range(24) if other.get(b"%d" % number) is not None]
    assert kept[1] in left
    assert len(left) <= 4
    other.close()


def test_a_cache_that_is_bounded_does_not_grow_and_leaves_recordings_alone(tmp_path: Path) -> None:
    request = LMRequest(messages=(Message("user", "?"),))
    asked = Asked.of("b", "m", request, {}, None)
    store = ReplyStore(tmp_path, writes=True, max_bytes=200_000)
    store.put(Call(asked.key, 0, "run", "", asked, request), LMReply(text="recorded"))
    for number in range(2_000):
        store.cache(b"%d" % number, LMReply(text="x" * 1_000))
    store.close()
    assert (tmp_path / FILE_NAME).stat().st_size < 600_000
    store = ReplyStore(tmp_path, writes=False)
    taken = store.take(asked.key, "", Seen())
    assert taken is not None
    assert isinstance(taken[0], LMReply)
    store.close()


def test_a_reply_larger_than_the_bound_is_not_kept(tmp_path: Path) -> None:
    store = ReplyStore(tmp_path, writes=True, max_bytes=1_000)
    store.cache(b"large", LMReply(text="x" * 2_000))
    store.cache(b"small", LMReply(text="x"))
    assert store.get(b"large") is None
    assert store.get(b"small") is not None
    store.close()


def _fills(folder: Path, process: int) -> None:
    store = ReplyStore(folder, writes=True, max_bytes=30_000)
    for number in range(100):
        store.cache(b"%d-%d" % (process, number), LMReply(text="x" * 1_000))
        store.get(b"%d-%d" % (1 - process, number))
    store.close()


def test_several_processes_keep_one_bound(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_fills, args=(tmp_path, process)) for process in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        (said,) = db.execute("SELECT size FROM total").fetchone()
        (count, really) = db.execute("SELECT count(*), sum(size) FROM cached").fetchone()
    db.close()
    assert said == really <= 30_000
    assert count >= 20
