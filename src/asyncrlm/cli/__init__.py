"""The `asyncrlm` command."""

from __future__ import annotations

import os
import signal
from typing import Final, NoReturn

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C: 128 + SIGINT."""


def main() -> None:
    """Entry point: run the command line and exit with its status."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # else somebody wants it ignored, or handles it
        signal.signal(signal.SIGINT, _end_at_once)
    try:
        from .app import app  # noqa: PLC0415 - whoever imports the package doesn't want a command line

        app(prog_name="asyncrlm")
    finally:
        signal.signal(signal.SIGINT, usual)


def _end_at_once(*_: object) -> NoReturn:
    """While modules load, which an exception could leave half-done: nothing has begun that would have to end."""
    try:
        os.write(2, b"asyncrlm: interrupted\n")
    finally:
        os._exit(INTERRUPTED)
