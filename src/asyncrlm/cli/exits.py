"""How the command ends, and what it writes where: answers to standard output, everything else to standard error."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from ..errors import ConfigurationError, RLMError, TimeoutExceededError
from ..observe.text import plain, printable
from .interrupted import INTERRUPTED, end_at_once
from .spoken import spoken

if TYPE_CHECKING:
    from collections.abc import Generator

FAILED: Final = 1
"""The run failed: a limit, a model that can't be asked, a lost sandbox."""
USAGE: Final = 2
"""The command line or its input is wrong; nothing was run."""
TIMED_OUT: Final = 124
"""`--max-timeout` was met; the status that timeout(1) uses."""
PIPE_CLOSED: Final = 141
"""Whoever read standard output is gone: 128 + SIGPIPE."""


@contextmanager
def exits(*, as_json: bool = False) -> Generator[None]:
    """Turn what a command raises into one line on standard error and an exit status."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.stdout is None:
        fail("standard output is closed; nothing was run", USAGE)
    try:
        yield
    except ConfigurationError as error:
        fail(spoken(error), USAGE)
    except RLMError as error:
        if as_json:
            write_json(_failure(error))
        fail(spoken(error), TIMED_OUT if isinstance(error, TimeoutExceededError) else FAILED)
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)


def fail(message: str, status: int) -> NoReturn:
    """Say what is wrong in one line and exit."""
    say(f"asyncrlm: {' '.join(message.split())}")
    raise SystemExit(status)


def say(text: str) -> None:
    """Write to standard error, whatever state it is in."""
    if sys.stderr is None:
        return  # `print` would take standard output for it
    try:
        print(printable(text), file=sys.stderr, flush=True)  # noqa: T201 - this is a command
    except (OSError, ValueError):
        # Nobody reads: the exit status is all that is left to tell.
        return


def write(text: str) -> None:
    """Write an answer to standard output, without terminal escapes and control characters."""
    _write(printable(text))


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    data = text.encode(encoding, "backslashreplace") + (b"" if text.endswith("\n") else b"\n")
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # What is still buffered would raise again at exit, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(PIPE_CLOSED) from None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        fail(f"standard output: {error.strerror}", FAILED)


def write_json(value: Any) -> None:
    """Write `value` to standard output as strict JSON; to a terminal without control characters, for any other reader
    with all that is in it, escapes as JSON has them."""
    text = msgspec.json.format(msgspec.json.encode(plain(value)), indent=2).decode("utf-8")
    _write(printable(text) if sys.stdout.isatty() else text)


def _failure(error: RLMError) -> dict[str, Any]:
    usage = error.usage_summary
    return {
        "error": {"type": type(error).__name__, "message": str(error)},
        "partial_answer": error.partial_answer,
        "run_id": error.run_id,
        "usage_summary": None if usage is None else usage.to_dict(),
    }
