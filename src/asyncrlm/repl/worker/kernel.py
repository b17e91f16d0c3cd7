"""A worker inside a Jupyter kernel: the kernel's main thread serves the host from within one cell, which never ends.

The keeper runs the kernel's command in the place of a worker, confined before the kernel's threads are there; a message
of the host's has it run `main` here. From then on nothing but the worker's channel is listened to.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, NoReturn

CHANNEL, OUT, ERR = 3, 4, 5
"""Descriptors of a kernel: it puts pipes of its own in the place of 1 and 2."""
_VARIABLE = "ASYNCRLM_KERNEL"
_ABOVE = 100
_CLOSING = 1.0
"""Seconds to close a kernel's sockets in; it takes milliseconds."""


def become(command: list[str], channel: int, in_force: dict[str, Any], network: bool) -> NoReturn:
    """Run the kernel's command in this process, confined as it is."""
    spares = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE) for fd in (channel, 1, 2)]
    for number, fd in enumerate(spares):
        os.dup2(fd, CHANNEL + number)
    os.closerange(ERR + 1, _ABOVE + 100)
    os.environ[_VARIABLE] = json.dumps({"in_force": in_force, "network": network, "environ": dict(os.environ)})
    try:
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} can't be run: {error.strerror}\n".encode())
        os._exit(70)


def main(_begun: bytes) -> NoReturn:
    """Called by a cell of the kernel, in its main thread."""
    try:
        _serve()
    except BaseException:
        os.write(ERR, traceback.format_exc().encode("utf-8", "backslashreplace"))
    os._exit(70)


def _serve() -> NoReturn:
    from . import birth, shell, syscalls  # noqa: PLC0415 - the process that becomes the kernel has no use for them
    from . import main as worker_main  # noqa: PLC0415 - as above

    told = json.loads(os.environ[_VARIABLE])
    in_force: dict[str, Any] = told["in_force"]
    null = os.open(os.devnull, os.O_RDWR)
    for source, target in ((null, 0), (OUT, 1), (ERR, 2)):
        os.dup2(source, target)
    os.close(null)
    birth.set_environment(told["environ"])  # without what a kernel adds, such as a terminal that there is not
    _leave_loop()
    worker = worker_main.prepare()
    ipython: Any = sys.modules["IPython"]
    interactive = ipython.get_ipython()
    _silence(interactive)
    shell.install(worker, interactive)
    if in_force.get("kernel") and not told["network"]:
        # With whatever threads of the kernel are left, which cells could reach.
        syscalls.seccomp_threads(syscalls.filter_program(False))
        in_force["network"] = "seccomp"
    else:
        in_force["network"] = None
    for fd in (OUT, ERR):
        os.set_inheritable(fd, False)
    worker.serve(CHANNEL, in_force)


def _silence(interactive: Any) -> None:
    """End all that listens or writes besides cells, as far as this kind of kernel has it: sockets, threads, history."""
    kernel = getattr(interactive, "kernel", None)
    app = getattr(sys.modules.get("ipykernel.kernelapp"), "IPKernelApp", None)
    app = app.instance() if app is not None and app.initialized() else None
    history = interactive.history_manager
    history.enabled = False
    threads = [getattr(kernel, name, None) for name in ("iopub_thread", "control_thread", "shell_channel_thread")]
    for thread in (*threads, getattr(history, "save_thread", None)):
        if thread is not None:
            with contextlib.suppress(Exception):
                thread.stop()
    contexts = {id(c): c for c in (getattr(o, "context", None) for o in (app, getattr(app, "heartbeat", None))) if c}

    def close() -> None:
        for context in contexts.values():
            context.destroy(0)

    # In a thread: of a socket that is still held somewhere it would wait for ever.
    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(_CLOSING)


def _leave_loop() -> None:
    """Forget that the kernel's event loop runs in this thread: it will not go on, and cells run loops of their own."""
    import asyncio  # noqa: PLC0415 - it is there, in a kernel

    events: Any = asyncio
    loop = events._get_running_loop()
    if loop is None:
        return
    if hasattr(asyncio.tasks, "_swap_current_task"):  # since 3.12
        events.tasks._swap_current_task(loop, None)
    elif (task := asyncio.current_task(loop)) is not None:
        events.tasks._leave_task(loop, task)
    events._set_running_loop(None)
    sys.set_asyncgen_hooks(None, None)
