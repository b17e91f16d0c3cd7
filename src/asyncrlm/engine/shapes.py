"""What an answer must be: a type or a JSON schema, stated to a model and held against what it says."""

from __future__ import annotations

import importlib
import itertools
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, cast, get_args

import msgspec
from msgspec import Struct

from ..caught import described
from ..clipping import clip
from ..errors import ConfigurationError
from .fitting import Steps, TooManySteps, are_unique

MOST_PROBLEMS = 5
"""Problems of one answer that its model is told of."""
PROBLEM_LENGTH = 400
"""Characters of each."""

_KEYWORDS = frozenset(
    [
        "$ref",
        "type",
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "items",
        "prefixItems",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "if",
        "$defs",
        "definitions",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "pattern",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "uniqueItems",
        "propertyNames",
    ]
)
"""One of these makes a dict a JSON schema."""


class Misfit(Exception):
    """An answer is not what was asked for; the text says where, what was expected and what was there."""


class Fit(Struct, frozen=True):
    """An answer that is what was asked for."""

    text: str
    """Its JSON."""
    value: Any


class Shape(Struct, frozen=True):
    """What an answer must be."""

    schema: dict[str, Any]
    check: Callable[[str, Steps], Any]
    """From JSON to the value. Raises `Misfit`, or `TooManySteps` where the schema is a cell's."""

    @property
    def stated(self) -> str:
        """The schema as a model reads it."""
        return json.dumps(self.schema, ensure_ascii=False)

    def read(self, text: str, steps: Steps) -> Fit:
        """The value that `text` says: JSON, JSON in a fenced block, or a text that itself is the value.

        Raises:
            Misfit: if it says none that fits.
            TooManySteps: if that can't be said in those steps.
        """
        text = text.strip()
        problem: Misfit | None = None
        for candidate in (text, *reversed([*_fenced(text)])):
            steps.spend(1)
            if _not_json(candidate) is None:
                try:
                    return Fit(candidate, self._checked(candidate, steps))
                except Misfit as misfit:
                    problem = problem or misfit
        try:
            whole = json.dumps(text)
            return Fit(json.dumps(text, ensure_ascii=False), self._checked(whole, steps))
        except Misfit as misfit:
            if problem is None and _may_be_text(self.schema):
                problem = Misfit(f"{misfit}; it is not JSON, so it was taken as a text")
            raise problem or Misfit(f"it is not JSON: {_not_json(text)}") from None

    def _checked(self, text: str, steps: Steps) -> Any:
        try:
            return self.check(text, steps)
        except (Misfit, TooManySteps):
            raise
        except BaseException as error:  # in a thread: of the caller's own class, whose code found something wrong
            raise Misfit(clip(described(error), PROBLEM_LENGTH)) from error


def _fenced(text: str) -> Iterator[str]:
    """What fenced blocks hold that may be JSON. In linear time, whatever the fences."""
    lines = text.split("\n")
    fences: dict[str, list[int]] = {}
    for at, line in enumerate(lines):
        bare = line.strip()
        if bare[:3] in ("```", "~~~") and bare == bare[0] * len(bare):
            fences.setdefault(bare, []).append(at)
    at = 0
    while at < len(lines):
        bare = lines[at].strip()
        name = bare.lstrip(bare[0]) if bare[:3] in ("```", "~~~") else "none"
        if name.strip().lower() in ("", "json"):
            closing = fences.get(bare.removesuffix(name), [])
            after = bisect_right(closing, at)
            if after < len(closing):
                yield "\n".join(lines[at + 1 : closing[after]]).strip()
                at = closing[after]
        at += 1


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    kind: Any = schema.get("type", "string")
    return "string" in (cast("list[Any]", kind) if isinstance(kind, list) else [kind])


