"""Files of the host in a cell: a sequence of texts that have names, each made of the bytes when it is asked for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from . import codec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

_SHOWN = 5
"""Names in a repr."""


class Document(str):
    """The text of a file: a str in every way, with the file's `name`."""

    __slots__ = ("name",)

    def __new__(cls, text: str, name: str) -> Self:
        document = super().__new__(cls, text)
        document.name = name
        return document

    def __reduce__(self) -> Any:
        return Document, (str(self), self.name)


class BinaryDocument(bytes):
    """The bytes of a file that is no UTF-8 text, with the file's `name`."""

    name: str

    def __new__(cls, data: bytes, name: str) -> Self:
        document = super().__new__(cls, data)
        document.name = name
        return document

    def __reduce__(self) -> Any:
        return BinaryDocument, (bytes(self), self.name)


class Documents(Sequence[Any]):
    """Files by position or by name. Each is a `Document`, or a `BinaryDocument` where it is no UTF-8 text; where they
    stay files, each is a `Text`."""

    def __init__(
        self, entries: list[tuple[str, int]], read: Callable[[int], Any], chosen: Sequence[int] | None = None
    ) -> None:
        """`entries`: name and bytes of each file; `read` gives one by its number; `chosen`: the numbers that count."""
        self._entries = entries
        self._reader = read
        self._chosen = range(len(entries)) if chosen is None else chosen
        self._by_name: dict[str, int] | None = None

    @property
    def names(self) -> list[str]:
        """The name of each."""
        return [self._entries[number][0] for number in self._chosen]

    @property
    def sizes(self) -> list[int]:
        """The bytes of each."""
        return [self._entries[number][1] for number in self._chosen]

    @property
    def nbytes(self) -> int:
        """The bytes of all."""
        return sum(self.sizes)

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, key: int | str) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> Documents: ...
    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, slice):
            return Documents(self._entries, self._reader, self._chosen[key])
        if isinstance(key, str):
            return self._reader(self._number(key))
        return self._reader(self._chosen[key])

    def __iter__(self) -> Iterator[Any]:
        return map(self._reader, self._chosen)

    def __contains__(self, name: object) -> bool:
        """Whether a document has this name."""
        name = getattr(name, "name", name)
        return isinstance(name, str) and name in self._numbers()

    def keys(self) -> list[str]:
        """As `names`: a dict is often expected."""
        return self.names

    def items(self) -> Iterator[tuple[str, Any]]:
        """Name and document, one after another."""
        return ((self._entries[number][0], self._reader(number)) for number in self._chosen)

    def _numbers(self) -> dict[str, int]:
        if self._by_name is None:
            self._by_name = {self._entries[number][0]: number for number in self._chosen}
        return self._by_name

    def _number(self, name: str) -> int:
        try:
            return self._numbers()[name]
        except KeyError:
            raise KeyError(f"{name!r} is the name of no document; `.names` has them") from None

    def __reduce__(self) -> Any:
        raise TypeError("documents can't be pickled; pass single ones, or their names")

    def __repr__(self) -> str:
        shown = [f"{name!r} ({size:,} bytes)" for name, size in zip(self.names[:_SHOWN], self.sizes, strict=False)]
        if len(self) > _SHOWN:
            shown.append("...")
        return f"<Documents: {len(self):,}: {', '.join(shown)}>"


def index(data: Any) -> tuple[list[tuple[str, int]], int]:
    """Name and bytes of each file, as the line with them says, and where that line ends."""
    end = data.find(b"\n")
    return [(codec.decode(name), size) for name, size in json.loads(data[:end])], end + 1


def packed(data: Any) -> Documents:
    """Documents that follow one another in `data`, after the line with their index."""
    entries, end = index(data)
    ends = list(itertools.accumulate([size for _, size in entries], initial=end))

    def read(number: int) -> Document | BinaryDocument:
        name, content = entries[number][0], data[ends[number] : ends[number + 1]]
        try:
            return Document(content.decode("utf-8"), name)
        except UnicodeDecodeError:
            return BinaryDocument(content, name)

    return Documents(entries, read)
