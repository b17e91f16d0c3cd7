"""Arguments of tools cut down to what a log can hold."""

from __future__ import annotations

from typing import Any, cast

from ..clipping import clip

LONGEST = 1_000
"""Characters kept of one text among the arguments."""
MOST_ITEMS = 50
"""Items kept of one container."""
MOST_VALUES = 500
"""Values kept of all arguments of a call."""

_SEQUENCES = ("tuple", "set", "frozenset")


def brief(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments in the codec's form as short plain data: long texts clipped, long containers cut.

    Reads what is kept, not the whole: arguments may be large.
    """
    briefly = _Brief()
    return briefly.items(args), briefly.mapping(list(kwargs.items()), len(kwargs))


class _Brief:
    def __init__(self) -> None:
        self._left = MOST_VALUES

    def value(self, value: Any) -> Any:
        self._left -= 1
        if isinstance(value, str):
            return clip(value, LONGEST)
        if isinstance(value, list):
            return self.items(cast("list[Any]", value))
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        return self._tagged(fields) if "$" in fields else self.mapping(list(fields.items()), len(fields))

    def _tagged(self, fields: dict[str, Any]) -> Any:
        tag, body = fields.get("$"), fields.get("v")
        if tag in _SEQUENCES and isinstance(body, list):
            return self.items(cast("list[Any]", body))
        if tag == "dict" and isinstance(body, list):
            pairs = [(str(self.value(pair[0])), pair[1]) for pair in cast("list[Any]", body)[:MOST_ITEMS]]
            return self.mapping(pairs, len(cast("list[Any]", body)))
        if tag == "bytes" and isinstance(body, str):
            return f"<{len(body) // 4 * 3:,} bytes>"
        return clip(str(body), LONGEST)

    def items(self, items: list[Any]) -> list[Any]:
        kept: list[Any] = []
        for item in items[:MOST_ITEMS]:
            if self._left <= 0:
                break
            kept.append(self.value(item))
        if len(kept) < len(items):
            kept.append(f"[... {len(items) - len(kept):,} items left out ...]")
        return kept

    def mapping(self, pairs: list[tuple[str, Any]], count: int) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, item in pairs[:MOST_ITEMS]:
            if self._left <= 0:
                break
            kept[clip(key, LONGEST)] = self.value(item)
        if len(kept) < count:
            kept["..."] = f"{count - len(kept):,} items left out"
        return kept
