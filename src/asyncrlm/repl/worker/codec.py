"""Inert values as JSON: what host and worker say to each other, and nothing that could run.

None, bool, str, finite float, int of 64 bits, list and dict with str keys are themselves. Anything else is
`{"$": tag, "v": ...}`. Values come back as what they were, except that subclasses come back as their base, members of
an Enum as their value, and objects with named fields (see `records.py`) as a `Record` or a `Row`.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import decimal
import enum
import math
from typing import TYPE_CHECKING, Any, cast

from .records import Record, Row, fields_of, record_type

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_ALIKE = 100
"""Keys of one dict, or items of one set, that hash alike."""
MAX_DEPTH = 100
"""Deepest nesting of containers, either way."""

_TAG = "$"
_BODY = "v"
_type: Callable[[Any], Any] = type
_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1


class _RefusedError(Exception):
    """Carries the path to the refused value, from the inside out."""

    def __init__(self, kind: type[Exception], reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.path: list[str] = []


class _Above(set[int]):
    """The ids of the containers around a value."""

    strict = False


def encode(value: Any, where: str = "value", *, strict: bool = False) -> Any:
    """The JSON form of `value`; `where` names it in errors.

    Args:
        value: Any plain data.
        where: What errors call it.
        strict: Refuse what would come back as another type: objects with named fields and members of an Enum.

    Raises:
        TypeError: for a type that can't be sent, naming where it is.
        ValueError: for a value that contains itself or nests deeper than `MAX_DEPTH`.
    """
    above = _Above()
    above.strict = strict
    try:
        return _encode(value, above)
    except _RefusedError as refused:
        path = where + "".join(reversed(refused.path[-8:]))
        raise refused.kind(f"{path}: {refused}") from None


def is_text(text: str) -> bool:
    """Whether `text` is valid Unicode text, that is without lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode(value: Any, above: _Above) -> Any:
    kind = _type(value)
    if kind is str:
        return value if is_text(value) else _tagged("str", _b64(value.encode("utf-8", "surrogatepass")))
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if _INT_MIN <= value <= _INT_MAX else _tagged("int", hex(value))
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", repr(value))
    if isinstance(value, _CONTAINERS):
        return _encode_container(value, above)
    if above.strict or (found := _encode_object(value, above)) is None:
        return _encode_other(value)
    return found


def _encode_object(value: Any, above: _Above) -> Any:
    """An object with named fields, or a member of an Enum; None for any other."""
    if isinstance(value, enum.Enum):
        return _encode(value.value, above)
    if (fields := fields_of(value)) is None:
        return None
    if getattr(_type(value), "__pydantic_root_model__", False):
        return _encode(fields["root"], above)
    return _encode_container(Record(_type(value).__name__, fields.items()), above, id(value))


def _tagged(tag: str, body: Any) -> dict[str, Any]:
    return {_TAG: tag, _BODY: body}


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_CONTAINERS = (list, tuple, set, frozenset, dict)


def _encode_container(value: Any, above: _Above, identity: int = 0) -> Any:
    """`identity`: that of the object which these are the fields of, if there is one."""
    identity = identity or id(value)
    if identity in above:
        raise _RefusedError(ValueError, "contains itself")
    if len(above) >= MAX_DEPTH:
        raise _RefusedError(ValueError, f"nested deeper than {MAX_DEPTH} levels")
    above.add(identity)
    try:
        if isinstance(value, dict):
            return _encode_dict(cast("dict[Any, Any]", value), above)
        items = _encode_items(cast("list[Any]", value), above)
    finally:
        above.discard(identity)
    if isinstance(value, list):
        return items
    names = getattr(value, "_fields", None)
    if isinstance(value, tuple) and isinstance(names, tuple) and not above.strict:
        kind = getattr(cast("Any", value), "_row_type", _type(value).__name__)
        return _tagged("row", [kind, list(cast("tuple[str, ...]", names)), items])
    return _tagged(next(tag for tag, base in _SEQUENCES if isinstance(value, base)), items)


_SEQUENCES: tuple[tuple[str, type[Any]], ...] = (("tuple", tuple), ("set", set), ("frozenset", frozenset))


