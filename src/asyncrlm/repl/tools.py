"""The caller's own values and callables in cells: values are copied in, callables are called on the host."""

from __future__ import annotations

import keyword
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, Literal, cast

from msgspec import UNSET, Struct, UnsetType, field

from ..caught import is_async
from ..errors import ConfigurationError
from .tool_objects import functions_of, source_of
from .tool_words import describe_function, describe_object, describe_source, describe_value, docstring

RESERVED_NAMES = frozenset(
    {
        "context",
        "history",
        "answer",
        "llm_query",
        "llm_query_batched",
        "rlm_query",
        "rlm_query_batched",
        "allm_query",
        "allm_query_batched",
        "arlm_query",
        "arlm_query_batched",
        "SHOW_VARS",
        "SHOW_LIMITS",
        "FailedReply",
        "SubcallError",
    }
)
"""Names that cells find already bound, besides `context_N` and `history_N`. No tool may have one."""

_NUMBERED = re.compile(r"(context|history)_\d+")
_KEYS = ("tool", "description", "timeout", "max_calls")


class Tool(Struct, frozen=True, kw_only=True):
    """One entry of `custom_tools`."""

    name: str
    kind: Literal["function", "source", "object", "value"]
    """A callable of the host; Python source that defines the name in the sandbox; what is no plain data, and has
    functions; anything else."""
    value: Any
    text: str
    """What the prompt says of it."""
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    """What cells may call on the host: itself, or "name.function" of an object that could not be sent."""
    docs: Mapping[str, str] = field(default_factory=dict[str, str])
    """What `help` says in a cell of each of `functions`."""
    timeout: float | UnsetType | None = UNSET
    """Seconds one call may take; unset: what the run says."""
    max_calls: int | None = None
    """Calls of each function in one completion, children included."""
    untrusted: bool = False
    """Whether `text` says what somebody else wrote."""


class HostTools:
    """`custom_tools`, checked: name → value, or name → {"tool": value, "description": str, …}.

    `argument` is what the caller knows them by, for messages.

    Raises:
        ConfigurationError: if they are no dict, a name is reserved or no identifier, or what belongs to an entry is
            wrong; the message names it.
    """

    def __init__(self, custom_tools: Mapping[str, Any] | None = None, argument: str = "custom_tools") -> None:
        if custom_tools is not None and not isinstance(cast("object", custom_tools), Mapping):
            raise ConfigurationError(
                f'{argument} must be a dict of names and values or callables, such as {{"look_up": look_up}}, '
                f"not {type(custom_tools).__name__}"
            )
        self.entries: dict[str, Tool] = {}
        """In the order they were given."""
        for name, entry in (custom_tools or {}).items():
            check_name(name)
            self.entries[name] = _tool(name, entry)
        self.names: dict[str, Callable[..., Any]] = {}
        """The host callables by the name that a call has: "name", or "name.function" for one of an object."""
        for tool in self.entries.values():
            self.names.update(tool.functions)

    def joined(self, more: Iterable[Tool]) -> HostTools:
        """These and `more`.

        Raises:
            ConfigurationError: if two have the same name.
        """
        joined = HostTools()
        for tool in (*self.entries.values(), *more):
            if tool.name in joined.entries:
                raise ConfigurationError(f"two tools have the name {tool.name!r}; give one of them another")
            joined.entries[tool.name] = tool
            joined.names.update(tool.functions)
        return joined

    def of_kind(self, *kinds: str) -> list[Tool]:
        return [tool for tool in self.entries.values() if tool.kind in kinds]

    @property
    def values(self) -> dict[str, Any]:
        """Name → what is sent into each worker as data."""
        return {tool.name: tool.value for tool in self.of_kind("value", "object")}

    @property
    def functions(self) -> dict[str, str]:
        """The callables that are called on the host wherever cells run: name → docstring there."""
        return {tool.name: tool.docs.get(tool.name, "") for tool in self.of_kind("function")}

    @property
    def awaitable(self) -> list[str]:
        """Those of `names` that are coroutine functions: cells may await what they return."""
        return [name for name, function in self.names.items() if is_async(function)]

    def entry(self, call: str) -> Tool:
        """The tool that a call by this name is for."""
        return self.entries[call.partition(".")[0]]

    def describe(self, untrusted: str) -> str:
        """One line or more for each tool, for the prompt: signature, types, what it does. Empty without tools.

        `untrusted` is said after those that somebody else describes.
        """
        lines = [f"- {tool.text}" for tool in self.entries.values()]
        if any(tool.untrusted for tool in self.entries.values()):
            lines.append(untrusted)
        return "\n".join(lines)


