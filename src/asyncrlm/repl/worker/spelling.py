"""Makes calls of the host that a cell awaits run at the same time, however they are spelt.

`llm_query(p)` is a plain call that waits, and so is one of a tool. Models write `await asyncio.gather(*[llm_query(p)
for p in prompts])` too: right, since replies can be awaited, but one after another. So where the text of a cell shows
that the result of such a call goes straight to `await` or to asyncio, the call becomes one of its twin that is a
coroutine function. Where that is not plain to see, nothing is changed and the cell is merely slower.
"""

from __future__ import annotations

import ast
from types import FunctionType
from typing import TYPE_CHECKING, Any

from .surface import TWIN, HostObject

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_TAKERS = frozenset({"gather", "as_completed", "wait", "wait_for", "shield", "ensure_future", "create_task", "run"})
"""Functions of asyncio that take awaitables, or a list of them."""


def apply(tree: ast.Module, source: str, reserved: Mapping[str, Any]) -> None:
    """Rewrite the tree of `source` if there may be anything to rewrite; `reserved` has the functions by their names."""
    if "asyncio" in source or "await" in source:
        rewrite(tree, reserved)


def rewrite(tree: ast.Module, reserved: Mapping[str, Any]) -> None:
    """Change calls in place. Source positions stay, so tracebacks show what the model wrote."""
    nodes = list(ast.walk(tree))
    given: list[ast.AST] = []
    for node in nodes:
        if isinstance(node, ast.Await):
            given.append(node.value)
        elif isinstance(node, ast.Call) and _takes(node.func):
            given.extend(_spread(node.args))
    lists = [node for node in given if isinstance(node, ast.Name)]
    calls = [node for node in (*given, *_collected(nodes, lists)) if isinstance(node, ast.Call)]
    if not calls:
        return
    bound = {name for node in nodes for name in _bound(node)}
    for call in calls:
        if _has_twin(call.func, reserved, bound):
            call.func = ast.copy_location(ast.Attribute(call.func, TWIN, ast.Load()), call.func)


def _has_twin(function: ast.expr, reserved: Mapping[str, Any], bound: set[str]) -> bool:
    """Whether it names a function of the host, or one of an object that is there."""
    names: list[str] = []
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name) or function.id in bound or len(names) > 1:
        return False
    value = reserved.get(function.id)
    if names:  # what is no object of the host may run code of its own where it is asked for an attribute
        value = value.__dict__.get(names[0]) if isinstance(value, HostObject) else None
    return hasattr(value, TWIN) if isinstance(value, FunctionType) else False


def _bound(node: ast.AST) -> Iterable[str]:
    """Names that the node itself binds."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.alias):
        yield node.asname or node.name


def _takes(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr in ("create_task", "run_until_complete"):  # of a task group or a loop
        return True
    return function.attr in _TAKERS and isinstance(function.value, ast.Name) and function.value.id == "asyncio"


def _spread(values: Iterable[ast.expr]) -> Iterable[ast.AST]:
    """What is handed over, also inside `*` and lists."""
    for value in values:
        if isinstance(value, ast.Starred):
            yield from _spread([value.value])
        elif isinstance(value, (ast.List, ast.Tuple, ast.Set)):
            yield from _spread(value.elts)
        elif isinstance(value, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            yield value.elt
        else:
            yield value


def _collected(nodes: list[ast.AST], handed: list[ast.Name]) -> Iterable[ast.AST]:
    """Calls that are collected in a list which is used for nothing but to be handed over."""
    for name in {node.id for node in handed}:
        known = {id(node) for node in handed if node.id == name}
        found: list[ast.AST] = []
        for node in nodes:
            if isinstance(node, ast.Assign) and _is_name(node.targets[0], name):
                if isinstance(node.value, (ast.List, ast.ListComp)):
                    known.add(id(node.targets[0]))
                    found.extend(_spread([node.value]))
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "append"
                and _is_name(node.func.value, name)
            ):
                known.add(id(node.func.value))
                found.extend(node.args)
        if all(id(node) in known for node in nodes if _is_name(node, name)):
            yield from found


def _is_name(node: Any, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
