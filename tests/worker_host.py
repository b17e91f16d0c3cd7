"""A small synchronous host for tests of the worker: one plain subprocess, nothing confined."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import asyncrlm.repl.worker

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = str(Path(asyncrlm.repl.worker.__file__).parent)
CAP = 10.0
"""Seconds that any wait may take."""
COVERAGE = os.environ.get("COVERAGE_PROCESS_START")
# Measured code must bear the name that the report asks for; else the worker is as alone as in a sandbox.
NAME = "asyncrlm.repl.worker" if COVERAGE else "_asyncrlm_worker"

BOOT = """
import faulthandler, importlib.util, json, signal, sys, types
faulthandler.register(signal.SIGUSR1, file=open("stacks", "w"))
fd, name, folder, in_force, measured = json.loads(sys.argv[1])
for parent in ("asyncrlm", "asyncrlm.repl") if measured else ():
    sys.modules[parent] = types.ModuleType(parent)
    sys.modules[parent].__path__ = []
if measured:
    import coverage
    measurement = coverage.Coverage(config_file=measured, data_suffix=True)
    measurement.start()
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
main = importlib.import_module(name + ".main")
if measured:
    def save():
        measurement.stop()
        measurement.save()
    main.before_exit.append(save)
main.serve(fd, in_force)
"""

Frame = dict[str, Any]


def echo(call: Frame) -> Frame | None:
    """The default service: the prompt again."""
    return {"value": f"A:{call['prompt']}"}


@dataclass
class Outcome:
    stdout: str = ""
    stderr: str = ""
    error: Frame | None = None
    variables: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    answers: list[Frame] = field(default_factory=list)
    calls: list[Frame] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)

    @property
    def trace(self) -> str:
        assert self.error is not None, self.stdout
        return self.error["traceback"]


class Host:
    """Serves one worker. `serve` answers a call with the fields of a reply, or with None to leave it open."""

    def __init__(self, *, in_force: Frame | None = None, python: str = sys.executable, **init: Any) -> None:
        self.socket, far = socket.socketpair()
        self.socket.settimeout(CAP)
        self.folder = tempfile.TemporaryDirectory()
        self.outputs = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115 -- closed by __exit__
        arguments = json.dumps([far.fileno(), NAME, FOLDER, in_force or {}, COVERAGE])
        self.process = subprocess.Popen(
            [python, *(() if COVERAGE else ("-I",)), "-c", BOOT, arguments],
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.outputs[0],
            stderr=self.outputs[1],
            cwd=self.folder.name,
        )
        far.close()
        self.read = [0, 0]
        self.buffer = b""
        self.cell = 0
        self.loads = 0
        self.serve: Callable[[Frame], Frame | None] = echo
        self.open: dict[int, Frame] = {}
        self.ready = self.frame()
        self.send({"t": "init", **init})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        try:
            self.process.wait(CAP)
        finally:
            self.process.kill()
            self.process.wait()
            for file in self.outputs:
                file.close()
            self.folder.cleanup()

    def send(self, *frames: Frame) -> None:
        self.socket.sendall(b"".join(json.dumps(frame).encode() + b"\n" for frame in frames))

    def frame(self) -> Frame:
        while b"\n" not in self.buffer:
            try:
                data = self.socket.recv(1 << 18)
            except TimeoutError:
                raise TimeoutError(f"no frame for {CAP:.0f} s; the worker is at\n{self.stacks()}") from None
            if not data:
                raise EOFError("the worker is gone")
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def stacks(self) -> str:
        """Where each thread of a worker that hangs is."""
        self.process.send_signal(signal.SIGUSR1)
        file = Path(self.folder.name) / "stacks"
        wait_for(lambda: file.exists() and "most recent call first" in file.read_text())
        return file.read_text()

    def output(self, stream: int) -> str:
        file = self.outputs[stream]
        data = os.pread(file.fileno(), 1 << 30, self.read[stream])
        self.read[stream] += len(data)
        return data.decode("utf-8", "replace")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def start(self, code: str) -> None:
        self.cell += 1
        self.send({"t": "execute", "cell": self.cell, "code": code})

    def finish(self, on_frame: Callable[[Frame], None] | None = None) -> Outcome:
        """Serve the running cell to its end; `on_frame` sees each frame first."""
        outcome = Outcome()
        while True:
            frame = self.frame()
            if on_frame is not None:
                on_frame(frame)
            if frame["t"] == "call":
                outcome.calls.append(frame)
                reply = self.serve(frame)
                if reply is None:
                    self.open[frame["id"]] = frame
                else:
                    self.reply(frame, **reply)
            elif frame["t"] == "cancel":
                outcome.cancelled.append(frame["id"])
                if self.open.pop(frame["id"], None) is not None:
                    self.send({"t": "reply", "id": frame["id"], "error": "cancelled", "kind": "cancelled"})
            elif frame["t"] == "answer":
                outcome.answers.append(frame)
            else:
                assert frame["t"] == "done", frame
                assert frame["cell"] == self.cell
                break
        if self.open:
            self.send({"t": "dropped", "ids": [[call, call] for call in self.open]})
        self.open.clear()
        outcome.error, outcome.variables = frame.get("error"), frame["variables"]
        outcome.values = frame.get("values", {})
        outcome.stdout, outcome.stderr = self.output(0), self.output(1)
        return outcome

    def reply(self, call: Frame, **fields: Any) -> None:
        self.open.pop(call["id"], None)
        self.send({"t": "reply", "id": call["id"], **fields})

    def run(self, code: str) -> Outcome:
        self.start(code)
        return self.finish()

    def show(self, code: str) -> str:
        """What a cell prints, which must not fail."""
        outcome = self.run(code)
        assert outcome.error is None, outcome.error
        return outcome.stdout

    def load(self, name: str, **fields: Any) -> str | None:
        """Load a variable and return the error, if any."""
        self.loads += 1
        self.send({"t": "load", "id": self.loads, "name": name, **fields})
        frame = self.frame()
        assert (frame["t"], frame["id"]) == ("loaded", self.loads)
        return frame.get("error")

    def wait_exit(self) -> int:
        return self.process.wait(CAP)


def wait_for(fact: Callable[[], bool]) -> None:
    """Until `fact()` holds."""
    deadline = time.monotonic() + CAP
    while not fact():
        assert time.monotonic() < deadline, "waited for 10 s"
        time.sleep(0.001)
