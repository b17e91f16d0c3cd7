"""Cells in sandboxes of Prime Intellect."""

from __future__ import annotations

import contextlib
import functools
import math
import shlex
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import msgspec
from msgspec import field

from ..errors import ConfigurationError
from .remote import asyncio_only, describe, imported
from .remote_pumped import Request, VendorEnvironment, asked, closing, ended, first_of
from .remote_resumed import ResumedMachine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from ..repl.sandbox import Scope
    from .machine import Machine
    from .remote import Confinement

MINUTE, IDLE_MINUTES = 60.0, 15
"""Minutes after which Prime ends a sandbox that nobody renews, such as one of a host that was killed."""
LIFETIME_MINUTES = 1440
"""Minutes that a sandbox may live at most, unless `timeout_minutes` says otherwise: that can't be renewed."""
DEFAULT_IMAGE = "python:3.11-slim"
LAST_WORDS, GOODBYE, RENEWAL_TIMEOUT = 5.0, 2.0, 30
"""Seconds to hear why a sandbox ended, for the stream of one that is gone to end, and to renew one."""


class PrimeMachine(ResumedMachine):
    """One sandbox, or one that is there already, and the keeper as a live process in it."""

    piece: ClassVar[int] = 1 << 20
    binary: ClassVar[bool] = True

    def __init__(self, settings: PrimeEnvironment, scope: Scope) -> None:
        super().__init__(settings, scope)
        self._sdk: Any = None
        self._client: Any = None
        self._starting: Request[Any] | None = None
        self._keeper: Any = None

    async def create(self) -> None:
        settings: PrimeEnvironment = self.settings
        asyncio_only("prime")
        self._sdk = sdk = imported("prime_sandboxes", "prime")
        client = self._client = await self.scope.shared(("prime", settings.api_key), settings.account)
        try:
            if settings.sandbox_id is not None:
                self.vendors = await asked(client.get(settings.sandbox_id))
                return
            await self.make(client.create(settings.create_request(self.label)))
            patience = math.ceil(settings.start_timeout)  # that of whoever waits is what ends it
            await asked(client.wait_for_creation(self.vendors.id, patience, image_build_timeout_seconds=patience))
        except sdk.UnauthorizedError as error:
            raise ConfigurationError(f"Prime refuses the credentials: {error}") from error

    async def start(self, command: Sequence[str]) -> None:
        line = "exec " + shlex.join(command)
        self._starting = Request(self._client.open_process(self.vendors.id, line, user=self.settings.user))
        self._keeper = await self._starting.result()
        if not hasattr(self._keeper, "_reconnect"):
            raise ConfigurationError("this release of prime-sandboxes is not known: asyncrlm was made for 0.5")
        # Its SDK would attach again a few times, soon, and say nothing of what was missed.
        self._keeper._reconnect = functools.partial(self._attach, self._keeper._reconnect)

    async def _attach(self, attach: Any, started: bool) -> AsyncGenerator[Any]:
        async with contextlib.aclosing(self.again(lambda: attach(started), self._ask_why)) as messages:
            async for message in messages:
                yield message
        self._keeper._reconnect = None  # or it would go on trying
        raise self._sdk.APIError("it could not be attached to any more")

    async def transmit(self, data: bytes) -> None:
        await self._keeper.write_stdin(bytes(data))

    async def pump(self) -> None:
        await first_of(self._read_all(), self.answer(), self._renew())

    async def _read_all(self) -> None:
        try:
            async for data in self._keeper.stdout:
                await self.pass_on(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # nobody listens any more
        except Exception as error:  # noqa: BLE001 -- it is the keeper's end, and told as such
            with anyio.move_on_after(LAST_WORDS):
                await self._ask_why()
            self.end(f"its stream broke: {describe(error)}")
            return
        status = await self._keeper.wait()
        words = b"".join([part async for part in self._keeper.stderr])
        self.end(ended("keeper", status, words.decode("utf-8", "replace")))

    async def _ask_why(self) -> None:
        try:
            made = await self._client.get(self.vendors.id)
        except self._sdk.APIError as error:
            if _is_gone(error):
                self.end(f"Prime says that it is gone{self.refused}")
            return
        if made.status != "RUNNING":
            said = ", ".join(filter(None, (made.termination_reason, made.error_type, made.error_message)))
            self.end(": ".join(filter(None, (f"Prime says that it is {made.status.lower()}", said))) + self.refused)

    async def _renew(self) -> None:
        """Whatever is run in a sandbox counts as a use of it."""
        minutes, run = self.settings.idle_timeout_minutes, self._client.execute_command
        pause = math.inf if minutes is None else minutes * MINUTE / 3
        await self.renew_each(pause, lambda: run(self.vendors.id, "true", timeout=RENEWAL_TIMEOUT))

    async def find(self, error: BaseException) -> Any:
        if isinstance(error, (self._sdk.UnauthorizedError, self._sdk.PaymentRequiredError)):
            return None  # it was refused
        team = self.settings.team_id
        listed = await self._client.list(team_id=team, labels=[self.label], exclude_terminated=True)
        return next(iter(listed.sandboxes), None)

    async def delete(self, made: Any) -> None:
        if self._keeper is not None:
            self._keeper._reconnect = None
        try:
            await self._client.delete(made.id)
        except self._sdk.APIError as error:
            if not _is_gone(error):
                raise
        finally:
            await self._hang_up()

    async def leave(self, made: Any) -> None:
        await self._hang_up(end=True)

    async def _hang_up(self, *, end: bool = False) -> None:
        starting, self._starting = self._starting, None
        if starting is None or (keeper := await starting.settle()) is None:
            return
        if end:
            with contextlib.suppress(self._sdk.APIError):
                await keeper.terminate()
        with anyio.move_on_after(GOODBYE) as patience, contextlib.suppress(Exception):  # why is not asked any more
            await keeper.wait()
        if patience.cancelled_caught:
            await Request(keeper.aclose()).settle()


def _is_gone(error: Exception) -> bool:
    return str(error).startswith(("HTTP 404", "HTTP 410"))


class PrimeEnvironment(VendorEnvironment, frozen=True, kw_only=True):
    """Cells in Prime's sandboxes: one for each worker, destroyed with it.

    Credentials: `api_key`, or the variable PRIME_API_KEY, or what `prime login` wrote to `~/.prime/config.json`.
    """

    name: ClassVar[str] = "prime"
    needs: ClassVar[str] = "prime_sandboxes"
    renamed: ClassVar[dict[str, str]] = {"name": "sandbox_name", "image": "docker_image"}
    api_key: str | None = None
    team_id: str | None = None
    """Who pays. None: PRIME_TEAM_ID, or what `prime` is configured with."""
    docker_image: str = DEFAULT_IMAGE
    """An image of Prime's or of Docker Hub, with a Python and bash."""
    checkpoint_id: str | None = None
    """A checkpoint of a sandbox's disk, instead of an image."""
    timeout_minutes: int = LIFETIME_MINUTES
    """Minutes that a sandbox may live at most, however busy: Prime can't renew it. Less than 0: no such limit."""
    idle_timeout_minutes: int | None = IDLE_MINUTES
    """Minutes after which a sandbox that is not renewed, as it is while its run lives, is ended. None: never."""
    cpu_cores: float | None = None
    memory_gb: float | None = None
    disk_size_gb: float | None = None
    gpu_count: int | None = None
    gpu_type: str | None = None
    region: str | None = None
    secrets: dict[str, str] = field(default_factory=dict[str, str])
    """Environment variable → its value, which Prime shows nobody; `volumes` are names."""
    environment_vars: dict[str, str] = field(default_factory=dict[str, str])
    """Environment variables of the sandbox, which cells see too."""
    labels: Sequence[str] = ()
    network_access: bool = False
    """Any network. The lists open it as far as they say."""
    network_allowlist: Sequence[str] | None = None
    network_denylist: Sequence[str] | None = None
    user: str | None = None
    """Who runs the keeper in the sandbox. None: the image's user."""
    create_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """More arguments of `prime_sandboxes.CreateSandboxRequest`."""

    def __repr__(self) -> str:
        return f"<PrimeEnvironment {self.sandbox_id or self.checkpoint_id or self.docker_image}>"  # and no key

    def machine(self, scope: Scope) -> Machine:
        return PrimeMachine(self, scope)

    @property
    def open_network(self) -> bool:
        return self.network_access or bool(self.network_allowlist) or self.network_denylist is not None

    def confinement(self) -> Confinement:
        given = super().confinement()
        return msgspec.structs.replace(given, inherit=given.inherit or bool(self.environment_vars))

    def create_request(self, name: str) -> Any:
        """A request for a sandbox of this name, which is a label of it too: by that it is found again.

        Raises:
            ConfigurationError: if the SDK knows that it can't be had.
        """
        sdk = imported("prime_sandboxes", "prime")
        passed = ("checkpoint_id", "timeout_minutes", "idle_timeout_minutes", "cpu_cores", "memory_gb", "disk_size_gb")
        passed += ("gpu_count", "gpu_type", "region", "team_id", "network_allowlist", "network_denylist")
        try:
            options = {
                "name": name,
                "docker_image": None if self.checkpoint_id is not None else self.docker_image,
                "labels": ["asyncrlm", name, *self.labels],
                "environment_vars": self.environment_vars or None,
                "secrets": self.secrets or None,
                "volumes": [sdk.VolumeMount(name=volume, mount_path=path) for path, volume in self.volumes.items()]
                or None,
                **{key: value for key in passed if (value := getattr(self, key)) is not None},
            }
            if not self.open_network:
                options["network_allowlist"] = []
            return sdk.CreateSandboxRequest(**{**options, **self.create_kwargs})
        except ValueError as error:
            wrong: Any = error  # its text shows what was given, which may be secret
            said = "; ".join(f"{'.'.join(map(str, one['loc']))} {one['msg']}".strip() for one in wrong.errors())
            raise ConfigurationError(f"environment 'prime': {said}") from None

    @contextlib.asynccontextmanager
    async def account(self) -> AsyncGenerator[Any]:
        """A client, which all sandboxes of a scope share."""
        sdk = imported("prime_sandboxes", "prime")
        client = sdk.AsyncSandboxClient(api_key=self.api_key)
        async with closing(client.aclose):
            if not client.client.api_key:
                raise ConfigurationError(
                    "environment 'prime' finds no credentials: set PRIME_API_KEY, or run `prime login`, which writes "
                    "~/.prime/config.json"
                )
            yield client
