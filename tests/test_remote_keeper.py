"""The keeper itself, spoken with over its standard input and output."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncrlm.environments.remote_boot import Options, bundle, command

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHERS = re.compile(r"3\.(9|1\d)(\.\d+)?")
PYTHONS = [
    sys.executable,
    *(str(p / "bin/python3") for p in Path("~/.pyenv/versions").expanduser().glob("*") if OTHERS.fullmatch(p.name)),
]


class Keeper:
    """A keeper in a process, and what it says."""

    def __init__(
        self, folder: Path, prefix: tuple[str, ...] = (), python: str = sys.executable, **options: Any
    ) -> None:
        self.process = subprocess.Popen([*prefix, *command(python)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.inp, self.out = self.process.stdin, self.process.stdout
        told = {"work": None, "confine": False, "limits": {}, "keep": 100, "folder": str(folder / "k"), **options}
        self.send(bundle() + Options(**told).line() + b'{"t":"init"}\n')
        self.cell = 0
        self.buffer = b""

    def send(self, data: bytes) -> None:
        self.inp.write(data)
        self.inp.flush()

    def frame(self) -> dict[str, Any]:
        while not (line := self.line().strip()):
            pass
        return json.loads(line)

    def line(self) -> bytes:
        while b"\n" not in self.buffer:
            assert select.select([self.out], [], [], 10)[0], f"nothing came after {self.buffer[-100:]!r}"
            data = os.read(self.out.fileno(), 1 << 16)
            assert data, "the stream ended"
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def begin(self, code: str) -> None:
        self.cell += 1
        self.send(json.dumps({"t": "execute", "cell": self.cell, "code": code}).encode() + b"\n")

    def run(self, code: str) -> list[dict[str, Any]]:
        self.begin(code)
        frames = [self.frame()]
        while frames[-1]["t"] not in ("done", "exited"):
            frames.append(self.frame())
        return frames

    def printed(self, code: str) -> str:
        *outputs, done = self.run(code)
        assert done["t"] == "done", done
        assert done.get("error") is None, done
        return b"".join(base64.b64decode(frame["data"]) for frame in outputs).decode()

    def end(self) -> None:
        with self.process:
            self.inp.close()
            assert self.process.wait(10) == 0


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Any]:
    kept: list[Keeper] = []

    def make(*args: Any, **options: Any) -> Keeper:
        kept.append(Keeper(tmp_path, *args, **options))
        ready = kept[-1].frame()
        assert ready["t"] == "ready", ready
        return kept[-1]

    yield make
    for keeper in kept:
        keeper.end()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("confine", [True, False])
def test_interpreters_from_3_9_on(keep: Any, python: str, confine: bool) -> None:
    assert keep(python=python, confine=confine).printed("print(6 * 7)") == "42\n"


@pytest.mark.parametrize("size", [1, 2, 7, 100_000])
def test_input_in_any_chunking(keep: Any, tmp_path: Path, size: int) -> None:
    keeper = keep(binary=False, padding=2)
    content = bytes(range(256)) * 3
    text = base64.b64encode(content)
    stream = b"".join(
        (
            b'{"t":"file","name":"f","size":%d,"more":true}\n' % len(text) + text,
            b'{"t":"file","name":"f","size":%d,"more":true}\n' % len(text[:8]) + text[:8],
            b'{"t":"file","name":"f","size":0}\n',
            b'{"t":"interrupt"}\n{"t":"interrupt"}\n\n',
            b'{"t":"load","id":1,"name":"f","form":"bytes","path":"%s"}\n' % str(tmp_path / "k/files/f").encode(),
        )
    )
    for start in range(0, len(stream), size):
        keeper.send(stream[start : start + size])
    assert keeper.frame() == {"t": "loaded", "id": 1}
    assert keeper.printed(f"print(f == bytes(range(256)) * 3 + {content[:6]!r})") == "True\n"


def test_output_comes_before_the_done_of_its_cell_and_says_what_is_missing(keep: Any) -> None:
    keeper = keep()
    out, tail, err, done = keeper.run("import sys\nprint('a' * 1000, 'end')\nprint('e', file=sys.stderr)")
    assert done["t"] == "done"
    assert (out["stream"], base64.b64decode(out["data"])) == (1, b"a" * 100)
    assert (tail["omitted"], base64.b64decode(tail["data"])) == (1005 - 200, b"a" * 95 + b" end\n")
    assert (err["stream"], base64.b64decode(err["data"])) == (2, b"e\n")


def test_a_worker_that_reads_nothing_can_be_interrupted_and_told_to_close(keep: Any) -> None:
    keeper = keep()
    keeper.begin("sum(range(10**13))")
    for number in range(200):  # replies that nobody waits for fill its channel
        keeper.send(b'{"t":"reply","id":%d,"value":"%s"}\n' % (number, b"x" * 10_000))
    keeper.send(b'{"t":"interrupt"}\n')
    keeper.send(b'{"t":"close"}\n')
    assert keeper.frame() == {"t": "exited", "status": -9, "reason": ""}


def test_a_host_that_reads_nothing_does_not_hold_more_than_a_megabyte_of_a_worker(keep: Any) -> None:
    keeper = keep()
    keeper.begin(
        "import threading\nfor i in range(300):\n threading.Thread(target=llm_query, args=('x' * 100_000,)).start()"
    )
    time.sleep(0.5)  # for what must not happen
    with open(f"/proc/{keeper.process.pid}/status") as f:
        rss = int(f.read().partition("VmRSS:")[2].split()[0])
    assert rss < 60_000
    keeper.send(b'{"t":"close"}\n')
    while not keeper.line().startswith(b'{"t":"exited"'):  # a frame may have been cut off
        pass


def test_a_file_that_can_not_be_written_ends_it_with_the_reason(keep: Any) -> None:
    keeper = keep()
    keeper.send(b'{"t":"file","name":"no/such/folder","size":3}\nabc')
    assert keeper.frame() == {
        "t": "exited",
        "status": -9,
        "reason": "no/such/folder could not be written: No such file or directory",
    }


def test_a_worker_that_ends_its_channel_ends_too(keep: Any) -> None:
    keeper = keep(network=True, confine=True)
    keeper.begin(
        "import os, socket\nfor fd in map(int, os.listdir('/proc/self/fd')):\n"
        " try: socket.socket(fileno=os.dup(fd)).shutdown(2)\n except OSError: pass\n"
        "sum(range(10**13))"
    )
    assert keeper.frame() == {"t": "exited", "status": -9, "reason": "it ended its channel"}


def test_a_file_that_was_given_up_is_not_gone_on_with(keep: Any, tmp_path: Path) -> None:
    keeper = keep()
    keeper.send(b'{"t":"file","name":"a","size":3,"more":true}\nabc{"t":"file","name":"b","size":2}\nxy')
    assert keeper.printed(f"import os\np = {str(tmp_path)!r} + '/k/files/'\nprint(open(p + 'b').read())") == "xy\n"


@pytest.mark.parametrize(("options", "seen"), [({"env": {"A": "1"}}, [None, "1"]), ({"inherit": True}, ["s", None])])
def test_environment_variables(keep: Any, monkeypatch: pytest.MonkeyPatch, options: Any, seen: Any) -> None:
    monkeypatch.setenv("SECRET", "s")
    code = "import os\nprint([os.environ.get(name) for name in ('SECRET', 'A')])"
    assert keep(**options).printed(code) == f"{seen}\n"


def test_a_keeper_that_can_not_begin_says_why(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / ("no" * 200))
    frame = keeper.frame()
    assert frame["t"] == "exited"
    assert "OSError" in frame["reason"]
    keeper.end()


def test_garbage_on_a_text_stream_stays_text(keep: Any) -> None:
    keeper = keep(binary=False, padding=3)
    keeper.begin(
        "import os, socket\nfor fd in map(int, os.listdir('/proc/self/fd')):\n"
        " try: socket.socket(fileno=os.dup(fd)).send(b'\\xff\\x01\\x01\\x01\\n')\n except OSError: pass"
    )
    assert [keeper.line() for _ in range(2)] == [b"   ", b"????"]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
def test_as_first_process_it_buries_orphans_and_takes_everything_with_it(keep: Any) -> None:
    keeper = keep(("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"))
    assert keeper.printed("import os\nprint(os.getppid())") == "1\n"
    orphan = (
        "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  os.execv('/bin/sleep', ['sleep', '{0}'])\n"
        " os._exit(0)\nos.wait()\n"
    )
    keeper.printed(orphan.format("0.01"))
    keeper.printed(
        "import time\nend = time.monotonic() + 5\n"
        "while len([p for p in os.listdir('/proc') if p.isdigit()]) > 2 and time.monotonic() < end: time.sleep(.01)"
    )
    assert keeper.printed("print([p for p in os.listdir('/proc') if p.isdigit()])") == "['1', '2']\n"
    keeper.printed(orphan.format("86399.125"))
    keeper.begin("os.kill(1, 9)\nos._exit(7)")
    assert keeper.frame() == {"t": "exited", "status": 7, "reason": ""}
    keeper.end()
    assert subprocess.run(["pgrep", "-f", "^sleep 86399.125"], check=False, stdout=subprocess.PIPE).stdout == b""
