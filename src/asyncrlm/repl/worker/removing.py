"""Removes folders that cells have filled, whatever they made there."""

from __future__ import annotations

import contextlib
import os

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str | os.PathLike[str], last: str = "") -> bool:
    """Remove a folder and all that is in it. `last` is a name in it that goes last, and only if all else went.

    Returns: whether it is gone. Never raises OSError, follows no link, leaves what is mounted inside.
    """
    try:
        top = os.open(path, _FOLDER)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        _Remover(top).run(last)
        if last and os.listdir(top) == [last]:
            os.unlink(last, dir_fd=top)
        os.rmdir(path)
    except OSError:
        return False
    finally:
        os.close(top)
    return True


class _Remover:
    """Empties the folder `top` with one more descriptor and no recursion, however deep it is.

    A folder that is not empty is moved up into `top` first. So no path grows, and since what is mounted can't be
    moved, none is entered.
    """

    def __init__(self, top: int) -> None:
        self.top = top
        self.prefix = f".gone-{os.urandom(8).hex()}-"
        self.moved = 0
        self.todo: list[str] = []

    def run(self, last: str) -> None:
        self.empty(self.top, last)
        while self.todo:
            name = self.todo.pop()
            with contextlib.suppress(OSError):
                folder = os.open(name, _FOLDER, dir_fd=self.top)
                try:
                    self.empty(folder)
                finally:
                    os.close(folder)
                os.rmdir(name, dir_fd=self.top)

    def empty(self, folder: int, last: str = "") -> None:
        """Remove what is in it, but for folders that are not empty: those are moved up."""
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for name, is_folder in found:
            if name == last:
                continue
            with contextlib.suppress(OSError):
                if is_folder:
                    self.remove_folder(folder, name)
                else:
                    os.unlink(name, dir_fd=folder)

    def remove_folder(self, parent: int, name: str) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=parent)
            return
        # Its owner may have taken the rights to it from itself. Some C libraries can't do this without following links.
        with contextlib.suppress(OSError, NotImplementedError):
            os.chmod(name, 0o700, dir_fd=parent, follow_symlinks=False)
        self.moved += 1
        moved = f"{self.prefix}{self.moved}"
        os.rename(name, moved, src_dir_fd=parent, dst_dir_fd=self.top)
        self.todo.append(moved)
