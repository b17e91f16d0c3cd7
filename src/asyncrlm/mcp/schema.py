"""Functions made of what a server says of its tools: names, signatures, types, text. None of it is trusted."""

from __future__ import annotations

import inspect
import json
import keyword
import re
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from ..clipping import clip
from ..observe.text import printable

LONGEST_NAME = 64
"""Characters of a name made of a server's."""
LONGEST_TEXT = 1_200
"""Characters of a tool's description in the prompt, its parameters' included."""
MOST_PARAMETERS = 64
_DEEPEST = 3
_FEW = 8
_LONGEST_VALUE = 60

_TYPES = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "array": "list",
    "object": "dict",
    "null": "None",
}


class _Shown:
    """Something to be shown in a signature as it is written here."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


OMITTED = _Shown("...")
"""The default of a parameter whose default is not known: it is left out of the call."""


def identifier(name: str) -> str:
    """A Python name of ASCII letters like `name`."""
    text = re.sub(r"[^0-9A-Za-z_]+", "_", name)[:LONGEST_NAME] or "_"
    if text[0].isdigit():
        text = f"_{text}"
    return f"{text}_" if keyword.iskeyword(text) or keyword.issoftkeyword(text) else text


class ToolSchema:
    """One tool of a server as a Python function."""

    def __init__(self, description: str, inputs: Any, outputs: Any) -> None:
        self._inputs = _object(inputs)
        self._outputs = _object(outputs)
        required = _texts(self._inputs.get("required"))
        self._json_names: dict[str, str] = {}
        """Parameter → the name that the server has for it."""
        fields: list[tuple[str, dict[str, Any], bool]] = []
        for name, schema in list(_object(self._inputs.get("properties")).items())[:MOST_PARAMETERS]:
            parameter = identifier(name)
            while parameter in self._json_names:
                parameter += "_"
            self._json_names[parameter] = name
            fields.append((parameter, _object(schema), name in required))
        self._text = _text(description, fields)
        self.signature = self._signature(fields)

    def _signature(self, fields: list[tuple[str, dict[str, Any], bool]]) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [
            inspect.Parameter(
                name,
                kind,
                default=inspect.Parameter.empty if needed else _default(schema),
                annotation=_Shown(self._type(schema)),
            )
            for name, schema, needed in sorted(fields, key=lambda field: not field[2])
        ]
        if self._inputs.get("additionalProperties") not in (None, False):
            name = "more"
            while name in self._json_names:
                name += "_"
            parameters.append(inspect.Parameter(name, inspect.Parameter.VAR_KEYWORD, annotation=_Shown("Any")))
        return inspect.Signature(parameters, return_annotation=_Shown(self._returns()))

    def _returns(self) -> str:
        if not self._outputs:
            return "str | list"
        return self._type(_object(_object(self._outputs["properties"])["result"]) if self.wraps else self._outputs)

    @property
    def wraps(self) -> bool:
        """Whether a result that is no object stands under "result"."""
        return list(_object(self._outputs.get("properties"))) == ["result"]

    def describe(self, name: str) -> str:
        """What the prompt says of it."""
        text = f"`{name}{self.signature}`"
        return f"{text} - described by its server as {self._text}" if self._text else text

    def docstring(self, name: str) -> str:
        """What `help` says of it in a cell."""
        text = f"{name}{self.signature}"
        return f"{text}\n\nDescribed by its server as {self._text}" if self._text else text

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call as the server knows them, as JSON data.

        Raises:
            TypeError: if they don't fit the signature, or can't be JSON.
        """
        ours = {name: parameter for parameter, name in self._json_names.items()}
        bound = self.signature.bind(*args, **{ours.get(name, name): value for name, value in kwargs.items()})
        given: dict[str, Any] = {}
        for parameter, value in bound.arguments.items():
            if parameter in self._json_names:
                given[self._json_names[parameter]] = value
            else:
                given.update(value)
        return msgspec.json.decode(msgspec.json.encode(given))

    def _type(self, schema: dict[str, Any], depth: int = 0) -> str:
        if depth > _DEEPEST:
            return "Any"
        if isinstance(reference := schema.get("$ref"), str):
            return self._type(self._referred(reference), depth + 1)
        if "const" in schema:
            return _literal([schema["const"]])
        if isinstance(values := schema.get("enum"), list) and values:
            return _literal(cast("list[Any]", values))
        for union in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(union), list) and options:
                return self._union([_object(option) for option in cast("list[Any]", options)], depth)
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._union([{**schema, "type": each} for each in cast("list[Any]", kind)], depth)
        name = _TYPES.get(kind, "Any") if isinstance(kind, str) else "Any"
        if name == "list" and (item := _object(schema.get("items"))):
            return f"list[{self._type(item, depth + 1)}]"
        if name == "dict" and (value := _object(schema.get("additionalProperties"))):
            return f"dict[str, {self._type(value, depth + 1)}]"
        return name

    def _union(self, options: list[dict[str, Any]], depth: int) -> str:
        names = list(dict.fromkeys(self._type(option, depth + 1) for option in options[:_FEW]))
        return "Any" if "Any" in names or len(options) > _FEW else " | ".join(names)

    def _referred(self, reference: str) -> dict[str, Any]:
        for root in (self._inputs, self._outputs):
            found: Any = root
            for part in reference.removeprefix("#/").split("/"):
                found = _object(found).get(part)
            if isinstance(found, dict):
                return cast("dict[str, Any]", found)
        return {}


def _object(value: Any) -> dict[str, Any]:
    return {str(key): item for key, item in cast("dict[Any, Any]", value).items()} if isinstance(value, dict) else {}


def _texts(value: Any) -> list[str]:
    return [item for item in cast("list[Any]", value) if isinstance(item, str)] if isinstance(value, list) else []


def _literal(values: list[Any]) -> str:
    shown = [_shown(value) for value in values[:_FEW]]
    if len(values) > _FEW or any(len(text) > _LONGEST_VALUE for text in shown):
        kinds = {type(value).__name__ for value in values}
        return kinds.pop() if len(kinds) == 1 else "Any"
    return f"Literal[{', '.join(shown)}]"


def _shown(value: Any) -> str:
    return ascii(value).replace("`", "'")


def _default(schema: dict[str, Any]) -> _Shown:
    text = _shown(schema["default"]) if "default" in schema else ""
    return _Shown(text) if text and len(text) <= _LONGEST_VALUE else OMITTED


def _text(description: str, fields: list[tuple[str, dict[str, Any], bool]]) -> str:
    """What the server says, as one quoted text that can't be taken for ours."""
    parts = [description[: 2 * LONGEST_TEXT].strip()]
    for name, schema, _ in fields:
        if isinstance(about := schema.get("description"), str) and about.strip():
            parts.append(f"{name}: {about[:LONGEST_TEXT].strip()}")
    text = "\n".join(part for part in parts if part)
    if not text:
        return ""
    return json.dumps(clip(printable(text), LONGEST_TEXT).replace("`", "'"), ensure_ascii=False)
