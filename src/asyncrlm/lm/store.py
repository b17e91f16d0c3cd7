"""Replies on disk: one SQLite file that several processes may use at once. All of it blocks: call it in a thread."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ConfigurationError, LMError
from .asked import Asked, Call, CutOff, Seen, text_bytes, text_hash
from .base import LMReply, LMRequest, LMUsage

if TYPE_CHECKING:
    from collections.abc import Generator

FILE_NAME = "replies.sqlite"
FORMAT = 2
BUSY_TIMEOUT = 30.0
"""Seconds to wait for another process that writes."""

_SCHEMA = """
CREATE TABLE replies (
    key BLOB, run TEXT, number INTEGER, place TEXT NOT NULL, request TEXT, outcome TEXT NOT NULL, made REAL,
    PRIMARY KEY (key, run, number)
);
CREATE TABLE texts (hash TEXT PRIMARY KEY, text BLOB NOT NULL);
"""


class ReplyStore:
    """An open file of replies.

    Args:
        folder: Where it is; made if it is missing, for its owner alone.
        writes: False to open what there is, and never change it.

    Raises:
        ConfigurationError: if it can't be opened, or was written by a later release.
    """

    def __init__(self, folder: Path, *, writes: bool) -> None:
        self.path = folder / FILE_NAME
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
            try:
                db = sqlite3.connect(f"{uri}?mode=ro", uri=True, **options)
                db.execute("SELECT 1 FROM replies LIMIT 1")
                return db
            except sqlite3.OperationalError:
                # In a folder that can't be written, SQLite needs to be told that nobody else does.
                return sqlite3.connect(f"{uri}?immutable=1", uri=True, **options)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self.path.chmod(0o600)
        db = sqlite3.connect(self.path, **options)
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

    def get(self, key: bytes) -> LMReply | LMError | None:
        """What the call of this key came to; None if it is not here."""
        row = self._db.execute(
            "SELECT outcome FROM replies WHERE key = ? AND run = '' AND number = 0", (key,)
        ).fetchone()
        outcome = None if row is None else _decoded(row[0])
        return None if isinstance(outcome, CutOff) else outcome

    def take(self, key: bytes, place: str, seen: Seen) -> LMReply | LMError | CutOff | None:
        """What one of the equal calls of this key came to that is not `seen` yet: best the one of the same place.

        All of it comes from one recorded tree, the newest that has the first call, as far as that has the others.
        """
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

    def put(self, call: Call, outcome: LMReply | LMError | CutOff) -> None:
        """Keep what a call came to.

        Raises:
            OSError: if it can't be written.
        """
        try:
            with self._transaction():
                if call.request is not None:
                    texts = [(text_hash(each.content), text_bytes(each.content)) for each in call.request.messages]
                    self._db.executemany("INSERT OR IGNORE INTO texts VALUES (?, ?)", texts)
                request = call.asked.text if call.asked else None
                row = (call.key, call.run, call.number, call.place, request, _encoded(outcome), time.time())
                self._db.execute("INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            raise OSError(f"{self.path}: {error}") from error

    def difference(self, asked: Asked, request: LMRequest, seen: Seen) -> str:
        """How a call that is not here differs from the most similar one that is."""
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


def _encoded(outcome: LMReply | LMError | CutOff) -> str:
    # With the standard library's ASCII, which keeps a lone surrogate.
    if isinstance(outcome, CutOff):
        return "{}"
    if isinstance(outcome, LMError):
        said = {"error": str(outcome), "kind": outcome.kind, "status": outcome.status, "retryable": outcome.retryable}
        return json.dumps(said)
    return json.dumps(
        {
            "text": outcome.text,
            "reasoning": outcome.reasoning,
            "finish_reason": outcome.finish_reason,
            "model": outcome.model,
            "usage": msgspec.structs.asdict(outcome.usage),
        }
    )


def _decoded(text: str) -> LMReply | LMError | CutOff:
    fields: dict[str, Any] = json.loads(text)
    if not fields:
        return CutOff()
    if "error" in fields:
        return LMError(fields.pop("error"), **fields)
    fields["usage"] = LMUsage(**fields["usage"])
    return LMReply(**fields, cached=True)
