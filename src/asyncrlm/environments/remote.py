"""Sandboxes on other machines: what a vendor's driver gives, and what all of them share.

A driver is a `Machine` (how one sandbox is made, spoken with and destroyed) and a `RemoteEnvironment` (its settings).
Everything else is here and in `remote_sandbox.py`: the keeper that runs in the sandbox, its stream, files, interrupts.
"""

from __future__ import annotations

import asyncio  # noqa: TID251 - to tell whether it runs
import importlib
import importlib.util
import secrets
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import anyio
import msgspec

from ..errors import ConfigurationError, RLMError, SandboxLost
from ..repl.resources import threads_of
from ..repl.sandbox import Environment, Report, Scope
from .remote_boot import Options, command
from .remote_sandbox import DESTROY_GRACE, RemoteSandbox
from .settings import ROWS, check_settings, limits_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType


class Machine(ABC):
    """One sandbox of a vendor and the one program in it: the keeper, whose stdin and stdout are the stream.

    `create` and `start` are called once, in this order; then `run`, `send` and `receive`, each by one task at a time;
    `destroy` ends it at any stage.
    """

    piece: ClassVar[int] = 256 * 1024
    """Longest single `send`, in bytes."""
    binary: ClassVar[bool] = False
    """The stream takes any byte, both ways. Otherwise it is given ASCII lines only."""
    padding: ClassVar[int] = 0
    """Spaces of a blank line that the keeper sends after each line, for a stream that holds back its last few bytes."""
    with_library: ClassVar[bool] = False
    """The keeper brings along what it imports of the standard library, compiled: half a megabyte more to send, and a
    start that is quicker by a tenth of a second where a sandbox has the sources only, of the same version."""
    scratch: str = "/tmp"  # noqa: S108 - of the sandbox
    """A folder of the sandbox that the keeper may write to."""

    def new_folder(self) -> str:
        """A path for the folder of one keeper, which makes it."""
        return f"{self.scratch.rstrip('/')}/asyncrlm-{secrets.token_hex(8)}"

    @abstractmethod
    async def create(self) -> None:
        """Make the vendor's sandbox. If that fails, or is cancelled in the middle, `destroy` follows."""

    @abstractmethod
    async def start(self, command: Sequence[str]) -> None:
        """Run the keeper in it, with its standard input and output as the stream."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Send all of `data`, at most `piece` bytes.

        Raises:
            anyio.BrokenResourceError: if the keeper is gone.
        """

    def send_nowait(self, data: bytes) -> int:
        """Send what fits without waiting and return how many bytes that was; 0 where that can't be told."""
        return 0

    @abstractmethod
    async def receive(self) -> bytes:
        """At least one byte of the keeper's standard output, in any chunking. Cancelled, it loses nothing.

        Raises:
            anyio.EndOfStream: at its end.
        """

    async def run(self) -> None:
        """Beside the others for as long as the sandbox lives: renewal of a lease, the SDK's pumps.

        What it raises ends the sandbox. It may return early.
        """

    async def put_file(self, path: str, chunks: Iterable[bytes]) -> bool:
        """Write a new file by a way that is quicker than the stream; False, and nothing consumed, if there is none."""
        return False

    @abstractmethod
    async def destroy(self) -> None:
        """At any stage, and twice is fine: whatever was created is gone afterwards. The caller shields it."""

    def fate(self) -> str:
        """Why the sandbox ended, if the vendor says; "" if not. Asked after `receive`, which may wait for it, ended."""
        return ""


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
        return RemoteSandbox(
            machine, self.options(machine), self.report(), threads=threads_of(scope), required=required
        )

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
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


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
