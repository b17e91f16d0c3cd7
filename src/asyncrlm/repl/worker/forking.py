"""Handlers of forks, put off: a template registers none, each worker does before it runs a cell.

Those of `threading` and `logging` make locks anew that other threads may have held. A template has no other thread, and
running them touches a hundred pages in each process it forks, which the kernel then copies: a third of a millisecond.
"""

from __future__ import annotations

import os
from typing import Any

_PUT_OFF = ("threading", "logging")
_register = os.register_at_fork
_waiting: list[dict[str, Any]] = []


def put_off() -> None:
    """From now on keep what these modules register. Others may count on being called, such as `random`, to seed."""
    os.register_at_fork = _keep  # type: ignore[assignment]


def _keep(**handlers: Any) -> None:
    if all(getattr(handler, "__module__", "") in _PUT_OFF for handler in handlers.values()):
        _waiting.append(handlers)
    else:
        _register(**handlers)


def register() -> None:
    """In a worker: have cells' forks as they are in any other process."""
    os.register_at_fork = _register
    for handlers in _waiting:
        _register(**handlers)
    if _waiting:
        import threading  # noqa: PLC0415 - it is there: one of those that wait is its own

        main: Any = threading.main_thread()
        main._set_native_id()
    _waiting.clear()