def _encode_items(value: Any, above: _Above) -> list[Any]:
    out: list[Any] = []
    try:
        for item in value:
            out.append(_encode(item, above))
    except _RefusedError as refused:
        refused.path.append(f"[{len(out)}]")
        raise
    return out


def _encode_dict(value: dict[Any, Any], above: _Above) -> Any:
    record = _type(value) is Record
    plain = not record and _TAG not in value and all(type(key) is str and is_text(key) for key in value)
    key: Any = None
    try:
        if plain:
            out: dict[str, Any] = {}
            for key, item in value.items():
                out[key] = _encode(item, above)
            return out
        pairs: list[Any] = []
        for key, item in value.items():
            pairs.append([_encode(key, above), _encode(item, above)])
        return _tagged("record", [record_type(cast("Record", value)), pairs]) if record else _tagged("dict", pairs)
    except _RefusedError as refused:
        refused.path.append(f"[{_short(key)}]")
        raise


def _short(key: Any) -> str:
    return repr(key[:40] if type(key) is str else key) if isinstance(key, (str, int, float)) else type(key).__name__


def _encode_other(value: Any) -> Any:
    if isinstance(value, str):
        return _encode(str.__str__(value), _Above())
    if isinstance(value, int):
        return _encode(int.__int__(value), _Above())
    if isinstance(value, float):
        return _encode(float.__float__(value), _Above())
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _tagged("bytes", _b64(bytes(cast("bytes", value))))
    if isinstance(value, dt.datetime):
        zone = getattr(value.tzinfo, "key", None)  # of a ZoneInfo
        if zone is None and not value.fold:
            return _tagged("datetime", value.isoformat())
        local = value.replace(tzinfo=None) if zone else value
        return _tagged("datetime", [local.isoformat(), value.fold, zone, value.isoformat()])
    if isinstance(value, dt.date):
        return _tagged("date", value.isoformat())
    if isinstance(value, dt.time):
        return _tagged("time", value.isoformat())
    if isinstance(value, dt.timedelta):
        return _tagged("timedelta", [value.days, value.seconds, value.microseconds])
    if isinstance(value, decimal.Decimal):
        return _tagged("decimal", str(value))
    if isinstance(value, complex):
        return _tagged("complex", [repr(value.real), repr(value.imag)])
    if isinstance(value, range):
        return _tagged("range", [_encode(part, _Above()) for part in (value.start, value.stop, value.step)])
    if _type(value).__module__ == "uuid" and _type(value).__name__ == "UUID":
        return _tagged("uuid", str(value))
    kind = _type(value)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    raise _RefusedError(
        TypeError,
        f"a value of type {name} can't be sent; plain data can: None, bool, numbers, str, bytes, dates, "
        "and list, tuple, set, dict, dataclass, Struct, pydantic model of these",
    )


