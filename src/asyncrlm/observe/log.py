"""Diagnostics of the library itself: what went wrong beside a run, never what happened in it."""

from __future__ import annotations

from typing import Any


def get_logger() -> Any:
    """A structlog logger named "asyncrlm".

    Where the application has configured structlog, its configuration rules. Otherwise records go to the standard
    library's logger "asyncrlm", so that nothing is printed to standard output and `logging` settings apply.
    """
    # Loaded when something has to be said, which is seldom: its import costs more than ours.
    import logging  # noqa: PLC0415

    import structlog  # noqa: PLC0415

    if structlog.is_configured():
        return structlog.get_logger("asyncrlm")
    return structlog.wrap_logger(
        logging.getLogger("asyncrlm"),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
    )
