"""What prompts say of tools: name, signature, types, what they do."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from .tool_objects import defined

LONGEST_DOC = 1000
"""Characters of a docstring that a prompt has."""
FEW_FUNCTIONS = 20
"""Functions of an object up to which each has a line of its own."""
MOST_NAMES = 40
LONGEST_DEFAULT = 16
"""Characters of a default value that a prompt has. A longer one may be a key, or a table."""
LONGEST_ANNOTATION = 200
LONGEST_SIGNATURE = 2000
_SECRET = re.compile(r"key|token|secret|passw|pwd|auth|credential|cookie|dsn", re.IGNORECASE)
"""What names of parameters have whose defaults no model reads."""
_INDENT = "\n  "


def describe_value(name: str, value: Any, description: str) -> str:
    return _said(f"`{name}`: {type(value).__name__}", description)


def describe_function(name: str, function: Callable[..., Any], description: str) -> str:
    return _said(f"`{signature(name, function)}`", description or doc(function))


def docstring(name: str, function: Callable[..., Any], description: str = "") -> str:
    """What `help` says of a function where cells run: its signature first, as of one that is built in."""
    text = description or doc(function)
    return f"{signature(name, function)}\n\n{text}" if text else signature(name, function)


def describe_object(name: str, value: Any, functions: Mapping[str, Callable[..., Any]], description: str) -> str:
    """An object by its functions, which can be called wherever it is."""
    kind = "module" if inspect.ismodule(value) else type(value).__name__
    text = _said(f"`{name}`: {kind}", description or doc(value if inspect.ismodule(value) else type(value)))
    if len(functions) <= FEW_FUNCTIONS:
        lines = [
            _said(f"  - `{signature(f'{name}.{each}', function)}`", doc(function).partition("\n")[0])
            for each, function in functions.items()
        ]
        return "\n".join([text, *lines])
    shown = ", ".join(f"`{name}.{each}`" for each in list(functions)[:MOST_NAMES])
    more = f", … (+{len(functions) - MOST_NAMES:,})" if len(functions) > MOST_NAMES else ""
    return f"{text}\n  - {shown}{more}"


def describe_source(name: str, source: str, description: str) -> str:
    """A function or class by its source, or a lambda."""
    tree = ast.parse(source)
    node = defined(name, tree)
    if node is None:
        value = tree.body[0].value if isinstance(tree.body[0], ast.Assign) else None
        if isinstance(value, ast.Lambda):
            _hide_defaults(value.args)
        parameters = ast.unparse(value.args) if isinstance(value, ast.Lambda) else "..."
        return _said(f"`{name}({parameters})`", description)
    text = description or (ast.get_docstring(node) or "")[:LONGEST_DOC]
    if isinstance(node, ast.ClassDef):
        return _said(f"`class {name}`", text)
    _hide_defaults(node.args)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    later = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return _said(f"`{later}{name}({ast.unparse(node.args)}){returns}`", text)


def _said(head: str, text: str) -> str:
    # Lines of a docstring stay under their tool's.
    return f"{head} - {_INDENT.join(text.splitlines())}" if text else head


class _Written:
    """What stands in a signature as it is written here."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


_HIDDEN = _Written("...")


def signature(name: str, function: Callable[..., Any]) -> str:
    """Name, parameters and types, as they would stand in a definition; of defaults, what is short and plain."""
    try:
        found = inspect.signature(function)
        parameters = [
            parameter.replace(annotation=_shown(parameter.annotation), default=_default(parameter))
            for parameter in found.parameters.values()
        ]
        text = f"{name}{found.replace(parameters=parameters, return_annotation=_shown(found.return_annotation))}"
    except (TypeError, ValueError):
        return f"{name}(...)"
    return text if len(text) <= LONGEST_SIGNATURE else f"{name}(...)"


def _shown(annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return _Written(" ".join(text.split())) if len(text) <= LONGEST_ANNOTATION else _HIDDEN


def _default(parameter: inspect.Parameter) -> Any:
    default = parameter.default
    return default if default is parameter.empty or _may_show(parameter.name, default) else _HIDDEN


def _may_show(name: str, default: Any) -> bool:
    if default is None or isinstance(default, bool):
        return True
    plain = type(default) in (int, float, str) and len(str(default)) <= LONGEST_DEFAULT
    return plain and _SECRET.search(name) is None


def _hide_defaults(given: ast.arguments) -> None:
    """Leave of the defaults in a definition what `signature` shows of one."""

    def shown(parameter: ast.arg, default: ast.expr) -> ast.expr:
        plain = isinstance(default, ast.Constant) and _may_show(parameter.arg, default.value)
        return default if plain else ast.Constant(...)

    positional = (*given.posonlyargs, *given.args)
    with_default = positional[len(positional) - len(given.defaults) :]
    given.defaults = [shown(*each) for each in zip(with_default, given.defaults, strict=True)]
    given.kw_defaults = [
        None if default is None else shown(parameter, default)
        for parameter, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]


def doc(function: Any) -> str:
    """Its docstring; not that of an instance's class, which tells nothing about this tool."""
    own = inspect.isroutine(function) or inspect.isclass(function) or inspect.ismodule(function)
    text = inspect.getdoc(function) if own else None
    return (text or "").strip()[:LONGEST_DOC]
