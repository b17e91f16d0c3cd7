"""What prompts say of tools: name, signature, types, what they do."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .tool_objects import defined

LONGEST_DOC = 1000
"""Characters of a docstring that a prompt has."""
FEW_FUNCTIONS = 20
"""Functions of an object up to which each has a line of its own."""
MOST_NAMES = 40
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
    more = f" and {len(functions) - MOST_NAMES} more" if len(functions) > MOST_NAMES else ""
    return f"{text}\n  Functions: {shown}{more}"


def describe_source(name: str, source: str, description: str) -> str:
    """A function or class by its source, or a lambda."""
    tree = ast.parse(source)
    node = defined(name, tree)
    if node is None:
        value = tree.body[0].value if isinstance(tree.body[0], ast.Assign) else None
        parameters = ast.unparse(value.args) if isinstance(value, ast.Lambda) else "..."
        return _said(f"`{name}({parameters})`", description)
    text = description or (ast.get_docstring(node) or "")[:LONGEST_DOC]
    if isinstance(node, ast.ClassDef):
        return _said(f"`class {name}`", text)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    later = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return _said(f"`{later}{name}({ast.unparse(node.args)}){returns}`", text)


def _said(head: str, text: str) -> str:
    # Lines of a docstring stay under their tool's.
    return f"{head} - {_INDENT.join(text.splitlines())}" if text else head


class _Annotation:
    """An annotation that was written as text, to be shown as it was written."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def signature(name: str, function: Callable[..., Any]) -> str:
    """Name, parameters and types, as they would stand in a definition."""
    try:
        found = inspect.signature(function)
        parameters = [
            parameter.replace(annotation=_shown(parameter.annotation)) for parameter in found.parameters.values()
        ]
        return f"{name}{found.replace(parameters=parameters, return_annotation=_shown(found.return_annotation))}"
    except (TypeError, ValueError):
        return f"{name}(...)"


def _shown(annotation: Any) -> Any:
    return _Annotation(annotation) if isinstance(annotation, str) else annotation


def doc(function: Any) -> str:
    """Its docstring; not that of an instance's class, which tells nothing about this tool."""
    own = inspect.isroutine(function) or inspect.isclass(function) or inspect.ismodule(function)
    text = inspect.getdoc(function) if own else None
    return (text or "").strip()[:LONGEST_DOC]
