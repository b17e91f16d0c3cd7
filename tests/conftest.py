"""An async test runs on asyncio and on trio, unless it says otherwise; `no_leaks` counts what a test left behind."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis  # noqa: F401 - it looks for trio's generator, and doesn't find it among what is frozen
import psutil
import pytest

from .docker_engine import docker, docker_host

__all__ = ["docker", "docker_host"]


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """Ctrl-C works here and in what tests start, also where a shell's `&` or nohup has it ignored."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


def _state() -> tuple[set[str], set[int]]:
    fds: set[str] = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds.add(f"{fd}:{os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            continue
    return fds, {p.pid for p in psutil.Process().children(recursive=True)}


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves a descriptor or a process behind. Ask for it before anything that runs a loop."""
    gc.collect()
    gc.freeze()  # what SDKs have loaded by now takes most of a second to look through
    fds, children = _state()
    yield
    gc.collect()
    fds_after, children_after = _state()
    assert children_after <= children, f"processes left: {children_after - children}"
    assert fds_after <= fds, f"descriptors left: {sorted(fds_after - fds)}"
