"""Cells in a container of a Docker Engine, or of Podman's compatible service: one container for each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import anyio
import msgspec

from ..errors import ConfigurationError, SandboxLost
from ..repl.resources import threads_of
from ..repl.sandbox import Report, Scope
from .docker_container import Container
from .docker_engine import Engine, prune
from .remote import Confinement, RemoteEnvironment, asyncio_only
from .remote_pool import Pool
from .settings import check_pool_size
from .units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .machine import Machine
    from .remote_sandbox import RemoteSandbox

__all__ = ["DockerEnvironment", "prune"]

DEFAULT_IMAGE = "python:3.11-slim"
NOBODY = "65534:65534"
SCRATCH = "/tmp"  # noqa: S108 - of the container
OWN_PROCESSES = 2
"""The keeper and the worker."""
CPU_PERIOD = 100_000
"""Microseconds over which the engine's kernel counts what a container may run."""


class DockerEnvironment(RemoteEnvironment, frozen=True, kw_only=True):
    """Cells run in a container: no network, a read-only root, nobody's rights, and limits on memory, CPU and processes.

    The engine is the one that `docker` itself would use: DOCKER_HOST, the current context, or the usual sockets, those
    of Podman among them. Any image with a Python (3.9 or later) will do; one that is missing is pulled. A container is
    of one worker and goes with it. It runs on asyncio only.

    Raises:
        ConfigurationError: for a value that can't be.
    """

    name: ClassVar[str] = "docker"
    needs: ClassVar[str] = "aiodocker"

    image: str = DEFAULT_IMAGE
    pull: Literal["missing", "always", "never"] = "missing"
    """When the image is fetched from its registry; once for each scope."""
    network: str = "none"
    """A network of the engine's, such as "bridge"; "none" for none."""
    user: str = NOBODY
    read_only: bool = True
    """The root file system can't be written; there is a /tmp in memory. If it can be, the disk is not bounded."""
    tmp_size: int | str = "1GB"
    """Of /tmp, where cells work and contexts arrive."""
    memory: int | str | None = "4GB"
    """Of all processes of the container, and its /tmp; None for no limit."""
    cpus: float | None = 2.0
    cap_add: tuple[str, ...] = ()
    """Capabilities to keep; all others are dropped."""
    no_new_privileges: bool = True
    volumes: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Path or volume of the engine's host → path in the container, with ":rw" behind it where cells may write."""
    runtime: str | None = None
    """The engine's runtime, such as "runsc"."""
    labels: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    pool_size: int = 0
    """Containers kept started ahead while the `AsyncRLM` is entered (`async with`): the runs that begin at the same
    time. The first run waits until all are there."""
    host_config: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Fields of the Engine API's HostConfig, over those made from the settings above, such as DeviceRequests for GPUs.
    With any, the report tells only what the worker itself found."""
    docker_host: str | None = None
    """The engine's address, such as "unix:///run/user/1000/podman/podman.sock"; None: as `docker` finds it."""
    docker_context: str | None = None
    """A context of the `docker` command."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pool_size(self.pool_size)
        for field in ("tmp_size", "memory"):
            parse_bytes(field, getattr(self, field))
        if self.cpus is not None and not self.cpus > 0:
            raise ConfigurationError(f"cpus={self.cpus!r}: use a number above 0, or None for no limit")
        for source, path in self.volumes.items():
            if not path.startswith("/"):
                raise ConfigurationError(f'volumes: {source!r} → {path!r}: use "/path", or "/path:rw" to write as well')
        if self.docker_host and self.docker_context:
            raise ConfigurationError("docker_host and docker_context both name an engine: use one of them")

    # ---- what a container is made from ----

    def config(self, keeper: Sequence[str], declared: Sequence[str], labels: dict[str, str]) -> dict[str, Any]:
        """The body of the request that makes the container; `declared` are the volumes that its image declares."""
        memory, processes = parse_bytes("memory", self.memory), self.max_processes
        tmpfs = f"rw,exec,nosuid,nodev,mode=1777,size={parse_bytes('tmp_size', self.tmp_size)}"
        # Declared volumes would be folders of the engine's disk, with no limit.
        in_memory = (SCRATCH, *declared) if self.read_only else (SCRATCH,)
        host: dict[str, Any] = {
            "AutoRemove": True,
            "NetworkMode": self.network,
            "IpcMode": "private",
            "ReadonlyRootfs": self.read_only,
            "CapDrop": ["ALL"],
            "CapAdd": list(self.cap_add),
            "SecurityOpt": ["no-new-privileges"] if self.no_new_privileges else [],
            "Tmpfs": dict.fromkeys(in_memory, tmpfs),
            "Binds": [
                f"{source}:{path}" if path.endswith(":rw") else f"{source}:{path.removesuffix(':ro')}:ro"
                for source, path in self.volumes.items()
            ],
            "LogConfig": {"Type": "none", "Config": {}},  # else all frames are written to the engine's disk
        }
        if memory is not None:
            host |= {"Memory": memory, "MemorySwap": memory}
        if self.cpus is not None:  # not NanoCpus: more of those than the engine has are an error
            host |= {"CpuPeriod": CPU_PERIOD, "CpuQuota": int(self.cpus * CPU_PERIOD)}
        if processes is not None:
            host["PidsLimit"] = processes + OWN_PROCESSES
        if self.runtime is not None:
            host["Runtime"] = self.runtime
        return {
            "Image": self.image,
            "Entrypoint": list(keeper),
            "Cmd": [],
            "User": self.user,
            "WorkingDir": SCRATCH,
            "Hostname": "sandbox",
            # As the network "none", at half the time to start, but for an /etc/hosts; no socket, no need of one.
            "NetworkDisabled": self.network == "none" and self.isolation != "none",
            "Labels": self.labels | labels,
            "Healthcheck": {"Test": ["NONE"]},
            "OpenStdin": True,
            "StdinOnce": True,  # the keeper hears of it when the host is gone
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "HostConfig": host | self.host_config,
        }

    def confinement(self) -> Confinement:
        places = [(path.removesuffix(":ro").removesuffix(":rw"), path) for path in self.volumes.values()]
        return Confinement(
            network=self.network != "none",
            read=(*self.read_paths, *(place for place, path in places if not path.endswith(":rw"))),
            write=(*self.write_paths, *(place for place, path in places if path.endswith(":rw"))),
        )

    def report(self) -> Report:
        if self.host_config:
            return super().report()
        held = {
            "read_outside": "a container",
            "write_outside": "a read-only root" if self.read_only else "a container",
            "network": "no network" if self.network == "none" else None,
            "other_processes": "a container",
            "kernel": "no new privileges, the engine's seccomp profile"
            if self.no_new_privileges and not self.cap_add
            else None,
            "environment": "a container",
            "memory": "a container's limit" if self.memory is not None else None,
            "fork_bomb": "a container's limit" if self.max_processes is not None else None,
            "disk": "a read-only root, a sized /tmp" if self.read_only else None,
            "outliving": "pid 1 of a container",
        }
        return Report(environment=self.name, isolation={row: by for row, by in held.items() if by})

    # ---- where it comes from ----

    def machine(self, scope: Scope) -> Machine:
        return Container(self, scope)

    async def engine(self, scope: Scope) -> Engine:
        """The session with the engine, which all runs of a scope share.

        Raises:
            ConfigurationError: if there is no engine.
        """
        return await scope.shared(
            ("docker", self.docker_host, self.docker_context),
            lambda: Engine(self.docker_host, self.docker_context, threads=threads_of(scope)),
        )

    async def prepare(self, scope: Scope) -> None:
        if self.pool_size:
            await (await self._pool(scope)).fill()

    async def open(self, scope: Scope) -> RemoteSandbox:
        if not self.pool_size or not getattr(scope, "long_lived", False):
            asyncio_only(self.name)
            return await super().open(scope)
        pool = await self._pool(scope)
        sandbox = await pool.take()
        pool.refill()
        return sandbox

    async def _pool(self, scope: Scope) -> Pool:
        asyncio_only(self.name)
        await self.engine(scope)  # before the pool, so that it is left after it
        return await scope.shared(
            ("docker pool", id(self)), lambda: Pool(self.pool_size, lambda: self._open_booted(scope), _is_running)
        )

    async def _open_booted(self, scope: Scope) -> RemoteSandbox:
        sandbox = await super().open(scope)
        try:
            await sandbox.boot()
        except BaseException as error:
            await sandbox.aclose()
            if isinstance(error, anyio.BrokenResourceError):
                raise SandboxLost(f"the docker sandbox ended at once: {sandbox.fate()}") from error
            raise
        return sandbox


def _container(sandbox: RemoteSandbox) -> Container:
    assert isinstance(sandbox.machine, Container)  # noqa: S101 - `machine` makes no other
    return sandbox.machine


async def _is_running(sandbox: RemoteSandbox) -> bool:
    return await _container(sandbox).is_running()
