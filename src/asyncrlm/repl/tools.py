"""The caller's own values and callables in cells: values are copied in, callables are called on the host."""

from __future__ import annotations

import inspect
import keyword
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, cast

import anyio
import anyio.to_thread

from ..errors import ConfigurationError
from .raised import innermost
from .worker import codec

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
_LONGEST_DOC = 1000


class ToolFailure(Exception):
    """A host callable raised, or returned what can't be sent. The text and `kind` are what the cell reads."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class HostTools:
    """`custom_tools`, checked: name → value, or name → {"tool": value, "description": str}.

    `argument` is what the caller knows them by, for messages.

    Raises:
        ConfigurationError: if they are no dict, a name is reserved or no identifier, or a description is no str; the
            message names it.
    """

    def __init__(self, custom_tools: Mapping[str, Any] | None = None, argument: str = "custom_tools") -> None:
        if custom_tools is not None and not isinstance(cast("object", custom_tools), Mapping):
            raise ConfigurationError(
                f'{argument} must be a dict of names and values or callables, such as {{"look_up": look_up}}, '
                f"not {type(custom_tools).__name__}"
            )
        self.values: dict[str, Any] = {}
        """Name → plain value, loaded into each worker."""
        self._callables: dict[str, Callable[..., Any]] = {}
        self._descriptions: dict[str, str] = {}
        for name, entry in (custom_tools or {}).items():
            check_name(name)
            value, description = _split_entry(name, entry)
            self._descriptions[name] = description
            if callable(value):
                self._callables[name] = value
            else:
                self.values[name] = value

    @property
    def names(self) -> Mapping[str, Callable[..., Any]]:
        """The host callables, by name."""
        return self._callables

    def describe(self) -> str:
        """One line or more for each tool, for the prompt: signature, types, what it does. Empty without tools."""
        lines: list[str] = []
        for name, description in self._descriptions.items():
            function = self._callables.get(name)
            if function is None:
                head = f"`{name}`: {type(self.values[name]).__name__}"
                text = description
            else:
                head = f"`{_signature(name, function)}`"
                text = description or _doc(function)
            lines.append(f"- {head}" + (f" - {text}" if text else ""))
        return "\n".join(lines)

    async def call(
        self, name: str, args: list[Any], kwargs: dict[str, Any], *, limiter: anyio.CapacityLimiter | None = None
    ) -> Any:
        """Call a host callable with arguments as the codec encoded them; its result is encoded likewise.

        Coroutine functions run in the calling task; plain ones in a worker thread, which a cancellation leaves behind.

        Raises:
            ToolFailure: if it raised, whatever it raised, or returned what can't be sent.
        """
        function = self._callables[name]
        try:
            positional = [codec.decode(value) for value in args]
            named = {key: codec.decode(value) for key, value in kwargs.items()}
        except ValueError as error:
            raise ToolFailure("ValueError", f"the arguments of {name} could not be read: {error}") from None
        if _is_async(function):
            outcome = await _run_async(name, function, positional, named)
        else:
            outcome = await anyio.to_thread.run_sync(
                _run_plain, name, function, positional, named, abandon_on_cancel=True, limiter=limiter
            )
            if isinstance(outcome, _Later):
                outcome = await _run_async(name, _awaited, [outcome.awaitable], {})
        if isinstance(outcome, ToolFailure):
            raise outcome
        return outcome


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
    if name in tools.names or name in tools.values:
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


def _split_entry(name: str, entry: Any) -> tuple[Any, str]:
    described = cast("dict[Any, Any]", entry) if isinstance(entry, dict) else {}
    if "tool" not in described:
        return cast("Any", entry), ""
    for key in described:
        if key not in ("tool", "description"):
            raise ConfigurationError(
                f'custom_tools: unknown key {key!r} beside "tool" for {name!r}; known are: tool, description (a dict '
                'of your own goes in as {"tool": {…}})'
            )
    description = described.get("description") or ""
    if not isinstance(description, str):
        raise ConfigurationError(f"custom_tools: the description of {name!r} must be a str")
    return described["tool"], description.strip()


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 -- not whether it can be called, but how


def _signature(name: str, function: Callable[..., Any]) -> str:
    try:
        return f"{name}{inspect.signature(function)}"
    except (TypeError, ValueError):
        return f"{name}(...)"


def _doc(function: Callable[..., Any]) -> str:
    # A class or an instance inherits a docstring that tells nothing about this tool.
    text = inspect.getdoc(function) if inspect.isroutine(function) or inspect.isclass(function) else None
    return (text or "").strip()[:_LONGEST_DOC]


class _Later:
    """What a plain function returned to be awaited. Bare, trio would not let it out of the thread."""

    def __init__(self, awaitable: Any) -> None:
        self.awaitable = awaitable


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


async def _run_async(name: str, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        result = await function(*args, **kwargs)
    except (anyio.get_cancelled_exc_class(), KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 -- a SystemExit of a tool is the cell's, not the host's
        return _failure(error)
    return _encode(name, result)


def _run_plain(name: str, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    # An exception is handed back as a value: neither StopIteration nor SystemExit passes through a future unharmed.
    try:
        result = function(*args, **kwargs)
    except BaseException as error:  # noqa: BLE001 -- see above
        return _failure(error)
    return _Later(result) if inspect.isawaitable(result) else _encode(name, result)


def _failure(raised: BaseException) -> ToolFailure:
    error = innermost(raised)
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 -- an exception whose __str__ raises is still an exception to report
        text = f"(its text can't be had: {type(broken).__name__})"
    return ToolFailure(type(error).__name__, text)


def _encode(name: str, result: Any) -> Any:
    try:
        return codec.encode(result)
    except Exception as error:  # noqa: BLE001 -- the caller's own objects take part in encoding and may raise anything
        text = f"the tool {name} returned a {type(result).__name__}, which can't be sent to a cell: {error}"
        return ToolFailure("TypeError", text)
