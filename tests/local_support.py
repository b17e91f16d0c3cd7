"""A scope and a client, enough to run code in a worker of the local environment without a session."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
from typing import TYPE_CHECKING, Any, Self

import anyio
import pytest

from asyncrlm.environments.local import LocalEnvironment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Hashable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from asyncrlm.repl.sandbox import Sandbox

CAP = 10.0
MODES = ("pidns", "warden", "scope", "walk")
"""Ways to end what a worker leaves; "warden" is the pid namespace of those who may have one, but not as root."""


def opening(path: Path) -> Callable[[], int]:
    """What a sandbox is given that is to pass this file."""
    return functools.partial(os.open, path, os.O_RDONLY | os.O_CLOEXEC)


class PlainScope:
    """A `Scope` of the simplest kind; keyword arguments become its attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self.stack = contextlib.AsyncExitStack()
        self.lock = anyio.Lock()
        self.values: dict[Hashable, Any] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        with anyio.CancelScope(shield=True):
            await self.stack.aclose()

    async def shared(self, key: Hashable, factory: Callable[[], AbstractAsyncContextManager[Any]]) -> Any:
        async with self.lock:
            if key not in self.values:
                self.values[key] = await self.stack.enter_async_context(factory())
        return self.values[key]

    @property
    def template(self) -> Any:
        [value] = self.values.values()
        return value


class Client:
    """Speaks just enough of the wire to run cells."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.buffer = b""
        self.cell = 0
        self.ready: dict[str, Any] = {}
        self.last: dict[str, Any] = {}

    async def frame(self) -> dict[str, Any]:
        while True:
            line, newline, rest = self.buffer.partition(b"\n")
            if not newline:
                self.buffer += await self.sandbox.receive()
                continue
            self.buffer = rest
            if line.strip():
                return json.loads(line)

    async def start(self) -> Client:
        self.ready = await self.frame()
        assert self.ready["t"] == "ready", self.ready
        await self.sandbox.send(b'{"t":"init"}\n')
        return self

    async def begin(self, code: str) -> None:
        self.cell += 1
        await self.sandbox.send(json.dumps({"t": "execute", "cell": self.cell, "code": code}).encode() + b"\n")

    async def run(self, code: str) -> str:
        """Run a cell and return what it printed; the `done` frame is in `last`."""
        await self.begin(code)
        while (frame := await self.frame())["t"] != "done":
            if frame["t"] == "output":
                data = base64.b64decode(frame["data"])
                self.sandbox.add_output(frame["stream"], data, frame.get("omitted", 0))
        self.last = frame
        printed = self.sandbox.take_output()
        assert printed is not None
        return printed[0].text()

    async def value(self, code: str) -> Any:
        """What the code prints, as JSON; it must not raise."""
        text = await self.run(code)
        assert self.last.get("error") is None, self.last["error"]
        return json.loads(text)

    async def attempt(self, code: str) -> str | None:
        """The name of the exception the code raises, or None."""
        await self.run(code)
        error = self.last.get("error")
        return None if error is None else f"{error['type']}: {error.get('message', '')}"

    async def until_end(self) -> list[dict[str, Any]]:
        """All frames up to the end of the channel."""
        frames: list[dict[str, Any]] = []
        with contextlib.suppress(anyio.EndOfStream):
            while True:
                frames.append(await self.frame())
        return frames


@contextlib.asynccontextmanager
async def client(scope: Any, environment: LocalEnvironment | None = None, **settings: Any) -> AsyncIterator[Client]:
    sandbox = await (environment or LocalEnvironment(**settings)).open(scope)
    try:
        with anyio.fail_after(CAP):
            started = await Client(sandbox).start()
        async with anyio.create_task_group() as group:
            group.start_soon(sandbox.pump)
            yield started
            group.cancel_scope.cancel()
    finally:
        await sandbox.aclose()


async def mode_or_skip(scope: Any, mode: str, **settings: Any) -> LocalEnvironment:
    """An environment in this mode; skips the test where the machine does not give it."""
    environment = LocalEnvironment(_mode=mode, **settings)
    async with client(scope, environment):
        pass
    if scope.template.facts.mode != {"warden": "pidns"}.get(mode, mode):
        pytest.skip(f"this machine gives {scope.template.facts.mode}, not {mode}")
    return environment


def marked(mark: str) -> list[int]:
    """The pids of living processes whose command line holds `mark`."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/cmdline", "rb") as f:
                command = f.read()
            with open(f"/proc/{name}/stat", "rb") as f:
                state = f.read().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        if mark.encode() in command and state not in b"ZX":
            found.append(int(name))
    return found


async def until(fact: Callable[[], object]) -> None:
    """Wait for a fact that gives no signal of its own, at most CAP seconds."""
    with anyio.fail_after(CAP):
        while not fact():
            await anyio.sleep(0.002)


DAEMONS = """
import os, subprocess
def daemon(tag):
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        os.setsid()
        os.execv('/bin/sleep', ['sleep', tag])
    os.wait()
daemon('{tag}'); daemon('{tag}')
keep = subprocess.Popen(['/bin/sleep', '{tag}'], start_new_session=True)
"""
COMETS = """
import os
for i in range(4):
    if os.fork() == 0:
        os.setsid()
        while True:
            try:
                if os.fork(): os._exit(0)
                os.setsid()
            except OSError: pass
"""


# ---- attacks ----

X86 = os.uname().machine == "x86_64"
PRELUDE = """
import ctypes, errno, fcntl, json, mmap, os, resource, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def raw(number, *args):
    result = libc.syscall(*(ctypes.c_long(x) if isinstance(x, int) else x for x in (number, *args)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
"""


async def assault(c: Client, attacks: dict[str, str], **values: Any) -> dict[str, str | None]:
    """Attack → the exception it met, or None where it went through."""
    await c.run(PRELUDE + "".join(f"{name} = {value!r}\n" for name, value in values.items()))
    assert c.last.get("error") is None, c.last
    return {name: await c.attempt(code) for name, code in attacks.items()}


def through(outcome: dict[str, str | None]) -> list[str]:
    return [name for name, error in outcome.items() if error is None]


def denied(outcome: dict[str, str | None]) -> None:
    assert through(outcome) == []
    odd = {k: v for k, v in outcome.items() if not v or v.split(":")[0] not in _DENIALS}
    assert odd == {}  # an attack that fails by a mistake of its own proves nothing


_DENIALS = ("PermissionError", "FileNotFoundError", "OSError", "MemoryError", "ProcessLookupError", "BlockingIOError")
