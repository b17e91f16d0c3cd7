"""How the worker's package gets into a sandbox: as one line of text on the standard input of a bare interpreter.

No file is written and nothing is installed, so a sandbox whose file systems are all read-only will do.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import marshal
import zlib
from functools import lru_cache
from pathlib import Path

import msgspec
from msgspec import field

from .. import repl
from .remote_library import library

NAME = "_asyncrlm_worker"
ORIGIN = "<asyncrlm>"
"""What tracebacks name as the folder of the worker's package."""

BOOT = """\
import os,sys,marshal,zlib,binascii
d=b""
while b"\\n" not in d:
    p=os.read(0,1<<18)
    if not p:sys.exit()
    d+=p
z,_,d=d.partition(b"\\n")
m=marshal.loads(zlib.decompress(binascii.a2b_base64(z)))
exec(m["boot"],{"bundle":m,"begun":d,"entry":"keeper"})
"""
"""The program of the interpreter: it reads a line, the bundle, and runs what that holds."""
_KERNEL_BOOT = """\
(lambda m: exec(m["boot"], {"bundle": m, "begun": b"", "entry": "kernel"}))(
    __import__("marshal").loads(__import__("zlib").decompress(__import__("binascii").a2b_base64(%r))))"""


def command(python: str) -> list[str]:
    """What runs in a sandbox."""
    return [python, "-I", "-u", "-c", BOOT]


def kernel_cell(line: bytes) -> str:
    """The cell that makes a worker of a kernel; `line` is the bundle."""
    return _KERNEL_BOOT % line.strip()


_LOADER = f"""\
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER, PathFinder, SourceFileLoader
import marshal
same = bundle["magic"] == MAGIC_NUMBER
class Bundled:
    def find_spec(self, name, path=None, target=None):
        package, _, module = name.rpartition(".")
        if name == "{NAME}" or package == "{NAME}" and module in bundle["sources"]:
            return ModuleSpec(name, self, origin="<asyncrlm>", is_package=not package)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        package, _, name = module.__name__.rpartition(".")
        if not package:
            return
        code = bundle["codes"].get(name) if same else None
        if code is not None:
            code = marshal.loads(code)
        else:
            code = compile(bundle["sources"][name], bundle["origin"] + name + ".py", "exec", dont_inherit=True)
        exec(code, module.__dict__)
    def get_source(self, name):
        return bundle["sources"].get(name.rpartition(".")[2])
class Library:
    def find_spec(self, name, path=None, target=None):
        if name in library:
            spec = PathFinder.find_spec(name, path)
            if spec is not None and type(spec.loader) is SourceFileLoader:
                spec.loader = Compiled(name, spec.origin)
                return spec
class Compiled(SourceFileLoader):
    def get_code(self, name):
        known, code = library[name]
        if _imp.source_hash(_RAW_MAGIC_NUMBER, self.get_data(self.path)) != known:
            return super().get_code(name)
        code = marshal.loads(code)
        _imp._fix_co_filename(code, self.path)
        return code
    def exec_module(self, module):
        super().exec_module(module)
        module.__loader__ = module.__spec__.loader = SourceFileLoader(self.name, self.path)
sys.meta_path.append(Bundled())
library = bundle.pop("library") if same else {{}}
if library:
    import _imp
    from _frozen_importlib_external import _RAW_MAGIC_NUMBER
    sys.meta_path.insert(0, Library())
begin = __import__("{NAME}." + entry, fromlist=["main"]).main
if library:
    del sys.meta_path[0]
    library.clear()
begin(begun)
"""


@lru_cache(maxsize=8)
def bundle(package: Path | None = None, with_library: bool = False) -> bytes:
    """The line that `BOOT` reads: the worker's package, compiled for this interpreter, with its sources for others.

    `with_library`: with code of the standard library's, for images that lack it; half a megabyte more.
    """
    folder = package or Path(repl.__path__[0]) / "worker"
    sources = {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.py")) if path.stem != "__init__"}
    codes = {
        name: marshal.dumps(compile(source, f"{ORIGIN}/{name}.py", "exec", dont_inherit=True))
        for name, source in sources.items()
    }
    parts = {
        "boot": _LOADER,
        "sources": sources,
        "codes": codes,
        "magic": importlib.util.MAGIC_NUMBER,
        "origin": f"{ORIGIN}/",
        "library": library() if with_library else {},
    }
    return base64.b64encode(zlib.compress(marshal.dumps(parts, 2), 1 if with_library else 6)) + b"\n"


class Options(msgspec.Struct, kw_only=True):
    """What a keeper is told, in the line after the bundle; see `repl/worker/sandboxed.py`."""

    folder: str
    work: str | None
    mode: str = "auto"
    confine: bool
    network: bool = False
    read: list[str] = field(default_factory=list[str])
    write: list[str] = field(default_factory=list[str])
    limits: dict[str, int]
    env: dict[str, str] = field(default_factory=dict[str, str])
    inherit: bool = False
    keep: int
    binary: bool = True
    padding: int = 0
    resumed: bool = False
    packages: list[str] = field(default_factory=list[str])
    shell: bool = False
    kernel: list[str] = field(default_factory=list[str])

    def line(self) -> bytes:
        """ASCII JSON, as all lines of the stream are."""
        return json.dumps(msgspec.to_builtins(self)).encode("ascii") + b"\n"
