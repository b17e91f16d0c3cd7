"""Cells in sandboxes of E2B, whose SDK runs on asyncio."""

from __future__ import annotations

import asyncio  # noqa: TID251 - the SDK is asyncio's, and a request to make a sandbox has to outlive a cancellation
import contextlib
import secrets
import shlex
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
from msgspec import field

from ..errors import ConfigurationError
from ..repl.sandbox import Report
from .local import ROWS
from .remote import Confinement, Machine, RemoteEnvironment, asyncio_only, describe, imported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..repl.sandbox import Scope

LIFETIME = 300
"""Seconds a sandbox lives once nobody renews it."""
SETTLE_GRACE = 5.0
"""Seconds that a request for a sandbox may still take once nobody waits for it."""
GOODBYE = 2.0
"""Seconds for streams of a sandbox that is gone to end."""


class E2BMachine(Machine):
    """One sandbox, or one that is there already, and the keeper as a command in it."""

    def __init__(self, settings: E2BEnvironment) -> None:
        self._settings = settings
        self._making: asyncio.Task[Any] | None = None
        self._sandbox: Any = None
        self._keeper: Any = None
        self._input: Any = None
        self._read, self._taken = anyio.create_memory_object_stream[bytes](16)
        self._words = ""
        self._fate = ""

    async def create(self) -> None:
        asyncio_only("e2b")
        sdk: Any = imported("e2b", "e2b")
        settings = self._settings
        account = settings.account()
        if settings.sandbox_id is not None:
            request = sdk.AsyncSandbox.connect(settings.sandbox_id, timeout=settings.timeout, **account)
        else:
            request = sdk.AsyncSandbox.create(**settings.create_options(), **account)
        self._making = asyncio.get_running_loop().create_task(request)
        try:
            self._sandbox = await asyncio.shield(self._making)
        except sdk.AuthenticationException as error:
            raise ConfigurationError(
                f"environment 'e2b' needs a valid E2B_API_KEY (or environment_kwargs api_key): {error}"
            ) from error

    async def start(self, command: Sequence[str]) -> None:
        self._keeper = await self._sandbox.commands.run(
            "exec " + shlex.join(command),
            background=True,
            stdin=True,
            timeout=0,  # of the command, which is to live as long as the sandbox
            on_stdout=self._hear,
            on_stderr=self._hear_words,
            user=self._settings.user,
            retain_output=False,
        )
        self._input = self._sandbox.commands.stream_input(self._keeper.pid, timeout=0)

    async def _hear(self, text: str) -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._read.send(text.encode("utf-8"))

    def _hear_words(self, text: str) -> None:
        self._words = (self._words + text)[-500:]

    async def send(self, data: bytes) -> None:
        try:
            await self._input.send(data)
        except Exception as error:  # whatever the SDK means by it, the keeper is not reached any more
            raise anyio.BrokenResourceError from error

    async def receive(self) -> bytes:
        return await self._taken.receive()

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._renew)
            try:
                await self._keeper.wait()
            except Exception as error:  # noqa: BLE001 -- it ends this sandbox, and `fate` tells
                status = getattr(error, "exit_code", None)
                words = f": {self._words.strip()}" if self._words.strip() else ""
                why = f"its keeper ended with status {status}{words}" if status is not None else describe(error)
                self._fate = self._fate or f"E2B: {why}"
            self._read.close()
            group.cancel_scope.cancel()

    async def _renew(self) -> None:
        while True:
            await anyio.sleep(self._settings.timeout / 3)
            try:
                await self._sandbox.set_timeout(self._settings.timeout)
            except Exception as error:  # noqa: BLE001 -- tried again; if the sandbox ends for it, this is why
                self._fate = f"E2B did not renew its lifetime: {describe(error)}"
            else:
                self._fate = ""

    async def destroy(self) -> None:
        self._read.close()
        self._taken.close()
        sandbox, self._sandbox = await self._made(), None
        if sandbox is None:
            return
        try:
            if self._settings.sandbox_id is None:
                await sandbox.kill()
            elif self._keeper is not None:
                await self._keeper.kill()
        finally:
            with anyio.move_on_after(GOODBYE):
                await self._hang_up()

    async def _made(self) -> Any:
        """The sandbox, also one whose maker was not told of it."""
        making, self._making = self._making, None
        if self._sandbox is not None or making is None:
            return self._sandbox
        if not making.done():
            await asyncio.wait({making}, timeout=SETTLE_GRACE)
        if not making.done():
            making.cancel()
            await asyncio.wait({making})
        return None if making.cancelled() or making.exception() else making.result()

    async def _hang_up(self) -> None:
        if self._input is not None:
            with contextlib.suppress(Exception):  # it ends with the keeper, and says so
                await self._input.close()
        if self._keeper is not None:
            await self._keeper.disconnect()

    def fate(self) -> str:
        return self._fate


class E2BEnvironment(RemoteEnvironment, frozen=True, kw_only=True):
    """Cells in E2B's sandboxes: one for each worker, destroyed with it. The key is that of E2B_API_KEY."""

    name: ClassVar[str] = "e2b"
    template: str | None = None
    """Name or id of a template, or of a snapshot, with a Python. None: E2B's base."""
    timeout: int = LIFETIME
    """Seconds that a sandbox outlives its host by; it is renewed while the run lives."""
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    envs: dict[str, str] = field(default_factory=dict[str, str])
    """Environment variables of the sandbox, which cells see too."""
    allow_internet_access: bool = False
    network: dict[str, Any] | None = None
    """E2B's network rules, in its own words; with them the sandbox has a network as far as they say."""
    user: str | None = None
    """Who runs the keeper in the sandbox. None: the template's user."""
    sandbox_id: str | None = None
    """A sandbox of yours that is there, for every run; it stays. Settings that make one have no effect."""
    api_key: str | None = None
    domain: str | None = None
    create_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """More arguments of `e2b.AsyncSandbox.create`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeout < 1:
            raise ConfigurationError(f"timeout={self.timeout!r}: a sandbox lives for a second at least")

    def machine(self, scope: Scope) -> Machine:
        return E2BMachine(self)

    @property
    def _networked(self) -> bool:
        return self.allow_internet_access or self.network is not None

    def confinement(self) -> Confinement:
        return Confinement(
            network=self._networked or self.sandbox_id is not None,
            read=self.read_paths,
            write=self.write_paths,
            inherit=bool(self.envs) or self.sandbox_id is not None,
        )

    def report(self) -> Report:
        if self.sandbox_id is not None:
            return Report(environment=self.name)
        rows = (row for row in ROWS if not (self._networked and row == "network"))
        return Report(environment=self.name, isolation=dict.fromkeys(rows, "E2B's sandbox"))

    def account(self) -> dict[str, Any]:
        """Arguments of every request that are not E2B's defaults."""
        given = {"api_key": self.api_key, "domain": self.domain}
        return {name: value for name, value in given.items() if value is not None}

    def create_options(self) -> dict[str, Any]:
        """Arguments of `AsyncSandbox.create`."""
        options = {
            "template": self.template,
            "timeout": self.timeout,
            "metadata": {"made-by": "asyncrlm", "asyncrlm": secrets.token_hex(8), **self.metadata},
            "envs": self.envs,
            "allow_internet_access": self._networked,
        }
        if self.network is not None:
            options["network"] = self.network
        return {**options, **self.create_kwargs}
