"""A `Text` in a cell: slices, searches, the index that the host counts, files that change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, Repl
from asyncrlm.repl import context as context_module
from asyncrlm.repl.context import describe
from asyncrlm.repl.shelf import CharacterIndex

from .helpers import scripted, submit, told
from .remote_support import Text as TextStream
from .remote_support import remote

TEXT = "héllo wörld\r\n😀 line two\n" * 4000
CELL = r"""
assert type(context).__name__ == "Text" and context.name == "text.txt" and context.nbytes == NBYTES
assert len(context) == LENGTH and context[5:11] == " w\u00f6rld" and context[-10:] == "\U0001f600 line two\n"[-10:]
assert context[-1] == "\n" and context[LENGTH // 2 :][:5] == str(context)[LENGTH // 2 :][:5]
assert "line two" in context and "line three" not in context
assert context.find("line", 100) == str(context).find("line", 100)
m = context.search(r"w\S+ld")
assert m.group() == "w\u00f6rld" and m.start() == 6
assert sum(1 for _ in context.finditer("line")) == 4000 == context.count("line") and len(list(context)) == 8000
assert "".join(context.chunks(1000)) == str(context)
import threading
got = []
threads = [threading.Thread(target=lambda: got.append(len(context))) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
assert got == [LENGTH] * 4
import os
if os.fork() == 0:
    os._exit(0 if len(context) == LENGTH and context[100:110] else 1)
assert os.wait()[1] == 0
context
"""


@pytest.mark.anyio
@pytest.mark.parametrize("place", ["local", "remote"])
async def test_a_text_in_a_cell(no_leaks: None, tmp_path: Path, place: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    code = CELL.replace("NBYTES", str(len(TEXT.encode()))).replace("LENGTH", str(len(TEXT)))
    with anyio.fail_after(30):
        async with Repl("local" if place == "local" else remote(TextStream), context=path, lazy=True) as repl:
            for _ in range(2):
                result = await repl.execute(code)
                assert result.error is None
                assert result.stdout.startswith(f"<Text 'text.txt', {len(TEXT.encode()):,} bytes: 'héllo")
                await repl.execute("import os; os._exit(1)")
            for wrong in ("import re; re.search('a', context)", "''.join([context])", "'a' + context"):
                result = await repl.execute(wrong)
                assert "Instead of re.search(p, text) write text.search(p)" in (result.error or "")
            result = await repl.execute("llm_query(context)")
            assert "pass a part of it, text[a:b]" in (result.error or "")


@pytest.mark.anyio
async def test_a_file_that_shrinks_is_an_error_and_no_dead_worker(no_leaks: None, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    with anyio.fail_after(10):
        async with Repl(context=path, lazy=True) as repl:
            assert (await repl.execute("kept = len(context)")).error is None
            os.truncate(path, 100)
            result = await repl.execute("print(context[-10:])")
            assert "has become shorter than its" in (result.error or "")
            assert (await repl.execute("print(kept)")).stdout == f"{len(TEXT)}\n"


@pytest.mark.anyio
async def test_a_new_worker_gets_what_has_taken_the_place_of_a_file(no_leaks: None, tmp_path: Path) -> None:
    path, other = tmp_path / "text.txt", tmp_path / "other.txt"
    path.write_bytes(TEXT.encode() * 50)
    other.write_bytes(b"abcde" * 2_000_000)
    with anyio.fail_after(20):
        async with Repl(context=path, lazy=True) as repl:
            assert (await repl.execute("print(len(context))")).stdout == f"{len(TEXT) * 50}\n"
            os.replace(other, path)
            assert "is gone" in ((await repl.execute("import os\nos._exit(1)")).error or "")
            look = "print(context.nbytes, len(context), context[7_000_000:7_000_005])"
            assert (await repl.execute(look)).stdout == "10000000 10000000 abcde\n"


@pytest.mark.anyio
async def test_a_passed_file_can_not_be_changed_through_its_descriptor(no_leaks: None, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("text")
    path.chmod(0o640)
    before = path.stat()
    code = """
import os
for n in os.listdir("/proc/self/fd"):
    for change in (lambda: os.fchmod(int(n), 0o777), lambda: os.utime(int(n), (1, 1)), lambda: os.ftruncate(int(n), 0)):
        try: change()
        except OSError: pass
"""
    with anyio.fail_after(10):
        async with Repl(context=path, lazy=True) as repl:
            assert (await repl.execute(code)).error is None
            assert (await repl.execute("print(context[:])")).stdout == "text\n"
    after = path.stat()
    assert (before.st_mode, before.st_mtime, before.st_size) == (after.st_mode, after.st_mtime, after.st_size)


@pytest.mark.anyio
async def test_a_large_file_is_not_copied(no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.write(b"begin")
        file.truncate(3 << 30)
        file.seek(0, 2)
        file.write(b"end")
    assert describe(path).kind == "text"
    copied: list[Any] = []
    monkeypatch.setattr("shutil.copyfileobj", lambda *files: copied.append(files))
    with anyio.fail_after(10):
        async with Repl(context=path) as repl:
            if copied:
                pytest.skip("the worker's own view of the file is not to be had here")
            result = await repl.execute("print(context.nbytes, context[:5], context[-3:], context.startswith('begin'))")
            assert result.stdout == f"{(3 << 30) + 3} begin end True\n"


@pytest.mark.anyio
async def test_waiting_for_the_index_is_not_the_cells_own_time(
    no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode() * 50)  # more than is counted at once
    build = CharacterIndex.build

    async def late(self: CharacterIndex, threads: anyio.CapacityLimiter) -> None:
        await anyio.sleep(0.6)  # twice what a cell may take by itself
        await build(self, threads)

    monkeypatch.setattr(CharacterIndex, "build", late)
    with anyio.fail_after(10):
        async with Repl(environment_kwargs={"cell_timeout": 0.3}, context=path, lazy=True) as repl:
            result = await repl.execute("print(context[:5], context[-4:-1])\nprint(len(context))")
            assert (result.error, result.stdout) == (None, f"héllo two\n{len(TEXT) * 50}\n")
            assert result.execution_time > 0.3


@pytest.mark.anyio
async def test_the_model_is_told_of_a_text(no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abc")
    root = scripted(submit("context.find('c')"), submit("context[1:]"))
    with anyio.fail_after(10):
        rlm = AsyncRLM(backend=root)
        assert (await rlm.acompletion(path, "What?", lazy=True)).response == "2"
        assert "is a `Text`" in told(root, 1)
        assert "3 bytes as a file. It is the file: 'text.txt'." in told(root, 1)
        monkeypatch.setattr(context_module, "MAX_PATH_BYTES", 2)
        assert (await rlm.acompletion(path, "What?")).response == "bc"
        with pytest.raises(ConfigurationError, match=r"lazy=True is for a pathlib\.Path"):
            await rlm.acompletion("text", lazy=True)
        with pytest.raises(ConfigurationError, match="lazy is True or False"):
            await rlm.acompletion(path, lazy=1)
