"""Server-sent events, without any reading of sockets."""

from __future__ import annotations

MAX_EVENT = 16 * 1024 * 1024
"""Bytes of one event at most: a server that never ends one must not fill the memory."""


class EventLines:
    """Cuts a stream of bytes, however it is chunked, into the data of its events."""

    __slots__ = ("_data", "_held", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._held = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that ends in `chunk`.

        Raises:
            ValueError: when an event grows past `MAX_EVENT`.
        """
        text = self._rest + chunk if self._rest else chunk
        # A carriage return at the very end may be half of a line's end: it waits for what follows.
        held = b""
        if text.endswith(b"\r"):
            text, held = text[:-1], b"\r"
        lines = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
        events: list[bytes] = []
        for line in lines:
            if not line:
                events += self._ended()
            elif line.startswith(b"data:"):
                data = line[5:].removeprefix(b" ")
                self._data.append(data)
                self._held += len(data)
        if self._held + len(self._rest) > MAX_EVENT:
            raise ValueError(f"an event of more than {MAX_EVENT:,} bytes")
        return events

    def end(self) -> list[bytes]:
        """What the stream held at its end: some servers leave out the last blank line."""
        return [*self.feed(b"\n"), *self._ended()]

    def _ended(self) -> list[bytes]:
        data, self._data, self._held = self._data, [], 0
        return [b"\n".join(data)] if data else []
