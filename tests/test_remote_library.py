"""The standard library's code that a keeper brings along: all that it imports, taken for the very same source only."""

from __future__ import annotations

import importlib.util
import json
import marshal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrlm.environments import remote_boot
from asyncrlm.environments.remote_library import library
from asyncrlm.repl import __path__ as repl_path

LOAD = """
import json, sys
bundle = {{"library": {library!r}, "sources": {sources!r}, "codes": {{}}, "origin": "<here>/", "magic": {magic!r}}}
at_start = set(sys.modules)
exec({boot!r}, {{"bundle": bundle, "entry": "keeper"}})
"""


def run(found: dict[str, tuple[bytes, bytes]], then: str, magic: bytes = importlib.util.MAGIC_NUMBER) -> str:
    """What `then` prints in a bare interpreter that has loaded the keeper, which does not begin."""
    worker = Path(repl_path[0]) / "worker"
    sources = {path.stem: path.read_text("utf-8") for path in worker.glob("*.py") if path.stem != "__init__"}
    boot = remote_boot._LOADER.replace("begin(begun)", "")
    code = LOAD.format(library=found, sources=sources, boot=boot, magic=magic) + then
    ran = subprocess.run([sys.executable, "-I", "-S", "-"], input=code, capture_output=True, text=True, check=True)
    return ran.stdout


def test_it_has_all_that_a_keeper_imports() -> None:
    listing = """
here = [name for name, module in sys.modules.items() if name not in at_start
        and type(getattr(getattr(module, "__spec__", None), "loader", None)).__name__ == "SourceFileLoader"]
print(json.dumps(here))
"""
    imported = set(json.loads(run({}, listing)))
    assert len(imported) > 10
    assert len(imported - library().keys()) <= 3  # each costs a sandbox without it a few milliseconds
    assert set(json.loads(run(library(), listing))) == imported


@pytest.mark.parametrize(
    ("hashed", "magic", "taken"),
    [
        (None, importlib.util.MAGIC_NUMBER, True),
        (b"12345678", importlib.util.MAGIC_NUMBER, False),
        (None, b"abcd", False),
    ],
    ids=["same", "another source", "another Python"],
)
def test_code_is_taken_for_the_very_same_source_only(hashed: bytes | None, magic: bytes, taken: bool) -> None:
    known, _ = library()["textwrap"]
    marked = marshal.dumps(compile("MARK = 1\ndef where(): pass", "elsewhere.py", "exec"))
    then = """
import textwrap
mine = hasattr(textwrap, "MARK")
file = textwrap.where.__code__.co_filename if mine else textwrap.__file__
print(json.dumps([mine, file == textwrap.__file__, type(textwrap.__loader__).__name__, len(sys.meta_path)]))
"""
    known = hashed or known
    found = json.loads(run({"textwrap": (known, marked)}, "del sys.modules['textwrap']" + then, magic))
    assert found[0] is False  # once it has begun, imports are as everywhere
    own = {"textwrap": (known, marked)}
    begins = remote_boot._LOADER.partition("begin = ")[0]
    during = f"""
sys.modules.pop("textwrap", None)
exec({begins!r}, {{"bundle": dict(bundle, library={own!r})}})
"""
    assert json.loads(run({}, during + then, magic))[:3] == [taken, True, "SourceFileLoader"]
