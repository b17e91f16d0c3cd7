"""What a server's tool gave, as plain data for a cell."""

from __future__ import annotations

import base64
import binascii
from typing import Any, cast

from ..clipping import clip
from ..observe.text import printable

LONGEST_ERROR = 4_000
"""Characters of an error that a server gave."""


def value_of(result: Any, *, wrapped: bool) -> Any:
    """The value of a `CallToolResult`: its structured content if it has some, else its text, else its parts.

    Raises:
        RuntimeError: if the tool failed, with the server's text.
    """
    parts = [_part(part) for part in result.content]
    if result.is_error:
        text = "\n".join(part for part in parts if isinstance(part, str))
        raise RuntimeError(error_text(text) or "the server gave an error without a text")
    structured: Any = result.structured_content
    if structured is not None:
        if wrapped and isinstance(structured, dict) and list(cast("dict[str, Any]", structured)) == ["result"]:
            return cast("Any", structured["result"])
        return cast("Any", structured)
    if all(isinstance(part, str) for part in parts):
        return "\n".join(cast("list[str]", parts))
    return parts


def error_text(text: str) -> str:
    return clip(printable(text).strip(), LONGEST_ERROR)


def _part(part: Any) -> Any:
    kind = part.type
    if kind == "text":
        return part.text
    if kind in ("image", "audio"):
        return {"type": kind, "mime_type": part.mime_type, "data": _bytes(part.data)}
    if kind == "resource":
        resource = part.resource
        body = {"text": resource.text} if hasattr(resource, "text") else {"data": _bytes(resource.blob)}
        return {"type": kind, "uri": str(resource.uri), "mime_type": resource.mime_type, **body}
    return {"type": kind, "uri": str(getattr(part, "uri", "")), "name": str(getattr(part, "name", ""))}


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise RuntimeError(f"the server sent data that is no base64: {error}") from None
