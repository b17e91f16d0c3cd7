"""The `asyncrlm` command."""

from __future__ import annotations

import signal

from .interrupted import end_at_once


def main() -> None:
    """Entry point: run the command line and exit with its status."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # else somebody wants it ignored, or handles it
        signal.signal(signal.SIGINT, end_at_once)
    try:
        from .app import app  # noqa: PLC0415 - whoever imports the package doesn't want a command line

        app(prog_name="asyncrlm")
    finally:
        signal.signal(signal.SIGINT, usual)
