"""Cells in IPython's shell: in the local environment's workers, or in a Jupyter kernel of the user's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..errors import ConfigurationError
from ..repl.resources import threads_of
from ..repl.sandbox import Report
from .local import LocalEnvironment

if TYPE_CHECKING:
    from ..repl.sandbox import Sandbox, Scope
    from .local_order import Facts, Order

_OLDEST = (8, 20)


class IPythonEnvironment(LocalEnvironment, frozen=True, kw_only=True):
    """Cells run in IPython's `InteractiveShell`: magics, `!`, `?`, `Out[]`, `display`, as text.

    Workers are those of the local environment, with its settings and its confinement. With `kernel` each is a kernel
    that Jupyter knows by that name, with the packages of its virtual environment: it takes half a second to start, has
    threads of its own, and runs on asyncio only. It is confined as they are, but for limits that take a namespace; the
    report says so.

    Raises:
        ConfigurationError: for a value that can't be.
    """

    name: ClassVar[str] = "ipython"
    elsewhere: ClassVar[dict[str, str]] = {
        "subcall_timeout": "it is an argument of AsyncRLM",
        "max_concurrent_subcalls": "it is an argument of AsyncRLM",
    }
    _shell: ClassVar[bool] = True

    kernel: str | None = None
    """The name of a kernel spec, as `jupyter kernelspec list` shows it; its language is Python."""
    kernel_dirs: tuple[str | Path, ...] = ()
    """Folders of kernel specs to look in before those that Jupyter knows."""
    kernel_mode: str | None = None
    """None or "subprocess", which is the same: cells never run in the host's process."""
    startup_timeout: float = 60.0
    """Seconds that a kernel or a worker may take to be ready."""

    def __post_init__(self) -> None:
        LocalEnvironment.__post_init__(self)  # no super(): msgspec makes the class anew
        if self.kernel_mode == "in_process":
            raise ConfigurationError(
                'kernel_mode="in_process": cells never run in the host\'s process, where they could not be confined or '
                "interrupted; leave it out, a worker with a shell starts in milliseconds"
            )
        if self.kernel_mode not in (None, "subprocess"):
            raise ConfigurationError(f'kernel_mode={self.kernel_mode!r}: leave it out, or use "subprocess"')
        if not self.startup_timeout > 0:
            raise ConfigurationError(f"startup_timeout={self.startup_timeout!r}: use seconds above 0")
        if self.kernel is None:
            if self.kernel_dirs:
                raise ConfigurationError("kernel_dirs= is where to look for kernel=, which is not given")
            return
        if self.python is not None:
            raise ConfigurationError("kernel= has an interpreter: leave python= out")
        if self.pool_size:
            raise ConfigurationError("pool_size: kernels are not kept ahead; leave it out")

    def check(self) -> None:
        module = "IPython" if self.kernel is None else "jupyter_client"
        if self.python is None and importlib.util.find_spec(module) is None:
            raise ConfigurationError(
                f"environment 'ipython' needs {module}, which is not installed: pip install 'asyncrlm[ipython]'"
            )

    async def open(self, scope: Scope) -> Sandbox:
        if self.kernel is not None:
            sandbox = await self._open_kernel(self.kernel, scope)
        else:
            self.check()
            sandbox = await LocalEnvironment.open(self, scope)
        sandbox.start_timeout = self.startup_timeout
        return sandbox

    async def _open_kernel(self, kernel: str, scope: Scope) -> Sandbox:
        from .ipython_kernel import Kernels, check_loop  # noqa: PLC0415 - it needs what only POSIX has

        check_loop()
        kernels = await scope.shared(("kernels",), lambda: Kernels("", [], threads=threads_of(scope)))
        return await kernels.kernel(kernel, self.kernel_dirs, self, Report(environment=self.name))

    def _order(self, facts: Facts) -> Order:
        oldest = ".".join(map(str, _OLDEST))
        if not facts.ipython:
            raise ConfigurationError(f"python={str(self.python)!r} has no IPython: install ipython>={oldest} there")
        if _version(facts.ipython) < _OLDEST:
            raise ConfigurationError(f"IPython is {facts.ipython} there: install ipython>={oldest}")
        return LocalEnvironment._order(self, facts)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
