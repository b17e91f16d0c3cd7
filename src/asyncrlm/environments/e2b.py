"""Cells in sandboxes of E2B, whose SDK runs on asyncio."""

from __future__ import annotations

import contextlib
import functools
import shlex
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import msgspec
from msgspec import field

from ..errors import ConfigurationError
from .remote import asyncio_only, describe, imported
from .remote_pumped import Request, VendorEnvironment, asked, ended, first_of, heed_cancellation, opened
from .remote_resumed import ResumedMachine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..repl.sandbox import Scope
    from .machine import Machine
    from .remote import Confinement

LIFETIME = 300
"""Seconds a sandbox lives once nobody renews it."""
ATTEMPT = 10.0
"""Seconds to attach to a keeper."""
LABEL = "asyncrlm"


class E2BMachine(ResumedMachine):
    """One sandbox, or one that is there already, and the keeper as a command in it."""

    def __init__(self, settings: E2BEnvironment, scope: Scope) -> None:
        super().__init__(settings, scope)
        self._sdk: Any = None
        self._starting: Request[Any] | None = None
        self._keeper: Any = None
        self._input: Any = None
        self._words = ""

    async def create(self) -> None:
        settings: E2BEnvironment = self.settings
        asyncio_only("e2b")
        self._sdk = sdk = imported("e2b", "e2b")
        account = settings.account()
        try:
            if settings.sandbox_id is not None:
                request = sdk.AsyncSandbox.connect(settings.sandbox_id, timeout=settings.timeout, **account)
                self.vendors = await asked(request)
            else:
                await self.make(sdk.AsyncSandbox.create(**settings.create_options(self.label), **account))
        except sdk.AuthenticationException as error:
            raise ConfigurationError(
                f"E2B refuses the credentials; it wants a valid E2B_API_KEY, or environment_kwargs api_key: {error}"
            ) from error

    async def start(self, command: Sequence[str]) -> None:
        self._starting = Request(
            self.vendors.commands.run(
                "exec " + shlex.join(command),
                background=True,
                stdin=True,
                timeout=0,  # of the command, which is to live as long as the sandbox
                user=self.settings.user,
                **self._listening,
            )
        )
        self._keeper = await self._starting.result()
        self._input = self.vendors.commands.stream_input(self._keeper.pid, timeout=0)

    @property
    def _listening(self) -> dict[str, Any]:
        return {"on_stdout": self._hear, "on_stderr": self._hear_words, "retain_output": False}

    async def _hear(self, text: str) -> None:
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self.pass_on(text.encode("utf-8"))

    def _hear_words(self, text: str) -> None:
        self._words = (self._words + text)[-500:]

    async def transmit(self, data: bytes) -> None:
        try:
            await self._input.send(data)
        except Exception:
            self._input = self.vendors.commands.stream_input(self._keeper.pid, timeout=0)  # for the next
            raise

    async def pump(self) -> None:
        seconds = self.settings.timeout
        # The first would shorten the life of one of yours.
        renew = self.vendors.set_timeout if self.settings.sandbox_id is None else self.vendors.connect
        await first_of(self._follow(), self.answer(), self.renew_each(seconds / 3, lambda: renew(seconds)))

    async def _follow(self) -> None:
        """Until the keeper ended, of which the SDK says why: it asks after the sandbox then."""
        gone, broken = (self._sdk.SandboxNotRunningException, self._sdk.NotFoundException), False
        while not self._over:
            try:
                if broken:
                    await self._attach()
                await self._keeper.wait()
                return None
            except Exception as error:  # noqa: BLE001 -- the stream breaks, or the keeper ended
                heed_cancellation(error)
                if (status := getattr(error, "exit_code", None)) is not None:
                    return self.end(ended("keeper", status, self._words))
                if isinstance(error, gone):
                    return self.end(f"its stream broke: {describe(error)}{self.refused}")
                self.broke(error)
                broken = True
                await self.rest()
        return None

    async def _attach(self) -> None:
        """Hear what the keeper says from now on."""
        await Request(self._keeper.disconnect()).settle()
        connect = functools.partial(self.vendors.commands.connect, self._keeper.pid, timeout=0, request_timeout=0)
        with anyio.fail_after(ATTEMPT):  # the SDK's own limit leaves an error behind when it is cancelled
            self._keeper = await opened(connect(**self._listening), lambda keeper: keeper.disconnect(), 0)
        self.attached()

    async def find(self, error: BaseException) -> Any:
        if isinstance(error, (self._sdk.AuthenticationException, self._sdk.RateLimitException)):
            return None  # it was refused
        query = self._sdk.SandboxQuery(metadata={LABEL: self.label})
        found = await self._sdk.AsyncSandbox.list(query=query, **self.settings.account()).next_items()
        return next(iter(found), None)

    async def delete(self, made: Any) -> None:
        try:
            await self._sdk.AsyncSandbox.kill(made.sandbox_id, **self.settings.account())
        finally:
            await self._hang_up()

    async def leave(self, made: Any) -> None:
        await self._hang_up(kill=True)

    async def _hang_up(self, *, kill: bool = False) -> None:
        starting, self._starting = self._starting, None
        begun = await starting.settle() if starting is not None else None
        if (keeper := self._keeper or begun) is not None:
            if kill:
                await keeper.kill()
            await Request(keeper.disconnect()).settle()
            if self._input is not None:
                # It ends with the keeper, and says so, unless nothing gets through; its own end does not wait for that.
                await Request(self._input.close()).settle(0 if self._link.broken else None)
                if (sending := getattr(self._input, "_task", None)) is not None:
                    sending.cancel()


class E2BEnvironment(VendorEnvironment, frozen=True, kw_only=True):
    """Cells in E2B's sandboxes: one for each worker, destroyed with it. The key is that of E2B_API_KEY."""

    name: ClassVar[str] = "e2b"
    needs: ClassVar[str] = "e2b"
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
    secrets: dict[str, str] = field(default_factory=dict[str, str])
    """As `envs`, but not shown; `volumes` are names."""
    api_key: str | None = None
    domain: str | None = None
    create_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """More arguments of `e2b.AsyncSandbox.create`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeout < 1:
            raise ConfigurationError(f"timeout={self.timeout!r}: a sandbox lives for a second at least")

    def __repr__(self) -> str:
        return f"<E2BEnvironment {self.sandbox_id or self.template or 'base'}>"  # and no key

    def machine(self, scope: Scope) -> Machine:
        return E2BMachine(self, scope)

    @property
    def open_network(self) -> bool:
        return self.allow_internet_access or self.network is not None

    def confinement(self) -> Confinement:
        given = super().confinement()
        return msgspec.structs.replace(given, inherit=given.inherit or bool(self.envs))

    def account(self) -> dict[str, Any]:
        """Arguments of every request that are not E2B's defaults."""
        given = {"api_key": self.api_key, "domain": self.domain}
        return {name: value for name, value in given.items() if value is not None}

    def create_options(self, label: str) -> dict[str, Any]:
        """Arguments of `AsyncSandbox.create`; by its label a sandbox is found again."""
        options = {
            "template": self.template,
            "timeout": self.timeout,
            "metadata": {"made-by": "asyncrlm", LABEL: label, **self.metadata},
            "envs": {**self.envs, **self.secrets},
            "allow_internet_access": self.open_network,
            "network": self.network,
            "volume_mounts": self.volumes or None,
        }
        return {**options, **self.create_kwargs}
