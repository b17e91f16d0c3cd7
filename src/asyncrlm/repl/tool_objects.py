"""What the caller's objects are to cells: plain data, functions to call on the host, or source to run there."""

from __future__ import annotations

import ast
import datetime as dt
import decimal
import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import PurePath
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from ..errors import ConfigurationError

MOST_FUNCTIONS = 200
"""Functions of one object that cells may call on the host."""

_PLAIN: tuple[type[Any], ...] = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict),
    *(dt.datetime, dt.date, dt.time, dt.timedelta, decimal.Decimal, PurePath),
)
_STARTS = re.compile(r"\s*(?:async\s+def|def|class|lambda|import|from|@)\b|\s*@")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def functions_of(value: Any) -> dict[str, Callable[..., Any]]:
    """The public functions of an object; none for plain data, whose type says what can be done with it.

    Those of its class, or, where it is a module or namespace, its own. No property is evaluated, and what it holds that
    can be called as well, such as a connection, is data.
    """
    if isinstance(value, _PLAIN):
        return {}
    found: dict[str, Callable[..., Any]] = {}
    own = isinstance(value, (ModuleType, SimpleNamespace))
    holder = value if own else cast("Any", type(value))
    fields = getattr(holder, "__dataclass_fields__", ())  # whose defaults are in the class
    for name in dir(value):
        if name.startswith("_") or name in fields or len(found) >= MOST_FUNCTIONS:
            continue
        static = inspect.getattr_static(holder, name, None)
        if isinstance(static, type) or not _is_function(static) or _is_of_library(cast("Any", type(value)), name):
            continue
        function = getattr(value, name, None)
        if callable(function):
            found[name] = function
    return found


def _is_of_library(kind: type[Any], name: str) -> bool:
    """Whether a class has an attribute as every model of its library has: it says nothing of this one."""
    giver = next((each for each in kind.__mro__ if name in vars(each)), kind)
    return giver.__module__.partition(".")[0] in ("pydantic", "msgspec")


def _is_function(static: Any) -> bool:
    """Whether an attribute, as it was written, is a function: also one that is decorated or builtin."""
    if isinstance(static, classmethod) or inspect.isbuiltin(static):
        return True
    return callable(static) and hasattr(type(static), "__get__")  # what is not bound to the object has no use for it


def source_of(name: str, text: str) -> str | None:
    """Source to be run in the sandbox, if `text` is some: it defines a function or class `name`, or is a lambda.

    Raises:
        ConfigurationError: if it begins like source that defines `name`, and is no Python.
    """
    begins = _STARTS.match(text) is not None
    defines = re.search(rf"^\s*(?:async\s+def|def|class)\s+{re.escape(name)}\b", text, re.MULTILINE) is not None
    if not defines and not text.lstrip().startswith("lambda"):
        return None
    source = textwrap.dedent(text).strip()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        if begins and defines:
            raise ConfigurationError(
                f"custom_tools: {name!r} is source that defines it, as it seems, and is no Python: {error}"
            ) from None
        return None
    if defined(name, tree) is not None:
        return source
    if len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr) and isinstance(tree.body[0].value, ast.Lambda):
        return f"{name} = {source}"
    return None


def defined(name: str, tree: ast.Module) -> Definition | None:
    """The last definition of `name` at the top of a module."""
    for node in reversed(tree.body):
        if isinstance(node, Definition) and node.name == name:
            return node
    return None
