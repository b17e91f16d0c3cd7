"""Tables of pandas, polars and pyarrow as contexts. None of these is imported: who has a table has its library."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

from msgspec import Struct

MOST_COLUMNS = 20


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
    used = value.memory_usage(index=True)
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
        frame.write_ipc_stream(data)
        return f"polars.{type(value).__name__}", data.getvalue()
    arrow = sys.modules["pyarrow"]
    from importlib import import_module  # noqa: PLC0415 - as the library itself, where there is one

    import_module("pyarrow.ipc")
    with arrow.ipc.new_stream(data, value.schema) as stream:
        stream.write(value)
    return f"pyarrow.{type(value).__name__}", data.getvalue()
