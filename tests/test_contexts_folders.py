"""Folders, patterns and lists of paths that are too large for memory: documents that stay files, each a `Text`."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, Repl
from asyncrlm.engine import plain
from asyncrlm.events import ContextProgress
from asyncrlm.repl import context as context_module
from asyncrlm.repl.context import describe
from asyncrlm.repl.files import found

from .helpers import cell, scripted, submit, told
from .remote_support import Plain, remote
from .remote_support import Text as TextStream

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_leaks")]

LONG = "héllo wörld\n" * 500_000
FILES = {"a.md": "# A\r\né", "b/c.txt": "c\n" * 3, "b/empty": "", "long.txt": LONG}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    (folder / "z.bin").write_bytes(b"\xff\x00needle")
    return folder


CELL = r"""
assert context.names == ["a.md", "b/c.txt", "b/empty", "long.txt", "z.bin"], context.names
assert context.sizes[:3] == [7, 6, 0] and context.nbytes == sum(context.sizes)
assert {type(d).__name__ for d in context} == {"Text"}
assert context[0][:] == "# A\r\n\u00e9" == str(context["a.md"]) and context[0].name == "a.md" and len(context[0]) == 6
assert [d.name for d in context[1:3]] == ["b/c.txt", "b/empty"] and list(context["b/c.txt"]) == ["c\n"] * 3
assert not context["b/empty"] and len(context["b/empty"]) == 0 and context["b/empty"][:] == ""
long = context["long.txt"]
assert len(long) == 6_000_000 and long[3_000_000:3_000_005] == "h\u00e9llo" and long[-6:] == "w\u00f6rld\n"
assert long.find("w\u00f6rld", 100) == 102 and long.search("w.r").start() == 6 and long.count("h\u00e9") == 500_000
assert "needle" in context["z.bin"] and context["z.bin"].raw(0, 2) == b"\xff\x00" and context[-1].raw(-6) == b"needle"
try:
    context["z.bin"][:]
except ValueError as error:
    assert ".raw(start, stop) gives its bytes" in str(error)
else:
    assert False
assert [name for name, d in context.items() if "w\u00f6rld" in d] == ["long.txt"]
print(context)
"""
SHOWN = (
    "<Documents: 5: 'a.md' (7 bytes), 'b/c.txt' (6 bytes), 'b/empty' (0 bytes), 'long.txt' (7,000,000 bytes), "
    "'z.bin' (8 bytes)>\n"
)


@pytest.mark.parametrize("place", ["local", "remote"])
async def test_a_folder_of_texts(tree: Path, place: str) -> None:
    where = "local" if place == "local" else remote()
    with anyio.fail_after(30):
        async with Repl(where, context=tree, lazy=True) as repl:
            for _ in range(2):
                result = await repl.execute(CELL)
                assert (result.error, result.stdout) == (None, SHOWN)
                await repl.execute("import os; os._exit(1)")
            if place == "local":
                assert (await repl.execute(f"open({str(tree / 'a.md')!r})")).error is not None


async def test_many_files_are_never_all_open(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number:03}").write_text(f"number {number}")
    code = """
import os, threading
kept = list(context)
before = len(os.listdir("/proc/self/fd"))
for _ in range(2):
    assert [d[7:] for d in kept] == [str(n) for n in range(200)]
assert len(os.listdir("/proc/self/fd")) <= before + 64
got = [None] * 200
def read(first):
    for number in range(first, 200, 8):
        got[number] = int(kept[number][7:])
