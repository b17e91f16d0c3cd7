"""What a keeper reads: frames for its worker, frames for itself, and files.

Its own are told by how a line begins. After the line of a `file` come `size` bytes of it, or `size` characters of
base64 where the stream is text; `more` says that another such frame goes on with the same file.
"""

from __future__ import annotations

import binascii
import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, Protocol

    class Listener(Protocol):
        """Who does what the host wants."""

        files: str

        def to_worker(self, data: bytes) -> None: ...
        def interrupt(self) -> None: ...
        def stop(self, reason: str) -> None: ...


_OWN = (b'{"t":"interrupt"', b'{"t":"close"', b'{"t":"file"')
_LONGEST_OWN = max(map(len, _OWN))


class Inward:
    """Takes the stream in any chunking."""

    def __init__(self, keeper: Listener, binary: bool) -> None:
        self._keeper = keeper
        self._binary = binary
        self._begun = b""  # of a line that may be ours
        self._inside = False  # of a frame for the worker
        self._left = 0  # of a file's piece
        self._quad = b""  # of its base64, what did not make up three bytes yet
        self._file = -1
        self._name = ""
        self._more = False

    def feed(self, data: bytes) -> None:
        data = self._begun + data
        self._begun = b""
        at, end = 0, len(data)
        passed = 0  # what lies between here and `at` is the worker's
        while at < end:
            if self._inside:
                newline = data.find(b"\n", at)
                self._inside = newline < 0
                at = newline + 1 or end
                continue
            if self._left:
                size = min(self._left, end - at)
                self._write(memoryview(data)[at : at + size])
                passed = at = at + size
                continue
            if data.startswith(_OWN, at):
                self._keeper.to_worker(data[passed:at])
                newline = data.find(b"\n", at)
                if newline < 0:
                    passed = at
                    break
                self._take(json.loads(data[at:newline]))
                passed = at = newline + 1
            elif end - at < _LONGEST_OWN and any(own.startswith(data[at:]) for own in _OWN):
                break
            else:
                self._inside = True
        self._keeper.to_worker(data[passed:at])
        self._begun = data[at:]

    def _take(self, frame: dict[str, Any]) -> None:
        kind = frame["t"]
        if kind == "interrupt":
            self._keeper.interrupt()
        elif kind == "close":
            self._keeper.stop("")
        else:
            if self._file >= 0 and str(frame["name"]) != self._name:  # the last one was given up
                self._more, self._left = False, 0
                self._end_piece()
            self._name = str(frame["name"])
            if self._file < 0:
                path = os.path.join(self._keeper.files, frame["name"])
                try:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                    self._file = os.open(path, flags, 0o600)
                except OSError as error:
                    self._keeper.stop(f"{frame['name']} could not be written: {error.strerror}")
            self._left, self._more, self._quad = frame["size"], frame.get("more", False), b""
            self._end_piece()

    def _write(self, view: memoryview) -> None:
        self._left -= len(view)
        if not self._binary:
            data = self._quad + view
            whole = len(data) // 4 * 4
            view, self._quad = memoryview(binascii.a2b_base64(data[:whole])), data[whole:]
        try:
            while view and self._file >= 0:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            self._keeper.stop(f"a file could not be written: {error.strerror}")
        self._end_piece()

    def _end_piece(self) -> None:
        if not self._left and not self._more and self._file >= 0:
            os.close(self._file)
            self._file = -1
