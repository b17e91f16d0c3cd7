"""A Docker Engine of the tests' own, with an image made from the Python that runs them: no registry is asked."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGE = "python:3.11-slim"
"""The name that the driver asks for by default."""
PROGRAMS = ("/bin/sh", "/bin/cat", "/bin/sleep", "/bin/ls", "/usr/bin/id", "/usr/bin/env")
UNNEEDED = {"test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "__pycache__", "site-packages"}


class NoEngine(Exception):
    """Why none can be had here."""


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """A running engine with the image; its address.

    Raises:
        NoEngine: with the reason.
    """
    if shutil.which("dockerd") is None:
        raise NoEngine("dockerd is not installed")
    if os.geteuid() != 0:
        raise NoEngine("starting an engine takes root")
    home = Path(tempfile.mkdtemp(prefix="dockerd-"))
    places = ["--data-root", home / "data", "--exec-root", home / "exec", "--pidfile", home / "pid"]
    for place in ("data", "exec"):
        (home / place).mkdir()
    quiet = ["--bridge", "none", "--iptables=false", "--ip-forward=false", "--log-level", "error"]
    with (home / "log").open("wb") as log:
        daemon = subprocess.Popen(
            ["dockerd", *map(str, places), "-H", f"unix://{home}/s", *quiet],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=f"{home}/s"), base_url="http://docker", timeout=60) as http:
            _wait_for(home / "s", daemon, home / "log")
            made = http.post(
                "/images/create",
                params={"fromSrc": "-", "repo": IMAGE.partition(":")[0], "tag": IMAGE.partition(":")[2],
                        "changes": "ENV PATH=/usr/local/bin:/usr/bin:/bin"},
                content=_image(),
                headers={"content-type": "application/x-tar"},
            )  # fmt: skip
            made.raise_for_status()
        yield f"unix://{home}/s"
    finally:
        daemon.terminate()
        try:
            daemon.wait(30)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        shutil.rmtree(home, ignore_errors=True)


def _wait_for(address: Path, daemon: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as end:
            end.connect(str(address))
            return
        if daemon.poll() is not None or time.monotonic() > until:
            raise NoEngine(f"dockerd did not start: {log.read_text(errors='replace')[-1000:]}")
        time.sleep(0.05)


def _image() -> bytes:
    """A root file system with this Python, a few programs and the libraries they need, as a tar file."""
    base = Path(sys.base_prefix)
    version = f"python{sysconfig.get_python_version()}"
    library = base / "lib" / version
    program = Path(os.path.realpath(sys.executable))
    programs = [program, *(Path(os.path.realpath(path)) for path in PROGRAMS if os.path.exists(path))]
    modules = list((library / "lib-dynload").glob("*.so"))
    listed = subprocess.run(
        ["ldd", *map(str, (*programs, *modules))], capture_output=True, text=True, check=False
    ).stdout
    libraries = {
        word for line in listed.splitlines() for word in line.split() if word.startswith("/") and os.path.isfile(word)
    }
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:

        def put(source: Path | str, name: str) -> None:
            info = tar.gettarinfo(os.path.realpath(source), name.lstrip("/"))
            info.uid = info.gid = 0
            with open(source, "rb") as file:
                tar.addfile(info, file)

        def special(name: str, kind: bytes, mode: int = 0o755, target: str = "") -> None:
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.linkname = kind, mode, target
            tar.addfile(info)

        for folder in (
            "usr",
            "usr/bin",
            "usr/lib",
            "usr/lib64",
            "usr/local",
            "usr/local/bin",
            "etc",
            "dev",
            "proc",
            "sys",
        ):
            special(folder, tarfile.DIRTYPE)
        special("tmp", tarfile.DIRTYPE, 0o1777)
        for name in ("bin", "lib", "lib64"):
            special(name, tarfile.SYMTYPE, target=f"usr/{name}")
        put(program, f"usr/local/bin/{version}")
        for name in ("python", "python3"):
            special(f"usr/local/bin/{name}", tarfile.SYMTYPE, target=version)
        for path, real in zip(PROGRAMS, programs[1:], strict=False):
            put(real, f"usr/bin/{Path(path).name}")
        for path in sorted(libraries):
            own = path.startswith(str(base))
            put(path, f"usr/lib/{Path(path).name}" if own else path if path.startswith("/usr/") else f"usr{path}")
        for folder, folders, files in os.walk(library):
            folders[:] = [name for name in folders if name not in UNNEEDED and not name.startswith("config-")]
            for name in files:
                if not name.endswith((".pyc", ".a")):
                    put(f"{folder}/{name}", f"usr/local/{os.path.relpath(folder, base)}/{name}")
        for name, text in (
            ("etc/passwd", "nobody:x:65534:65534:nobody:/:/bin/sh\n"),
            ("etc/group", "nogroup:x:65534:\n"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return data.getvalue()
