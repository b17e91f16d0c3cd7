"""Ctrl-C before a command has begun."""

from __future__ import annotations

import os
from typing import Final, NoReturn

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C: 128 + SIGINT."""


def end_at_once(*_: object) -> NoReturn:
    """While modules load, which an exception could leave half-done: nothing has begun that would have to end."""
    try:
        os.write(2, b"asyncrlm: interrupted\n")
    finally:
        os._exit(INTERRUPTED)
