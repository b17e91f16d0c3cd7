"""Replies on disk: one SQLite file that several processes may use at once. All of it blocks: call it in a thread."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...caught import described
from ...errors import ConfigurationError, LMError
from ...money import Settlement
from ..base import LMReply, LMRequest
from .asked import Asked, Call, CutOff, Seen, text_bytes, text_hash

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

FILE_NAME = "replies.sqlite"
FORMAT = 3
BUSY_TIMEOUT = 30.0
"""Seconds to wait for another process that writes."""

MARKED_AT_ONCE = 256
"""Replies read from a cache before it is written down that they were in use. Till then only this process knows."""

ROW_BYTES = 200
"""What keeping one reply takes beside its text, about."""

LEFT = 0.9
"""How much of its bound a cache that was full is emptied to."""

_SCHEMA = """
CREATE TABLE replies (
    key BLOB, run TEXT, number INTEGER, place TEXT NOT NULL, request TEXT, outcome TEXT NOT NULL, made REAL,
    PRIMARY KEY (key, run, number)
);
CREATE TABLE texts (hash TEXT PRIMARY KEY, text BLOB NOT NULL);
CREATE TABLE cached (key BLOB PRIMARY KEY, outcome TEXT NOT NULL, size INTEGER NOT NULL, used REAL NOT NULL);
CREATE INDEX by_use ON cached (used);
CREATE TABLE total (size INTEGER NOT NULL);
INSERT INTO total VALUES (0);
"""


class ReplyStore:
    """An open file of replies.

    Args:
        folder: Where it is; made if it is missing, for its owner alone.
        writes: False to open what there is, and never change it.
        max_bytes: What cached replies may take at most; recordings don't count, and stay. None for no end.

    Raises:
        ConfigurationError: if it can't be opened, or was written by a later release.
    """

    def __init__(self, folder: Path, *, writes: bool, max_bytes: int | None = None) -> None:
        self.path = folder / FILE_NAME
        self._max_bytes = max_bytes
        self._marked: dict[bytes, float] = {}
        """Key of a reply that was in use → when; to be written down."""
        try:
            self._db = self._opened(writes)
            with self._transaction() if writes else _nothing():
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                if version == 0 and writes:
                    for statement in _SCHEMA.split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {FORMAT}")
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(f"{self.path} can't be used as a file of replies: {error}") from error
        if version not in (FORMAT, 0):
            self._db.close()
            raise ConfigurationError(f"{self.path} has format {version}; this release reads format {FORMAT}")

    def _opened(self, writes: bool) -> sqlite3.Connection:
        options: dict[str, Any] = {"timeout": BUSY_TIMEOUT, "isolation_level": None, "check_same_thread": False}
        if not writes:
            if not self.path.exists():
                raise ConfigurationError(f"nothing was recorded in {self.path.parent}: {self.path.name} is missing")
            uri = self.path.resolve().as_uri()
            db = sqlite3.connect(f"{uri}?mode=ro", uri=True, **options)
            try:
                db.execute("SELECT 1 FROM replies LIMIT 1")
                return db
            except sqlite3.OperationalError as error:
                db.close()
                if "no such table" in str(error):
                    raise
                # In a folder that can't be written, SQLite needs to be told that nobody else does.
                return sqlite3.connect(f"{uri}?immutable=1", uri=True, **options)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self.path.chmod(0o600)
        db = sqlite3.connect(self.path, **options)
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new file: what is deleted can be given back
        _write_ahead(db)
        db.execute("PRAGMA synchronous = NORMAL")
        return db

    @contextmanager
    def _transaction(self) -> Generator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # ---- the cache ----

    def get(self, key: bytes) -> LMReply | None:
        """The cached reply of this key; None if it is not here.

        Raises:
            OSError: if it can't be read.
        """
        with self._readable():
            row = self._db.execute("SELECT outcome FROM cached WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        if self._max_bytes is not None:
            self._marked[key] = time.time()
            if len(self._marked) >= MARKED_AT_ONCE:
                self._mark_now()
        with self._readable():
            outcome, _ = _decoded(row[0])
        return outcome if isinstance(outcome, LMReply) else None

    def cache(self, key: bytes, reply: LMReply) -> None:
        """Keep a reply for equal calls to come. Where there is no room, those go that were not used for longest.

        Raises:
            OSError: if it can't be written.
        """
        outcome = _encoded(reply)
        size = len(outcome) + ROW_BYTES
        with self._written():
            self._mark()
            (old,) = self._db.execute("SELECT total(size) FROM cached WHERE key = ?", (key,)).fetchone()
            row = (key, outcome, size, time.time())
            self._db.execute("INSERT OR REPLACE INTO cached VALUES (?, ?, ?, ?)", row)
            self._db.execute("UPDATE total SET size = size + ?", (size - int(old),))
            if self._evict():
                self._db.execute("PRAGMA incremental_vacuum").fetchall()

    def _mark(self) -> None:
        marks = [(used, key) for key, used in self._marked.items()]
        self._marked.clear()
        self._db.executemany("UPDATE cached SET used = max(used, ?) WHERE key = ?", marks)

    def _mark_now(self) -> None:
        with suppress(OSError), self._written():  # it only matters to which of them go first
            self._mark()

    def _evict(self) -> int:
        """Delete what is too much; how many bytes went."""
        (size,) = self._db.execute("SELECT total(size) FROM total").fetchone()
        if self._max_bytes is None or size <= self._max_bytes:
            return 0
        too_much, gone, keys = size - LEFT * self._max_bytes, 0, list[tuple[bytes]]()
        for key, its in self._db.execute("SELECT key, size FROM cached ORDER BY used"):
            if gone >= too_much:
                break
            keys.append((key,))
            gone += its
        self._db.executemany("DELETE FROM cached WHERE key = ?", keys)
        self._db.execute("UPDATE total SET size = size - ?", (gone,))
        return gone

    # ---- recordings ----

    def take(self, key: bytes, place: str, seen: Seen) -> tuple[LMReply | LMError | CutOff, list[Settlement]] | None:
        """What one of the equal calls of this key came to that is not `seen` yet: best the one of the same place.

        With it, what its tries were booked as.

        All of it comes from one recorded tree, the newest that has the first call, as far as that has the others.

        Raises:
            OSError: if it can't be read.
        """
        with self._readable():
            return self._taken(key, place, seen)

    def _taken(self, key: bytes, place: str, seen: Seen) -> tuple[LMReply | LMError | CutOff, list[Settlement]] | None:
        run = self._run_of(key, seen)
        if run is None:
            return None
        seen.follows = seen.follows or run
        taken = seen.calls.setdefault((run, key), set())
        rows = self._db.execute(
            "SELECT number, outcome FROM replies WHERE key = ? AND run = ? ORDER BY place != ?, number",
            (key, run, place),
        )
        for number, outcome in rows:
            if number not in taken:
                taken.add(number)
                return _decoded(outcome)
        return None

    def _run_of(self, key: bytes, seen: Seen) -> str | None:
        row = self._db.execute(
            "SELECT run FROM replies WHERE key = ? ORDER BY run != ?, run DESC LIMIT 1", (key, seen.follows or "")
        ).fetchone()
        return None if row is None else row[0]

    def put(self, call: Call, outcome: LMReply | LMError | CutOff, bill: Sequence[Settlement] = ()) -> None:
        """Record what a call came to, and what its tries were booked as.

        Raises:
            OSError: if it can't be written.
        """
        with self._written():
            texts = [(text_hash(each.content), text_bytes(each.content)) for each in call.request.messages]
            self._db.executemany("INSERT OR IGNORE INTO texts VALUES (?, ?)", texts)
            row = (call.key, call.run, call.number, call.place, call.asked.text, _encoded(outcome, bill), time.time())
            self._db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    @contextmanager
    def _readable(self) -> Generator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise OSError(f"{self.path}: {error}") from error
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, msgspec.MsgspecError) as error:
            raise OSError(f"{self.path} is damaged: {described(error)}") from error

    @contextmanager
    def _written(self) -> Generator[None]:
        try:
            with self._transaction():
                yield
        except sqlite3.Error as error:
            raise OSError(f"{self.path}: {error}") from error

    def difference(self, asked: Asked, request: LMRequest, seen: Seen) -> str:
        """How a call that is not here differs from the most similar one that is.

        Raises:
            OSError: if it can't be read.
        """
        with self._readable():
            return self._difference(asked, request, seen)

    def _difference(self, asked: Asked, request: LMRequest, seen: Seen) -> str:
        if taken := seen.calls.get((self._run_of(asked.key, seen) or "", asked.key)):
            return f"{len(taken)} equal calls were recorded, and this is number {len(taken) + 1}"
        rows = self._db.execute("SELECT request FROM replies WHERE request IS NOT NULL ORDER BY made")
        best = max((json.loads(text) for (text,) in rows), key=lambda other: _likeness(asked, other), default=None)
        return "nothing is recorded" if best is None else self._first_difference(asked, request, best)

    def _first_difference(self, asked: Asked, request: LMRequest, other: dict[str, Any]) -> str:
        for name in ("backend", "model"):
            if getattr(asked, name) != other[name]:
                return f"the {name} was {other[name]!r} and is {getattr(asked, name)!r}"
        for number, (now, then) in enumerate(zip(asked.messages, other["messages"], strict=False)):
            where = f"message {number + 1} of {len(asked.messages)}"
            if now[0] != then[0]:
                return f"{where} was of the {then[0]} and is of the {now[0]}"
            if now[1] != then[1]:
                row = self._db.execute("SELECT text FROM texts WHERE hash = ?", (then[1],)).fetchone()
                recorded = row[0].decode("utf-8", "surrogatepass") if row else ""
                return (
                    f"{where} (of the {now[0]}) differs {_where_texts_part(recorded, request.messages[number].content)}"
                )
        if len(asked.messages) != len(other["messages"]):
            return f"it had {len(other['messages'])} messages and has {len(asked.messages)}"
        for name in sorted(asked.args.keys() | other["args"].keys()):
            now, then = (args.get(name, "not given") for args in (asked.args, other["args"]))
            if now != then:
                return f"the sampling argument {name!r} was {then!r} and is {now!r}"
        return f"the cap on output tokens was {other['cap']} and is {asked.cap}"

    def close(self) -> None:
        if self._marked:
            self._mark_now()
        self._db.close()


def _write_ahead(db: sqlite3.Connection) -> None:
    # Changing the mode of a new file does not wait for others that do the same.
    until = time.monotonic() + BUSY_TIMEOUT
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


@contextmanager
def _nothing() -> Generator[None]:
    yield


def _likeness(asked: Asked, other: dict[str, Any]) -> tuple[bool, int, bool, int]:
    same = 0
    for now, then in zip(asked.messages, other["messages"], strict=False):
        if list(now) != then:
            break
        same += 1
    return (
        asked.model == other["model"],
        same,
        len(asked.messages) == len(other["messages"]),
        sum(other["args"].get(name) == value for name, value in asked.args.items()),
    )


def _where_texts_part(then: str, now: str) -> str:
    pairs = enumerate(zip(then, now, strict=False))
    common = next((index for index, (one, other) in pairs if one != other), min(len(then), len(now)))
    start = max(0, common - 20)
    return f"at character {common + 1}: it was {then[start : common + 60]!r} and is {now[start : common + 60]!r}"


_OF_ERRORS = ("kind", "status", "retryable", "model", "where", "attempts")


def _encoded(outcome: LMReply | LMError | CutOff, bill: Sequence[Settlement] = ()) -> str:
    # With the standard library's ASCII, which keeps a lone surrogate.
    booked = {"booked": [msgspec.structs.asdict(each) for each in bill]} if bill else {}
    if isinstance(outcome, CutOff):
        return json.dumps(booked)
    if isinstance(outcome, LMError):
        error = {name: getattr(outcome, name) for name in _OF_ERRORS}
        return json.dumps({"error": outcome.message} | error | booked)
    return json.dumps(
        {
            "text": outcome.text,
            "reasoning": outcome.reasoning,
            "finish_reason": outcome.finish_reason,
            "model": outcome.model,
            "usage": msgspec.structs.asdict(outcome.usage),
        }
        | booked
    )


def _decoded(text: str) -> tuple[LMReply | LMError | CutOff, list[Settlement]]:
    fields: dict[str, Any] = json.loads(text)
    bill = msgspec.convert(fields.pop("booked", ()), list[Settlement])
    if not fields:
        return CutOff(), bill
    if "error" in fields:
        error = LMError(str(fields.pop("error")))
        for name in _OF_ERRORS:
            setattr(error, name, fields[name])
        return error, bill
    return msgspec.convert(fields | {"cached": True}, LMReply), bill
