"""The contexts of one session: how each gets to a worker, and what cells ask the host about their files."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from ..errors import ConfigurationError
from .context import LoadPlan, plan_load
from .files import FileRefusedError, HostFile, HostFiles, found_again
from .gather import gathered, is_stream
from .web import Web, is_url
from .worker import codec
from .worker.characters import BLOCK, Counts, characters

STEP = 32 * BLOCK
"""Bytes of a file that are counted at a time."""


PASSED = object()
"""Instead of a value: the descriptor that was passed last."""
HandOver = Callable[[str, HostFile], Awaitable["str | None"]]
"""Gives a cell a file, known by a key: its path there, or None if its descriptor was passed."""


class FileError(Exception):
    """What a cell asked of a file can't be had; the text is for the cell."""


class CharacterIndex:
    """Counts the characters of a file in the background, for cells that ask where one is."""

    def __init__(self, file: HostFile) -> None:
        self._file = file
        self._counts = Counts(file.size)
        self._news = anyio.Event()
        self._error: str | None = None

    async def build(self, threads: anyio.CapacityLimiter) -> None:
        """Count all of it. What goes wrong is told to those who ask."""
        try:
            fd = await anyio.to_thread.run_sync(self._file.open, limiter=threads)
            try:
                while not self._counts.complete:
                    start = self._counts.nbytes
                    new = await anyio.to_thread.run_sync(self._count, fd, start, limiter=threads)
                    self._counts.add(new, start // BLOCK)
                    self._tell()
            finally:
                os.close(fd)
        except (OSError, ConfigurationError) as error:
            self._error = _told(self._file, error)
        finally:
            if not self._counts.complete:
                self._error = self._error or "the characters of the file are counted no longer"
            self._tell()

    def _count(self, fd: int, start: int) -> array[int]:
        counts = array("I")
        stop = min(start + STEP, self._counts.size)
        for at in range(start, stop, BLOCK):
            wanted = min(BLOCK, stop - at)
            data = os.pread(fd, wanted, at)
            if len(data) < wanted:
                size = self._counts.size
                raise OSError(f"the file {self._file.name!r} has become shorter than its {size:,} bytes")
            counts.append(characters(data))
        return counts

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    async def since(self, block: int, nbytes: int | None, character: int | None) -> bytes:
        """The counts of the blocks from `block` on, once those with this byte and this character are among them.

        Raises:
            FileError: if they can't be had.
        """
        while not self._counts.reaches(nbytes, character):
            if self._error is not None:
                raise FileError(self._error)
            await self._news.wait()
        return self._counts.since(max(block, 0)).tobytes()


def _unheard(_name: str, _received: int, _total: int | None) -> None:
    """Progress that nobody asked for."""


class Shelf:
    """What each new worker gets, in this order, and the files behind it.

    Args:
        threads: Bounds the reading of files.
    """

    def __init__(self, threads: anyio.CapacityLimiter) -> None:
        self._plans: dict[str, LoadPlan] = {}
        self._threads = threads
        self._group: anyio.abc.TaskGroup | None = None  # where files of folders are counted, once there are any
        self._keys = itertools.count(1)
        self._indexes: dict[str, CharacterIndex] = {}
        self._folders: dict[str, HostFiles] = {}

    async def plan(
        self, name: str, value: Any, *, also: str | None = None, lazy: bool = False, web: Web | None = None
    ) -> LoadPlan:
        """How to load `value`; see `Session.load`."""
        if isinstance(value, (str, bytes)):
            plan = plan_load(name, value)
        else:
            if is_stream(value) or is_url(value):
                value = await gathered(value, lazy=lazy, web=web or Web(), threads=self._threads, tell=_unheard)
            make = functools.partial(plan_load, name, value, lazy=lazy)
            plan = await anyio.to_thread.run_sync(make, abandon_on_cancel=True, limiter=self._threads)
        return plan if also is None else msgspec.structs.replace(plan, also=also)

    def keep(self, plan: LoadPlan) -> None:
        """Give it to each new worker from now on, instead of the one of its name."""
        self._plans[plan.name] = plan

    async def plans(self, group: anyio.abc.TaskGroup) -> list[LoadPlan]:
        """What a new worker gets."""
        for plan in list(self._plans.values()):
            self.keep(self.prepare(await self._as_it_is(plan), group))
        return list(self._plans.values())

    async def _as_it_is(self, plan: LoadPlan) -> LoadPlan:
        """With what has taken the place of its file since an earlier worker got it."""
        file = plan.file
        if plan.form != "lazy" or plan.value is None or file is None or file.spool is not None:
            return plan
        again = await anyio.to_thread.run_sync(found_again, file, abandon_on_cancel=True, limiter=self._threads)
        return plan if again is file else msgspec.structs.replace(plan, file=again, value=None)

    def prepare(self, plan: LoadPlan, group: anyio.abc.TaskGroup) -> LoadPlan:
        """The plan as workers get it; counting what it needs begins, in `group`."""
        if plan.value is not None or plan.form not in ("lazy", "folder"):
            return plan
        key = str(next(self._keys))
        if plan.files is not None:
            self._folders[key] = plan.files
            self._group = group
            return msgspec.structs.replace(plan, value=key)
        if plan.file is None:
            return plan
        file = _same(plan.file)
        self._count(key, file, group)
        return msgspec.structs.replace(plan, file=file, value=[key, codec.encode(file.name), file.size])

    def _count(self, key: str, file: HostFile, group: anyio.abc.TaskGroup) -> CharacterIndex:
        index = self._indexes[key] = CharacterIndex(file)
        group.start_soon(index.build, self._threads)
        return index

    async def answer(self, key: Any, question: list[Any], hand_over: HandOver) -> Any:
        """What a cell asked of a file; `PASSED` if the answer is the file itself, whose descriptor was passed.

        Raises:
            FileError: if it can't be had, or was no question.
            anyio.BrokenResourceError: if the worker is gone.
        """
        match question:
            case ["index", int(block), int() | None as nbytes, int() | None as character]:
                counts = await self._index(key).since(block, nbytes, character)
                return [counts, sys.byteorder]
            case ["open", int(number)] if key in self._folders:
                file = self._file(key, number)
                try:
                    path = await hand_over(f"{key}/{number}", file)
                except (OSError, ConfigurationError) as error:
                    raise FileError(_told(file, error)) from error
                return PASSED if path is None else path
            case _:
                raise FileError("there is no such file")

    def _index(self, key: Any) -> CharacterIndex:
        if key in self._indexes:
            return self._indexes[key]
        folder, _, number = str(key).partition("/")
        if folder not in self._folders or not number.isdecimal() or self._group is None:
            raise FileError("there is no such file")
        return self._count(key, self._file(folder, int(number)), self._group)

    def _file(self, key: str, number: int) -> HostFile:
        files = self._folders[key].files
        if not 0 <= number < len(files):
            raise FileError("there is no such file")
        return _same(files[number])


def _same(file: HostFile) -> HostFile:
    return msgspec.structs.replace(file, same=file.mark is not None)


def _told(file: HostFile, error: OSError | ConfigurationError) -> str:
    """Why it can't be had; a cell is not told where files of the host are."""
    if isinstance(error, ConfigurationError):
        return f"{file.name!r} {error.why if isinstance(error, FileRefusedError) else 'is another file than it was'}"
    return f"{file.name!r} can't be read: {error.strerror}" if error.strerror else str(error)
