"""The warden: parent of one worker and of every orphan of its cells; when the worker ends, it ends all the rest.

Three ways to end them, told apart by `mode`: "pidns" (the warden is pid 1 of a pid namespace), "scope" (kill(-1) inside
a Landlock domain that scopes signals), "walk" (through /proc: best effort).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

from . import confine, namespaces
from .removing import remove_tree
from .title import entitle

if TYPE_CHECKING:
    from typing import NoReturn

    from .birth import Birth, Mode, Request

# ---- ending processes ------------------------------------------------------------------------------------------------


def signal_quietly(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def children() -> list[int]:
    """The pids of this process's children, ended ones included."""
    with open(f"/proc/self/task/{os.getpid()}/children") as f:
        return [int(pid) for pid in f.read().split()]


def _below(root: int) -> list[int]:
    by_parent: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as f:
                line = f.read()
        except OSError:
            continue
        state, parent = line[line.rindex(b")") + 2 :].split()[:2]
        if state not in b"ZX":
            by_parent.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    todo = [root]
    while todo:
        for pid in by_parent.get(todo.pop(), ()):
            found.append(pid)
            todo.append(pid)
    return found


def sweep(mode: Mode) -> None:
    """End and reap everything below this process, which must be pid 1 or a subreaper.

    kill(-1) is atomic against fork: the kernel holds the list of tasks while it walks it, and a fork whose parent has a
    SIGKILL pending fails. In a namespace or a signal scope it reaches what is inside only.
    """
    if mode == "walk":
        _hunt()
        return
    signal_quietly(-1, signal.SIGKILL)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _hunt() -> None:
    # Stop all until no new one shows, then kill; then race with what forked meanwhile, on the shortest list there is.
    end = time.monotonic() + 2
    seen: set[int] = set()
    new = set(_below(os.getpid()))
    while new - seen and time.monotonic() < end:
        for pid in new - seen:
            signal_quietly(pid, signal.SIGSTOP)
        seen |= new
        new = set(_below(os.getpid()))
    for pid in seen:
        signal_quietly(pid, signal.SIGKILL)
    while time.monotonic() < end:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in children():
            signal_quietly(pid, signal.SIGKILL)


# ---- the warden itself -----------------------------------------------------------------------------------------------


def say_exited(channel: int, status: int | None, reason: str = "") -> None:
    """The last frame of a worker's channel; best effort, since its reader may be gone or slow."""
    frame = "\n" + json.dumps({"t": "exited", "status": status, "reason": reason}) + "\n"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, os.dup(channel)) as end:
        end.send(frame.encode(), socket.MSG_DONTWAIT)


def remove_folders(request: Request) -> None:
    """Remove what belongs to one worker; never the user's own working folder."""
    folder = request["folder"]
    try:  # most often they are empty
        if request["work"].startswith(folder):
            os.rmdir(request["work"])
        os.rmdir(folder)
    except OSError:
        remove_tree(folder)


def guard(birth: Birth, parent: int, ids: tuple[int, int]) -> NoReturn:
    """Run in the process cloned for one worker. Forks the worker, waits for its end, ends the rest. Never returns."""
    facts, request, mode = birth.facts, birth.request, birth.facts["mode"]
    if facts["userns"]:
        namespaces.map_ids(*ids)
    if mode == "pidns":
        if os.getpid() != 1:
            os._exit(72)
        # The template dies, so does pid 1, and the kernel ends the namespace.
        confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
        birth.prepare_namespace()
    else:
        _prepare_scope(mode, request, parent)
    entitle("asyncrlm-warden", request["folder"])
    worker = os.fork()
    if worker == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # SIGINT stays ignored until the worker sets its handler
        if mode != "pidns":
            confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGKILL)
        birth.become_worker()
    for fd in birth.descriptors() - {birth.channel}:
        os.close(fd)
    while True:
        ended, status = os.wait()  # orphans are reaped here too
        if ended == worker:
            break
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sweep(mode)
    if not (request["confine"] and "readonly" in facts["mounts"]):  # there the folder is the template's to remove
        remove_folders(request)
    say_exited(birth.channel, os.waitstatus_to_exitcode(status))
    os._exit(0)


def _prepare_scope(mode: Mode, request: Request, parent: int) -> None:
    def template_is_gone(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sweep(mode)
        remove_folders(request)
        os._exit(0)

    signal.signal(signal.SIGTERM, template_is_gone)
    confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGTERM)
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:  # it died before the death signal was set
        template_is_gone()
    if mode == "scope":
        confine.restrict(scope=confine.SCOPE_SIGNAL)  # the domain that kill(-1) will empty
