"""Cells in a Jupyter kernel of the user's, which `jupyter_client` starts under a keeper and one message makes a worker.

The kernel runs in its own virtual environment, confined before its first instruction. Kernel and host speak over Unix
sockets in a folder of ours, for that one message; then the host hangs up, and all goes over the keeper's stream.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from ..errors import ConfigurationError, SandboxLost
from .local_machine import LocalMachine
from .local_order import ENVIRON
from .local_portable import LocalPortable
from .remote import asyncio_only, describe, imported
from .remote_boot import Options, bundle, command, kernel_cell
from .remote_sandbox import RemoteSandbox
from .settings import ROWS, limits_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..repl.sandbox import Report
    from .local import LocalEnvironment

_PYTHON = re.compile(r"(python|pypy)[\d.]*t?")
_LONGEST_PATH = 100
"""Bytes of the path of a Unix socket, of the 107 that there are."""


class KernelMachine(LocalMachine):
    """A keeper on this machine that a kernel manager started, in the place and with the interpreter of a kernel."""

    def __init__(self, manager: Any, scratch: str, *, threads: anyio.CapacityLimiter, pass_fds: Sequence[int]) -> None:
        super().__init__(scratch, threads=threads, pass_fds=pass_fds)
        self._manager = manager
        self._entered = anyio.Event()
        self.argv: list[str] = []
        """The kernel's command, once started."""
        format_command = manager.format_kernel_cmd

        def keeper(extra_arguments: list[str] | None = None) -> list[str]:
            self.argv = format_command(extra_arguments)
            return command(self.argv[0])

        manager.format_kernel_cmd = keeper

    async def start(self, command: Sequence[str]) -> None:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        near.setblocking(False)
        self._socket = near
        try:
            with anyio.CancelScope(shield=True):
                await self._manager.start_kernel(
                    stdin=far.fileno(),
                    stdout=far.fileno(),
                    stderr=subprocess.DEVNULL,
                    env=dict(ENVIRON),
                    cwd="/",
                    pass_fds=tuple(self._pass_fds),
                    independent=True,  # it has a parent of ours that ends it
                )
        except OSError as error:
            raise ConfigurationError(f"the kernel's command {self.argv[:1]} can't be run: {error.strerror}") from error
        finally:
            far.close()
            if self._manager.provisioner is not None:
                self.process = self._manager.provisioner.process

    async def run(self) -> None:
        """Send the one message, and hang up when it has done its work: nothing of a cell's comes by that way."""
        cell = kernel_cell(await anyio.to_thread.run_sync(bundle, limiter=self._threads))
        client = self._manager.client()
        try:
            client.start_channels(shell=True, iopub=False, stdin=False, hb=False, control=False)  # noqa: S604
            client.execute(cell, silent=True, store_history=False, allow_stdin=False)
            await self._entered.wait()
        finally:
            client.stop_channels()
            client.context.destroy(linger=0)

    async def receive(self) -> bytes:
        data = await super().receive()
        self._entered.set()  # nothing is said before the worker is ready
        return data

    async def destroy(self) -> None:
        try:
            await super().destroy()
        finally:
            manager = self._manager
            if manager.provisioner is not None:
                manager.provisioner.process = None
            manager.context.destroy(linger=0)
            folder = Path(manager.connection_file).parent
            await anyio.to_thread.run_sync(shutil.rmtree, folder, True, limiter=self._threads)


class Kernels(LocalPortable):
    """What the kernels of one scope share: a folder, locked by the host and by every keeper."""

    async def kernel(
        self, name: str, folders: Sequence[str | Path], environment: LocalEnvironment, report: Report
    ) -> RemoteSandbox:
        """A new worker in a kernel of this name, which is looked for in these folders first.

        Raises:
            ConfigurationError: if there is no such kernel, or it can't be one.
            SandboxLost: if it does not start.
        """
        folder = self._home / f"kernel-{secrets.token_hex(4)}"
        manager = await anyio.to_thread.run_sync(_manager, name, folders, folder, limiter=self._threads)
        machine = KernelMachine(manager, str(self._home), threads=self._threads, pass_fds=[self._lock])
        options = Options(
            folder=machine.new_folder(),
            work=None if environment.workdir is None else str(environment.workdir),
            confine=environment.isolation != "none",
            limits=limits_of(environment),
            read=[str(path) for path in environment.read_paths],
            write=[str(folder)],
            env={
                **{name: Template(value).safe_substitute(ENVIRON) for name, value in manager.kernel_spec.env.items()},
                "IPYTHONDIR": f"{folder}/ipython",
                **dict.fromkeys(("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"), str(folder)),
            },
            keep=max(1, environment.max_output // 2),
        )
        required = ROWS if environment.isolation == "strict" else ()
        sandbox = RemoteSandbox(machine, options, report, threads=self._threads, required=required)
        try:
            await self._start(sandbox, ())
        except (ConfigurationError, SandboxLost):
            raise
        except Exception as error:
            raise SandboxLost(f"the kernel {name!r} did not start: {describe(error)}") from error
        options.kernel = machine.argv
        return sandbox


def _manager(name: str, folders: Sequence[str | Path], folder: Path) -> Any:
    """The manager of a kernel that is yet to be started, with its connection file in `folder`. Blocks."""
    client, specs = imported("jupyter_client", "ipython"), imported("jupyter_client.kernelspec", "ipython")
    finder = specs.KernelSpecManager()
    finder.kernel_dirs = [*map(str, folders), *finder.kernel_dirs]
    try:
        spec = finder.get_kernel_spec(name)
    except specs.NoSuchKernel:
        there = ", ".join(map(repr, sorted(finder.find_kernel_specs()))) or "none"
        raise ConfigurationError(
            f"kernel={name!r}: there is no such kernel; there is {there} "
            "(python -m ipykernel install --user --name NAME makes one of a virtual environment)"
        ) from None
    if spec.language.lower() != "python" or not spec.argv or not _PYTHON.fullmatch(Path(spec.argv[0]).name):
        raise ConfigurationError(
            f"kernel={name!r}: its command is {' '.join(spec.argv[:1])!r}, for {spec.language}; cells "
            "run in kernels of Python whose command begins with the interpreter"
        )
    folder.mkdir(0o700)
    if len(os.fsencode(folder)) > _LONGEST_PATH - len("/kernel-ipc-5"):
        raise ConfigurationError(f"{folder}: too long for a Unix socket; set TMPDIR to a shorter folder")
    manager = client.AsyncKernelManager(
        kernel_name=name,
        kernel_spec_manager=finder,
        transport="ipc",
        connection_file=str(folder / "kernel.json"),
    )
    # To send without a copy pyzmq keeps a thread for the rest of the process.
    manager.session.copy_threshold = sys.maxsize
    return manager


def check_loop() -> None:
    """Raises ConfigurationError under an event loop that kernels can't be started from."""
    try:
        asyncio_only("ipython")
    except ConfigurationError as error:
        raise ConfigurationError(
            "kernel=: jupyter_client runs on asyncio only, and this event loop is another; python= runs cells in the "
            "shell of another interpreter on any loop"
        ) from error
