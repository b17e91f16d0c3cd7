"""Local workers with nothing but POSIX: a keeper process for each, a process group, resource limits."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import anyio
import anyio.to_thread

from .. import repl
from ..errors import ConfigurationError
from .local_output import CHUNK, open_pipes
from .local_process import WORKER_IMPORT, sweep_homes
from .local_sandbox import LocalSandbox

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from ..repl.sandbox import Report

_BOOTSTRAP = WORKER_IMPORT + "from _asyncrlm_worker import portable\nportable.main(sys.argv[2])\n"
_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}


class PortableSandbox(LocalSandbox):
    """A worker under a keeper, which signals it for the host."""

    passes_files: ClassVar[bool] = False

    control: int = -1
    keeper: subprocess.Popen[bytes] | None = None

    def _read(self) -> bytes:
        try:
            data = self._channel.recv(CHUNK)
        except ConnectionResetError:
            data = b""
        if not data:
            self._ended = True
        return data

    def kill(self) -> None:
        self._killing = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.control >= 0 and not self._ended:
            with contextlib.suppress(OSError):  # the keeper is gone, and the worker with it
                os.write(self.control, b"k" if number == signal.SIGKILL else b"i")

    def cpu_seconds(self) -> float | None:
        return None

    async def _wait_for_end(self) -> None:
        await super()._wait_for_end()
        if self.keeper is not None:
            await anyio.to_thread.run_sync(self.keeper.wait, abandon_on_cancel=True, limiter=self._threads)

    def release(self) -> None:
        if self.control >= 0:
            os.close(self.control)
            self.control = -1
        super().release()


class LocalPortable:
    """What the runs of one scope share: a folder, locked by the host and by every keeper."""

    def __init__(
        self, python: str, packages: list[str], package: Path | None, *, threads: anyio.CapacityLimiter
    ) -> None:
        self._python = python
        self._packages = packages
        self._threads = threads
        self._package = package or Path(repl.__path__[0]) / "worker"
        self._sandboxes: set[LocalSandbox] = set()
        self._home = Path()
        self._lock = -1

    async def __aenter__(self) -> Self:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._make_home, limiter=self._threads)
        return self

    def _make_home(self) -> None:
        sweep_homes()
        self._home = Path(tempfile.mkdtemp(prefix="asyncrlm-")).resolve()
        # Locked before it has the name that a sweep looks for.
        self._lock = os.open(self._home / "making", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self._home / "making").rename(self._home / "lock")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not shielded: whoever leaves it has a grace of its own.
        try:
            async with anyio.create_task_group() as group:
                for sandbox in list(self._sandboxes):
                    group.start_soon(sandbox.aclose)
            await anyio.to_thread.run_sync(
                shutil.rmtree, self._home, True, abandon_on_cancel=True, limiter=self._threads
            )
        finally:
            os.close(self._lock)

    async def worker(self, report: Report, limits: dict[str, int], work: str | None, keep: int) -> PortableSandbox:
        """A new worker."""
        sandbox: PortableSandbox | None = None
        with anyio.CancelScope(shield=True):  # a thread's result that nobody takes would be a process nobody stops
            sandbox = await anyio.to_thread.run_sync(self._spawn, report, limits, work, keep, limiter=self._threads)
        assert sandbox is not None  # noqa: S101 - a shielded scope lets every exception through
        return sandbox

    def _spawn(self, report: Report, limits: dict[str, int], work: str | None, keep: int) -> PortableSandbox:
        folder = self._home / secrets.token_hex(8)
        (folder / "files").mkdir(mode=0o700, parents=True)
        own = folder / "work"
        own.mkdir(mode=0o700)
        work = work or str(own)
        with contextlib.ExitStack() as undo:  # of what is open when the next thing can't be had
            near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            undo.callback(far.close)
            undo.callback(near.close)
            orders, control = os.pipe()
            undo.callback(os.close, orders)
            undo.callback(os.close, control)
            outputs, (out, err) = open_pipes(keep)
            undo.pop_all()
        os.set_blocking(control, False)
        near.setblocking(False)
        sandbox = PortableSandbox(
            near,
            outputs,
            str(folder / "files"),
            report,
            copies_passed=False,
            threads=self._threads,
            on_closed=self._sandboxes.discard,
            held=False,
        )
        sandbox.control = control
        options: dict[str, Any] = {
            "channel": far.fileno(),
            "control": orders,
            "out": out,
            "err": err,
            "work": work,
            "folder": str(folder),
            "limits": limits,
            "env": {**_ENV, "HOME": work, "TMPDIR": work, "PWD": work},
            "in_force": report.isolation,
            "packages": self._packages,
        }
        try:
            sandbox.keeper = subprocess.Popen(  # noqa: S603 - the interpreter the caller named
                [self._python, "-I", "-c", _BOOTSTRAP, str(self._package), json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                env=_ENV,
                cwd="/",
                pass_fds=[far.fileno(), orders, out, err, self._lock],
                start_new_session=True,
            )
        except OSError as e:
            sandbox.release()
            raise ConfigurationError(f"python={self._python!r} can't be run: {e.strerror}") from e
        finally:
            far.close()
            for fd in (orders, out, err):
                os.close(fd)
        self._sandboxes.add(sandbox)
        return sandbox


def rows(names: tuple[str, ...], *, confine: bool) -> dict[str, str | None]:
    """What holds here: a clean environment, and nothing else. A process group can be left by whoever wants to."""
    held = {"environment": "clean exec"} if confine else {}
    return {name: held.get(name) for name in names}


def python_version(python: str) -> str:
    """The version of the host's own interpreter; another's is not known before it runs."""
    return platform.python_version() if python == sys.executable else ""
