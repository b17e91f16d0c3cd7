"""Files of a folder that stay files: opened when they are looked at, only some of them at a time."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from .lazytext import Source, Text

if TYPE_CHECKING:
    from collections.abc import Callable

    from .lazytext import Ask

    Open = Callable[[int], "tuple[int, str]"]

MOST_OPEN = 64
"""Files open at a time."""


class Folder:
    """The files of a context, by number.

    Args:
        entries: Name and size of each.
        ask: Opens the file of a number: gives a descriptor, or the path of one that is here to stay.
        counter: Gives what counts the characters of the file of a number.
    """

    def __init__(self, entries: list[tuple[str, int]], ask: Open, counter: Callable[[int], Ask]) -> None:
        self._entries = entries
        self._ask = ask
        self._counter = counter
        self._lock = threading.Lock()
        self._open: dict[int, Source] = {}  # the one used last at the end
        self._paths: dict[int, str] = {}

    def text(self, number: int) -> Text:
        """A file as a text."""
        name, size = self._entries[number]
        return Text(FolderSource(self, number, name, size), self._counter(number))

    def source(self, number: int) -> Source:
        """A file, open."""
        with self._lock:
            source = self._open.pop(number, None)
            if source is not None:
                self._open[number] = source
                return source
        name, size = self._entries[number]
        source = Source(self._opened(number, name), name, size)
        with self._lock:
            self._open[number] = source
            if len(self._open) > MOST_OPEN:  # closed once nobody reads it
                del self._open[next(iter(self._open))]
        return source

    def _opened(self, number: int, name: str) -> int:
        if number not in self._paths:
            try:
                fd, path = self._ask(number)
            except RuntimeError as error:  # a process that the cell forked, or a thread that outlived it
                raise OSError(f"the file {name!r} is not open here, and can't be opened: {error}") from None
            if fd >= 0:
                return fd
            self._paths[number] = path
        return os.open(self._paths[number], os.O_RDONLY | os.O_CLOEXEC)


class FolderSource(Source):
    """The bytes of one of them."""

    def __init__(self, folder: Folder, number: int, name: str, size: int) -> None:
        super().__init__(-1, name, size)
        self._folder, self._number = folder, number

    def read(self, start: int, stop: int) -> bytes:
        if start >= min(stop, self.size):
            return b""
        return self._folder.source(self._number).read(start, stop)


def folder_of(entries: list[tuple[str, int]], key: str, files: Any) -> Folder:
    """The folder that the host knows by `key`; `files` has `opener` and `counter`."""
    return Folder(entries, files.opener(key), lambda number: files.counter(f"{key}/{number}"))
