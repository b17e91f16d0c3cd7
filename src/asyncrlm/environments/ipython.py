"""Cells in IPython's shell: the local environment's workers with the shell in them, or a kernel of the user's."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, ClassVar

from ..errors import ConfigurationError
from .local import LocalEnvironment

if TYPE_CHECKING:
    from ..repl.sandbox import Sandbox, Scope
    from .local_order import Facts, Order

_OLDEST = (8, 20)


class IPythonEnvironment(LocalEnvironment, frozen=True, kw_only=True):
    """Cells run in IPython's `InteractiveShell`: magics, `!`, `?`, `Out[]`, `display`, as text.

    Workers are those of the local environment, with its settings and its confinement.

    Raises:
        ConfigurationError: for a value that can't be.
    """

    name: ClassVar[str] = "ipython"
    elsewhere: ClassVar[dict[str, str]] = {
        "subcall_timeout": "it is an argument of AsyncRLM",
        "max_concurrent_subcalls": "it is an argument of AsyncRLM",
    }
    _shell: ClassVar[bool] = True

    kernel_mode: str | None = None
    """None or "subprocess", which is the same: cells never run in the host's process."""

    def __post_init__(self) -> None:
        LocalEnvironment.__post_init__(self)  # no super(): msgspec makes the class anew
        if self.kernel_mode == "in_process":
            raise ConfigurationError(
                'kernel_mode="in_process": cells never run in the host\'s process, where they could not be confined or '
                "interrupted; leave it out, a worker with a shell starts in milliseconds"
            )
        if self.kernel_mode not in (None, "subprocess"):
            raise ConfigurationError(f'kernel_mode={self.kernel_mode!r}: leave it out, or use "subprocess"')

    async def open(self, scope: Scope) -> Sandbox:
        if self.python is None and importlib.util.find_spec("IPython") is None:
            raise ConfigurationError(
                "environment 'ipython' needs IPython, which is not installed: pip install 'asyncrlm[ipython]'"
            )
        return await LocalEnvironment.open(self, scope)

    def _order(self, facts: Facts) -> Order:
        oldest = ".".join(map(str, _OLDEST))
        if not facts.ipython:
            raise ConfigurationError(f"python={str(self.python)!r} has no IPython: install ipython>={oldest} there")
        if _version(facts.ipython) < _OLDEST:
            raise ConfigurationError(f"IPython is {facts.ipython} there: install ipython>={oldest}")
        return LocalEnvironment._order(self, facts)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