threads = [threading.Thread(target=read, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert got == list(range(200))
if os.fork() == 0:
    try:
        fine = kept[199][:] == "number 199"  # open already
        kept[0][:]
    except OSError as error:
        os._exit(0 if fine and "is not open here" in str(error) else 2)
    os._exit(1)
assert os.wait()[1] == 0
"""
    with anyio.fail_after(20):
        async with Repl(context=tmp_path, lazy=True) as repl:
            assert (await repl.execute(code)).error is None


async def test_what_becomes_of_a_file_meanwhile(tree: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with anyio.fail_after(20):
        async with Repl(context=tree, lazy=True) as repl:
            os.truncate(tree / "long.txt", 100)
            (tree / "a.md").unlink()
            (tree / "a.md").symlink_to(secret)
            (tree / "b/c.txt").unlink()
            os.mkfifo(tree / "b/c.txt")
            (tree / "z.bin").unlink()
            for name, why in (
                ("long.txt", "has become shorter than its 7,000,000 bytes"),
                ("a.md", "leads out of the folder"),
                ("b/c.txt", "is no regular file"),
                ("z.bin", "No such file"),
            ):
                result = await repl.execute(f"context[{name!r}].raw(-5)")
                assert why in (result.error or ""), (name, result)
                assert "OSError" in (result.error or "")
                assert str(tree) not in result.stderr + (result.error or "")  # where it is on the host
            assert (await repl.execute("print(context['long.txt'][:5])")).stdout == "héllo\n"


async def test_what_takes_the_place_of_a_file_that_was_looked_at_is_refused(tree: Path, tmp_path: Path) -> None:
    """Else its characters were those of one file, and where they are of another."""
    path, other = tree / "long.txt", tmp_path / "other"
    other.write_text("another one " * 700_000)
    with anyio.fail_after(20):
        async with Repl(context=tree, lazy=True) as repl:
            assert (await repl.execute("text = context['long.txt']\nprint(text[:5])")).stdout == "héllo\n"
            os.replace(other, path)
            result = await repl.execute("len(text)")
            assert "'long.txt' is another file than it was" in (result.error or "")


async def test_a_folder_of_too_many_folders_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(1_200):
        os.mkdir("d")
        os.chdir("d")
    try:
        with pytest.raises(ConfigurationError, match="has folders in folders, too many to go through"):
            found(tmp_path)
    finally:
        os.chdir(tmp_path)
        subprocess.run(["rm", "-rf", "d"], check=True)  # what pytest has for it would go too deep as well


async def test_a_cell_gets_nothing_but_its_files(tree: Path) -> None:
    code = """
[surface] = [c.cell_contents for c in context._reader.__self__._ask.__closure__ if type(c.cell_contents) is not str]
for key, question in (("1", ["open", 99]), ("1", ["open", -1]), ("1", ["open", "a"]), ("9", ["open", 0]),
                      ("1/99", ["index", 0, 1, 1]), ("1/x", ["index", 0, 1, 1]), ("1", ["index", 0, 1, 1])):
    try:
        surface._file(key, question)
    except OSError as error:
        assert str(error) == "there is no such file", error
    else:
        assert False, question
"""
    with anyio.fail_after(20):
        async with Repl(context=tree, lazy=True) as repl:
            assert (await repl.execute(code)).error is None


async def test_over_the_bound_they_stay_files(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe(tree).kind == "documents"
    monkeypatch.setattr(context_module, "MAX_PATH_BYTES", 11)
    assert describe(tree / "a.md").kind == "file"
    assert describe([tree / "a.md", tree / "b"]).kind == "texts"
    root = scripted(cell("print(type(context[0]).__name__)"), submit("context['b/c.txt'][2:]"))
    with anyio.fail_after(20):
        rlm = AsyncRLM(root)
        assert (await rlm.acompletion(tree, "What?")).response == "c\nc\n"
        assert "a sequence of documents with names" in told(root, 1)
        assert "5 files, 7,000,021 bytes as files. Names: 'a.md', 'b/c.txt'," in told(root, 1)
        assert "Text" in told(root, 2)
        monkeypatch.setattr(plain, "MAX_PATH_BYTES", 11)
        with pytest.raises(ConfigurationError, match="it has 7,000,021 bytes, and at most 11 can be read at once"):
            await AsyncRLM(scripted("x"), max_depth=0).acompletion(tree)


class Spied(Plain):
    """Tells which files came."""

    came: ClassVar[list[str]]

    async def put_file(self, path: str, chunks: Iterable[bytes]) -> bool:
        self.came.append(Path(path).name)
        return False


async def test_a_remote_sandbox_gets_what_is_looked_at_once(tree: Path) -> None:
    Spied.came = []
    root = scripted(
        cell("x = context['long.txt'][:5]"), cell("y = context[3][-6:] + list(context)[0][:3]"), submit("x + y")
    )
    seen: list[ContextProgress] = []
    with anyio.fail_after(20):
        async with AsyncRLM(root, environment=remote(Spied)).astream(tree, lazy=True) as events:
            async for event in events:
                if isinstance(event, ContextProgress):
                    seen.append(event)
        assert events.result is not None
        assert events.result.response == "héllowörld\n# A"
    assert Spied.came == ["load-1", "file-1", "file-2"]
    uploads = [(event.name, event.received, event.total) for event in seen if event.to == "sandbox"]
    size = len(LONG.encode())
    assert uploads[-3:-1] == [("long.txt", 4 << 20, size), ("long.txt", size, size)]
    assert uploads[-1] == ("a.md", 7, 7)


@pytest.mark.parametrize("stream", [Plain, TextStream])
async def test_an_upload_outlives_the_cell_that_asked_for_it(tree: Path, stream: Any) -> None:
    """Its stream could not go on otherwise."""
    worker = 0

    class Interrupting(stream):
        async def put_file(self, path: str, chunks: Iterable[bytes]) -> bool:
            if Path(path).name == "file-1":
                os.kill(worker, signal.SIGALRM)
            return await super().put_file(path, chunks)

    code = """
import os, signal
def stop(*_): raise KeyboardInterrupt
signal.signal(signal.SIGALRM, stop)
kept = 1
print(os.getpid())
"""
    with anyio.fail_after(30):
        async with Repl(remote(Interrupting), context=tree, lazy=True) as repl:
            worker = int((await repl.execute(code)).stdout)
            assert "KeyboardInterrupt" in ((await repl.execute("context['long.txt'][:5]")).error or "")
            result = await repl.execute("print(kept, context['long.txt'][:5], context['a.md'][:3])")
            assert (result.error, result.stdout) == (None, "1 héllo # A\n")
