"""What all environments can be told: which values can be, what limits they make, and the rows of their reports."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from ..errors import ConfigurationError
from .units import parse_bytes

if TYPE_CHECKING:
    from ..repl.sandbox import Environment, Settings

# Rows of the report: what a cell may try. "strict" wants each held by something.
ROWS = (
    "read_outside",
    "write_outside",
    "network",
    "other_processes",
    "kernel",
    "environment",
    "memory",
    "fork_bomb",
    "disk",
    "outliving",
)
_WORKER_DESCRIPTORS = 1024
_LEAST_MEMORY = 64 << 20
_MOST_STACK = 64 << 20
_LEAST_ADDRESSES = 64 << 30
_MOST_PROCESSES = 4_000_000  # of Linux, of all users
_MOST_OUTPUT = 1 << 30


def limits_of(settings: Settings) -> dict[str, int]:
    """The resource limits of one process, by their names without RLIMIT_."""
    limits = {"CORE": 0, "NOFILE": _WORKER_DESCRIPTORS}
    if (size := parse_bytes("max_file_size", settings.max_file_size)) is not None:
        limits["FSIZE"] = size
    if (memory := parse_bytes("memory_limit", settings.memory_limit)) is not None:
        # DATA counts neither a stack nor page tables, of which an address space takes up to a 512th.
        limits |= {"DATA": memory, "STACK": _MOST_STACK, "AS": max(_LEAST_ADDRESSES, 64 * memory)}
    return limits


def check_settings(place: Environment) -> None:
    """Look at all settings of an environment for their types, and at the common ones for their values.

    Raises:
        ConfigurationError: for the first that can't be; it names the setting and what would be right.
    """
    _check_types(place)
    if place.cell_timeout is not None and not place.cell_timeout > 0:
        raise ConfigurationError(f"cell_timeout={place.cell_timeout!r}: use seconds above 0, or None for no limit")
    memory = parse_bytes("memory_limit", place.memory_limit)
    if memory is not None and memory < _LEAST_MEMORY:
        raise ConfigurationError(
            f'memory_limit={place.memory_limit!r}: a worker itself takes more; use "{_LEAST_MEMORY >> 20}MB" or more'
        )
    parse_bytes("max_file_size", place.max_file_size)
    if place.max_processes is not None and not 1 <= place.max_processes <= _MOST_PROCESSES:
        raise ConfigurationError(
            f"max_processes={place.max_processes!r}: use 1 to {_MOST_PROCESSES:,}, or None for no limit"
        )
    if not 1 <= place.max_output <= _MOST_OUTPUT:
        raise ConfigurationError(f"max_output={place.max_output!r}: use 1 to {_MOST_OUTPUT:,} bytes")


def check_pool_size(size: int | None) -> None:
    """Raises ConfigurationError for a `pool_size` that can't be."""
    if size is not None and size < 0:
        raise ConfigurationError(f"pool_size={size!r}: use a whole number of workers, 0 for none, None for the default")


# ---- types -----------------------------------------------------------------------------------------------------------


def _check_types(environment: Environment) -> None:
    for name, hint in _hints(type(environment)).items():
        value = getattr(environment, name)
        if not _fits(value, hint):
            # What can't be shown in a word may be a secret.
            shown = f"{name}={value!r}" if type(value) in (str, int, float, bool, type(None)) else name
            raise ConfigurationError(f"{shown}: use {_words(hint)}, not {type(value).__name__}")


@functools.cache
def _hints(kind: type[Environment]) -> dict[str, Any]:
    """Setting → the type that it is declared with."""
    hints = get_type_hints(kind, localns={"Sequence": Sequence, "Mapping": Mapping})
    return {name: hints[name] for name in kind.__struct_fields__ if not name.startswith("_")}


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(
            _fits(key, arguments[0]) and _fits(each, arguments[1])
            for key, each in cast("Mapping[Any, Any]", value).items()
        )
    if origin is tuple and Ellipsis not in arguments:
        fits = isinstance(value, (tuple, list)) and len(cast("Sequence[Any]", value)) == len(arguments)
        return fits and all(map(_fits, cast("Sequence[Any]", value), arguments))
    if origin in (tuple, list, Sequence):
        return isinstance(value, (tuple, list)) and all(_fits(each, arguments[0]) for each in cast("Any", value))
    if origin is not None or not isinstance(hint, type):  # what a driver of the caller's may have
        return True
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a str",
    bool: "True or False",
    Path: "a Path",
    NoneType: "None",
    Any: "anything",
}


def _words(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _or(list(map(_words, arguments)))
    if origin is Literal:
        return _or([f'"{each}"' for each in arguments])
    if origin in (dict, Mapping):
        return "a dict with str keys"
    if origin is tuple and Ellipsis not in arguments:
        return f"({', '.join(map(_words, arguments))})"
    if origin is not None:
        return f"a list, of {_words(arguments[0])} each"
    return _WORDS.get(hint) or hint.__name__


def _or(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
