"""Cells in sandboxes of Daytona."""

from __future__ import annotations

import contextlib
import math
import shlex
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import anyio.to_thread
from msgspec import field

from ..errors import ConfigurationError
from ..repl.resources import threads_of
from .remote import asyncio_only, describe, imported
from .remote_pumped import PumpedMachine, VendorEnvironment, asked, closing, ended, first_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from ..repl.sandbox import Scope
    from .machine import Machine

MINUTE, IDLE_MINUTES = 60.0, 15
"""Minutes after which Daytona ends a sandbox that nobody renews, such as one of a host that was killed."""
DEFAULT_IMAGE = "python:3.12-slim"  # for a sandbox with resources of its own, which a snapshot can't have
RETRIES, RETRY_DELAY = 5, 0.1  # of a stream that broke off, without anything coming of it
_NO_LABELS = {1: None, 2: None}  # of which a part is left where a stream broke off


class DaytonaMachine(PumpedMachine):
    """One sandbox, or one that is there already, and the keeper as a command of a session in it.

    The vendor's daemon passes on whole lines only, both ways: it labels each line that comes out, and ends what goes in
    with a newline. Who follows its log of what came out gets it from the start, so that a stream can be resumed.
    """

    piece: ClassVar[int] = 1 << 20
    padding: ClassVar[int] = 3

    def __init__(self, settings: DaytonaEnvironment, scope: Scope) -> None:
        super().__init__(settings, scope)
        self._sdk: Any = None
        self._client: Any = None
        self._command = ""
        self._unsent = bytearray()  # of a line that is not complete
        self._seen = self._skip = 0  # bytes of the log that were passed on, and how many of those come again

    async def create(self) -> None:
        settings: DaytonaEnvironment = self.settings
        asyncio_only("daytona")
        self._sdk = sdk = imported("daytona", "daytona")
        try:
            client = self._client = await self.scope.shared(
                ("daytona", settings.api_key, settings.api_url, settings.target), settings.account
            )
            if settings.sandbox_id is None:
                await self.make(client.create(settings.create_params(self.label), timeout=0))
            else:
                self.vendors = await asked(client.get(settings.sandbox_id))
        except sdk.DaytonaAuthenticationError as error:
            raise ConfigurationError(f"Daytona refuses the credentials: {error}") from error

    async def start(self, command: Sequence[str]) -> None:
        process = self.vendors.process
        await asked(process.create_session(self.label))
        request = self._sdk.SessionExecuteRequest(command=shlex.join(command), run_async=True, suppress_input_echo=True)
        self._command = (await asked(process.execute_session_command(self.label, request))).cmd_id

    async def send(self, data: bytes) -> None:
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            text = (self._unsent + whole + newline).decode("ascii")
            self._unsent.clear()
            try:
                await self.vendors.process.send_session_command_input(self.label, self._command, text)
            except self._sdk.DaytonaError as error:
                raise self.unheard(error) from error
        self._unsent += rest

    async def pump(self) -> None:
        await first_of(self._follow(), self._renew())

    async def _renew(self) -> None:
        minutes = self.settings.auto_stop_interval
        pause = minutes * MINUTE / 3 if minutes > 0 else math.inf
        await self.renew_each(pause, self.vendors.refresh_activity)

    async def _follow(self) -> None:
        process, tries = self.vendors.process, 0
        while True:
            before = self._skip = self._seen
            broke = "it ended"
            try:
                await process.get_session_command_logs_async(self.label, self._command, self._take, str)  # str: a no-op
            except Exception as error:  # noqa: BLE001 -- it is a stream's end, and told as such
                broke = describe(error)
            if await self._is_over():
                return
            tries = 1 if self._seen > before else tries + 1
            if tries > RETRIES:
                self.end(f"its stream broke: {broke}")
                return
            await anyio.sleep(RETRY_DELAY * 2**tries)

    async def _take(self, text: str) -> None:
        data = text.translate(_NO_LABELS).encode("ascii", "replace")
        known = min(self._skip, len(data))
        self._skip -= known
        await self.pass_on(data[known:])
        self._seen += len(data) - known

    async def _is_over(self) -> bool:
        """Whether there is nothing more to come, and then why."""
        errors, process = self._sdk, self.vendors.process
        try:
            command = await process.get_session_command(self.label, self._command)
            if command.exit_code:
                logs = await process.get_session_command_logs(self.label, self._command)
                self.end(ended("keeper", command.exit_code, logs.stderr or ""))
            return command.exit_code is not None
        except errors.DaytonaError:
            pass  # perhaps since there is no sandbox any more
        try:
            await self.vendors.refresh_data()
        except errors.DaytonaNotFoundError:
            state = "gone"
        except errors.DaytonaError:
            return False
        else:
            state = getattr(self.vendors.state, "value", self.vendors.state)
        if state != "started":
            reason = f": {self.vendors.error_reason}" if self.vendors.error_reason else ""
            self.end(f"Daytona says that it is {state}{reason}{self.refused}")
        return state != "started"

    async def put_file(self, path: str, chunks: Iterable[bytes]) -> bool:
        pieces, threads = iter(chunks), threads_of(self.scope)

        async def content() -> AsyncGenerator[bytes]:
            while piece := await anyio.to_thread.run_sync(next, pieces, b"", limiter=threads):
                yield piece

        try:
            await self.vendors.fs.upload_file_stream(content(), path, timeout=0)
        except self._sdk.DaytonaError as error:
            raise OSError(f"Daytona did not take it: {error}") from error
        return True

    async def find(self, error: BaseException) -> Any:
        with contextlib.suppress(self._sdk.DaytonaNotFoundError, self._sdk.DaytonaAuthenticationError):
            return await self._client.get(self.label)  # one that failed to start is there all the same

    async def delete(self, made: Any) -> None:
        with contextlib.suppress(self._sdk.DaytonaNotFoundError):
            while True:
                try:
                    await made.delete()
                    break
                except self._sdk.DaytonaConflictError:  # it changes its state just now
                    await anyio.sleep(RETRY_DELAY)

    async def leave(self, made: Any) -> None:
        with contextlib.suppress(self._sdk.DaytonaNotFoundError):
            await made.process.delete_session(self.label)


