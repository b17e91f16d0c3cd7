"""Vendors' environments against servers of ours, for whatever test asks for `vendor`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import psutil
import pytest
from msgspec import Struct

from asyncrlm.environments import environment

if TYPE_CHECKING:
    from asyncrlm import Environment

    from .fakes.served import FakeVendor

SDK_WARNINGS = (
    # The SDK's own generated models, when they are imported.
    pytest.mark.filterwarnings("ignore:`server_url` is deprecated:DeprecationWarning"),
    # It sends a line of input as one body, which aiohttp finds large above a MiB.
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
    # aiohttp's own way to read what is uploaded, in the server.
    pytest.mark.filterwarnings("ignore:unread_data:DeprecationWarning"),
)


class Vendor(Struct):
    name: str
    server: FakeVendor
    create: str
    """The name of the request that makes a sandbox."""
    execute: str
    read: str
    send: str
    destroy: str
    refusals: dict[str, Any]
    """Kind of refusal → what such a request ends with."""

    def environment(self, **kwargs: Any) -> Any:
        return environment(self.name, kwargs)

    @property
    def leaked(self) -> list[str]:
        return sorted(set(self.server.made) - set(self.server.destroyed))


def modal_vendor(patch: pytest.MonkeyPatch, folder: str, version: str = "1") -> Iterator[Vendor]:
    pytest.importorskip("modal", reason="the SDK of modal is not installed")
    from grpclib import Status

    from asyncrlm.environments.modal import ModalMachine

    from .fakes.modal_server import TOKEN, ModalServer

    with ModalServer() as server:
        patch.setenv("MODAL_SERVER_URL", server.url)
        patch.setenv("MODAL_TOKEN_ID", TOKEN[0])
        patch.setenv("MODAL_TOKEN_SECRET", TOKEN[1])
        patch.setenv("MODAL_SANDBOX_V2", version)
        patch.setattr(ModalMachine, "scratch", folder)
        second = "V2" if version == "1" else ""
        yield Vendor(
            name="modal",
            server=server,
            create=f"SandboxCreate{second}",
            execute="TaskExecStart",
            read="TaskExecStdioRead",
            send="TaskExecStdinWrite",
            destroy=f"SandboxTerminate{second}",
            refusals={
                "quota": (Status.RESOURCE_EXHAUSTED, "the workspace is over its limit"),
                "broken": (Status.FAILED_PRECONDITION, "no worker took it"),
                "token": (Status.UNAUTHENTICATED, "the token was revoked"),
                "passing": (Status.UNAVAILABLE, "not now"),
            },
        )


def daytona_vendor(patch: pytest.MonkeyPatch, folder: str) -> Iterator[Vendor]:
    pytest.importorskip("daytona", reason="the SDK of daytona is not installed")
    from asyncrlm.environments.daytona import DaytonaMachine

    from .fakes.daytona_server import KEY, DaytonaServer

    with DaytonaServer() as server:
        patch.setenv("DAYTONA_API_URL", f"{server.url}/api")
        patch.setenv("DAYTONA_API_KEY", KEY)
        patch.setattr(DaytonaMachine, "scratch", folder)
        yield Vendor(
            name="daytona",
            server=server,
            create="create",
            execute="execute",
            read="logs",
            send="input",
            destroy="delete",
            refusals={
                "quota": (429, "Total CPU quota exceeded"),
                "broken": (500, "no runner took it"),
                "token": (401, "Invalid credentials"),
            },
        )


def e2b_vendor(patch: pytest.MonkeyPatch, folder: str) -> Iterator[Vendor]:
    pytest.importorskip("e2b", reason="the SDK of e2b is not installed")
    pytest.importorskip("uvicorn", reason="the server for e2b needs uvicorn")
    from asyncrlm.environments.e2b import E2BMachine

    from .fakes.e2b_server import KEY, E2BServer

    with E2BServer() as server:
        for name, value in {"API_KEY": KEY, "API_URL": server.url, "SANDBOX_URL": server.url}.items():
            patch.setenv(f"E2B_{name}", value)
        patch.setattr(E2BMachine, "scratch", folder)
        yield Vendor(
            name="e2b",
            server=server,
            create="create",
            execute="execute",
            read="execute",
            send="input",
            destroy="delete",
            refusals={
                "quota": (403, "the team may have no more sandboxes"),
                "broken": (500, "no node took it"),
                "token": (401, "no such key"),
            },
        )


def prime_vendor(patch: pytest.MonkeyPatch, folder: str) -> Iterator[Vendor]:
    pytest.importorskip("prime_sandboxes", reason="the SDK of prime is not installed")
    from asyncrlm.environments.prime import PrimeMachine

    from .fakes.prime_server import KEY, PrimeServer

    with PrimeServer() as server:
        patch.setenv("PRIME_API_BASE_URL", server.url)
        patch.setenv("PRIME_API_KEY", KEY)
        patch.setenv("HOME", folder)  # where the SDK has its settings and keeps tokens
        patch.setattr(PrimeMachine, "scratch", folder)
        yield Vendor(
            name="prime",
            server=server,
            create="create",
            execute="execute",
            read="execute",
            send="input",
            destroy="delete",
            refusals={
                "quota": (403, "the team may have no more sandboxes"),
                "broken": (500, "no node took it"),
                "token": (401, "Invalid API key"),
                "passing": (503, "not now"),
            },
        )


MAKERS: dict[str, Callable[[pytest.MonkeyPatch, str], Iterator[Vendor]]] = {
    "modal": modal_vendor,
    "modal-v1": lambda patch, folder: modal_vendor(patch, folder, "0"),
    "daytona": daytona_vendor,
    "e2b": e2b_vendor,
    "prime": prime_vendor,
}


@contextlib.contextmanager
def serving(name: str, folder: Path) -> Iterator[Vendor]:
    """A vendor whose sandboxes have this folder; at the end all that was made is destroyed, and nothing is left."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    (folder / "sandboxes").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for variable in [one for one in os.environ if one.startswith(("MODAL_", "DAYTONA_", "E2B_", "PRIME_"))]:
            patch.delenv(variable)
        patch.chdir(folder)  # where there is no `.env`
        for one in MAKERS[name](patch, str(folder / "sandboxes")):
            yield one
            assert one.server.unknown == []
            assert one.leaked == []
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


@contextlib.contextmanager
def offered(name: str) -> Iterator[Environment]:
    """The environment of a vendor that is served meanwhile."""
    with tempfile.TemporaryDirectory() as folder, serving(name, Path(folder)) as one:
        yield one.environment()


modal, daytona, e2b, prime = (partial(offered, name) for name in ("modal", "daytona", "e2b", "prime"))


@pytest.fixture(params=list(MAKERS))
def vendor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Vendor]:
    with serving(request.param, tmp_path) as one:
        yield one


async def echo(messages: list[dict[str, str]]) -> str:
    return "re: " + messages[-1]["content"]


def said(result: Any) -> str:
    """What a cell's result says of what went wrong."""
    return (result.error or "") + result.stderr


async def fact(what: Callable[[], Any]) -> None:
    """Wait until it is so."""
    with anyio.fail_after(10):
        while not what():
            await anyio.sleep(0.005)
