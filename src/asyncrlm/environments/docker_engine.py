"""The Docker Engine that a scope's containers run on: its session, its images, and what strays there."""

from __future__ import annotations

import ssl
import time
from typing import TYPE_CHECKING, Any, Self, cast

import anyio
import anyio.to_thread

from ..errors import ConfigurationError, SandboxLost
from ..observe.log import get_logger
from .docker_endpoints import Endpoint, find_engine
from .owners import LABEL, is_stray, owner_labels
from .remote import asyncio_only, imported

if TYPE_CHECKING:
    from types import TracebackType

INVALID, NOT_FOUND, CONFLICT = 400, 404, 409
"""Statuses of the engine's errors."""
TOLD_EVERY = 2.0
"""Seconds between two lines about an image that is being pulled."""


class Layers:
    """What of an image that is being pulled is there."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[int, int]] = {}
        self._told = time.monotonic()

    def hear(self, line: dict[str, Any]) -> str | None:
        """A line of the engine's; how far it is by then, now and again."""
        layer, detail = str(line.get("id", "")), cast("dict[str, int]", line.get("progressDetail") or {})
        if line.get("status") == "Downloading" and "total" in detail:
            self._sizes[layer] = detail.get("current", 0), detail["total"]
        elif line.get("status") == "Download complete" and layer in self._sizes:
            self._sizes[layer] = self._sizes[layer][1], self._sizes[layer][1]
        if not self._sizes or time.monotonic() - self._told < TOLD_EVERY:
            return None
        self._told = time.monotonic()
        done, of = (sum(sizes) for sizes in zip(*self._sizes.values(), strict=True))
        return f"{done >> 20} of {of >> 20}"


