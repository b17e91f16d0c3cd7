"""Sandboxes on other machines: what a vendor's driver gives, and what all of them share.

A driver is a `Machine` (how one sandbox is made, spoken with and destroyed) and a `RemoteEnvironment` (its settings).
Everything else is here and in `remote_sandbox.py`: the keeper that runs in the sandbox, its stream, files, interrupts.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - to tell whether it runs
import importlib
import importlib.util
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import anyio
import msgspec

from ..caught import described, said
from ..errors import ConfigurationError, RLMError, SandboxLost
from ..repl.resources import threads_of
from ..repl.sandbox import Environment, Report, Scope
from .remote_boot import Options, command
from .remote_sandbox import DESTROY_GRACE, RemoteSandbox
from .settings import ROWS, check_settings, limits_of

if TYPE_CHECKING:
    from types import ModuleType

    from .machine import Machine


class Confinement(msgspec.Struct, frozen=True, kw_only=True):
    """What cells may do inside the sandbox, where its kernel can hold them to it."""

    network: bool = False
    """Sockets may be made; whether anything is reached by them is the vendor's to say."""
    read: tuple[str, ...] = ()
    """Paths in the sandbox that may be read as well."""
    write: tuple[str, ...] = ()
    """Folders in the sandbox that may be written as well."""
    inherit: bool = False
    """The sandbox's environment variables are the cells' too."""


class RemoteEnvironment(Environment, frozen=True, kw_only=True):
    """A kind of sandbox that a `Machine` reaches. Subclasses define `name` and `machine`."""

    needs: ClassVar[str] = ""
    """The module of the vendor's SDK, which the extra named like the environment installs."""
    isolation: Literal["auto", "strict", "none"] = "auto"
    """"auto": the worker confines itself as far as the sandbox's kernel allows, beside what the sandbox does. "strict":
    every row of the report holds, or a ConfigurationError at the start. "none": only the sandbox holds it."""
    python: str = "python3"
    """The interpreter inside the sandbox (3.9 or later)."""
    workdir: str | None = None
    """A folder of the sandbox that cells run in and write to. None: a new one."""
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Environment variables of cells."""
    start_timeout: float = 300.0
    """Seconds that making the sandbox and starting the keeper may take."""
    read_paths: tuple[str, ...] = ()
    """Files and folders of the sandbox that cells may read as well."""
    write_paths: tuple[str, ...] = ()
    """Folders of the sandbox that cells may write as well."""

    def __post_init__(self) -> None:
        check_settings(self)

    def check(self) -> None:
        if self.needs and importlib.util.find_spec(self.needs) is None:
            raise not_installed(self.name, self.needs)

    def machine(self, scope: Scope) -> Machine:
        """A sandbox that is yet to be made."""
        raise NotImplementedError

    def confinement(self) -> Confinement:
        """What cells may do there; drivers add what their settings allow: a network, volumes, secrets."""
        return Confinement(read=self.read_paths, write=self.write_paths)

    def report(self) -> Report:
        """What the sandbox itself holds, row by row, for drivers to say; the keeper adds the rest when it is ready."""
        return Report(environment=self.name)

    async def open(self, scope: Scope) -> RemoteSandbox:
        machine = self.machine(scope)
        try:
            with anyio.move_on_after(self.start_timeout) as limit:
                await machine.create()
                await machine.start(command(self.python))
            if limit.cancelled_caught:
                raise SandboxLost(f"the {self.name} sandbox was not there within {self.start_timeout:g} s")
        except BaseException as error:
            await _destroy(machine, error)
            if isinstance(error, RLMError) or not isinstance(error, Exception):
                raise
            raise SandboxLost(f"the {self.name} sandbox could not be had: {describe(error)}") from error
        return self.sandbox(machine, scope)

    def sandbox(self, machine: Machine, scope: Scope) -> RemoteSandbox:
        """The sandbox on a machine that was started; it boots when it is first used."""
        required = ROWS if self.isolation == "strict" else ()
        threads = threads_of(scope)
        sandbox = RemoteSandbox(machine, self.options(machine), self.report(), threads=threads, required=required)
        sandbox.start_timeout = min(sandbox.start_timeout, self.start_timeout)
        return sandbox

    def options(self, machine: Machine) -> Options:
        """What the keeper is told."""
        allowed = self.confinement()
        return Options(
            folder=machine.new_folder(),
            work=self.workdir,
            confine=self.isolation != "none",
            network=allowed.network,
            read=list(allowed.read),
            write=list(allowed.write),
            limits=limits_of(self),
            env=dict(self.env),
            inherit=allowed.inherit,
            keep=max(1, self.max_output // 2),
            binary=machine.binary,
            padding=machine.padding,
            resumed=machine.resumed,
        )


async def _destroy(machine: Machine, why: BaseException) -> None:
    try:
        with anyio.move_on_after(DESTROY_GRACE, shield=True):
            await machine.destroy()
    except Exception as error:  # noqa: BLE001 -- `why` is what the caller must hear of
        why.add_note(f"and what was there of the sandbox could not be destroyed: {describe(error)}")


def describe(error: BaseException) -> str:
    """An error of a vendor's SDK in a line; of a group, those inside."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(describe, cast("BaseExceptionGroup[BaseException]", error).exceptions))
    return described(error) if said(error) else type(error).__name__


def asyncio_only(name: str) -> None:
    """Refuse to run under trio, for an environment whose SDK can't.

    Raises:
        ConfigurationError: under any event loop but asyncio's.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(
            f"environment {name!r} runs on asyncio only, since its vendor's SDK does; this event loop is another"
        ) from None


def not_installed(extra: str, module: str | None) -> ConfigurationError:
    """What to raise where a vendor's SDK is missing."""
    return ConfigurationError(
        f"environment {extra!r} needs {module}, which is not installed: pip install 'asyncrlm[{extra}]'"
    )


def imported(module: str, extra: str) -> ModuleType:
    """A vendor's SDK.

    Raises:
        ConfigurationError: if it is not installed, and how to do that, or can't be imported.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise not_installed(extra, error.name) from error
    except ImportError as error:
        raise ConfigurationError(
            f"environment {extra!r}: its SDK can't be imported; some can't share a Python environment, "
            f"such as e2b's and prime's: {error}"
        ) from error
