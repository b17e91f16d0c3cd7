"""Lines for people on a stream that nobody may ever have to wait for."""

from __future__ import annotations

import os
import select
import sys
from collections import deque
from typing import Final, TextIO

_PENDING: Final = 1_000
_COLUMNS: Final = 80
"""Of a terminal that does not say."""
_CLEAR: Final = "\r\x1b[K"


class Lines:
    """Lines on their way to a stream that may be slow, closed, or not there at all."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._waiting: deque[str] = deque(maxlen=_PENDING)
        self._broken = False
        self._passing = ""
        """What stands in the terminal's last line until the next line is written."""

    def _target(self) -> TextIO | None:
        return self._stream if self._stream is not None else sys.stderr

    def wants_colour(self) -> bool:
        return not os.environ.get("NO_COLOR") and self._on_terminal()

    def _on_terminal(self) -> bool:
        """Whether it is one that knows escapes."""
        if os.environ.get("TERM") == "dumb":
            return False
        try:
            target = self._target()
            return target is not None and target.isatty()
        except (AttributeError, ValueError):
            return False

    def add(self, line: str) -> None:
        self._waiting.append(line)

    def flush(self) -> None:
        """Write what can be written without waiting."""
        target = self._target()
        if self._broken or target is None:
            self._waiting.clear()
            return
        try:
            while self._waiting and _has_room(target):
                clear, self._passing = _CLEAR if self._passing else "", ""
                target.write(f"{clear}{_encodable(self._waiting[0], target)}\n")
                target.flush()
                self._waiting.popleft()
        except (OSError, ValueError):
            # Closed, or its reader is gone: nobody is left to tell.
            self._broken = True

    def status(self, text: str) -> None:
        """On a terminal, show `text` in the last line until the next is written, or "" comes; elsewhere do nothing."""
        target = self._target()
        if self._broken or target is None or text == self._passing or not self._on_terminal():
            return
        try:
            if not self._waiting and _has_room(target):
                columns = os.get_terminal_size(target.fileno()).columns or _COLUMNS
                self._passing = _encodable(text, target)[: columns - 1]  # a line that wraps could not be taken back
                target.write(_CLEAR + self._passing)
                target.flush()
        except (OSError, ValueError):
            self._broken = True


def _has_room(stream: TextIO) -> bool:
    """Whether a line can be written to `stream` without waiting; a pipe with room has room for 4 KiB."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return True
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


def _encodable(line: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return line.encode(encoding, "backslashreplace").decode(encoding)
