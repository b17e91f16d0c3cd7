"""Folders, patterns and lists of paths: what is found, what is refused, and what it is in a cell."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, Repl
from asyncrlm.repl.context import describe, plan_load, resolved
from asyncrlm.repl.files import HostFile, HostFiles

from .helpers import scripted, submit, told
from .remote_support import Text, remote

TREE = {
    "a.md": "# A\r\né",
    "b.txt": "b",
    "sub/c.md": "c\n" * 3,
    "sub/deep/d.md": "",
    "sub/.hidden.md": "h",
    ".git/config.md": "g",
    "z.md": "\ufeffz",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    for name, text in TREE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


def names(value: Any) -> list[str]:
    found = resolved(value)
    assert isinstance(found, HostFiles)
    return [file.name for file in found.files]


def test_what_folders_and_patterns_lead_to(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = ["a.md", "b.txt", "sub/c.md", "sub/deep/d.md", "z.md"]
    assert names(tree) == names(tree / "**/*") == seen
    assert names(tree / "*.md") == ["a.md", "z.md"]
    assert names(tree / "**/*.md") == names(tree / "**" / "[a-z]*.md") == [n for n in seen if n.endswith("md")]
    assert names(tree / "*/c.md") == ["sub/c.md"]
    assert names(tree / "s?b/**") == ["sub/c.md", "sub/deep/d.md"]
    assert names(tree / "sub/.*.md") == [".hidden.md"]
    assert names([tree / "z.md", tree / "sub/c.md"]) == ["z.md", "sub/c.md"]
    assert names([tree / "sub", tree / "a.md"]) == ["sub/c.md", "sub/deep/d.md", "a.md"]
    assert names((tree / "a.md",)) == ["a.md"]
    monkeypatch.chdir(tree)
    assert names(Path("*.md")) == names([Path("a.md"), Path("z.md")]) == ["a.md", "z.md"]
    assert names(Path()) == names(Path("**")) == seen
    (tree / "[odd].txt").write_text("x")
    assert isinstance(resolved(tree / "[odd].txt"), HostFile)


def test_descriptions(tree: Path) -> None:
    info = describe(tree)
    assert (info.kind, info.size, info.count) == ("documents", 18, 5)
    assert info.names == ("'a.md'", "'b.txt'", "'sub/c.md'", "'sub/deep/d.md'", "'z.md'")


def test_what_is_refused(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(value: Any, why: str) -> None:
        with pytest.raises(ConfigurationError, match=why):
            describe(value)

    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no file")
    refused(tree / "*.py", "no file matches")
    refused(tmp_path / "none/*.py", "can't be read")
    refused([tree / "a.md", tree / "none"], "No such file")
    refused([tree / "a.md", Path("/dev/zero")], "no regular file")
    refused(Path("/dev/nul?"), "no regular file")
    secret = tmp_path / "secret"
    secret.write_text("s")
    for target, why in ((secret, "leads out of"), (tmp_path, "leads out of"), (tmp_path / "none", "leads out of")):
        (tree / "link").symlink_to(target)
        refused(tree, why)
        refused(tree / "*", why)
        assert names(tree / "*.md") == ["a.md", "z.md"]
        (tree / "link").unlink()
    (tree / "link").symlink_to("nothing")
    refused(tree, "no regular file")
    (tree / "link").unlink()
    (tree / "link").symlink_to("a.md")
    (tree / "folder").symlink_to("sub")
    (tree / "sub/up").symlink_to("..")
    assert names(tree) == ["a.md", "b.txt", "link", "sub/c.md", "sub/deep/d.md", "z.md"]
    assert names(tree / "folder/*.md") == ["c.md"]
    os.mkfifo(tree / "sub/fifo")
    refused(tree, "fifo.* is no regular file")
    (tree / "sub/fifo").unlink()
    with socket.socket(socket.AF_UNIX) as bound:
        monkeypatch.chdir(tree)
        bound.bind("socket")
        refused(tree, "socket.* is no regular file")
    (tree / "socket").unlink()


def test_what_takes_the_place_of_a_file_is_refused(tree: Path, tmp_path: Path) -> None:
    plan, single = plan_load("context", tree), plan_load("context", tree / "a.md")
    path = tree / "a.md"
    path.unlink()
    os.mkfifo(path)
    for each in (plan, single):
        with pytest.raises(ConfigurationError, match="no regular file"):
            list(each.chunks())
    path.unlink()
    (tmp_path / "secret").write_text(TREE["a.md"])
    path.symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigurationError, match="leads out of"):
        list(plan.chunks())
    path.unlink()
    path.write_text("longer than it was")
    with pytest.raises(ConfigurationError, match="changed while it was loaded"):
        list(plan.chunks())


CELL = r"""
assert len(context) == 6 and context.names[:2] == ["a.md", "b.txt"], context.names
assert context[0] == "# A\r\n\u00e9" and context[0].name == "a.md" and context["sub/c.md"] == context[2] == "c\n" * 3
assert [d.name for d in context] == context.names == list(context.keys()) and context[-1].name == "z.md"
assert context[3] == "" and context.sizes[3] == 0 and context[5] == "\ufeffz"
assert type(context[4]) is not str and context[4] == b"\xff\x00" and context[4].name == "y.bin"
assert [d.name for d in context[1:3]] == ["b.txt", "sub/c.md"] and context.nbytes == sum(context.sizes) == 20
assert "b.txt" in context and context[0] in context and "nothing" not in context and 5 not in context
assert dict(context)["b.txt"] == "b" == dict(context.items())["b.txt"]
import re, copy, pickle
assert re.search("A", context[0]) and "".join(d for d in context[:4]) and isinstance(context[0], str)
assert copy.copy(context[0]).name == pickle.loads(pickle.dumps(context[0])).name == "a.md"
assert pickle.loads(pickle.dumps(context[4])).name == "y.bin"
for key, error in (("x", KeyError), (6, IndexError), (-7, IndexError)):
    try:
        context[key]
    except error:
        pass
    else:
        assert False, key
