"""Cells on this machine: a process of its own for each run, confined as far as the kernel allows."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from msgspec.structs import force_setattr

from ..errors import ConfigurationError
from ..repl.resources import threads_of
from ..repl.sandbox import Environment, Report, Sandbox, Scope
from .local_order import ENVIRON, Order, Request
from .settings import ROWS, check_pool_size, check_settings, limits_of

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from .local_order import Facts

_LOWEST_PID_MAX = 301
"""What Linux takes for a namespace's at least."""


class LocalEnvironment(Environment, frozen=True, kw_only=True):
    """Cells run in a worker process on this machine (Linux; x86_64 and aarch64 have every row of confinement).

    A worker reads Python, its installed packages, the system's libraries, its context and `read_paths`; it writes its
    working folder; it reaches no network, no other process, no environment variable of the host. chmod and utime do
    nothing outside the working folder; where the kernel gives no mount namespace, they do nothing inside it either.
    On macOS a worker has a clean environment, resource limits and a process group, and nothing else is confined.

    Raises:
        ConfigurationError: for a value that can't be.
    """

    name: ClassVar[str] = "local"

    isolation: Literal["auto", "strict", "none"] = "auto"
    """"auto": what this machine gives. "strict": every row of the report, or a ConfigurationError at `open`. "none": no
    confinement; only limits, and that nothing outlives its worker."""
    read_paths: tuple[str | Path, ...] = ()
    """Files and folders cells may read as well."""
    workdir: str | Path | None = None
    """A folder of yours that cells run in and write to; it stays. None: a new one for each worker, gone with it."""
    python: str | Path | None = None
    """Another interpreter (3.9 or later), with its own packages. None: this one."""
    pool_size: int | None = None
    """Workers kept started ahead while the `AsyncRLM` is entered (`async with`), at about 2.5 MB each. A number: the
    runs that begin together; all are there once it is entered. None: up to 16, started by and by. 0: none."""
    _shell: ClassVar[bool] = False
    _mode: str = "auto"
    _package: Path | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        check_pool_size(self.pool_size)
        # Resolved here, once: it takes system calls, which have no place in `open`.
        read_paths = tuple(Path(path).expanduser().resolve() for path in self.read_paths)
        for given, path in zip(self.read_paths, read_paths, strict=True):
            if given == "" or not path.exists():
                raise ConfigurationError(f"read_paths: {str(given)!r} does not exist")
        force_setattr(self, "read_paths", read_paths)
        if self.workdir is not None:
            workdir = Path(self.workdir).expanduser().resolve()
            if self.workdir == "" or not workdir.is_dir():
                raise ConfigurationError(f"workdir={str(self.workdir)!r} is not a folder")
            if workdir == workdir.parent:
                raise ConfigurationError(f"workdir={str(self.workdir)!r}: cells write there, so use a folder of theirs")
            temporary = Path(tempfile.gettempdir()).resolve()
            if temporary.is_relative_to(workdir) and self.isolation != "none":
                raise ConfigurationError(
                    f"workdir={str(self.workdir)!r} holds the folder of temporary files, {str(temporary)!r}, and with "
                    "it what other workers run from: use a folder beside or inside it"
                )
            force_setattr(self, "workdir", workdir)
        if self.python is not None:
            python = shutil.which(Path(self.python).expanduser())
            if python is None:
                raise ConfigurationError(f"python={str(self.python)!r} can't be run: give the path of an interpreter")
            force_setattr(self, "python", Path(python).absolute())

    async def prepare(self, scope: Scope) -> None:
        if self.pool_size:
            await (await self.open(scope)).aclose()  # the first to be opened waits for all

    async def open(self, scope: Scope) -> Sandbox:
        if self._mode == "portable" or sys.platform == "darwin":
            return await self._open_portable(scope)
        if not sys.platform.startswith("linux"):
            raise ConfigurationError(f"the local environment does not run on {sys.platform}: it needs Linux or macOS")
        from .local_template import LocalTemplate  # noqa: PLC0415 - it needs what only POSIX has

        python = os.fspath(self.python) if self.python is not None else sys.executable

        def template() -> AbstractAsyncContextManager[LocalTemplate]:
            packages = _host_packages() if self.python is None else []
            threads = threads_of(scope)
            return LocalTemplate(python, self._mode, packages, self._package, threads=threads, shell=self._shell)

        shared = await scope.shared((self.name, python, self._mode, self._package), template)
        order = shared.orders.get(self)
        if order is None:
            order = shared.orders[self] = self._order(shared.facts)
        return await shared.worker(
            order, depth=getattr(scope, "depth", None), long_lived=getattr(scope, "long_lived", False)
        )

    async def _open_portable(self, scope: Scope) -> Sandbox:
        from .local_portable import LocalPortable, rows  # noqa: PLC0415 - it needs what only POSIX has

        report_rows = rows(ROWS, confine=self.isolation != "none")
        if self.isolation == "strict":
            failing = ", ".join(row for row in ROWS if not report_rows[row])
            raise ConfigurationError(f'isolation="strict" does not hold here for {failing}; use isolation="auto"')
        python = os.fspath(self.python) if self.python is not None else sys.executable
        packages = _host_packages() if self.python is None else []
        shared = await scope.shared(
            (self.name, python, "portable"),
            lambda: LocalPortable(python, packages, threads=threads_of(scope), shell=self._shell),
        )
        report = Report(environment=self.name, isolation=report_rows)
        work = None if self.workdir is None else str(self.workdir)
        return await shared.worker(report, limits_of(self), work, max(1, self.max_output // 2))

    def _order(self, facts: Facts) -> Order:
        """What every worker with these settings is asked for with."""
        report = Report(environment=self.name, python=facts.python, isolation=self._rows(facts))
        if self.isolation == "strict" and (failing := [row for row in ROWS if not report.isolation[row]]):
            raise ConfigurationError(
                f'isolation="strict" does not hold here for {", ".join(failing)} (mode {facts.mode}, '
                f'Landlock ABI {facts.landlock}); isolation="auto" takes what there is'
            )
        return Order(self._request(facts, report), report, max(1, self.max_output // 2), self.pool_size)

    def _request(self, facts: Facts, report: Report) -> Request:
        confine = self.isolation != "none"
        limits = limits_of(self)
        file_size = limits.get("FSIZE")
        pid_max = None
        if self.max_processes is not None:
            if facts.userns:
                limits["NPROC"] = self.max_processes + 1  # the warden is one of them
            elif facts.pid_max:
                pid_max = _pid_max(self.max_processes)
        own_folder = self.workdir is None
        return Request(
            confine=confine,
            read=[str(path) for path in self.read_paths],
            work=None if self.workdir is None else str(self.workdir),
            size=file_size if own_folder and confine and "readonly" in facts.mounts else None,
            limits=limits,
            pid_max=pid_max,
            env=ENVIRON,
            in_force=report.isolation,
        )

    def _rows(self, facts: Facts) -> dict[str, str | None]:
        """What holds each row with these settings on this machine."""
        outliving = {"pidns": "pid namespace", "scope": "Landlock signal scope"}.get(facts.mode)
        if self.isolation == "none":
            return {row: outliving if row == "outliving" else None for row in ROWS}
        filtered = facts.seccomp
        landlock = f"Landlock ABI {facts.landlock}" if facts.landlock else None
        seccomp = "seccomp" if filtered else None
        read_only = "read-only mounts" if "readonly" in facts.mounts else None
        own_processes = "pid namespace" if facts.mode == "pidns" else landlock if facts.landlock >= 6 else None
        forks = None
        if self.max_processes is not None:
            if facts.userns:
                forks = "RLIMIT_NPROC in a user namespace"
            elif facts.pid_max:
                forks = f"pid_max {_pid_max(self.max_processes)} of the pid namespace"
        sized = read_only and self.workdir is None and self.max_file_size is not None
        return {
            "read_outside": landlock,
            "write_outside": _both(landlock, read_only or seccomp) if landlock else read_only,
            "network": seccomp,
            "other_processes": _both(own_processes, seccomp),
            "kernel": seccomp,
            "environment": _both("clean exec", landlock),
            "memory": _both("RLIMIT_DATA", seccomp) if self.memory_limit is not None else None,
            "fork_bomb": forks,
            "disk": "sized tmpfs" if sized else None,
            "outliving": outliving,
        }


def _pid_max(processes: int) -> int:
    return max(_LOWEST_PID_MAX, processes + 2)  # the warden, and one that is never given out


def _both(first: str | None, second: str | None) -> str | None:
    return f"{first}, {second}" if first and second else None


def _host_packages() -> list[str]:
    """Folders of installed packages on this interpreter's path: never the script's folder or an editable install's."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
