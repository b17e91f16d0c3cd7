"""The environments that the conformance suite is run on: one line for each."""

from __future__ import annotations

import importlib
import shutil
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncrlm import Environment
from asyncrlm.environments import environment
from asyncrlm.testing import EnvironmentConformance

from .vendors import SDK_WARNINGS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def place(opens: str, *, needs: str | None = None, alive: str | None = None, **attributes: Any) -> type:
    """The suite for one environment.

    Args:
        opens: "module:name" of what gives the environment when called: an `Environment`, or a context manager of one
            (async or not), entered for each check: fake servers are started there. It may `pytest.skip`.
        needs: The module of an SDK; without it the checks are skipped, and say so.
        alive: "module:name" of an async function that names what is alive at the provider.
        **attributes: Of the suite: `backends`, `big`, `cap`, `known_failures`, … (see `Conformance`).
    """

    class Suite(EnvironmentConformance):
        @pytest.fixture
        async def environment(self, anyio_backend: str) -> AsyncIterator[Environment]:
            if needs is not None:
                pytest.importorskip(needs, reason=f"{needs} is not installed")
            made = _found(opens)()
            async with AsyncExitStack() as stack:
                if isinstance(made, AbstractAsyncContextManager):
                    made = await stack.enter_async_context(made)
                elif isinstance(made, AbstractContextManager):
                    made = stack.enter_context(made)
                yield made

        async def leftovers(self) -> set[str]:
            return {*await super().leftovers(), *(await _found(alive)() if alive else ())}

    return type("Suite", (Suite,), attributes)


def _found(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def kernel() -> Environment:
    """The kernel of this interpreter, which Jupyter knows by itself."""
    return environment("ipython", {"kernel": "python3"})


def oldest_python() -> Path:
    """An interpreter of the oldest version that workers run on, which is not among those that CI installs."""
    found = [*Path.home().glob(".pyenv/versions/3.9.*/bin/python"), *filter(None, [shutil.which("python3.9")])]
    if not found:
        pytest.skip("there is no Python 3.9 here")
    return Path(found[0])


def oldest() -> Environment:
    """Workers on the oldest Python there may be."""
    return environment("local", {"python": str(oldest_python())})


class Docker(EnvironmentConformance):
    """In containers of an engine that the tests start."""

    backends = ("asyncio",)

    @pytest.fixture
    async def environment(self, docker_host: str) -> Environment:
        return environment("docker", {"docker_host": docker_host})


PLACES = {
    "Local": place("asyncrlm.environments.local:LocalEnvironment"),
    "Python39": place("tests.conformance_environments:oldest", backends=("asyncio",)),
    "IPython": place("asyncrlm.environments.ipython:IPythonEnvironment", needs="IPython"),
    "Kernel": place("tests.conformance_environments:kernel", needs="ipykernel", backends=("asyncio",)),
    "Docker": Docker,
    "Modal": place("tests.vendors:modal", needs="modal", backends=("asyncio",)),
    "Daytona": place("tests.vendors:daytona", needs="daytona", backends=("asyncio",), pytestmark=[*SDK_WARNINGS]),
    "E2B": place("tests.vendors:e2b", needs="e2b", backends=("asyncio",)),
    "Prime": place("tests.vendors:prime", needs="prime_sandboxes", backends=("asyncio",)),
}
"""Name → suite, collected as `TestName` by test_conformance.py: `pytest tests/test_conformance.py -k Local`."""
