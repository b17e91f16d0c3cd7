"""The `asyncrlm` command."""

from __future__ import annotations

import signal
import threading

from .interrupted import end_at_once


def main() -> None:
    """Entry point: run the command line and exit with its status."""
    usual = signal.getsignal(signal.SIGINT)
    # Else somebody wants it ignored, or handles it; and no other thread may say what a signal does.
    ours = usual is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, end_at_once)
    try:
        from .app import app  # noqa: PLC0415 - whoever imports the package doesn't want a command line

        app(prog_name="asyncrlm")
    finally:
        if ours:
            signal.signal(signal.SIGINT, usual)
