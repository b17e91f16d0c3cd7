"""The JSON of a request, whatever text it holds."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from ...errors import LMError
from ..arguments import endless
from .replies import whole_text

_encode = msgspec.json.Encoder().encode


def encoded(body: dict[str, Any]) -> bytes:
    """`body` as JSON; text that is no valid Unicode is made so.

    Raises:
        LMError: of kind "bad_request", if something in it is no JSON.
    """
    try:
        data = _encode(body)
    except UnicodeEncodeError:
        data = _encode(_with_whole_text(msgspec.to_builtins(body)))
    except (TypeError, ValueError) as error:
        raise LMError(f"the request can't be sent as JSON: {error}", kind="bad_request") from error
    # The encoder writes null for what JSON has no number for: the server would take it for something left out.
    if b"null" in data and (number := endless(msgspec.to_builtins(body))) is not None:
        raise LMError(f"the request can't be sent as JSON: it holds {number}", kind="bad_request")
    return data


def _with_whole_text(value: Any) -> Any:
    match value:
        case str():
            return whole_text(value)
        case dict():
            return {
                _with_whole_text(name): _with_whole_text(item) for name, item in cast("dict[Any, Any]", value).items()
            }
        case list() | tuple():
            return [_with_whole_text(item) for item in cast("list[Any]", value)]
        case _:
            return value
