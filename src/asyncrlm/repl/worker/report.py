"""What the model reads of a cell: values, shortened, and errors, with a hint where a setting was in the way."""

from __future__ import annotations

import errno
import linecache
import os
import re
import socket
import sys
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from .records import Record, record_type
from .replies import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

MAX_TRACEBACK = 20_000
"""Characters kept of a traceback: its head and, mostly, its tail."""
MAX_NAME = 200
"""Characters of the name of a class or a variable."""
MAX_DIGITS = 100_000
"""Digits of an int that is written out."""
MAX_SHOWN = 20_000
"""Characters shown of the last expression of a cell."""
_MAX_FRAMES = 60
_DEEPEST = 20
_PACKAGE = os.path.dirname(sys._getframe().f_code.co_filename) + os.sep  # pyright: ignore[reportPrivateUsage]
_COMPACT: dict[str, Any] = {"compact": True} if sys.version_info >= (3, 10) else {}
hidden = [_PACKAGE]
"""Folders whose frames are left out of tracebacks."""
_BRACKETS: dict[type, tuple[str, str]] = {list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}"), dict: ("{", "}")}
_type: Callable[[Any], Any] = type
_bits: Callable[[Any], int] = int.bit_length


def valid(text: str) -> str:
    """`text` as valid Unicode: lone surrogates written as escapes."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def shorten(text: str, limit: int, head: float = 0.5) -> str:
    """Head and tail of `text`, `limit` characters in all, and how much lies between."""
    if len(text) <= limit:
        return text
    first = int(limit * head)
    last = limit - first
    return f"{text[:first]}\n[... {len(text) - limit:,} characters left out ...]\n{text[len(text) - last :]}"


def class_name(kind: type[Any]) -> str:
    """The name of a class, whatever its own class makes of `__name__`."""
    return str.__str__(_type.__dict__["__name__"].__get__(kind))[:MAX_NAME]  # pyright: ignore[reportUnknownArgumentType]


def type_name(value: Any) -> str:
    """The type that a reader of the cell would name."""
    kind = _type(value)
    return class_name(next((plain for own, plain in PLAIN.items() if own is kind), kind))


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """As `isinstance`, but asks nothing of the value, which may say or raise anything."""
    return issubclass(_type(value), kinds)


@contextmanager
def long_ints() -> Generator[None, None, None]:
    """Have ints of many digits written out; Python refuses from 4,300 on, lest an attacker keep it busy."""
    limit = getattr(sys, "get_int_max_str_digits", int)()
    if not 0 < limit < MAX_DIGITS:
        yield
        return
    sys.set_int_max_str_digits(MAX_DIGITS)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(limit)


class _FullError(Exception):
    """The room for a repr is used up."""


class _Writer:
    """Writes a repr into a bounded space, without ever making one that is much longer."""

    def __init__(self, limit: int) -> None:
        self.left = limit
        self.parts: list[str] = []
        self.above: list[Any] = []

    def put(self, text: str) -> None:
        if len(text) > self.left:
            self.parts.append(text[: self.left])
            raise _FullError
        self.parts.append(text)
        self.left -= len(text)

    def value(self, value: Any) -> None:
        kind: Any = PLAIN.get(_type(value)) or _type(value)
        if kind in _BRACKETS:
            self.container(value, *_BRACKETS[kind])
        elif kind is Record:
            self.put(record_type(value))
            self.container(dict(value), "{", "}")
        elif isinstance(value, (str, bytes, bytearray)) and len(value) > self.left:
            self.put(repr(value[: self.left]))
            raise _FullError
        elif kind is int and _bits(value) > 4 * self.left:
            self.put(f"<int of {_bits(value):,} bits>")
        elif isinstance(value, (list, tuple, set, frozenset, dict)) and len(cast("list[Any]", value)) > self.left:
            self.put(f"<{kind.__name__} of {len(cast('list[Any]', value)):,} items>")
        else:
            self.put(_own_repr(value))

    def container(self, value: Any, opening: str, closing: str) -> None:
        if any(value is other for other in self.above) or len(self.above) >= _DEEPEST:
            self.put(f"{opening}...{closing}")
            return
        if not value and type(value) is set:
            self.put("set()")
            return
        self.above.append(value)
        self.put(opening)
        separator = ""
        if isinstance(value, dict):
            for key, item in cast("dict[Any, Any]", value).items():
                self.put(separator)
                separator = ", "
                self.value(key)
                self.put(": ")
                self.value(item)
        else:
            for item in value:
                self.put(separator)
                separator = ", "
                self.value(item)
        self.put(",)" if opening == "(" and len(cast("list[Any]", value)) == 1 else closing)
        self.above.pop()


def _own_repr(value: Any) -> str:
    try:
        with long_ints():
            text = repr(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _no_text(value, "repr", error)
    return str.__str__(text)


def _no_text(value: Any, how: str, error: BaseException) -> str:
    return f"<{type_name(value)} object; its {how}() raised {type_name(error)}>"


def own_text(value: Any) -> str:
    """`str(value)`, whatever that raises but an interrupt."""
    try:
        with long_ints():
            return str.__str__(str(value))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _no_text(value, "str", error)


def short_repr(value: Any, limit: int) -> str:
    """`repr(value)`, cut after about `limit` characters. Raises nothing but an interrupt, whatever `value` does."""
    writer = _Writer(limit)
    try:
        writer.value(value)
    except _FullError:
        return valid("".join(writer.parts)) + "..." + _length(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a container that changes while it is read, a key that can't be looked up
        return _no_text(value, "repr", error)
    return valid("".join(writer.parts))


def _length(value: Any) -> str:
    kind: Any = next((base for base in (str, bytes, bytearray, *_BRACKETS) if is_a(value, base)), None)
    return f" (length {kind.__len__(value):,})" if kind else ""


# ---- errors ----------------------------------------------------------------------------------------------------------


def describe_error(error: BaseException, *, interrupted: bool, confined: bool) -> dict[str, Any]:
    """The `CellError` of what a cell raised. Raises nothing, whatever `error` does."""
    message = _tried(own_text, error)
    text = format_error(error)
    if is_a(error, SystemExit):
        text += "The cell ended here; its variables are kept.\n"
    hint = _tried(_no_str, error) or _tried(_no_awaitable, error)
    if hint is None and confined and not interrupted:
        hint = _tried(_hint, error)
    if hint:
        text += hint + "\n"
    frame: dict[str, Any] = {"type": valid(type_name(error))}
    frame["message"] = valid(shorten("<its text can't be had>" if message is None else message, MAX_TRACEBACK))
    frame["traceback"] = valid(shorten(text, MAX_TRACEBACK, head=0.25))
    if interrupted:
        frame["interrupted"] = True
    return frame


def _tried(step: Callable[[BaseException], Any], error: BaseException) -> Any:
    try:
        return step(error)
    except BaseException:  # of the error's own methods, which may raise anything
        return None


def format_error(error: BaseException) -> str:
    """The traceback of what a cell raised, from the cell's own code on. Raises nothing, whatever `error` does."""
    try:
        trace = error.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
            trace = trace.tb_next
        if is_a(error, SyntaxError):
            _find_line(cast("SyntaxError", error))
        report = traceback.TracebackException(_type(error), error, trace, **_COMPACT)
        _trim(report)
        return "".join(report.format())
    except BaseException as failure:
        return f"{type_name(error)}: <the traceback could not be shown: {type_name(failure)}>\n"