class DaytonaEnvironment(VendorEnvironment, frozen=True, kw_only=True):
    """Cells in Daytona's sandboxes: one for each worker, destroyed with it.

    Credentials: `api_key`, or the variables DAYTONA_API_KEY, or DAYTONA_JWT_TOKEN and DAYTONA_ORGANIZATION_ID.
    """

    name: ClassVar[str] = "daytona"
    needs: ClassVar[str] = "daytona"
    api_key: str | None = None
    api_url: str | None = None
    target: str | None = None
    """The region. None, as for `api_url`: what DAYTONA_TARGET (DAYTONA_API_URL) says, or the vendor."""
    timeout: float | None = None
    """Seconds that a sandbox may live at most, in whole minutes. None: as long as its run."""
    snapshot: str | None = None
    image: Any = None
    """A name in a registry or a `daytona.Image`, with a Python. None: `snapshot`, or the vendor's default one."""
    cpu: int | None = None
    gpu: int | None = None
    memory: int | None = None
    disk: int | None = None
    """GiB, as `memory`."""
    auto_stop_interval: int = IDLE_MINUTES
    """Minutes after which a sandbox that is not renewed, as it is while its run lives, is deleted. 0: never."""
    secrets: dict[str, str] = field(default_factory=dict[str, str])
    """Environment variable → the name of a secret of the organization's; `volumes` are ids."""
    labels: dict[str, str] = field(default_factory=dict[str, str])
    network_block_all: bool = True
    """No network at all. The allow lists open it as far as they say, and False altogether."""
    network_allow_list: str | None = None
    domain_allow_list: str | None = None

    def __repr__(self) -> str:
        return f"<DaytonaEnvironment {self.sandbox_id or self.snapshot or self.image or 'default'}>"  # and no key

    def machine(self, scope: Scope) -> Machine:
        return DaytonaMachine(self, scope)

    @property
    def open_network(self) -> bool:
        return not self.network_block_all or bool(self.network_allow_list or self.domain_allow_list)

    def create_params(self, name: str) -> Any:
        sdk = imported("daytona", "daytona")
        wanted = {key: value for key in ("cpu", "memory", "disk", "gpu") if (value := getattr(self, key)) is not None}
        if self.snapshot is not None and (wanted or self.image is not None):
            raise ConfigurationError("snapshot= has an image and resources: leave out image, cpu, memory, disk, gpu")
        common = {
            "name": name,
            "auto_stop_interval": self.auto_stop_interval,
            "network_allow_list": self.network_allow_list,
            "domain_allow_list": self.domain_allow_list,
            "language": "python",
            "labels": {"made-by": "asyncrlm", **self.labels},
            "secrets": self.secrets or None,
            "volumes": [sdk.VolumeMount(volume_id=volume, mount_path=path) for path, volume in self.volumes.items()],
            "ephemeral": True,
            "ttl_minutes": math.ceil(self.timeout / MINUTE) if self.timeout else None,
            "network_block_all": not self.open_network,
        }
        if self.image is None and not wanted:
            return sdk.CreateSandboxFromSnapshotParams(snapshot=self.snapshot, **common)
        image = DEFAULT_IMAGE if self.image is None else self.image
        return sdk.CreateSandboxFromImageParams(image=image, resources=sdk.Resources(**wanted), **common)

    @contextlib.asynccontextmanager
    async def account(self) -> AsyncGenerator[Any]:
        """A client, which all sandboxes of a scope share."""
        sdk = imported("daytona", "daytona")
        try:
            client = sdk.AsyncDaytona(sdk.DaytonaConfig(api_key=self.api_key, api_url=self.api_url, target=self.target))
        except sdk.DaytonaAuthenticationError as error:
            raise ConfigurationError(f"environment 'daytona' finds no credentials: {error}") from error
        async with closing(client.close):
            yield client
