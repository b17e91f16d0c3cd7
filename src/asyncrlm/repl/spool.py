"""Files without a name, for contexts that come as a stream: gone when nobody holds them any more, whatever happens."""

from __future__ import annotations

import os
import tempfile


class Spool:
    """A temporary file. It is closed, and its room on the disk free, once this object is gone."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile(buffering=0) as file:
            self.fd = os.dup(file.fileno())
        self.size = 0
        """Bytes written."""

    def write(self, data: bytes) -> None:
        """Add all of `data`. Blocks."""
        view = memoryview(data)
        while view:
            done = os.write(self.fd, view)
            self.size += done
            view = view[done:]

    def clear(self) -> None:
        """Begin anew."""
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)
        self.size = 0

    def open(self) -> int:
        """A descriptor for reading; the caller closes it."""
        try:
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no such folder on this system
            return os.dup(self.fd)

    def close(self) -> None:
        """Give it up before this object is gone. Twice is fine."""
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            os.close(fd)

    __del__ = close
