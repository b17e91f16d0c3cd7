"""Which process a sandbox belongs to, told in its labels, so that what a crashed host left behind can be recognised."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .._version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

LABEL = "asyncrlm"
"""The label of every sandbox of ours; its value is the version that made it."""


def owner_labels() -> dict[str, str]:
    """Labels that name this process. Reads a few files of the kernel's."""
    boot, namespace = _boot()
    return {
        LABEL: __version__,
        f"{LABEL}.host": _host(),
        f"{LABEL}.boot": boot,
        f"{LABEL}.namespace": namespace,
        f"{LABEL}.process": f"{os.getpid()}:{_started(os.getpid())}",
    }


def is_stray(labels: Mapping[str, str]) -> bool:
    """Whether these are the labels of a process of this machine that is no more.

    False for what belongs to another machine or to another container's processes: those can't be looked at from here.
    """
    if LABEL not in labels or labels.get(f"{LABEL}.host") != _host():
        return False
    boot, namespace = _boot()
    if labels.get(f"{LABEL}.boot") != boot:
        return bool(boot)
    if labels.get(f"{LABEL}.namespace") != namespace:
        return False
    pid, _, started = labels.get(f"{LABEL}.process", "").partition(":")
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:  # it lives and is another user's
        return False
    return _started(int(pid)) != started


def _host() -> str:
    """A name of this machine. Those that others gave it are given to several: clones, runners, "localhost"."""
    machine = ""
    with contextlib.suppress(OSError):
        machine = Path("/etc/machine-id").read_text("ascii").strip()
    return f"{platform.node()} {machine}".strip()


def _boot() -> tuple[str, str]:
    """An id of this boot of the machine and one of our process namespace; "" where the system has none."""
    if not sys.platform.startswith("linux"):
        return "", ""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - it names no file
    return boot, namespace


def _started(pid: int) -> str:
    """When a process was started, as the kernel counts; "" where that can't be told. Ids alone are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