def check_name(name: Any) -> None:
    """Whether a caller may give a tool this name.

    Raises:
        ConfigurationError: if not; the message names it.
    """
    _check_identifier("custom_tools", name)
    if _NUMBERED.fullmatch(name):
        raise _reserved("custom_tools", name, RESERVED_NAMES)
    _refuse_reserved("custom_tools", name, RESERVED_NAMES)


def check_context_name(name: Any, tools: HostTools) -> None:
    """Whether a caller may bind a context under this name: `context`, `history`, either numbered, or one of their own.

    Raises:
        ConfigurationError: if not; the message says why.
    """
    _check_identifier("load", name)
    _refuse_reserved("load", name, RESERVED_NAMES - {"context", "history"})
    if name in tools.entries:
        raise ConfigurationError(f"load: the name {name!r} is that of one of the custom_tools; choose another")


def _check_identifier(what: str, name: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigurationError(f"{what}: {name!r} is no Python identifier")
    if keyword.iskeyword(name):
        raise ConfigurationError(f"{what}: {name!r} is a keyword of Python: no variable can have that name")
    normal = unicodedata.normalize("NFKC", name)
    if name != normal:
        raise ConfigurationError(f"{what}: Python reads the name {name!r} as {normal!r}; spell it so")


def _refuse_reserved(what: str, name: str, reserved: frozenset[str]) -> None:
    if name in reserved or name.startswith("__"):
        raise _reserved(what, name, reserved)


def _reserved(what: str, name: str, reserved: frozenset[str]) -> ConfigurationError:
    numbered = ", context_N, history_N" if "context" in reserved else ""
    return ConfigurationError(
        f"{what}: the name {name!r} is reserved; choose another than {', '.join(sorted(reserved))}{numbered} or __*"
    )


def _tool(name: str, entry: Any) -> Tool:
    about: dict[Any, Any] = {"tool": entry}
    if isinstance(entry, dict) and "tool" in entry:
        about = cast("dict[Any, Any]", entry)
    for key in about:
        if key not in _KEYS:
            raise ConfigurationError(
                f'custom_tools: unknown key {key!r} beside "tool" for {name!r}; known are: {", ".join(_KEYS)} (a dict '
                'of your own goes in as {"tool": {…}})'
            )
    description = about.get("description") or ""
    if not isinstance(description, str):
        raise ConfigurationError(f"custom_tools: the description of {name!r} must be a str")
    description = description.strip()
    limits: dict[str, Any] = {}
    if "timeout" in about:
        limits["timeout"] = checked_seconds(f"custom_tools: the timeout of {name!r}", about["timeout"])
    if about.get("max_calls") is not None:
        limits["max_calls"] = _checked_count(name, about["max_calls"])
    tool = _made(name, about["tool"], description, limits)
    if limits and not tool.functions:
        raise ConfigurationError(
            f"custom_tools: {name!r} is not called on the host, so it can't have {' or '.join(limits)}"
        )
    return tool


def _made(name: str, value: Any, description: str, limits: dict[str, Any]) -> Tool:
    if callable(value):
        text = describe_function(name, value, description)
        functions, docs = {name: value}, {name: docstring(name, value, description)}
        return Tool(name=name, kind="function", value=value, text=text, functions=functions, docs=docs, **limits)
    if isinstance(value, str) and (source := source_of(name, value)) is not None:
        return Tool(name=name, kind="source", value=source, text=describe_source(name, source, description))
    functions = functions_of(value)
    if functions:
        text = describe_object(name, value, functions, description)
        named = {f"{name}.{each}": function for each, function in functions.items()}
        docs = {each: docstring(each, function) for each, function in named.items()}
        return Tool(name=name, kind="object", value=value, text=text, functions=named, docs=docs, **limits)
    return Tool(name=name, kind="value", value=value, text=describe_value(name, value, description))


def checked_seconds(what: str, value: Any) -> float | None:
    """`value` as a time limit; None for none.

    Raises:
        ConfigurationError: if it is no number, 0 or more.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise ConfigurationError(f"{what} must be a number of seconds, 0 or more, or None")
    return None if float(value) == math.inf else float(value)


def _checked_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise ConfigurationError(f"custom_tools: max_calls of {name!r} must be a whole number, 1 or more, or None")
    return int(value)
