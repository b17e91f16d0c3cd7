"""Objects with named fields as data: what a dataclass, a Struct, a model or a named tuple is in a cell."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self


class Record(dict[str, Any]):
    """A dict whose keys are attributes too, except those that dict itself has a method for."""

    __slots__ = ("_record_type",)

    def __init__(self, kind: str, fields: Iterable[tuple[str, Any]]) -> None:
        super().__init__(fields)
        object.__setattr__(self, "_record_type", kind)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{record_type(self)} has no {name!r}; it has {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]

    def copy(self) -> Record:
        return Record(record_type(self), self.items())

    def __reduce__(self) -> Any:
        return Record, (record_type(self), list(self.items()))

    def __repr__(self) -> str:
        return f"{record_type(self)}({', '.join([f'{name}={value!r}' for name, value in self.items()])})"


class Row(tuple[Any, ...]):  # noqa: SLOT001 - a tuple can have no slots
    """A tuple whose items have names."""

    _row_type: str
    _fields: tuple[str, ...]

    def __new__(cls, kind: str, fields: Sequence[str], values: Iterable[Any]) -> Self:
        row = super().__new__(cls, values)
        row._row_type, row._fields = kind, tuple(fields)
        if len(row) != len(row._fields):
            raise ValueError("a row with more names than items, or fewer")
        return row

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._fields:
            raise AttributeError(name)
        return self[self._fields.index(name)]

    def _asdict(self) -> dict[str, Any]:
        return {name: self[index] for index, name in enumerate(self._fields)}

    def __reduce__(self) -> Any:
        return Row, (self._row_type, self._fields, tuple(self))

    def __repr__(self) -> str:
        return f"{self._row_type}({', '.join([f'{name}={value!r}' for name, value in self._asdict().items()])})"


def record_type(record: Record) -> str:
    """The name of the class that a record was."""
    return cast("str", object.__getattribute__(record, "_record_type"))


def fields_of(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass instance, a `msgspec.Struct`, an attrs instance or a pydantic model; None for the rest.

    They are known by what their classes have: none of these libraries is imported for it.
    """
    if isinstance(value, type):
        return None
    kind = cast("Any", type(value))
    if (names := _names(kind)) is None:
        return None
    found = {name: getattr(value, name) for name in names if hasattr(value, name)}
    extra = getattr(value, "__pydantic_extra__", None)
    if isinstance(extra, dict):
        found.update(cast("dict[str, Any]", extra))
    unset = getattr(sys.modules.get("msgspec"), "UNSET", None)
    return {name: item for name, item in found.items() if unset is None or item is not unset}


def _names(kind: Any) -> Iterable[str] | None:
    if isinstance(names := getattr(kind, "__struct_fields__", None), tuple):
        return cast("tuple[str, ...]", names)
    if isinstance(fields := getattr(kind, "__pydantic_fields__", None), dict):
        return cast("dict[str, Any]", fields)
    if isinstance(fields := getattr(kind, "__dataclass_fields__", None), dict):
        import dataclasses  # noqa: PLC0415 - there already, where something is one

        return [field.name for field in dataclasses.fields(kind)]
    if isinstance(attributes := getattr(kind, "__attrs_attrs__", None), tuple):
        return [attribute.name for attribute in cast("tuple[Any, ...]", attributes)]
    return None
