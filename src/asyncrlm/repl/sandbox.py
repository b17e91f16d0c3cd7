"""What a place where cells run must give: a byte stream to a worker inside it, a way to put files there, an end.

A driver knows nothing of models, prompts or answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Protocol, TypeVar

from msgspec import Struct, field

from ..errors import ProtocolError

T = TypeVar("T")


class Scope(Protocol):
    """What outlives a run: the engine scope of an `AsyncRLM`, or a `Repl`'s own.

    It may have three attributes more: `long_lived`, true where it pays to keep spare workers, `depth`, how many runs
    wait for the one it is passed to, so that a driver short of room never lets parents hold what their children need,
    and `threads`, the `anyio.CapacityLimiter` of blocking calls (see `threads_of`).
    """

    async def shared(self, key: Hashable, factory: Callable[[], AbstractAsyncContextManager[T]]) -> T:
        """The value of the context manager entered under `key`: entered by the first who asks, left with the scope.

        It is left by another task than entered it, so it must not hold a task group or a cancel scope open.
        """
        ...


class Settings(Struct, frozen=True, kw_only=True):
    """What every environment can be told where it makes sense; the defaults are the local environment's."""

    cell_timeout: float | None = 120.0
    """Seconds a cell may run while none of its sub-calls or tool calls is in flight; None for no limit."""
    memory_limit: int | str | None = "2GB"
    """Bytes of data segment per process, or a str such as "2GB"."""
    max_processes: int | None = 64
    max_file_size: int | str | None = "1GB"
    max_output: int = 131_072
    """Bytes kept of each output stream of a cell, half of them its head and half its tail."""
    setup_code: str | None = None
    """Code run in the worker before the first cell. What it prints, and an answer that it sets, nobody gets."""


class Printed(Struct, frozen=True, kw_only=True):
    """What a cell wrote to one stream: head and tail of at most half `max_output` each, and how much lay between."""

    head: bytes = b""
    tail: bytes = b""
    omitted: int = 0

    def text(self) -> str:
        """The text, with one line that says how much was left out, if any was."""
        if not self.omitted:
            return (self.head + self.tail).decode("utf-8", "replace")
        note = f"\n[... {self.omitted:,} bytes left out ...]\n"
        return self.head.decode("utf-8", "replace") + note + self.tail.decode("utf-8", "replace")


class Exit(Struct, frozen=True, kw_only=True):
    """How a worker ended: an exit code, or minus the number of the signal that ended it; None if not known."""

    status: int | None = None
    reason: str = ""


class Report(Struct, frozen=True, kw_only=True):
    """What is in force in a sandbox, for `repr`, the run-started event and `isolation="strict"`."""

    environment: str
    python: str = ""
    isolation: dict[str, Any] = field(default_factory=dict[str, Any])
    """Attack row → what holds it, or None where nothing does."""


class Sandbox(ABC):
    """One worker and what is around it. Owned by one run.

    `send` and `receive` are each used by one task at a time; any other method may be called meanwhile.
    """

    passes_files: ClassVar[bool] = False
    """True if `pass_file` can hand an open file of the host to the worker."""

    another_is_free: ClassVar[bool] = False
    """True if it costs next to nothing to try another one where the worker ended before it was ready."""

    start_timeout: float = 60.0
    """Seconds that the worker may take to say that it is ready."""

    report: Report

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Send all of `data` to the worker.

        Raises:
            anyio.BrokenResourceError: if the worker is gone.
        """

    def send_nowait(self, data: bytes) -> int:
        """Send what fits without waiting and return how many bytes that was; 0 where a driver can't tell."""
        return 0

    @abstractmethod
    async def receive(self) -> bytes:
        """At least one byte from the worker.

        Raises:
            anyio.EndOfStream: once the worker and everything it started is gone.
        """

    async def pump(self) -> None:
        """Run beside `receive` for as long as the sandbox lives; drivers that read output streams do it here."""

    def add_output(self, stream: int, data: bytes, omitted: int) -> None:
        """Take what an `output` frame brought of stream 1 or 2, before which `omitted` bytes were left out.

        Raises:
            ProtocolError: in drivers that read output themselves.
        """
        raise ProtocolError("the worker sent `output`, which this environment reads elsewhere")

    def take_output(self) -> tuple[Printed, Printed] | None:
        """What was written to standard output and error since the last call, all of what the kernel holds included."""
        return None

    @abstractmethod
    async def put_file(self, name: str, chunks: Iterable[bytes]) -> str:
        """Write a file of this name in the sandbox and return the path at which the worker can open it.

        `chunks` may be slow to make (encoding of a large text): it is consumed in a worker thread where it matters.

        Raises:
            ValueError: if it is not the name of a file in one folder.
        """

    async def pass_file(self, open_file: Callable[[], int]) -> None:
        """Hand the descriptor that `open_file` gives to the worker, ahead of the next bytes sent.

        Only where `passes_files`. The worker takes descriptors in the order they were passed. `open_file` is called in
        a worker thread; it opens a file for reading, and what it raises is raised.
        """
        raise NotImplementedError

    @abstractmethod
    def interrupt(self) -> None:
        """Ask the worker to stop its cell (SIGINT). Does not wait."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker and everything it started, now. Does not wait: `receive` then ends."""

    def check_report(self, report: Report) -> None:
        """Look at what a worker that is ready said of itself; `report` is all that is known then.

        Raises:
            ConfigurationError: if that is less than was asked for.
        """

    def fate(self) -> str:
        """Why the worker ended, where something outside of it knows; "" if not."""
        return ""

    def cpu_seconds(self) -> float | None:
        """CPU time of the worker process so far, or None where it can't be told."""
        return None

    @abstractmethod
    async def aclose(self) -> None:
        """Kill what is left and release everything, also if cancelled meanwhile. Closing twice is fine."""


def check_file_name(name: str) -> None:
    """Raises ValueError if `name` is not that of a file in one folder."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is no plain file name")


class Environment(Settings, frozen=True, kw_only=True, dict=True):
    """A kind of place where cells run, and its settings. Immutable, shared by any number of runs.

    Subclasses are frozen Structs too and define `name` and `open`; their fields are settings beside the common ones.
    """

    name: ClassVar[str]
    elsewhere: ClassVar[dict[str, str]] = {}
    """Settings that users of this name may look for and that are not here → where they are."""
    renamed: ClassVar[dict[str, str]] = {}
    """Other names of settings, in `environment_kwargs`, such as one that a ClassVar has here."""

    def check(self) -> None:
        """Look for what it needs in this process, without starting anything; asked when it is given to an `AsyncRLM`.

        Raises:
            ConfigurationError: if that is not installed.
        """

    async def prepare(self, scope: Scope) -> None:
        """Start what runs are not to wait for, when an `AsyncRLM` is entered; raises as `open` does."""

    async def open(self, scope: Scope) -> Sandbox:
        """Start a worker. Returns before it said `ready`.

        Raises:
            SandboxLost: if it can't be had.
            ConfigurationError: if `isolation="strict"` asks for what does not hold here.
        """
        raise NotImplementedError
