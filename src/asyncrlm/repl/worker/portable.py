"""The keeper: parent of one worker where only POSIX is to be had; when the worker or the host ends, it ends the rest.

It reaches what stays in the worker's process group; what leaves the group outlives it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from . import main as worker_main

if TYPE_CHECKING:
    from typing import NoReturn


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        number = getattr(resource, "RLIMIT_" + name, None)
        if number is None:
            continue
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(OSError, ValueError):  # some systems refuse some of them
            resource.setrlimit(number, (value, value))


def _become_worker(options: dict[str, Any]) -> NoReturn:
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((null, 0), (options["out"], 1), (options["err"], 2)):
        os.dup2(fd, target)
    keep = options["channel"]
    os.closerange(3, keep)
    os.closerange(keep + 1, 1024)
    os.chdir(options["work"])
    os.environ.clear()
    os.environ.update(options["env"])
    _limit(options["limits"])
    worker_main.serve(keep, options["in_force"])


def _signal(send: Any, pid: int, number: int) -> None:
    with contextlib.suppress(OSError):  # it may be gone
        send(pid, number)


def _keep(worker: int, control: int, wake: int) -> int:
    """Until the worker has ended or the host is gone; the worker's status."""
    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if wake in ready:
            os.read(wake, 64)
            ended, status = os.waitpid(worker, os.WNOHANG)
            if ended:
                return status
        if control in ready:
            orders = os.read(control, 64)
            if not orders or b"k" in orders:
                _signal(os.killpg, worker, signal.SIGKILL)
                _signal(os.kill, worker, signal.SIGKILL)
                return os.waitpid(worker, 0)[1]
            _signal(os.kill, worker, signal.SIGINT)


def _wake(_number: int, _frame: object) -> None:
    """Nothing: the descriptor wakes the loop."""


def main(text: str) -> NoReturn:
    """Start one worker and keep it; `text` is the host's JSON."""
    options = json.loads(text)
    sys.path += [path for path in options["packages"] if path not in sys.path]
    wake, far = os.pipe()
    os.set_blocking(far, False)
    signal.signal(signal.SIGCHLD, _wake)
    signal.set_wakeup_fd(far)
    worker = os.fork()
    if worker == 0:
        try:
            _become_worker(options)
        finally:
            os._exit(72)
    with contextlib.suppress(OSError):  # done by both, so that it is done whoever comes first
        os.setpgid(worker, worker)
    os.close(options["out"])
    os.close(options["err"])
    status = _keep(worker, options["control"], wake)
    _signal(os.killpg, worker, signal.SIGKILL)
    shutil.rmtree(options["folder"], ignore_errors=True)
    exit_code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    frame = "\n" + json.dumps({"t": "exited", "status": exit_code, "reason": ""}) + "\n"
    with contextlib.suppress(OSError), socket.socket(fileno=options["channel"]) as channel:
        channel.send(frame.encode(), socket.MSG_DONTWAIT)
    os._exit(0)
