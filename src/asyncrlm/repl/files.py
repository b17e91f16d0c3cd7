"""Files of the host as contexts: one file, those of a folder, those that a pattern matches."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from msgspec import Struct, structs

from ..errors import ConfigurationError
from .spool import Spool

MOST_DOCUMENTS = 1_000_000
"""Files of one context."""
Tell = Callable[[str, int, "int | None"], None]
"""Is told what is on its way, the bytes so far, and how many there will be, where that is known."""
_MAGIC = frozenset("*?[")


class FileRefusedError(ConfigurationError):
    """A file is none that a context can have. `why` says so without its place, which cells are not told."""

    def __init__(self, path: Path, why: str, more: str = "") -> None:
        super().__init__(f"{str(path)!r} {why}{more}")
        self.why = why


class HostFile(Struct, frozen=True, kw_only=True):
    """A regular file of the host, or what a stream was written to."""

    name: str
    """What it is called in cells: its name, or its path below the folder it was found in."""
    path: Path
    size: int
    """Bytes, when it was found."""
    root: str | None = None
    """A folder that it may not lead out of."""
    lazy: bool = False
    """Whether it stays a file in cells."""
    text: bool = True
    """Whether it is UTF-8 text; else bytes."""
    odd: bool = False
    """Whether the text has lone surrogates."""
    spool: Spool | None = None
    """Where it is, if it has no path."""
    mark: tuple[int, int] | None = None
    """Device and inode, when it was found."""
    same: bool = False
    """Whether what has taken its place since is refused: it is opened several times, and each must be the same file."""

    @classmethod
    def spooled(cls, name: str, spool: Spool, *, text: bool, odd: bool = False) -> Self:
        """What was written to `spool`."""
        return cls(name=name, path=Path(name), size=spool.size, text=text, odd=odd, spool=spool)

    def open(self) -> int:
        """A descriptor for reading; the caller closes it.

        Raises:
            ConfigurationError: if what is there now is no regular file, or lies outside of `root`.
            OSError: if it can't be opened.
        """
        if self.spool is not None:
            return self.spool.open()
        _check_regular(self.path, self.path.stat())
        # Not to wait for, should something else have taken its place since.
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            status = os.fstat(fd)
            _check_regular(self.path, status)
            if self.root is not None:
                _check_inside(self.path, _real_path(fd, self.path), self.root)
            if self.same and _mark(status) != self.mark:
                raise FileRefusedError(self.path, "is another file than it was")
        except BaseException:
            os.close(fd)
            raise
        return fd


class HostFiles(Struct, frozen=True, kw_only=True):
    """Files that are one context, sorted by name."""

    files: tuple[HostFile, ...]
    lazy: bool = False
    """Whether they stay files in cells."""

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(file.size for file in self.files)


def found(path: Path) -> HostFile | HostFiles:
    """What a path leads to: a file, the files of a folder, or those that match where it is a pattern.

    Raises:
        ConfigurationError: if that is nothing that can be a context.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and _MAGIC.intersection(str(path)):
            return _matching(path)
        raise ConfigurationError(f"the file {str(path)!r} can't be read: {error}") from error
    if stat.S_ISDIR(status.st_mode):
        return _below(path, ["**", "*"], f"the folder {str(path)!r} holds no file")
    _check_regular(path, status)
    return HostFile(name=path.name, path=path.absolute(), size=status.st_size, mark=_mark(status))


def found_all(paths: Sequence[Path]) -> HostFiles:
    """The files of a list of paths, in its order, named by what their paths differ in.

    Raises:
        ConfigurationError: if one of them can't be a context.
    """
    files: list[HostFile] = []
    common = os.path.commonpath([path.absolute().parent for path in paths])
    for path in paths:
        what = found(path)
        if isinstance(what, HostFile):
            name = os.path.relpath(what.path, common)
            files.append(structs.replace(what, name=Path(name).as_posix()))
            continue
        for file in what.files:
            name = Path(os.path.relpath(file.path, common)).as_posix()
            files.append(structs.replace(file, name=name))
    return _bounded(files)


def _matching(pattern: Path) -> HostFiles:
    parts = pattern.parts
    first = next(index for index, part in enumerate(parts) if _MAGIC.intersection(part))
    return _below(Path(*parts[:first]), list(parts[first:]), f"no file matches {str(pattern)!r}")


def _below(folder: Path, patterns: list[str], otherwise: str) -> HostFiles:
    root = os.path.realpath(folder)
    base = folder.absolute()
    names: set[str] = set()
    try:
        for entry in _walk(str(base), patterns, root):
            names.add(entry)
            if len(names) > MOST_DOCUMENTS:
                break
        files = [_file(base, Path(name), root) for name in sorted(names)]
    except OSError as error:
        raise ConfigurationError(f"the files of {str(folder)!r} can't be read: {error}") from error
    except RecursionError as error:
        raise ConfigurationError(f"{str(folder)!r} has folders in folders, too many to go through") from error
    if not files:
        raise ConfigurationError(otherwise)
    return _bounded(files)


def _file(base: Path, path: Path, root: str) -> HostFile:
    status = path.stat()
    _check_regular(path, status)
    name = path.relative_to(base).as_posix()
    return HostFile(name=name, path=path, size=status.st_size, root=root, mark=_mark(status))


def found_again(file: HostFile) -> HostFile:
    """The file, or what has taken its place since."""
    try:
        status = file.path.stat()
    except (OSError, ValueError):
        return file  # whoever opens it will tell
    return file if _mark(status) == file.mark else structs.replace(file, size=status.st_size, mark=_mark(status))


def _walk(folder: str, patterns: list[str], root: str) -> Iterator[str]:
    """Paths that match, by the rules of a shell: what begins with a dot is matched by what begins with one.

    Raises:
        ConfigurationError: for a device, a FIFO or a link that leads out of `root`, where it matches.
    """
    head, rest = patterns[0], patterns[1:]
    if head == "**":
        yield from _walk(folder, rest or ["*"], root)
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith(".") and not head.startswith("."):
                continue
            if head != "**" and not fnmatch.fnmatchcase(entry.name, head):
                continue
            if head == "**":
                # What a link to a folder leads to is below `root` as well, so it comes without the link.
                if entry.is_dir(follow_symlinks=False):
                    yield from _walk(entry.path, patterns, root)
                continue
            if entry.is_symlink():
                _check_inside(Path(entry.path), os.path.realpath(entry.path), root)
            if entry.is_dir():
                if rest:
                    yield from _walk(entry.path, rest, root)
            elif not rest:
                if not entry.is_file():
                    raise ConfigurationError(f"{entry.path!r} is no regular file; only those can be documents")
                yield entry.path


def _bounded(files: list[HostFile]) -> HostFiles:
    if len(files) > MOST_DOCUMENTS:
        raise ConfigurationError(f"that is more than {MOST_DOCUMENTS:,} files, the most that one context can have")
    return HostFiles(files=tuple(files))


def _mark(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FileRefusedError(path, "is no regular file", "; a path must lead to files or to a folder of them")


def _check_inside(path: Path, real: str, root: str) -> None:
    if not Path(real).is_relative_to(root):
        raise FileRefusedError(path, "is a link that leads out of the folder", f" {root!r}, so it is refused")


def _real_path(fd: int, path: Path) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 -- of a deleted file too
    except OSError:  # no such folder on this system
        return os.path.realpath(path)
