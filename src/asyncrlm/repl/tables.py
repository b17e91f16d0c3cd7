"""Tables of pandas, polars and pyarrow as contexts. None of these is imported: who has a table has its library."""

from __future__ import annotations

import io
import pickle
import sys
from importlib import import_module
from typing import Any

from msgspec import Struct


class TableInfo(Struct, frozen=True):
    """What a table is."""

    type: str
    rows: int
    columns: tuple[str, ...]
    size: int
    """Bytes in memory, as its library counts them."""


def library_of(value: Any) -> str | None:
    """The library that `value` is a table of; None if it is none."""
    for name, kinds in (
        ("pandas", ("DataFrame", "Series")),
        ("polars", ("DataFrame", "Series")),
        ("pyarrow", ("Table", "RecordBatch")),
    ):
        module = sys.modules.get(name)
        known = tuple(found for kind in kinds if isinstance(found := getattr(module, kind, None), type))
        if known and isinstance(value, known):
            return name
    return None


def describe_table(value: Any) -> TableInfo:
    """Its type, rows, columns and size."""
    library = library_of(value) or ""
    kind = f"{library}.{type(value).__name__}"
    if library == "pyarrow":
        return TableInfo(kind, value.num_rows, tuple(map(str, value.schema.names)), value.nbytes)
    columns = value.columns if hasattr(value, "columns") else [value.name]
    if library == "polars":
        return TableInfo(kind, len(value), tuple(map(str, columns)), int(value.estimated_size()))
    used = value.memory_usage(index=True, deep=True)
    return TableInfo(kind, len(value), tuple(map(str, columns)), int(used.sum() if hasattr(used, "sum") else used))


def encode_table(value: Any) -> tuple[str, bytes]:
    """The library and what `worker/loading.py` makes the table of: Arrow's stream format, or for pandas a pickle, since
    Arrow does not keep all that pandas has (indexes, objects, names that are no str). Host → worker only.

    Raises:
        Exception: whatever the library raises for a table that it can't write.
    """
    library = library_of(value) or ""
    if library == "pandas":
        return library, pickle.dumps(value, protocol=5)
    data = io.BytesIO()
    if library == "polars":
        frame = value if hasattr(value, "write_ipc_stream") else value.to_frame()
        if objects := [name for name, kind in frame.schema.items() if kind.is_object()]:
            raise TypeError(f"column {objects[0]!r} holds Python objects")  # their addresses would be written
        frame.write_ipc_stream(data)
        return f"polars.{type(value).__name__}", data.getvalue()
    with import_module("pyarrow.ipc").new_stream(data, value.schema) as stream:
        stream.write(value)
    return f"pyarrow.{type(value).__name__}", data.getvalue()


def table_text(value: Any) -> str:
    """All of a table as CSV, with its names and, of pandas, its index.

    Raises:
        Exception: whatever the library raises for a table that has no such form.
    """
    library = library_of(value) or ""
    if library == "pandas":
        return value.to_csv()
    if library == "polars":
        return (value if hasattr(value, "write_csv") else value.to_frame()).write_csv()
    data = io.BytesIO()
    import_module("pyarrow.csv").write_csv(value, data)
    return data.getvalue().decode("utf-8")
