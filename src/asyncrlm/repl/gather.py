"""What a prompt is once all of it is there: streams are written to a file, paths are looked up, the web is fetched."""

from __future__ import annotations

import functools
import io
from collections.abc import AsyncIterable
from typing import Any, Protocol, cast

import anyio
import anyio.from_thread
import anyio.to_thread

from ..caught import described, is_own
from ..errors import ConfigurationError
from .context import check_prompt_type, resolved
from .files import HostFile, Tell
from .spool import Spool
from .web import Web, fetch, is_url

PIECE = 1 << 20
"""Bytes read or written at a time."""


class BinaryFile(Protocol):
    """A file that was opened for reading bytes."""

    def read(self, size: int, /) -> bytes: ...


def is_stream(value: Any) -> bool:
    """Whether `value` is read only once: an open file or an asynchronous iterator."""
    return isinstance(value, AsyncIterable) or callable(getattr(value, "read", None))


def check_given(value: Any) -> None:
    """Whether `value` may be the prompt of a run.

    Raises:
        ConfigurationError: if not; the message names what may.
    """
    if is_stream(value):
        check_stream(value)
    elif not is_url(value):
        check_prompt_type(value)


def check_stream(value: Any) -> None:
    """Whether a stream is one of bytes, or of what is asked for.

    Raises:
        ConfigurationError: for a file that was opened as text.
    """
    if isinstance(value, io.TextIOBase):
        raise ConfigurationError("the prompt is a file opened as text; open it in binary mode or give its path")


async def gathered(value: Any, *, lazy: bool, web: Web, threads: anyio.CapacityLimiter, tell: Tell) -> Any:
    """`value`, or the files that hold it.

    Raises:
        ConfigurationError: if it can't be had.
    """
    if is_url(value):
        file = await fetch(str(value), web, threads, tell)
    elif isinstance(value, AsyncIterable):
        try:
            file = await _iterated(cast("AsyncIterable[Any]", value), threads, tell)
        except ConfigurationError:
            raise
        except BaseException as error:  # of the caller's iterator
            if not is_own(error):
                raise
            raise ConfigurationError(f"the asynchronous iterator given as prompt raised {described(error)}") from error
    elif is_stream(value):
        check_stream(value)
        file = await anyio.to_thread.run_sync(_read, value, abandon_on_cancel=True, limiter=threads)
        tell("file", file.size, file.size)
    else:
        return await anyio.to_thread.run_sync(
            functools.partial(resolved, value, lazy=lazy), abandon_on_cancel=True, limiter=threads
        )
    return resolved(file, lazy=lazy)


async def _iterated(pieces: AsyncIterable[Any], threads: anyio.CapacityLimiter, tell: Tell) -> HostFile:
    spool = Spool()
    kind: type[Any] | None = None
    held: list[bytes] = []
    size = 0
    odd = False
    async for piece in pieces:
        base = str if isinstance(piece, str) else bytes
        if not isinstance(piece, (str, bytes, bytearray, memoryview)) or kind not in (None, base):
            raise ConfigurationError(
                f"an asynchronous iterator as prompt gives str or bytes, all of one kind; this one gave "
                f"{type(cast('Any', piece)).__name__} after {kind.__name__ if kind else 'nothing'}"
            )
        kind = base
        if isinstance(piece, str):
            try:
                data = piece.encode("utf-8")
            except UnicodeEncodeError:
                odd, data = True, piece.encode("utf-8", "surrogatepass")
        else:
            data = bytes(cast("bytes", piece))
        held.append(data)
        size += len(data)
        if size >= PIECE:
            await _keep(spool, held, threads)
            held, size = [], 0
            tell("iterator", spool.size, None)
    await _keep(spool, held, threads)
    tell("iterator", spool.size, spool.size)
    return HostFile.spooled("", spool, text=kind is not bytes, odd=odd)


async def _keep(spool: Spool, held: list[bytes], threads: anyio.CapacityLimiter) -> None:
    try:
        await anyio.to_thread.run_sync(spool.write, b"".join(held), limiter=threads)
    except OSError as error:
        raise ConfigurationError(f"what the asynchronous iterator gave could not be kept in a file: {error}") from error


def _read(file: BinaryFile) -> HostFile:
    """All that is left of an open file, whose position is put back where it can be."""
    spool = Spool()
    tell: Any = getattr(file, "tell", None)
    try:
        begin = tell()
    except Exception:  # noqa: BLE001 -- a pipe, or a file that knows no position
        begin = None
    try:
        try:
            while data := file.read(PIECE):
                if isinstance(data, str):
                    raise ConfigurationError("the prompt is a file opened as text; open it in binary mode")
                anyio.from_thread.check_cancelled()
                spool.write(data)
        finally:
            if begin is not None:
                cast("Any", file).seek(begin)
    except ConfigurationError:
        raise
    except Exception as error:
        spool.close()  # the thread may keep the error, and with it what this function had
        raise ConfigurationError(f"the file given as prompt can't be read: {described(error)}") from error
    return HostFile.spooled("", spool, text=False)