def _not_json(text: str) -> str | None:
    """Why `text` is not JSON; None if it is."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return clip(str(error), PROBLEM_LENGTH)
    return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def shape_of(given: Any, argument: str = "response_format") -> Shape | None:
    """The shape that `response_format=` asks for; None for any text.

    Args:
        argument: What the caller knows it by, for messages.
        given: OpenAI's own dict form, a JSON schema, or a type that msgspec or pydantic can handle.

    Raises:
        ConfigurationError: naming what would be right.
    """
    if not isinstance(given, Mapping):
        return None if given is None else _of_type(given)
    schema = schema_in(cast("Mapping[str, Any]", given), argument)
    return None if schema is None else _of_schema(schema, argument)


def schema_in(given: Mapping[str, Any], argument: str) -> dict[str, Any] | None:
    """The JSON schema that a dict gives, itself or in one of OpenAI's forms; None for any text.

    Raises:
        ConfigurationError: if there is none in it.
    """
    schema = dict(given)
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema"}:
            held = given.get("json_schema")
            held = cast("dict[str, Any]", held).get("schema") if isinstance(held, dict) else None
            if not isinstance(held, dict):
                raise ConfigurationError(
                    f'{argument} of type "json_schema" must hold its schema: '
                    '{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
                )
            schema = cast("dict[str, Any]", held)
        case _:
            pass
    if schema and not _KEYWORDS & schema.keys():
        raise ConfigurationError(
            f"{argument} has none of JSON schema's keywords, its keys are {clip(str(list(schema)), 120)}: "
            'write such as {"type": "object", "properties": {…}}'
        )
    return schema


# ---- types -----------------------------------------------------------------------------------------------------------


def _of_type(given: Any) -> Shape:
    if given is object or isinstance(given, (str, bytes, int, float, list, tuple, set)):
        raise _wrong(given)
    if not _is_pydantic(given):
        try:
            return _with_msgspec(given)
        except (TypeError, ValueError, NameError, AttributeError):  # no type of msgspec's; maybe one of pydantic's
            pass
    try:
        return _with_pydantic(given)
    except ConfigurationError:
        raise
    except Exception as error:
        raise _wrong(given) from error


def _wrong(given: Any) -> ConfigurationError:
    what = getattr(given, "__name__", None) if isinstance(given, type) else None
    return ConfigurationError(
        f"response_format can't be {f'the type {what}' if what else f'a value of type {type(given).__name__}'}: give a "
        "msgspec.Struct, pydantic model, dataclass, TypedDict, list[…] or another type that msgspec or pydantic can "
        'handle, a JSON schema as a dict, or {"type": "json_schema", "json_schema": {"schema": {…}}}'
    )


def _is_pydantic(given: Any) -> bool:
    """Whether pydantic made the type, or one of its parts: msgspec would not know their validators."""
    return hasattr(given, "__pydantic_core_schema__") or any(_is_pydantic(part) for part in get_args(given))


def _with_msgspec(given: Any) -> Shape:
    schema: dict[str, Any] = msgspec.json.schema(given)
    decoder = msgspec.json.Decoder(given)

    def check(text: str, _: Steps) -> Any:
        try:
            return decoder.decode(text)
        except msgspec.DecodeError as error:  # also a ValidationError
            raise Misfit(clip(str(error), PROBLEM_LENGTH)) from error
        except RecursionError as error:
            raise Misfit("it is nested too deeply") from error

    return Shape(_opened(schema), check)


def _with_pydantic(given: Any) -> Shape:
    pydantic: Any = importlib.import_module("pydantic")
    adapter: Any = given if isinstance(given, pydantic.TypeAdapter) else pydantic.TypeAdapter(given)
    schema = cast("dict[str, Any]", adapter.json_schema())

    def check(text: str, _: Steps) -> Any:
        try:
            return adapter.validate_json(text)
        except pydantic.ValidationError as error:
            found = cast("list[dict[str, Any]]", error.errors(include_url=False, include_context=False))
            raise Misfit(_told([_pydantic_problem(each) for each in found])) from error

    return Shape(_opened(schema), check)


def _pydantic_problem(error: Mapping[str, Any]) -> str:
    path = "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    return f"{error['msg']}, got {clip(repr(error['input']), 120)} - at `{path}`"


def _opened(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema with its root in the open, where it is a reference to a definition."""
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    root = schema.get("$defs", {}).get(name)
    if root is None or set(schema) != {"$ref", "$defs"}:
        return schema
    others = {key: value for key, value in schema["$defs"].items() if key != name}
    defs = schema["$defs"] if f'"#/$defs/{name}"' in json.dumps(schema["$defs"]) else others
    return {**root, "$defs": defs} if defs else dict(root)


# ---- schemas ---------------------------------------------------------------------------------------------------------


def _of_schema(schema: dict[str, Any], argument: str) -> Shape:
    jsonschema: Any = importlib.import_module("jsonschema")
    registry: Any = importlib.import_module("referencing").Registry()
    try:
        json.dumps(schema)
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        kind.check_schema(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{argument} is not a JSON schema: {error}") from error
    except jsonschema.SchemaError as error:
        raise ConfigurationError(
            f"{argument} is not a JSON schema: {clip(error.message, PROBLEM_LENGTH)} - at `{error.json_path}`"
        ) from error
    _check_references(schema, schema, argument)
    # jsonschema compares each item with each other one, and the answer that holds them may be a cell's.
    kind = jsonschema.validators.extend(kind, {"uniqueItems": _unique_items})
    # An empty registry: what a reference names is in the schema, nothing is fetched.
    validator = kind(schema, registry=registry)

    def check(text: str, _: Steps) -> Any:
        value = json.loads(text)
        try:
            errors: list[Any] = list(itertools.islice(validator.iter_errors(value), MOST_PROBLEMS))
        except RecursionError as error:
            raise Misfit("it is nested too deeply, or its schema refers to itself without end") from error
        if errors:
            deepest: list[Any] = [jsonschema.exceptions.best_match([error]) for error in errors]
            raise Misfit(
                _told([f"{clip(error.message, PROBLEM_LENGTH)} - at `{error.json_path}`" for error in deepest])
            )
        return value

    return Shape(schema, check)


def _unique_items(validator: Any, wanted: bool, value: Any, schema: Any) -> Iterator[Any]:
    if wanted and validator.is_type(value, "array") and not are_unique(value):
        jsonschema: Any = importlib.import_module("jsonschema")
        yield jsonschema.ValidationError("it has equal items, which it must not")


def _check_references(part: Any, schema: dict[str, Any], argument: str) -> None:
    if isinstance(part, dict):
        items = cast("dict[str, Any]", part)
        reference = items.get("$ref")
        if isinstance(reference, str) and not _leads_somewhere(reference, schema):
            raise ConfigurationError(f"{argument} refers to {reference[:80]!r}, which its schema does not hold")
        part = list(items.values())
    if isinstance(part, list):
        for each in cast("list[Any]", part):
            _check_references(each, schema, argument)


def _leads_somewhere(reference: str, schema: dict[str, Any]) -> bool:
    if not reference.startswith("#/"):
        return reference == "#"
    found: Any = schema
    for step in reference[2:].split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or key not in found:
            return False
        found = cast("dict[str, Any]", found)[key]
    return True


def _told(problems: list[str]) -> str:
    more = len(problems) - MOST_PROBLEMS
    return "; ".join(problems[:MOST_PROBLEMS]) + (f"; and {more:,} more" if more > 0 else "")
