"""Schemas that cells give. A cell is not trusted: what its schema costs to read and to check is bounded."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

from ..errors import ConfigurationError, LMError
from .fitting import Fitting, Steps
from .shapes import MOST_PROBLEMS, Misfit, Shape, schema_in

MAX_PARTS = 10_000
"""Values in a schema, each name and number counted."""
MAX_CHARACTERS = 100_000
"""Of its texts and names."""
MAX_DEPTH = 60
"""Dicts and lists in each other."""
MAX_BITS = 1_000
"""Of a whole number."""
MAX_SPREAD = 10_000
"""Schemas that it comes to with each reference replaced by what it refers to."""

_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_ONE = frozenset(["not", "if", "then", "else", "items", "additionalProperties", "propertyNames"])
_LISTS = frozenset(["anyOf", "oneOf", "allOf", "prefixItems"])
_NAMED = frozenset(["properties", "$defs", "definitions"])
_IN_PLACE = frozenset(["not", "if", "then", "else", "anyOf", "oneOf", "allOf", "$ref"])
_COUNTS = frozenset(["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"])
_NUMBERS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_REFUSED = frozenset(
    [
        "pattern",  # a hostile one is matched without end
        "patternProperties",
        "contains",
        "minContains",
        "maxContains",
        "unevaluatedItems",
        "unevaluatedProperties",
        "dependentSchemas",
        "dependentRequired",
        "dependencies",
        "additionalItems",
        "$dynamicRef",
        "$recursiveRef",
    ]
)


def measured(schema: Any) -> tuple[dict[str, Any], int]:
    """What a cell gave as `schema=`, and the number of its values; quick, whatever it holds.

    Raises:
        LMError: of kind "bad_request", if it is no dict of JSON, or too large.
    """
    if not isinstance(schema, dict):
        raise _refused("schema= must be a JSON schema, a dict")
    schema = cast("dict[str, Any]", schema)
    parts = characters = depth = 0
    level: list[Any] = [schema]
    while level:
        depth += 1
        deeper: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                deeper += part
                deeper += cast("dict[Any, Any]", part).values()
            elif isinstance(part, list):
                deeper += cast("list[Any]", part)
            elif isinstance(part, str):
                characters += len(part)
            elif part is not None and not isinstance(part, (bool, int, float)):
                raise _refused(f"schema= must be a JSON schema; it holds a value of type {type(part).__name__}")
            elif isinstance(part, float) and not math.isfinite(part):
                raise _refused("schema= holds a number that JSON does not have")
            elif isinstance(part, int) and part.bit_length() > MAX_BITS:
                raise _refused("schema= holds a number that is too large")
            if parts + len(deeper) > MAX_PARTS or characters > MAX_CHARACTERS or depth > MAX_DEPTH:
                raise _refused(
                    f"schema= is too large: at most {MAX_PARTS:,} values, {MAX_CHARACTERS:,} characters and a depth of "
                    f"{MAX_DEPTH} are possible; ask for less in one call"
                )
        parts += len(deeper)
        level = deeper
    return schema, parts


def shape_of_cell(given: dict[str, Any]) -> Shape:
    """The shape that a schema of a cell asks for, one that `measured` let pass.

    Raises:
        LMError: of kind "bad_request", naming what is wrong, and what would be right.
    """
    try:
        schema = schema_in(given, "schema=")
        if schema is None:
            raise _refused("schema= must say what the reply must be")
        read = _Read(schema)
    except ConfigurationError as error:
        raise _refused(str(error)) from error
    except RecursionError as error:
        raise _refused("schema= has too long a chain of references: refer to less") from error

    def check(text: str, steps: Steps) -> Any:
        value = json.loads(text)
        try:
            problems = [*itertools.islice(Fitting(read.targets, steps).problems(schema, value), MOST_PROBLEMS)]
        except RecursionError as error:
            raise Misfit("it is nested too deeply") from error
        if problems:
            raise Misfit("; ".join(problems))
        return value

    return Shape(schema, check)


def _refused(text: str) -> LMError:
    return LMError(text, kind="bad_request")


class _Read:
    """A schema, its parts looked at once each, and what its references refer to."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.targets: dict[str, Any] = {}
        self._root = root
        self._known: set[int] = set()
        self._look(root, "$")
        self._spread(root, {}, lambda keyword: keyword in _IN_PLACE)
        if self._spread(root, {}, None) > MAX_SPREAD:
            raise _refused(
                f"schema= comes to more than {MAX_SPREAD:,} schemas where each $ref stands for what it refers to: "
                "refer to fewer, or ask in several calls"
            )

    def _look(self, schema: Any, path: str) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            self._wrong(path, f"a schema is a dict, not {schema!r:.80}")
        schema = cast("dict[str, Any]", schema)
        if id(schema) in self._known:
            return
        self._known.add(id(schema))
        for keyword, value in schema.items():
            self._look_at(keyword, value, f"{path}.{keyword}")

    def _look_at(self, keyword: str, value: Any, path: str) -> None:
        if keyword in _REFUSED:
            raise _refused(f"schema= can't have {keyword!r} here (at `{path:.200}`): check the reply in the cell")
        if keyword in _ONE:
            self._look(value, path)
        elif keyword in _LISTS:
            if not isinstance(value, list) or not value:
                self._wrong(path, "it must be a list of schemas")
            for index, each in enumerate(cast("list[Any]", value)):
                self._look(each, f"{path}[{index}]")
        elif keyword in _NAMED:
            if not isinstance(value, dict):
                self._wrong(path, "it must be a dict of schemas")
            for name, each in cast("dict[str, Any]", value).items():
                self._look(each, f"{path}.{name}")
        elif keyword == "$ref":
            self._look(self._target(value, path), str(value))
        elif (wanted := _plain_problem(keyword, value)) is not None:
            self._wrong(path, f"it must be {wanted}, not {value!r:.80}")

    def _target(self, reference: Any, path: str) -> Any:
        if not isinstance(reference, str) or (reference != "#" and not reference.startswith("#/")):
            self._wrong(path, "a reference is such as '#/$defs/name', into the schema itself")
        found: Any = self._root
        for step in reference.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or key not in found:
                raise _refused(f"schema= refers to {reference[:80]!r}, which its schema does not hold")
            found = cast("dict[str, Any]", found)[key]
        self.targets[reference] = found
        return found

    def _wrong(self, path: str, text: str) -> NoReturn:
        raise _refused(f"schema= is not a JSON schema: {text} - at `{path:.200}`")

    def _spread(self, schema: Any, spreads: dict[int, int | None], follow: Callable[[str], bool] | None) -> int:
        """How many schemas this one comes to; with `follow`, of those that are held against the same value."""
        if not isinstance(schema, dict):
            return 1
        schema = cast("dict[str, Any]", schema)
        if id(schema) in spreads:
            known = spreads[id(schema)]
            if known is None and follow is not None:
                raise _refused("schema= refers to itself without end: a reference back belongs into a property or item")
            return known or 1
        spreads[id(schema)] = None
        total = 1
        for keyword, value in schema.items():
            if follow is None or follow(keyword):
                total += sum(self._spread(each, spreads, follow) for each in self._below(keyword, value))
        spreads[id(schema)] = total
        return total

    def _below(self, keyword: str, value: Any) -> Iterator[Any]:
        if keyword == "$ref":
            yield self.targets[value]
        elif keyword in _ONE:
            yield value
        elif keyword in _LISTS:
            yield from value
        elif keyword == "properties":
            yield from value.values()


def _plain_problem(keyword: str, value: Any) -> str | None:
    """What a keyword that holds no schemas must be, where this is not it."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if keyword == "type":
        names = cast("list[Any]", value if isinstance(value, list) else [value])
        fine = 0 < len(names) <= len(_TYPES) and all(name in _TYPES for name in names)
        return None if fine else f"one of {', '.join(_TYPES)}"
    if keyword == "enum":
        return None if isinstance(value, list) else "a list of values"
    if keyword == "required":
        fine = isinstance(value, list) and all(isinstance(each, str) for each in cast("list[Any]", value))
        return None if fine else "a list of names"
    if keyword == "uniqueItems":
        return None if isinstance(value, bool) else "true or false"
    if keyword in _COUNTS:
        return None if number and value >= 0 else "a number from 0"
    if keyword in _NUMBERS:
        return None if number and (keyword != "multipleOf" or value > 0) else "a number"
    return None
