"""The `asyncrlm` command."""

from __future__ import annotations


def main() -> None:
    """Entry point: run the command line and exit with its status."""
    from .app import app  # noqa: PLC0415 - whoever imports the package doesn't want a command line

    app(prog_name="asyncrlm")
