"""Cells on another machine that you reach with `ssh`: `python ssh_environment.py HOST`. All that a new place needs.

Nothing is installed there: it needs a Python (3.9 or later) and a folder to write to.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import ClassVar

import anyio
import anyio.abc

from asyncrlm import AsyncRLM, Machine, RemoteEnvironment, Scope


class SshMachine(Machine):
    """One login: the program that runs in it speaks with us over its standard input and output."""

    binary = True  # ssh -T passes every byte on

    def __init__(self, host: str) -> None:
        self._host = host
        self._process: anyio.abc.Process | None = None

    async def create(self) -> None:
        """The machine is there already; elsewhere this is where it is made."""

    async def start(self, command: Sequence[str]) -> None:
        login = ["ssh", "-T", "-o", "BatchMode=yes", self._host, "exec " + shlex.join(command)]
        self._process = await anyio.open_process(login, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None)

    async def send(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        await self._process.stdin.send(data)

    async def receive(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        return await self._process.stdout.receive()

    async def destroy(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        await process.stdin.aclose()  # hung up on, it ends everything that cells started
        with anyio.move_on_after(5):
            await process.wait()
        if process.returncode is None:
            process.kill()
        await process.aclose()

    def fate(self) -> str:
        status = self._process.returncode if self._process is not None else None
        return f"ssh ended with status {status}" if status else ""


class SshEnvironment(RemoteEnvironment, frozen=True, kw_only=True):
    """Cells on `host`, a name that `ssh` knows."""

    name: ClassVar[str] = "ssh"
    host: str

    def machine(self, scope: Scope) -> Machine:
        return SshMachine(self.host)


TEXT = "\n".join([f"Room {number} is painted grey." for number in range(20_000)] + ["Room 77777 is painted red."])


async def main(host: str) -> None:
    async with AsyncRLM(backend="offline", environment=SshEnvironment(host=host)) as rlm:
        completion = await rlm.acompletion(TEXT, "Which room is painted red?")
    print(completion.response or f"no answer: {completion.error}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python ssh_environment.py HOST")
    anyio.run(main, sys.argv[1])
