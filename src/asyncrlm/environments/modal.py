"""Cells in sandboxes of Modal, whose SDK has a loop of its own, in a thread that all its users in a process share."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import anyio
from msgspec import field

from ..errors import ConfigurationError
from .remote import asyncio_only, describe, imported
from .remote_pumped import PumpedMachine, Request, VendorEnvironment, asked, closing, ended, first_of, opened

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Hashable, Sequence

    from ..repl.sandbox import Scope
    from .machine import Machine

LIFETIME = 3600
"""Seconds, unless `timeout` says otherwise. Modal takes 86,400 at most, and none more once the sandbox is there."""
LAST_WORDS = 2.0
"""Seconds to hear why a sandbox ended."""
_MIB = 1 << 20


class Account(NamedTuple):
    """A client and an app of it: what all sandboxes of a scope with the same settings share."""

    sdk: Any
    client: Any
    app: Any


class ModalMachine(PumpedMachine):
    """One sandbox, or one that is there already, and the keeper as a command in it."""

    piece: ClassVar[int] = _MIB
    binary: ClassVar[bool] = True

    def __init__(self, settings: ModalEnvironment, scope: Scope) -> None:
        super().__init__(settings, scope)
        self._account: Account | None = None
        self._starting: Request[Any] | None = None
        self._keeper: Any = None

    async def create(self) -> None:
        settings: ModalEnvironment = self.settings
        asyncio_only("modal")
        sdk = imported("modal", "modal")
        try:
            account = self._account = await self.scope.shared(settings.account_key(sdk), settings.account)
            if settings.sandbox_id is not None:
                self.vendors = await asked(sdk.Sandbox.from_id.aio(settings.sandbox_id, client=account.client))
                return
            image = await asked(settings.built_image(account))
            options = {"app": account.app, "client": account.client, "image": image, "name": self.label}
            await self.make(sdk.Sandbox.create.aio("sleep", "infinity", **options, **settings.create_options(sdk)))
        except sdk.exception.AuthError as error:
            raise ConfigurationError(f"Modal refuses the credentials: {error}") from error

    @property
    def _errors(self) -> Any:
        return imported("modal", "modal").exception

    async def start(self, command: Sequence[str]) -> None:
        self._starting = Request(self.vendors.exec.aio(*command, text=False))
        self._keeper = await self._starting.result()

    async def send(self, data: bytes) -> None:
        try:
            self._keeper.stdin.write(data)
            await asked(self._keeper.stdin.drain.aio())
        except Exception as error:  # whatever the SDK means by it, the keeper can't be reached any more
            raise self.unheard(error) from error

    async def pump(self) -> None:
        """Read, and hear at once if the sandbox ends: its streams would be tried again for ten seconds."""
        await first_of(self._read_all(), self._watch())

    async def _read_all(self) -> None:
        why = ""
        try:
            async for data in self._keeper.stdout:
                await self.pass_on(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # nobody listens any more
        except Exception as error:  # noqa: BLE001 -- it is the keeper's end, and told as such
            why = f"its stream broke: {describe(error)}"
        with anyio.move_on_after(LAST_WORDS):
            status = await self._keeper.wait.aio()
            words = await self._keeper.stderr.read.aio() if status else b""
            self.end(ended("keeper", status, words.decode("utf-8", "replace")))
        self.end(why)

    async def _watch(self) -> None:
        errors = self._errors
        try:
            await self.vendors.wait.aio()
        except errors.SandboxTimeoutError:
            self.end(f"Modal ended it after its lifetime of {self.settings.timeout} s (timeout= takes up to 86400)")
        except errors.SandboxTerminatedError:
            self.end("Modal says that it was terminated")
        except Exception as error:  # noqa: BLE001 -- as above
            self.end(f"Modal does not answer for it any more: {describe(error)}")
        else:
            self.end(f"Modal says that it ended with status {self.vendors.returncode}")

    async def find(self, error: BaseException) -> Any:
        errors = self._errors
        unsure = errors.ServiceError, errors.InternalError
        if self._account is None or (isinstance(error, errors.Error) and not isinstance(error, unsure)):
            return None  # it was refused
        sdk, client, app = self._account
        where = {"client": client, "environment_name": self.settings.environment_name}
        with contextlib.suppress(errors.NotFoundError):
            return await sdk.Sandbox.from_name.aio(app.name, self.label, **where)

    async def _settled(self) -> Any:
        """The keeper, if it was started: the SDK loses a connection which it is making when that is given up."""
        starting, self._starting = self._starting, None
        return await starting.settle() if starting is not None else None

    async def delete(self, made: Any) -> None:
        await self._settled()
        try:
            with contextlib.suppress(self._errors.NotFoundError):
                await made.terminate.aio()
        finally:
            await made.detach.aio()

    async def leave(self, made: Any) -> None:
        if (keeper := await self._settled()) is not None:
            with contextlib.suppress(self._errors.Error):
                keeper.stdin.write_eof()
                await keeper.stdin.drain.aio()
                await keeper.wait.aio()
        await made.detach.aio()


class ModalEnvironment(VendorEnvironment, frozen=True, kw_only=True):
    """Cells in Modal's sandboxes: one for each worker, destroyed with it.

    Credentials are the `modal` command's: MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or a profile of `~/.modal.toml`.
    """

    name: ClassVar[str] = "modal"
    needs: ClassVar[str] = "modal"
    app_name: str = "rlm-sandbox"
    """The app that the sandboxes belong to; made if there is none."""
    environment_name: str | None = None
    """The Modal environment of the app. None: the profile's."""
    image: Any = None
    """A `modal.Image` with a Python, the id of one or of a snapshot ("im-…"), or a name in a registry ("python:3.12").
    None: Debian with a Python and nothing else."""
    timeout: int = LIFETIME
    """Seconds that a sandbox may live at most, however busy: Modal can't renew it."""
    idle_timeout: int | None = None
    cpu: float | tuple[float, float] | None = None
    """Cores asked for, or those and the limit."""
    memory: int | tuple[int, int] | None = None
    """MiB asked for, or those and the limit."""
    gpu: str | None = None
    cloud: str | None = None
    region: str | Sequence[str] | None = None
    secrets: Sequence[Any] = ()
    """`modal.Secret`s, or their names; `volumes` are `modal.Volume`s, or their names."""
    tags: dict[str, str] = field(default_factory=dict[str, str])
    block_network: bool = True
    """No network at all. The allowlists open it as far as they say, and False altogether."""
    outbound_cidr_allowlist: Sequence[str] | None = None
    outbound_domain_allowlist: Sequence[str] | None = None
    create_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """More arguments of `modal.Sandbox.create`."""

    def machine(self, scope: Scope) -> Machine:
        return ModalMachine(self, scope)

    @property
    def open_network(self) -> bool:
        lists = self.outbound_cidr_allowlist is not None or self.outbound_domain_allowlist is not None
        return not self.block_network or lists

    def create_options(self, sdk: Any) -> dict[str, Any]:
        """Arguments of `Sandbox.create`."""
        passed = ("timeout", "idle_timeout", "cpu", "memory", "gpu", "cloud", "region")
        lists = ("outbound_cidr_allowlist", "outbound_domain_allowlist")

        def found(kind: Any, value: Any) -> Any:
            return kind.from_name(value, environment_name=self.environment_name) if isinstance(value, str) else value

        return {
            **{name: getattr(self, name) for name in passed + lists},
            "secrets": [found(sdk.Secret, secret) for secret in self.secrets],
            "volumes": {path: found(sdk.Volume, volume) for path, volume in self.volumes.items()},
            "tags": {"made-by": "asyncrlm", **self.tags},
            "block_network": not self.open_network,
            **self.create_kwargs,
        }

    def account_key(self, sdk: Any) -> Hashable:
        config = sdk.config.config
        credentials = (config.get("server_url"), config.get("token_id"), config.get("token_secret"))
        return ("modal", self.app_name, self.environment_name, *credentials)

    @contextlib.asynccontextmanager
    async def account(self) -> AsyncGenerator[Account]:
        """A client of our own where there is a token; else the process's, which knows the other ways to log in."""
        sdk = imported("modal", "modal")
        token, secret = map(sdk.config.config.get, ("token_id", "token_secret"))
        own = bool(token and secret)
        try:
            if own:
                client = await opened(sdk.Client.from_credentials.aio(token, secret), lambda client: client.close.aio())
            else:
                client = await sdk.Client.from_env.aio()
        except (sdk.exception.AuthError, sdk.exception.InvalidError) as error:
            raise ConfigurationError(
                f"environment 'modal' finds no credentials: set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or run "
                f"`modal setup`, which writes ~/.modal.toml ({error})"
            ) from error
        async with closing(client.close.aio if own else None):
            where = {"client": client, "environment_name": self.environment_name}
            app = await asked(sdk.App.lookup.aio(self.app_name, create_if_missing=True, **where))
            yield Account(sdk, client, app)

    async def built_image(self, account: Account) -> Any:
        """The image, built: that may take minutes, and can be given up at any time."""
        factory, image = account.sdk.Image, self.image
        if image is None:
            image = factory.debian_slim()
        elif isinstance(image, str):
            image = factory.from_id(image) if image.startswith("im-") else factory.from_registry(image)
        return await image.build.aio(account.app)
