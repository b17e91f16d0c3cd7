"""A pytest plugin for one run of `.ci/run`: local workers run unconfined and measured.

    pytest -p tests.unconfined tests/...

A confined worker can't write what was measured, and the template starts with a clean environment that knows nothing of
coverage. So here workers get `isolation="none"`, and template, wardens and workers each save on their way out.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import coverage
import msgspec

import asyncrlm.repl.worker
from asyncrlm.environments import local_template
from asyncrlm.environments.local import LocalEnvironment

FOLDER = str(Path(asyncrlm.repl.worker.__file__).parent)

MEASURE = f"""\
import atexit, os, sys
sys.path.insert(0, {str(Path(coverage.__file__).parent.parent)!r})
import coverage
measured = coverage.Coverage(
    data_file={os.environ.get("COVERAGE_FILE", str(Path(".coverage").absolute()))!r},
    data_suffix=True, branch=True, source=[{FOLDER!r}], config_file=False, messages=False,
)
measured.start()
def save():
    measured.stop()
    try:
        measured.save()
    except Exception:
        pass
def leave(status, end=os._exit):
    save()
    end(status)
os._exit = leave
atexit.register(save)
"""


def pytest_configure() -> None:
    """Start all templates of this process measured and all their workers unconfined."""
    local_template._BOOTSTRAP = MEASURE + local_template._BOOTSTRAP
    opened = LocalEnvironment.open

    async def open_unconfined(self: LocalEnvironment, scope: Any) -> Any:
        return await opened(msgspec.structs.replace(self, isolation="none"), scope)

    LocalEnvironment.open = open_unconfined