def decode(value: Any) -> Any:
    """The value that `encode` was given. Safe on anything that a JSON parser returns.

    Raises:
        ValueError: for what `encode` can't have made.
    """
    try:
        return _decode(value, 0)
    except ValueError:
        raise
    except (TypeError, ArithmeticError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a value: {error}") from None


def _decode(value: Any, depth: int) -> Any:
    kind = _type(value)
    if kind is str or value is None or kind is bool or kind is int or kind is float:
        return value
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if kind is list:
        return [_decode(item, depth + 1) for item in value]
    if kind is not dict:
        raise ValueError(f"not a value: {kind.__name__}")
    if _TAG not in value:
        return {_key(key): _decode(item, depth + 1) for key, item in value.items()}
    tag = value[_TAG]
    reader = _READERS.get(tag) if type(tag) is str else None
    if reader is None or len(value) != 2 or _BODY not in value:
        raise ValueError("not a value: unknown tag")
    return reader(value[_BODY], depth)


def _key(key: Any) -> str:
    if type(key) is not str:
        raise ValueError("not a value: a key that is no str")
    return key


def _str(body: Any) -> str:
    if type(body) is not str:
        raise ValueError("not a value: a tag without its text")
    return body


def _list(body: Any, length: int | None = None) -> list[Any]:
    if type(body) is not list or (length is not None and len(cast("list[Any]", body)) != length):
        raise ValueError("not a value: a tag without its list")
    return cast("list[Any]", body)


def _bytes(body: Any) -> bytes:
    try:
        return base64.b64decode(_str(body), validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def _float(body: Any) -> float:
    if body not in ("nan", "inf", "-inf"):
        raise ValueError("not a value: float")
    return float(body)


def _int(body: Any) -> int:
    digits = _str(body)
    if not digits.lstrip("-").startswith("0x"):
        raise ValueError("not a value: int")
    return int(digits, 16)


def _timedelta(body: Any) -> dt.timedelta:
    parts = _list(body, 3)
    if not all(type(part) is int for part in parts):
        raise ValueError("not a value: timedelta")
    return dt.timedelta(*parts)


def _datetime(body: Any) -> dt.datetime:
    if type(body) is str:
        return dt.datetime.fromisoformat(body)
    local, fold, zone, whole = _list(body, 4)
    if fold not in (0, 1):
        raise ValueError("not a value: datetime")
    moment = dt.datetime.fromisoformat(_str(local)).replace(fold=int(fold))
    if zone is None:
        return moment
    try:
        import zoneinfo  # noqa: PLC0415 - few values need it

        return moment.replace(tzinfo=zoneinfo.ZoneInfo(_str(zone)))
    except (ImportError, KeyError, OSError):  # no such zone is known here
        return dt.datetime.fromisoformat(_str(whole))


def _uuid(body: Any) -> Any:
    import uuid  # noqa: PLC0415 - few values need it

    return uuid.UUID(_str(body))


def _range(body: Any) -> range:
    return range(*[_decode(part, MAX_DEPTH) for part in _list(body, 3)])


def _complex(body: Any) -> complex:
    real, imag = _list(body, 2)
    return complex(float(_str(real)), float(_str(imag)))


def _items(body: Any, depth: int) -> list[Any]:
    return [_decode(item, depth + 1) for item in _list(body)]


def _dict(body: Any, depth: int) -> dict[Any, Any]:
    pairs = [_list(pair, 2) for pair in _list(body)]
    keys = _apart([_decode(key, depth + 1) for key, _ in pairs])
    return {key: _decode(item, depth + 1) for key, (_, item) in zip(keys, pairs)}  # noqa: B905 - Python 3.9


def _apart(keys: list[Any]) -> list[Any]:
    """Keys as they are, if they don't hash alike: made so on purpose, those of one frame take hours to tell apart."""
    counts: dict[int, int] = {}
    for key in keys if len(keys) > MOST_ALIKE else ():
        code = hash(key)
        counts[code] = counts.get(code, 0) + 1
        if counts[code] > MOST_ALIKE:
            raise ValueError("not a value: too many keys that hash alike")
    return keys


def _record(body: Any, depth: int) -> Record:
    kind, pairs = _list(body, 2)
    fields = [_list(pair, 2) for pair in _list(pairs)]
    return Record(_str(kind), [(_key(_decode(key, depth + 1)), _decode(item, depth + 1)) for key, item in fields])


def _row(body: Any, depth: int) -> Row:
    kind, names, items = _list(body, 3)
    return Row(_str(kind), [_str(name) for name in _list(names)], _items(items, depth))


_READERS: dict[str, Callable[[Any, int], Any]] = {
    "str": lambda body, _: _bytes(body).decode("utf-8", "surrogatepass"),
    "bytes": lambda body, _: _bytes(body),
    "int": lambda body, _: _int(body),
    "float": lambda body, _: _float(body),
    "complex": lambda body, _: _complex(body),
    "decimal": lambda body, _: decimal.Decimal(_str(body)),
    "datetime": lambda body, _: _datetime(body),
    "uuid": lambda body, _: _uuid(body),
    "range": lambda body, _: _range(body),
    "date": lambda body, _: dt.date.fromisoformat(_str(body)),
    "time": lambda body, _: dt.time.fromisoformat(_str(body)),
    "timedelta": lambda body, _: _timedelta(body),
    "tuple": lambda body, depth: tuple(_items(body, depth)),
    "set": lambda body, depth: set(_apart(_items(body, depth))),
    "frozenset": lambda body, depth: frozenset(_apart(_items(body, depth))),
    "dict": _dict,
    "record": _record,
    "row": _row,
}
