"""The log: one JSON Lines file per tree of runs, written as it happens."""

from __future__ import annotations

import os
import re
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec
from anyio import CancelScope, CapacityLimiter

from .._version import __version__
from ..caught import said
from ..errors import ConfigurationError
from ..events import FORMAT_VERSION, Event
from .log import get_logger
from .text import plain

MAX_TEXT: Final = 65_536
"""Characters of one text that the log keeps, half of them its head and half its tail."""

FORMAT: Final = "asyncrlm"
"""What the first line of every log names as its format."""


class RLMLogger:
    """Keeps the trajectory of each run, and logs it to disk where told to.

    A run with a logger carries its trajectory in `RLMChatCompletion.metadata`. With `log_dir` each tree (a root run
    and all its descendants) is also written to a file of its own, `rlm_TIMESTAMP_UUID.jsonl`, readable by its owner
    only. The first line says the format's version; each other line is one event as strict JSON, written when it
    happens. The context is never written, long texts are clipped, keys and Authorization headers redacted.

    A logger holds no state of a run: share one between any number of concurrent runs.

    Args:
        log_dir: Folder of the files, made if it is missing; None for no files.
        file_name: How file names begin.
        max_text: Characters kept of one text, half head and half tail.

    Raises:
        ConfigurationError: if `log_dir` can't be made or `file_name` is not a plain name.
    """

    def __init__(
        self, log_dir: str | os.PathLike[str] | None = None, file_name: str = "rlm", *, max_text: int = MAX_TEXT
    ) -> None:
        if not file_name or Path(file_name).name != file_name:
            raise ConfigurationError(f"file_name={file_name!r}: give a name without a folder; log_dir= is the folder")
        if max_text < 1:
            raise ConfigurationError(f"max_text={max_text!r}: give at least 1 character")
        self.log_dir = None if log_dir is None else Path(log_dir)
        self.file_name = file_name
        self.max_text = max_text
        if self.log_dir is not None:
            try:
                self.log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigurationError(f"log_dir={str(log_dir)!r}: {error.strerror or error}") from error

    def __repr__(self) -> str:
        where = "in memory" if self.log_dir is None else f"log_dir={str(self.log_dir)!r}"
        return f"<RLMLogger {where}>"

    def for_tree(self, root_run_id: str) -> TreeLog:
        """The listener that writes the tree of `root_run_id`; without `log_dir` it writes nothing."""
        if self.log_dir is None:
            return TreeLog(None, root_run_id)
        stamp = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
        name = f"{self.file_name}_{stamp}_{re.sub(r'[^A-Za-z0-9-]', '', root_run_id)}.jsonl"
        return TreeLog(self.log_dir / name, root_run_id, max_text=self.max_text)


class TreeLog:
    """Writes the events of one tree to one file. Calling it takes the event and returns; `run` writes.

    Run `run()` as a task for as long as the tree lives, then `await aclose()`: it writes what is left, also when
    the tree is being cancelled. The run never waits for the disk: events that were not written yet stay in memory, with
    their prompts and replies, without a bound.

    A file that can't be written (a full disk) never ends a run: the log stops after its last whole line, and the next
    call raises the error, once, which makes it a `ListenerFailed` event for the others.
    """

    def __init__(self, path: Path | None, root_run_id: str, *, max_text: int = MAX_TEXT) -> None:
        self.path = path
        self._root_run_id = root_run_id
        self._max_text = max_text
        self._events: deque[Event] = deque()
        self._more = anyio.Event()
        self._fd: int | None = None
        # Its own limiter: one write at a time, in order, and never queued behind other users of worker threads.
        self._limiter = CapacityLimiter(1)
        self._closed = path is None
        self._error: BaseException | None = None

    def __call__(self, event: Event) -> None:
        """Take `event`; it is written soon, by `run` or `aclose`.

        Raises:
            Exception: once, after the file could not be written: why.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if not self._closed:
            self._events.append(event)
            self._more.set()

    async def run(self) -> None:
        """Write events as they come, until cancelled or closed."""
        while not self._closed:
            await self._more.wait()
            self._more = anyio.Event()
            await anyio.to_thread.run_sync(self._write, limiter=self._limiter)

    async def aclose(self) -> None:
        """Write what is left and close the file, also if cancelled meanwhile. Closing twice is fine."""
        if self._closed and self._fd is None:
            return
        with CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._finish, limiter=self._limiter)
        self._more.set()
        if self._error is not None:
            get_logger().warning("log not written", path=str(self.path), error=said(self._error))

    # ---- in a worker thread ------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._write()
        self._closed = True
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self) -> None:
        # The thread takes the events itself: a batch taken by `run` would be lost if it were cancelled before this.
        lines = bytearray()
        try:
            while self._events:
                lines += self._line(self._events.popleft())
            if not lines or self._closed or self.path is None:
                return
            if self._fd is None:
                self._fd = _open(self.path, self._root_run_id)
            _append(self._fd, lines)
        except BaseException as error:  # noqa: BLE001 - a log must not end a run: reported by the next call, or `aclose`
            self._error = error
            self._closed = True

    def _line(self, event: Event) -> bytes:
        fields: dict[str, Any] = {"type": type(event).__name__}
        fields |= {name: getattr(event, name) for name in event.__struct_fields__}
        return msgspec.json.encode(plain(fields, limit=self._max_text, redacting=True)) + b"\n"


def _open(path: Path, root_run_id: str) -> int:
    """A new file for its owner only, with its first line in it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    header = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "asyncrlm": __version__,
        "created": datetime.now(UTC).isoformat(),
        "run_id": root_run_id,
    }
    try:
        _append(fd, msgspec.json.encode(header) + b"\n")
    except OSError:
        os.close(fd)
        path.unlink()
        raise
    return fd


def _append(fd: int, data: bytes | bytearray) -> None:
    """Write all of `data`, or none of it: a reader never meets half a line."""
    start = os.fstat(fd).st_size
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        os.ftruncate(fd, start)
        raise
