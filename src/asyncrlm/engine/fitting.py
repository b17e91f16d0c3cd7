"""JSON held against a schema in a bounded number of steps."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from ..clipping import clip

FREE_STEPS = 100_000
STEPS_PER_CHARACTER = 2
MAX_STEPS = 5_000_000
"""Taken in about three seconds."""
_SHOWN = 120
"""Characters of a value that a problem shows."""
_CHARACTERS_PER_STEP = 32
"""Of texts that are compared or written."""


class TooManySteps(Exception):
    """A text can't be held against a schema in the steps allowed, or nobody waits for it any more."""


class Steps:
    """What may be spent on one text, in all that is tried with it."""

    def __init__(self, length: int) -> None:
        self.allowed = self._left = min(FREE_STEPS + STEPS_PER_CHARACTER * length, MAX_STEPS)
        self._stopped = False

    def spend(self, steps: int) -> None:
        """Raises TooManySteps once there are none left, or after `stop`."""
        self._left -= steps
        if self._left < 0 or self._stopped:
            raise TooManySteps(f"the schema takes more than {self.allowed:,} steps to check: a simpler one is needed")

    def stop(self) -> None:
        """Nobody waits for the outcome any more; for another thread to call."""
        self._stopped = True


class Fitting:
    """Holds values against the parts of one schema, which was looked through before.

    Args:
        targets: What each of its references refers to.
    """

    def __init__(self, targets: Mapping[str, Any], steps: Steps) -> None:
        self._targets = targets
        self._steps = steps

    def problems(self, schema: Any, value: Any) -> Iterator[str]:
        """What is wrong with a value, and where; nothing if it fits."""
        for path, told in self._problems(schema, value, "$"):
            yield f"{told} - at `{clip(path, _SHOWN)}`"

    def _fits(self, schema: Any, value: Any) -> bool:
        return next(self._problems(schema, value, ""), None) is None

    def _problems(self, schema: Any, value: Any, path: str) -> Iterator[tuple[str, str]]:
        if isinstance(schema, bool):
            self._steps.spend(1)
            if not schema:
                yield path, f"{_shown(value)} may not be here"
            return
        schema = cast("dict[str, Any]", schema)
        self._steps.spend(2 + len(schema) + len(path) // _CHARACTERS_PER_STEP)
        if "$ref" in schema:
            yield from self._problems(self._targets[schema["$ref"]], value, path)
        told = self._plain(schema, value)
        if told is not None:
            yield path, told
        yield from self._combined(schema, value, path)
        if isinstance(value, dict):
            yield from self._object(schema, cast("dict[str, Any]", value), path)
        elif isinstance(value, list):
            yield from self._array(schema, cast("list[Any]", value), path)

    # ---- the value itself --------------------------------------------------------------------------------------------

    def _plain(self, schema: dict[str, Any], value: Any) -> str | None:
        kinds: list[str] = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if kinds and not any(_is(value, kind) for kind in kinds):
            return f"{_shown(value)} is not of type {', '.join(map(repr, kinds))}"
        if "enum" in schema and not any(self._same(each, value) for each in schema["enum"]):
            return f"{_shown(value)} is not one of {_first(schema['enum'])}"
        if "const" in schema and not self._same(schema["const"], value):
            return f"{_shown(schema['const'])} was expected, not {_shown(value)}"
        if isinstance(value, str):
            return _length_problem(schema, len(value), "Length", "characters")
        if isinstance(value, dict):
            return _length_problem(schema, len(cast("dict[str, Any]", value)), "Properties", "properties")
        if isinstance(value, list):
            return _length_problem(schema, len(cast("list[Any]", value)), "Items", "items")
        return None if value is None or isinstance(value, bool) else _number_problem(schema, value)

    def _same(self, one: Any, other: Any) -> bool:
        self._steps.spend(1)
        if isinstance(one, bool) or isinstance(other, bool):
            return one is other
        if isinstance(one, str) and isinstance(other, str):
            self._steps.spend(len(one) // _CHARACTERS_PER_STEP)
            return one == other
        if isinstance(one, list) and isinstance(other, list):
            ones, others = cast("list[Any]", one), cast("list[Any]", other)
            return len(ones) == len(others) and all(map(self._same, ones, others))
        if isinstance(one, dict) and isinstance(other, dict):
            names, found = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
            return len(names) == len(found) and all(
                name in found and self._same(each, found[name]) for name, each in names.items()
            )
        return one == other

    # ---- schemas that hold of the same value -------------------------------------------------------------------------

    def _combined(self, schema: dict[str, Any], value: Any, path: str) -> Iterator[tuple[str, str]]:
        for each in schema.get("allOf", ()):
            yield from self._problems(each, value, path)
        if "anyOf" in schema:
            yield from self._none_of(schema["anyOf"], value, path)
        if "oneOf" in schema:
            fitting = sum(self._fits(each, value) for each in schema["oneOf"])
            if fitting > 1:
                yield path, f"{_shown(value)} fits {fitting} of the schemas of which it must fit one"
            elif not fitting:
                yield from self._none_of(schema["oneOf"], value, path)
        if "not" in schema and self._fits(schema["not"], value):
            yield path, f"{_shown(value)} fits what `not` says, which it must not"
        if "if" in schema:
            then = schema.get("then" if self._fits(schema["if"], value) else "else", True)
            yield from self._problems(then, value, path)

    def _none_of(self, schemas: Iterable[Any], value: Any, path: str) -> Iterator[tuple[str, str]]:
        """What is wrong where the value fits none: in the schema that it comes furthest in."""
        nearest = path, f"{_shown(value)} does not fit any of the schemas of which it must fit one"
        for each in schemas:
            problem = next(self._problems(each, value, path), None)
            if problem is None:
                return
            if len(problem[0]) > len(nearest[0]):
                nearest = problem
        yield nearest

    # ---- what it holds -----------------------------------------------------------------------------------------------

    def _object(self, schema: dict[str, Any], value: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
        required: list[str] = schema.get("required", [])
        properties: dict[str, Any] = schema.get("properties", {})
        self._steps.spend(len(required) + len(properties))
        for name in required:
            if name not in value:
                yield path, f"{clip(repr(name), _SHOWN)} is a required property"
        for name, each in properties.items():
            if name in value:
                yield from self._problems(each, value[name], f"{path}.{name}")
        others = schema.get("additionalProperties", True)
        names = schema.get("propertyNames", True)
        if others is True and names is True:
            return
        for name, each in value.items():
            self._steps.spend(1)
            if names is not True:
                yield from self._problems(names, name, path)
            if name not in properties and others is False:
                yield path, f"{clip(repr(name), _SHOWN)} is a property that the schema does not have"
            elif name not in properties:
                yield from self._problems(others, each, f"{path}.{name}")

    def _array(self, schema: dict[str, Any], value: list[Any], path: str) -> Iterator[tuple[str, str]]:
        first: list[Any] = schema.get("prefixItems", [])
        for index, each in enumerate(first[: len(value)]):
            yield from self._problems(each, value[index], f"{path}[{index}]")
        items = schema.get("items", True)
        if items is not True:
            for index in range(len(first), len(value)):
                yield from self._problems(items, value[index], f"{path}[{index}]")
        if schema.get("uniqueItems") and not are_unique(value, self._steps):
            yield path, "it has equal items, which it must not"


def are_unique(items: list[Any], steps: Steps | None = None) -> bool:
    """Whether no two items are equal, in linear time."""
    seen: set[str] = set()
    for each in items:
        written = json.dumps(each, sort_keys=True)
        if steps is not None:
            steps.spend(1 + len(written) // _CHARACTERS_PER_STEP)
        if written in seen:
            return False
        seen.add(written)
    return True


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, (int, float)):
        return kind == "number" or (kind == "integer" and (isinstance(value, int) or value.is_integer()))
    if value is None:
        return kind == "null"
    return kind == ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object")


def _length_problem(schema: dict[str, Any], length: int, of: str, unit: str) -> str | None:
    least, most = schema.get(f"min{of}", 0), schema.get(f"max{of}")
    if length < least:
        return f"it has {length:,} {unit}, at least {least:,} are needed"
    if most is not None and length > most:
        return f"it has {length:,} {unit}, at most {most:,} are possible"
    return None


def _number_problem(schema: dict[str, Any], value: Any) -> str | None:
    for keyword, fits in _NUMBERS.items():
        if keyword in schema and not fits(value, schema[keyword]):
            return f"{_shown(value)} is wrong: {keyword} is {_shown(schema[keyword])}"
    return None


def _is_multiple(value: Any, of: Any) -> bool:
    if isinstance(value, int) and isinstance(of, int):
        return value % of == 0
    try:
        quotient = value / of
    except OverflowError:
        return False
    return abs(quotient - round(quotient)) < 1e-9 if abs(quotient) < 1e15 else True


_NUMBERS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
    "multipleOf": _is_multiple,
}


def _first(values: list[Any]) -> str:
    return ", ".join(map(_shown, values[:10])) + (f" and {len(values) - 10:,} more" if len(values) > 10 else "")


def _shown(value: Any) -> str:
    """A value in few characters, at a price that does not grow with it."""
    if isinstance(value, dict):
        return f"an object of {len(cast('dict[str, Any]', value)):,} properties"
    if isinstance(value, list):
        return f"a list of {len(cast('list[Any]', value)):,} items"
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]!r}..."
    return "null" if value is None else clip(repr(value), _SHOWN)