class Engine:
    """A session with an engine; one for all runs of a scope. Enter it on asyncio."""

    def __init__(self, host: str | None, context: str | None, *, threads: anyio.CapacityLimiter) -> None:
        self._wanted = host, context
        self._threads = threads
        self._docker: Any = None
        self._session: Any = None  # aiodocker leaves one it was given open
        self.labels: dict[str, str] = {}
        self.endpoint = Endpoint("", "")
        self._images: dict[tuple[str, str], list[str]] = {}
        self._pulling = anyio.Lock()
        self.error: type[Exception] = imported("aiodocker", "docker").DockerError

    @property
    def docker(self) -> Any:
        """The `aiodocker.Docker`."""
        return self._docker

    async def __aenter__(self) -> Self:
        asyncio_only("docker")

        def find() -> tuple[Endpoint, ssl.SSLContext | None]:
            self.labels = owner_labels()
            endpoint = find_engine(*self._wanted)
            return endpoint, None if endpoint.certificates is None else endpoint.tls()

        try:
            self.endpoint, tls = await anyio.to_thread.run_sync(find, limiter=self._threads)
        except (OSError, ssl.SSLError) as e:
            raise ConfigurationError(f"the certificates for the Docker engine can't be read: {e}") from e
        try:
            self._docker = self._connect(tls)
            await self._docker.version()
        except BaseException as e:
            await self.__aexit__(None, None, None)
            if isinstance(e, self.error):
                raise ConfigurationError(
                    f"no Docker Engine answers at {self.endpoint.url} ({self.endpoint.source}): {words(e)}; start it, "
                    "or name another one with DOCKER_HOST or docker_host="
                ) from e
            raise
        return self

    def _connect(self, tls: ssl.SSLContext | None) -> Any:
        sdk, http = imported("aiodocker", "docker"), imported("aiohttp", "docker")
        scheme, _, rest = self.endpoint.url.partition("://")
        if scheme == "ssh":
            return sdk.Docker(url=self.endpoint.url)
        # Each container holds a connection or two: no limit to them.
        if scheme == "unix":
            url, connector = "unix://localhost", http.UnixConnector(rest, limit=0)
        elif scheme in ("tcp", "http", "https"):
            url = f"{'http' if tls is None else 'https'}://{rest}"
            connector = http.TCPConnector(limit=0, **({} if tls is None else {"ssl": tls}))
        else:
            raise ConfigurationError(
                f"{self.endpoint.url!r} ({self.endpoint.source}) is no address of a Docker Engine: use unix://, tcp:// "
                "or ssh://"
            )
        self._session = http.ClientSession(connector=connector, timeout=http.ClientTimeout(total=None))
        return sdk.Docker(url=url, connector=connector, session=self._session)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            for closing in (self._docker, self._session):
                if closing is not None:
                    await closing.close()
            await anyio.lowlevel.checkpoint()  # asyncio takes a pass of its loop to close what was told to close
        self._docker = self._session = None

    # ---- images ----

    async def image(self, name: str, pull: str) -> list[str]:
        """See to it that an image is there, once: pull it if it is "missing", "always" or "never".

        Returns: the volumes that it declares.

        Raises:
            ConfigurationError: if there is no such image.
            SandboxLost: if it can't be pulled now.
        """
        if (name, pull) not in self._images:
            async with self._pulling:
                if (name, pull) not in self._images:
                    self._images[name, pull] = await self._fetch(name, pull)
        return self._images[name, pull]

    async def _fetch(self, name: str, pull: str) -> list[str]:
        found = None if pull == "always" else await self._inspect(name)
        if found is None:
            if pull == "never":
                raise ConfigurationError(f'the image {name!r} is not there, and pull="never" was asked for')
            await self._pull(name)
            found = await self._inspect(name)
        return found or []

    async def _inspect(self, name: str) -> list[str] | None:
        try:
            image = await self.docker.images.inspect(name)
        except self.error as e:
            if status(e) == NOT_FOUND:
                return None
            raise SandboxLost(f"the engine does not tell of image {name!r}: {words(e)}") from e
        return list(cast("dict[str, Any]", image["Config"].get("Volumes") or {}))

    async def _pull(self, name: str) -> None:
        log = get_logger()
        log.info("pulling a Docker image", image=name)
        layers = Layers()
        began = time.monotonic()
        try:
            async for line in self.docker.images.pull(name, stream=True):
                if (progress := layers.hear(line)) is not None:
                    log.info("pulling a Docker image", image=name, megabytes=progress)
        except self.error as e:
            absent = status(e) == NOT_FOUND or any(
                w in words(e) for w in ("not found", "unknown", "denied", "unauthorized")
            )
            message = f"the image {name!r} is not there and can't be pulled: {words(e)}"
            if absent:
                raise ConfigurationError(f"{message}; a private one can be fetched first by: docker pull {name}") from e
            raise SandboxLost(message) from e
        log.info("pulled a Docker image", image=name, seconds=round(time.monotonic() - began, 1))


def status(error: Exception) -> int:
    """Of an aiodocker `DockerError`."""
    return getattr(error, "status", 0)


def words(error: Exception) -> str:
    """What the engine said in an aiodocker `DockerError`."""
    return str(getattr(error, "message", error)).strip()


async def prune(docker_host: str | None = None, docker_context: str | None = None) -> list[str]:
    """Remove the containers that crashed processes of this machine left on an engine; the names of those removed.

    Raises:
        ConfigurationError: if there is no engine to be asked.
    """
    threads = anyio.CapacityLimiter(1)
    removed: list[str] = []
    async with Engine(docker_host, docker_context, threads=threads) as engine:
        found = await engine.docker.containers.list(all=True, filters=f'{{"label": ["{LABEL}"]}}')
        for container in found:
            if not await anyio.to_thread.run_sync(is_stray, container["Labels"], limiter=threads):
                continue
            try:
                await container.delete(force=True, v=True)
            except engine.error as e:
                if status(e) not in (NOT_FOUND, CONFLICT):  # it is gone, or going
                    raise
            removed.append(container["Names"][0].lstrip("/"))
    return removed
