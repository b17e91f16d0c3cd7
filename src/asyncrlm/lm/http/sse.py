"""Server-sent events, without any reading of sockets."""

from __future__ import annotations

MAX_EVENT = 16 * 1024 * 1024
"""Bytes of one event at most: a server that never ends one must not fill the memory."""


MAX_STREAM = 256 * 1024 * 1024
"""Bytes of one stream at most: some hundred times the text that it brings."""


class EventLines:
    """Cuts a stream of bytes, however it is chunked, into the data of its events."""

    __slots__ = ("_data", "_held", "_pieces", "_rest", "_returned", "_total")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        """Of a line that has not ended."""
        self._rest = 0
        """Bytes of those."""
        self._returned = b""
        """A carriage return at the very end, which may be half of a line's end: it waits for what follows."""
        self._total = 0
        self._data: list[bytes] = []
        self._held = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that ends in `chunk`.

        Raises:
            ValueError: when an event grows past `MAX_EVENT`, or the stream past `MAX_STREAM`.
        """
        self._total += len(chunk)
        if self._total > MAX_STREAM:
            raise ValueError(f"a stream of more than {MAX_STREAM:,} bytes")
        text, self._returned = self._returned + chunk, b""
        if text.endswith(b"\r"):
            text, self._returned = text[:-1], b"\r"
        # Only what is new is looked at, or an event in small pieces would take the square of its size.
        first, *lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._pieces.append(first)
        self._rest += len(first)
        if lines:
            lines = [b"".join(self._pieces), *lines]
            self._pieces = [lines.pop()]
            self._rest = len(self._pieces[0])
        events: list[bytes] = []
        for line in lines:
            if not line:
                events += self._ended()
            elif line.startswith(b"data:"):
                data = line[5:].removeprefix(b" ")
                self._data.append(data)
                self._held += len(data)
        if self._held + self._rest > MAX_EVENT:
            raise ValueError(f"an event of more than {MAX_EVENT:,} bytes")
        return events

    def end(self) -> list[bytes]:
        """What the stream held at its end: some servers leave out the last blank line."""
        return [*self.feed(b"\n"), *self._ended()]

    def _ended(self) -> list[bytes]:
        data, self._data, self._held = self._data, [], 0
        return [b"\n".join(data)] if data else []
