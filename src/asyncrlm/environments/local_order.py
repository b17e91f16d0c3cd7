"""What is asked of the template of the local environment, and what it says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from ..repl.sandbox import Report


ENVIRON = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
"""Of the processes started on this machine: nothing of the host's."""
SPARES = 16
"""Workers kept ahead by a scope that lives long, unless `pool_size` says otherwise; each costs 2.5 MB."""


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a template found in force on this machine; see `repl/worker/template.py`."""

    python: str
    mode: str
    flags: int
    mounts: list[str]
    userns: bool
    landlock: int
    seccomp: bool
    pid_max: bool
    ipython: str


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is started with; the template adds its folders."""

    confine: bool
    read: list[str]
    work: str | None
    size: int | None
    """Bytes of the memory file system that is the working folder, where mounts are to be had."""
    limits: dict[str, int]
    pid_max: int | None
    env: dict[str, str]
    in_force: dict[str, str | None]


class Order:
    """A request with what goes with it on the host's side; made once for all runs with the same settings."""

    def __init__(self, request: Request, report: Report, keep: int, pool_size: int | None = None) -> None:
        self.request = request
        self.report = report
        self.keep = keep
        """Bytes of head and of tail that are kept of each output stream."""
        self.ahead = SPARES if pool_size is None else pool_size
        """Workers to keep started ahead of need."""
        self.filled = bool(pool_size)
        """Whether the first run waits for all of them."""
        self.body = msgspec.json.encode(request)
        self.key = self.body, keep
        """Workers started for orders of the same key are alike."""
