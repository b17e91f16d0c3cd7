"""Vendors' environments against servers of ours, for whatever test asks for `vendor`."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
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


class Requests(Struct, frozen=True):
    """What a vendor calls the requests that faults can be put on."""

    create: str = "create"
    execute: str = "execute"
    read: str = "execute"
    send: str = "input"
    destroy: str = "delete"


class Vendor(Struct):
    name: str
    server: FakeVendor
    requests: Requests
    refusals: dict[str, Any]
    """Kind of refusal → what a request ends with."""

    def environment(self, **kwargs: Any) -> Any:
        return environment(self.name, kwargs)

    @property
    def leaked(self) -> list[str]:
        return sorted(set(self.server.made) - set(self.server.destroyed))


class Offer(Struct, frozen=True, kw_only=True):
    """How a vendor's SDK and driver are led to a server of ours."""

    name: str
    needs: tuple[str, ...]
    """Modules without which it is skipped."""
    server: str
    machine: str
    variables: Callable[[Any, ModuleType, str], dict[str, str]]
    """Of the server, its module and the folder for sandboxes → the SDK's environment variables."""
    requests: Requests = Requests()
    refusals: Callable[[], dict[str, Any]]


def _modal_refusals() -> dict[str, Any]:
    from grpclib import Status

    return {
        "quota": (Status.RESOURCE_EXHAUSTED, "the workspace is over its limit"),
        "broken": (Status.FAILED_PRECONDITION, "no worker took it"),
        "token": (Status.UNAUTHENTICATED, "the token was revoked"),
        "passing": (Status.UNAVAILABLE, "not now"),
    }


def _modal(version: str) -> Offer:
    second = "V2" if version == "1" else ""
    return Offer(
        name="modal",
        needs=("modal",),
        server="ModalServer",
        machine="ModalMachine",
        variables=lambda server, module, folder: {
            "MODAL_SERVER_URL": server.url,
            "MODAL_TOKEN_ID": module.TOKEN[0],
            "MODAL_TOKEN_SECRET": module.TOKEN[1],
            "MODAL_SANDBOX_V2": version,
        },
        requests=Requests(
            create=f"SandboxCreate{second}",
            execute="TaskExecStart",
            read="TaskExecStdioRead",
            send="TaskExecStdinWrite",
            destroy=f"SandboxTerminate{second}",
        ),
        refusals=_modal_refusals,
    )


OFFERS = {
    "modal": _modal("1"),
    "modal-v1": _modal("0"),
    "daytona": Offer(
        name="daytona",
        needs=("daytona",),
        server="DaytonaServer",
        machine="DaytonaMachine",
        variables=lambda server, module, folder: {
            "DAYTONA_API_URL": f"{server.url}/api",
            "DAYTONA_API_KEY": module.KEY,
        },
        requests=Requests(read="logs"),
        refusals=lambda: {
            "quota": (429, "Total CPU quota exceeded"),
            "broken": (500, "no runner took it"),
            "token": (401, "Invalid credentials"),
        },
    ),
    "e2b": Offer(
        name="e2b",
        needs=("e2b", "uvicorn"),
        server="E2BServer",
        machine="E2BMachine",
        variables=lambda server, module, folder: {
            "E2B_API_KEY": module.KEY,
            "E2B_API_URL": server.url,
            "E2B_SANDBOX_URL": server.url,
        },
        refusals=lambda: {
            "quota": (403, "the team may have no more sandboxes"),
            "broken": (500, "no node took it"),
            "token": (401, "no such key"),
        },
    ),
    "prime": Offer(
        name="prime",
        needs=("prime_sandboxes",),
        server="PrimeServer",
        machine="PrimeMachine",
        variables=lambda server, module, folder: {
            "PRIME_API_BASE_URL": server.url,
            "PRIME_API_KEY": module.KEY,
            "HOME": folder,  # where the SDK has its settings and keeps tokens
        },
        refusals=lambda: {
            "quota": (403, "the team may have no more sandboxes"),
            "broken": (500, "no node took it"),
            "token": (401, "Invalid API key"),
            "passing": (503, "not now"),
        },
    ),
}


@contextlib.contextmanager
def _served(offer: Offer, patch: pytest.MonkeyPatch, folder: str) -> Iterator[Vendor]:
    for needed in offer.needs:
        pytest.importorskip(needed, reason=f"{offer.name} needs {needed}, which is not installed")
    module = importlib.import_module(f"{__package__}.fakes.{offer.name}_server")
    driver = importlib.import_module(f"asyncrlm.environments.{offer.name}")
    with getattr(module, offer.server)() as server:
        for name, value in offer.variables(server, module, folder).items():
            patch.setenv(name, value)
        patch.setattr(getattr(driver, offer.machine), "scratch", folder)
        yield Vendor(offer.name, server, offer.requests, offer.refusals())


@contextlib.contextmanager
def serving(name: str, folder: Path) -> Iterator[Vendor]:
    """A vendor whose sandboxes have this folder; at the end all that was made is destroyed, and nothing is left."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    (folder / "sandboxes").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for variable in [one for one in os.environ if one.startswith(("MODAL_", "DAYTONA_", "E2B_", "PRIME_"))]:
            patch.delenv(variable)
        patch.chdir(folder)  # where there is no `.env`
        with _served(OFFERS[name], patch, str(folder / "sandboxes")) as one:
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


@pytest.fixture(params=list(OFFERS))
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