try:
    pickle.dumps(context)
except TypeError as error:
    assert "pass single ones" in str(error)
print(repr(context))
context
"""
SHOWN = (
    "<Documents: 6: 'a.md' (7 bytes), 'b.txt' (1 bytes), 'sub/c.md' (6 bytes), 'sub/deep/d.md' (0 bytes), "
    "'y.bin' (2 bytes), ...>\n"
)


@pytest.mark.anyio
@pytest.mark.parametrize("place", ["local", "remote"])
async def test_documents_in_a_cell(no_leaks: None, tree: Path, place: str) -> None:
    (tree / "y.bin").write_bytes(b"\xff\x00")
    where = "local" if place == "local" else remote(Text)
    with anyio.fail_after(20):
        async with Repl(where, context=tree) as repl:
            result = await repl.execute(CELL)
            assert (result.error, result.stdout) == (None, SHOWN * 2)
            await repl.execute("import os; os._exit(1)")
            assert (await repl.execute("print(context['b.txt'])")).stdout == "b\n"
            outside = await repl.execute(f"open({str(tree / 'a.md')!r})")
            assert outside.error is not None


@pytest.mark.anyio
async def test_the_model_is_told_of_documents(no_leaks: None, tree: Path) -> None:
    root = scripted(submit("context['b.txt']"))
    with anyio.fail_after(10):
        rlm = AsyncRLM(backend=root)
        assert (await rlm.acompletion(tree / "*.*", "What?")).response == "b"
        assert "3 files, 12 bytes as files. Names: 'a.md', 'b.txt', 'z.md'." in told(root, 1)
        with pytest.raises(ConfigurationError, match="no file matches"):
            await rlm.acompletion(tree / "*.py")
        plain = scripted("fine")
        await AsyncRLM(backend=plain, max_depth=0).acompletion(tree / "*.md", "What?")
    assert told(plain, 1) == "What?\n\n# a.md\n\n# A\r\né\n\n# z.md\n\n\ufeffz"