def _find_line(error: SyntaxError) -> None:
    """The compiler gives no source line for errors it finds after parsing."""
    if error.text is None and error.filename and isinstance(error.lineno, int):
        error.text = linecache.getline(error.filename, error.lineno) or None


def _trim(report: traceback.TracebackException) -> None:
    """Leave out the worker's own frames, and the middle of a very deep stack."""
    todo = [report]
    seen: set[int] = set()
    folders = tuple(hidden)
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        frames = [frame for frame in part.stack if not frame.filename.startswith(folders)]
        if len(frames) > _MAX_FRAMES:
            frames = frames[: _MAX_FRAMES // 3] + frames[-2 * _MAX_FRAMES // 3 :]
        part.stack[:] = frames
        todo.extend(other for other in (part.__cause__, part.__context__) if other is not None)
        todo.extend(getattr(part, "exceptions", None) or ())


_SETTING = "[sandbox] {what}; {how} in environment_kwargs allows it."
_NO_NETWORK = (
    "[sandbox] there is no network here. A tool of the host's can fetch what is needed (custom_tools of the caller); "
    'isolation="none" in environment_kwargs allows it by ending all confinement.'
)
_TOO_NESTED = "Python's parser took no more of it: the code is nested too deeply, or one expression is too long."
_PARSES = re.compile(r"(?<!re\.)\b(?:eval|exec|compile|parse|literal_eval)\s*\(")


def _no_str(error: BaseException) -> str | None:
    """One line that says what to write where a `Text` was given to what takes a str only."""
    if not isinstance(error, TypeError) or re.search(r"\bText\b", str(error)) is None:
        return None
    return (
        "[context] a Text is no str. Instead of re.search(p, text) write text.search(p), of re.finditer(p, text) "
        'text.finditer(p); for "".join, + and functions that want a str take a part: text[a:b], or the pieces of '
        "text.chunks(size)."
    )


_NO_AWAITABLE = (
    "can't be used in 'await' expression",
    "a coroutine or an awaitable is required",
    "a coroutine was expected",
)


def _no_awaitable(error: BaseException) -> str | None:
    """One line that says why a value can't be awaited: mostly it is the result of a call that has waited."""
    if not isinstance(error, TypeError) or not any(text in str(error) for text in _NO_AWAITABLE):
        return None
    return (
        "[await] that is a value, no awaitable. Functions that you were given have waited and are called: they return "
        "their result, so don't await it once more."
    )


def _hint(error: BaseException) -> str | None:
    """One line that names the setting which allows what was denied."""
    for cause in _causes(error):
        if isinstance(cause, MemoryError) and _of_parser(cause):
            return _TOO_NESTED
        if _no_network(cause):
            return _NO_NETWORK
        found = _denied(cause)
        if found is not None:
            return _SETTING.format(what=found[0], how=found[1])
    return None


def _causes(error: BaseException) -> Iterable[BaseException]:
    todo: list[Any] = [error]
    seen: set[int] = set()
    while todo and len(seen) < 20:
        cause = todo.pop(0)
        if not isinstance(cause, BaseException) or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        todo += [cause.__cause__, cause.__context__, getattr(cause, "reason", None)]
        todo += [*cause.args[:3], *(getattr(cause, "exceptions", None) or ())[:5]]


def _denied(error: BaseException) -> tuple[str, str] | None:
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError) or number == errno.ENOMEM:
        return "the process is out of its memory", "a larger memory_limit"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "no more threads or processes may be started", "a larger max_processes"
    if number == errno.EAGAIN and "fork" in _last_line(error):
        return "no more threads or processes may be started", "a larger max_processes"
    if number in (errno.EFBIG, errno.ENOSPC):
        return "a file may not grow any further", "a larger max_file_size"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        if getattr(error, "filename", None) is not None:
            return (
                "files outside the working folder, Python and its packages can't be reached",
                'read_paths=[...] (to read) or isolation="none"',
            )
        return "this is not allowed here", 'isolation="none"'
    return None


def _of_parser(error: MemoryError) -> bool:
    """Whether it is what the parser raises at the end of its stack: it has memory enough."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return bool(frames) and _PARSES.search(frames[-1].line or "") is not None


def _no_network(error: BaseException) -> bool:
    if isinstance(error, socket.gaierror):
        return True
    denied = isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return denied and getattr(error, "filename", None) is None and _inside_socket(error)


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{frames[-1].filename} {frames[-1].name} {frames[-1].line}" if frames else ""


def _inside_socket(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith(("socket.py", "asyncio/base_events.py")):
            return True
        trace = trace.tb_next
    return "socket" in _last_line(error) or "connect" in _last_line(error)
