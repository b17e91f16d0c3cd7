"""Changes to modules that most cells never import, and that take as long to import as all the rest of the worker."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def when_imported(name: str, change: Callable[[ModuleType], object]) -> None:
    """Call `change` with the module: now if it is there, else once it is imported, before who imports it sees it."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
    else:
        sys.meta_path.insert(0, _Finder(name, change))  # type: ignore[arg-type]


class _Finder:
    def __init__(self, name: str, change: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._change = change

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == name:
                    self._change(module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec
