"""Whether a value is so large that encoding it has no place on an event loop."""

from __future__ import annotations

from typing import Any, cast

from .framing import LARGE
from .worker.records import fields_of

NODE = 16
"""Bytes counted for each item, beside those of texts."""


def is_large(value: Any) -> bool:
    """Whether its JSON takes more than about `LARGE` bytes. Looks at no more of it than it takes to know."""
    left, around = LARGE, [value]
    try:
        while around and left > 0:
            item = around.pop()
            if isinstance(item, (str, bytes, bytearray)):
                left -= len(item)
                continue
            if not isinstance(item, (dict, list, tuple, set, frozenset)):
                item = fields_of(item) or ()
            items = cast("dict[Any, Any] | list[Any]", item)
            left -= NODE * len(items)
            if left > 0:
                around.extend(items)
                if isinstance(items, dict):
                    around.extend(items.values())
    except Exception:  # noqa: BLE001 -- the caller's own objects may raise anything; whoever encodes them tells of it
        return False
    return left <= 0
