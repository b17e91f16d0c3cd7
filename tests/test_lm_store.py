"""The file that replies are kept in."""

from __future__ import annotations

import multiprocessing
import sqlite3
from pathlib import Path

import pytest

from asyncrlm import ConfigurationError
from asyncrlm.lm.asked import Call
from asyncrlm.lm.base import LMReply
from asyncrlm.lm.store import FILE_NAME, ReplyStore


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
        store.put(Call(b"%d-%d" % (process, number)), LMReply(text=f"{process}-{number}"))
        store.put(Call(b"same"), LMReply(text="same"))
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
            assert isinstance(kept, LMReply)
            assert kept.text == f"{process}-{number}"
    store.close()
