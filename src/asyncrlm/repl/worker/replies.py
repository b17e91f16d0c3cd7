"""What calls give to a cell: values that can be awaited, and failures that can be told apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Self


class _Ready:
    """An awaitable that is there already, and itself the result.

    `send`, `throw` and `close` make it a coroutine for `asyncio.create_task`, `TaskGroup` and `gather`, which take
    nothing else: models write `gather(llm_query(a), llm_query(b))` as often as they write plain calls.
    """

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, Any]:
        return self
        yield

    def send(self, value: Any) -> Any:
        raise StopIteration(self)

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        raise kind

    def close(self) -> None:
        return None


class Text(_Ready, str):
    """The reply to one sub-call: a str in every way, and awaitable."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return str, (str(self),)


class Texts(_Ready, list[Any]):
    """The replies to a batch: a list in every way, and awaitable."""

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]  # asyncio.gather puts its arguments into a dict

    def __reduce__(self) -> Any:
        return list, (list(self),)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


class _Dict(_Ready, dict[Any, Any]):
    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]  # as above

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


class _Tuple(_Ready, tuple[Any, ...]):
    __slots__ = ()

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


class _Int(_Ready, int):
    __slots__ = ()

    def __reduce__(self) -> Any:
        return int, (int(self),)


class _Float(_Ready, float):
    __slots__ = ()

    def __reduce__(self) -> Any:
        return float, (float(self),)


PLAIN: dict[Any, type[Any]] = {Text: str, Texts: list, _Dict: dict, _Tuple: tuple, _Int: int, _Float: float}
"""Type that can be awaited → what it is otherwise."""
for _kind, _plain in PLAIN.items():  # in a cell `type(x)` is shown as what it is for
    _kind.__name__, _kind.__qualname__, _kind.__module__ = _plain.__name__, _plain.__name__, "builtins"
_READY: dict[Any, Any] = {plain: ready for ready, plain in PLAIN.items()}


def _same(value: Any) -> Any:
    return value


def ready(value: Any) -> Any:
    """`value` so that it can be awaited, too, where there is a type for that: not so with None, True and records."""
    return _READY.get(type(value), _same)(value)


class FailedReply(_Ready, str):
    """A sub-call that failed, as text that begins with "Error: ".

    Attributes:
        error: What went wrong.
        kind: In one word, for example "rate_limit", "too_long", "limit", "child".
        retryable: Whether the same call may succeed later.
    """

    __slots__ = ("error", "kind", "retryable")

    def __new__(cls, error: str = "", kind: str | None = None, retryable: bool = False) -> Self:
        reply = super().__new__(cls, f"Error: {error}")
        reply.error, reply.kind, reply.retryable = error, kind, retryable
        return reply

    def __reduce__(self) -> Any:
        return FailedReply, (self.error, self.kind, self.retryable)


class SubcallError(Exception):
    """A sub-call that failed, where failures are raised.

    Attributes:
        error, kind, retryable: as in `FailedReply`.
        replies: All replies of the batch it was part of, failed ones as `FailedReply`.
    """

    def __init__(
        self, error: str = "", kind: str | None = None, retryable: bool = False, replies: list[Any] | None = None
    ) -> None:
        super().__init__(error)
        self.error, self.kind, self.retryable = error, kind, retryable
        self.replies: list[Any] = replies if replies is not None else []

    def __reduce__(self) -> Any:
        return SubcallError, (self.error, self.kind, self.retryable, self.replies)


# They resolve as builtins in cells, so that is where pickle and tracebacks look for them.
FailedReply.__module__ = SubcallError.__module__ = "builtins"
BUILTINS: dict[str, Any] = {"FailedReply": FailedReply, "SubcallError": SubcallError}
