"""Compiled modules of the standard library for sandboxes that have its sources only, as the usual images of Python do.

To compile what a keeper imports takes longer than all the rest of its start. So its bundle may have the code of these
modules, as this interpreter compiled them; the sandbox takes one if the source that it has is the very same text.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import marshal
from functools import cache
from pathlib import Path

_MODULES = (
    "__future__ _weakrefset ast base64 bisect codeop collections collections.abc contextlib contextvars copyreg ctypes "
    "ctypes._endian datetime _pydatetime decimal dis enum functools importlib importlib._abc inspect json json.decoder "
    "json.encoder json.scanner keyword linecache numbers opcode _opcode_metadata operator re re._casefix re._compiler "
    "re._constants re._parser reprlib selectors signal socket sre_compile sre_constants sre_parse struct textwrap "
    "threading token tokenize traceback types typing warnings _py_warnings weakref _colorize annotationlib"
)
"""All that a keeper imports, in the versions of Python that there are."""


@cache
def library() -> dict[str, tuple[bytes, bytes]]:
    """Name of a module → the hash of its source and its code, as `marshal` writes it. Reads files."""
    found: dict[str, tuple[bytes, bytes]] = {}
    for name in _MODULES.split():
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # of a package that this version has not
            continue
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader) or spec.origin is None:
            continue
        code = spec.loader.get_code(name)
        if code is not None:
            found[name] = importlib.util.source_hash(Path(spec.origin).read_bytes()), marshal.dumps(code)
    return found
