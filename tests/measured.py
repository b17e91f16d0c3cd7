"""A pytest plugin for one run of `.ci/run`: template, wardens, keepers and workers are measured.

    python -m pytest -p tests.measured tests/...

A template or keeper starts with a clean environment that knows nothing of coverage, and a confined worker can open no
file to save to. So it opens one before anything is confined, all its descendants keep that descriptor, and each appends
what it ran to it on its way out. Nothing else is changed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import coverage
from coverage.data import CoverageData

import asyncrlm.repl.worker
from asyncrlm.environments import local_process, remote_boot

FOLDER = str(Path(asyncrlm.repl.worker.__file__).parent)
SIZE = 8
"""Bytes of a record's length, which stands before it."""

MEASURE = """\
def _measure(folder, site, records):
    import os, sys
    sys.path.insert(0, site)
    import coverage
    sink = os.open(records, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    measured = coverage.Coverage(data_file=None, branch=True, source=[folder], config_file=False, messages=False)
    measured.start()
    closerange, leave = os.closerange, os._exit
    def save():
        measured.stop()
        data = measured.get_data().dumps()
        os.write(sink, len(data).to_bytes({size}, "big") + data)
    def _exit(status):
        try:
            save()
        finally:
            leave(status)
    def keep(low, high):
        if low <= sink < high:
            closerange(low, sink)
            low = sink + 1
        closerange(low, high)
    os._exit, os.closerange = _exit, keep
    import atexit
    atexit.register(save)
import sys
if sys.version_info[:2] == {version!r}:
    _measure({folder!r}, {site!r}, {records!r})
"""


def pytest_configure() -> None:
    """Have all templates that this process starts measured."""
    handle, path = tempfile.mkstemp(prefix="measured-")
    os.close(handle)
    site = str(Path(coverage.__file__).parent.parent)
    measure = MEASURE.format(folder=FOLDER, site=site, records=path, size=SIZE, version=sys.version_info[:2])
    local_process._BOOTSTRAP = measure + local_process._BOOTSTRAP
    remote_boot.BOOT = measure + remote_boot.BOOT
    remote_boot.ORIGIN = FOLDER
    _records.append(Path(path))


_records: list[Path] = []


def pytest_unconfigure() -> None:
    """Write what was appended as one data file beside those of other measured processes."""
    for path in _records:
        records = path.read_bytes()
        path.unlink()
        total = CoverageData(os.environ.get("COVERAGE_FILE", ".coverage"), suffix=f"template-{os.getpid()}")
        while records:
            size = int.from_bytes(records[:SIZE], "big")
            one = CoverageData(no_disk=True)
            one.loads(records[SIZE : SIZE + size])
            total.update(one)
            records = records[SIZE + size :]
        total.write()
