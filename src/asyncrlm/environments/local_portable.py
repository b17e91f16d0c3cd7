"""Local workers with nothing but POSIX: a keeper process for each, a process group, resource limits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio
import anyio.to_thread

from ..repl.worker.removing import remove_tree
from .local_machine import LocalMachine
from .local_process import make_home
from .remote_boot import Options, command
from .remote_sandbox import RemoteSandbox

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from ..repl.sandbox import Report


class LocalPortable:
    """What the runs of one scope share: a folder, locked by the host and by every keeper."""

    def __init__(
        self, python: str, packages: list[str], *, threads: anyio.CapacityLimiter, shell: bool = False
    ) -> None:
        self._python = python
        self._packages = packages
        self._threads = threads
        self._shell = shell
        self._sandboxes: set[RemoteSandbox] = set()
        self._home = Path()
        self._lock = -1

    async def __aenter__(self) -> Self:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._make_home, limiter=self._threads)
        return self

    def _make_home(self) -> None:
        home, self._lock = make_home()
        self._home = home.resolve()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not shielded: whoever leaves it has a grace of its own.
        try:
            async with anyio.create_task_group() as group:
                for sandbox in self._sandboxes:
                    group.start_soon(sandbox.aclose)
            await anyio.to_thread.run_sync(
                remove_tree, self._home, "lock", abandon_on_cancel=True, limiter=self._threads
            )
        finally:
            os.close(self._lock)

    async def worker(self, report: Report, limits: dict[str, int], work: str | None, keep: int) -> RemoteSandbox:
        """A new worker."""
        machine = LocalMachine(str(self._home), threads=self._threads, pass_fds=[self._lock])
        options = Options(
            folder=machine.new_folder(),
            work=work,
            mode="group",
            confine=False,
            limits=limits,
            keep=keep,
            packages=self._packages,
            shell=self._shell,
        )
        sandbox = RemoteSandbox(machine, options, report, threads=self._threads)
        await self._start(sandbox, command(self._python))
        return sandbox

    async def _start(self, sandbox: RemoteSandbox, keeper: Sequence[str]) -> None:
        self._sandboxes = {sandbox for sandbox in self._sandboxes if not sandbox.closed}
        try:
            await sandbox.machine.start(keeper)
        except BaseException:
            await sandbox.aclose()
            raise
        self._sandboxes.add(sandbox)


def rows(names: tuple[str, ...], *, confine: bool) -> dict[str, str | None]:
    """What holds here: a clean environment, and nothing else. A process group can be left by whoever wants to."""
    held = {"environment": "clean exec"} if confine else {}
    return {name: held.get(name) for name in names}
