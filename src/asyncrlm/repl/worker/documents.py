"""Files of the host in a cell: a sequence of texts that have names, each made of the bytes when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from . import codec

if TYPE_CHECKING:
    from collections.abc import Iterator
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
    """Files by position or by name. Each is a `Document`, or a `BinaryDocument` where it is no UTF-8 text."""

    def __init__(self, data: Any, places: list[tuple[str, int, int]] | None = None) -> None:
        """`data`: a line with the index, and all files one after another; `places`: name, start and end of each."""
        self._data = data
        self._places = _places(data) if places is None else places
        self._by_name: dict[str, int] | None = None

    @property
    def names(self) -> list[str]:
        """The name of each."""
        return [name for name, _, _ in self._places]

    @property
    def sizes(self) -> list[int]:
        """The bytes of each."""
        return [end - start for _, start, end in self._places]

    @property
    def nbytes(self) -> int:
        """The bytes of all."""
        return sum(self.sizes)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, key: int | str) -> Any: ...
    @overload
    def __getitem__(self, key: slice) -> Documents: ...
    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, slice):
            return Documents(self._data, self._places[key])
        if isinstance(key, str):
            return self._read(self._position(key))
        return self._read(range(len(self._places))[key])

    def __iter__(self) -> Iterator[Any]:
        return map(self._read, range(len(self._places)))

    def __contains__(self, name: object) -> bool:
        """Whether a document has this name."""
        if not isinstance(name, str):
            return False
        name = getattr(name, "name", name)
        return any(name == known for known, _, _ in self._places)

    def keys(self) -> list[str]:
        """As `names`: a dict is often expected."""
        return self.names

    def items(self) -> Iterator[tuple[str, Any]]:
        """Name and document, one after another."""
        return ((place[0], self._read(index)) for index, place in enumerate(self._places))

    def _position(self, name: str) -> int:
        if self._by_name is None:
            self._by_name = {place[0]: index for index, place in enumerate(self._places)}
        try:
            return self._by_name[name]
        except KeyError:
            raise KeyError(f"{name!r} is the name of no document; `.names` has them") from None

    def _read(self, index: int) -> Document | BinaryDocument:
        name, start, end = self._places[index]
        data = self._data[start:end]
        try:
            return Document(data.decode("utf-8"), name)
        except UnicodeDecodeError:
            return BinaryDocument(data, name)

    def __reduce__(self) -> Any:
        raise TypeError("documents can't be pickled; pass single ones, or their names")

    def __repr__(self) -> str:
        shown = [f"{name!r} ({end - start:,} bytes)" for name, start, end in self._places[:_SHOWN]]
        if len(self) > _SHOWN:
            shown.append("...")
        return f"<Documents: {len(self):,}: {', '.join(shown)}>"


def _places(data: Any) -> list[tuple[str, int, int]]:
    end = data.find(b"\n")
    places: list[tuple[str, int, int]] = []
    start = end + 1
    for name, size in json.loads(data[:end]):
        places.append((codec.decode(name), start, start + size))
        start += size
    return places
