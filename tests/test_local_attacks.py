"""Isolation is promised by attack: what a cell may reach, tried from inside one in every mode that is to be had."""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from local_support import (
    MODES,
    X86,
    Client,
    PlainScope,
    assault,
    client,
    denied,
    mode_or_skip,
    opening,
    through,
)

import asyncrlm.errors
from asyncrlm.environments.ipython import IPythonEnvironment
from asyncrlm.environments.local import LocalEnvironment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"  # the attacks are the worker's; the driver's tests run on both


@pytest.fixture(scope="module", params=[*MODES, "ipython"])
async def scope(request: pytest.FixtureRequest) -> AsyncIterator[PlainScope]:
    """One template in each mode, and one with IPython's shell, for all attacks."""
    if request.param == "ipython":
        pytest.importorskip("IPython", reason="IPython is not installed")
        async with PlainScope(mode="auto", place=IPythonEnvironment) as scope:
            yield scope
        return
    async with PlainScope(mode=request.param, place=LocalEnvironment) as scope:
        await mode_or_skip(scope, request.param)
        yield scope


# ---- reading ---------------------------------------------------------------------------------------------------------

READS = {
    "secret": "open(SECRET).read()",
    "folder": "os.listdir(os.path.dirname(SECRET))",
    "by openat": "os.open(os.path.basename(SECRET), os.O_RDONLY, dir_fd=os.open(os.path.dirname(SECRET), os.O_PATH))",
    "by symlink": "os.symlink(SECRET, 'link'); open('link').read()",
    "by hard link": "os.link(SECRET, 'hard'); open('hard').read()",
    "editable install": "open(SOURCE).read()",
    "script's folder": "os.listdir(SCRIPT)",
}
HOST_READS = {
    "passwd": "open('/etc/passwd').read()",
    "root's home": "os.listdir('/root')",
    "host's environ": "open(f'/proc/{HOST}/environ').read()",
    "host's cmdline": "open(f'/proc/{HOST}/cmdline').read()",
    "host's memory": "open(f'/proc/{HOST}/mem', 'rb').read(1)",
    "template's environ": "open(f'/proc/{TEMPLATE}/environ').read()",
    "parent's memory": "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "shared temporary folder": "os.listdir(TMP)",
    "disks": "os.listdir('/dev')",
}


async def test_reading_outside_is_denied(scope: PlainScope, tmp_path: Path) -> None:
    secret = tmp_path / ".env"
    secret.write_text("KEY=1")
    values = {
        "SECRET": str(secret),
        "SOURCE": asyncrlm.errors.__file__,
        "SCRIPT": str(Path(__file__).parent),
        "HOST": os.getpid(),
        "TMP": str(tmp_path),
    }
    environment = scope.place(_mode=scope.mode)
    async with client(scope, environment) as c:
        values["TEMPLATE"] = scope.template._process._popen.pid
        denied(await assault(c, READS | HOST_READS, **values))
    async with client(scope, scope.place(_mode=scope.mode, isolation="none", workdir=tmp_path)) as c:
        assert through(await assault(c, READS, **values)) == list(READS)


ATTRIBUTES = {
    "value": "os.getxattr(SECRET, 'user.secret')",
    "value, not following": "os.getxattr(SECRET, 'user.secret', follow_symlinks=False)",
    "value, by descriptor": "os.getxattr(os.open(SECRET, os.O_PATH), 'user.secret')",
    "value, by descriptor path": "os.getxattr('/proc/self/fd/%d' % os.open(SECRET, os.O_PATH), 'user.secret')",
    "getxattrat": "raw(464, -100, os.fsencode(SECRET), 0, b'user.secret', struct.pack('QII', 0, 0, 0), 16)",
    "names": "os.listxattr(SECRET)",
    "names, not following": "os.listxattr(SECRET, follow_symlinks=False)",
    "listxattrat": "raw(465, -100, os.fsencode(SECRET), 0, None, 0)",
}


async def test_attributes_of_files_outside_cannot_be_read(scope: PlainScope, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("")
    try:
        os.setxattr(secret, "user.secret", b"1")
    except OSError as e:
        pytest.skip(f"the folder of temporary files has no attributes: {e}")
    async with client(scope, scope.place(_mode=scope.mode)) as c:
        denied(await assault(c, ATTRIBUTES, SECRET=str(secret)))
        assert await c.attempt("import shutil; open('a', 'w').close(); shutil.copy2('a', 'b')") is None
    async with client(scope, scope.place(_mode=scope.mode, isolation="none")) as c:
        assert {"value", "names"} <= set(through(await assault(c, ATTRIBUTES, SECRET=str(secret))))


TELLTALES = """
from pathlib import Path
told = {}
for name in ('cmdline', 'diskstats', 'keys', 'locks', 'partitions', 'timer_list', 'sysvipc/shm', 'net/tcp', 'net/unix'):
    try:
        told[name] = Path('/proc', name).read_text()[:1000]
    except OSError:
        told[name] = ''
print(json.dumps(told))
"""


async def test_proc_says_nothing_of_the_rest_of_the_machine(scope: PlainScope) -> None:
    async with client(scope, scope.place(_mode=scope.mode)) as c:
        await assault(c, {})
        told = await c.value(TELLTALES)
        networks = {name: told.pop(name).splitlines()[1:] for name in ("net/tcp", "net/unix")}
        assert not any(told.values())
        if scope.template.facts.mode == "pidns" and scope.mode != "warden" and not os.geteuid():
            assert not any(networks.values())
            assert "MemTotal" in await c.run("print(open('/proc/meminfo').read())")


async def test_read_paths_and_packages_are_readable(scope: PlainScope, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.txt").write_text("there")
    (tmp_path / "c.txt").write_text("not there")
    environment = scope.place(_mode=scope.mode, read_paths=(tmp_path / "a",))
    async with client(scope, environment) as c:
        assert await c.run(f"print(open({str(tmp_path / 'a' / 'b.txt')!r}).read())") == "there\n"
        assert await c.attempt(f"open({str(tmp_path / 'c.txt')!r})")
        assert await c.attempt(f"open({str(tmp_path / 'a' / 'b.txt')!r}, 'a')")
        assert await c.run("import anyio, msgspec; print(anyio.__name__, msgspec.__name__)") == "anyio msgspec\n"
        if "site-packages" not in asyncrlm.errors.__file__:
            assert await c.attempt("import asyncrlm")


# ---- writing ---------------------------------------------------------------------------------------------------------

WRITES = {
    "append": "open(VICTIM, 'a')",
    "truncate": "os.truncate(VICTIM, 0)",
    "remove": "os.unlink(VICTIM)",
    "rename away": "os.rename(VICTIM, 'mine')",
    "rename over": "open('mine', 'w').close(); os.rename('mine', VICTIM)",
    "create": "open(os.path.join(os.path.dirname(VICTIM), 'new'), 'w')",
    "folder": "os.mkdir(os.path.join(os.path.dirname(VICTIM), 'new'))",
    "symlink": "os.symlink('/', os.path.join(os.path.dirname(VICTIM), 'new'))",
    "fifo": "os.mkfifo(os.path.join(os.path.dirname(VICTIM), 'new'))",
    "disk node": "os.mknod('disk', 0o60600, os.makedev(254, 0))",
    "disk node elsewhere": "os.mknod(os.path.join(os.path.dirname(VICTIM), 'new'), 0o20666, os.makedev(1, 3))",
}
# These may fail or do nothing: what counts is the file.
METADATA = {
    "chmod": "os.chmod(VICTIM, 0o777)",
    "fchmod": "os.fchmod(os.open(VICTIM, os.O_RDONLY), 0o777)",
    "by descriptor path": "os.chmod('/proc/self/fd/%d' % os.open(VICTIM, os.O_RDONLY), 0o777)",
    "by O_PATH": "os.chmod('/proc/self/fd/%d' % os.open(VICTIM, os.O_PATH), 0o777)",
    "fchmodat": "os.chmod(os.path.basename(VICTIM), 0o777, dir_fd=os.open(os.path.dirname(VICTIM), os.O_PATH))",
    "fchmodat2": "raw(452, -100, os.fsencode(VICTIM), 0o777, 0)",
    "fchmodat2 empty": "raw(452, os.open(VICTIM, os.O_RDONLY), b'', 0o777, 0x1000)",
    "utime": "os.utime(VICTIM, (1, 1))",
    "futimens": "os.utime(os.open(VICTIM, os.O_RDONLY), (1, 1))",
    "chown": "os.chown(VICTIM, 12345, 12345)",
    "lchown": "os.lchown(VICTIM, 12345, 12345)",
    "fchown": "os.fchown(os.open(VICTIM, os.O_RDONLY), 12345, 12345)",
    "setxattr": "os.setxattr(VICTIM, 'user.x', b'1')",
    "fsetxattr": "os.setxattr(os.open(VICTIM, os.O_RDONLY), 'user.x', b'1')",
    "flags": "fcntl.ioctl(os.open(VICTIM, os.O_RDONLY), 0x40086602, struct.pack('l', 0x80))",
    "chmod of the passed": "os.fchmod(FD, 0o777)",
    "chmod of the passed by path": "os.chmod('/proc/self/fd/%d' % FD, 0o777)",
    "utime of the passed": "os.utime(FD, (1, 1))",
    "link into mine": "os.link(VICTIM, 'mine'); os.chmod('mine', 0o777)",
}


def _looks(path: Path) -> tuple[Any, ...]:
    s = path.stat()
    return (
        s.st_mode,
        s.st_uid,
        s.st_gid,
        s.st_mtime_ns,
        s.st_atime_ns < 2_000_000_000,
        os.listxattr(path),
        path.read_text(),
    )


async def test_writing_outside_is_denied(scope: PlainScope, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    victim.chmod(0o644)
    before = _looks(victim)
    # Readable, so that descriptors of it are to be had, and passed by the host as well.
    environment = scope.place(_mode=scope.mode, read_paths=(victim,))
    async with client(scope, environment) as c:
        denied(await assault(c, WRITES, VICTIM=str(victim)))
        await c.sandbox.pass_file(opening(victim))
        passed = "FD = [int(n) for n in os.listdir('/proc/self/fd') if os.path.isfile('/proc/self/fd/' + n)][0]"
        assert await c.attempt(passed) is None
        await assault(c, METADATA, VICTIM=str(victim))
        assert _looks(victim) == before
        assert os.listdir(tmp_path) == ["victim"]
    async with client(scope, scope.place(_mode=scope.mode, isolation="none")) as c:
        control = {k: METADATA[k] for k in ("chmod", "utime")}
        assert through(await assault(c, control, VICTIM=str(victim))) == list(control)
        assert _looks(victim) != before
        assert await c.attempt("open(VICTIM, 'a')") is None


SUID = {
    "chmod": "open('f', 'w').close(); os.chmod('f', 0o4755); assert not os.stat('f').st_mode & 0o6000; raise OSError",
    "open": "os.open('g', os.O_CREAT | os.O_WRONLY, 0o4755)",
    "openat": "os.open('g', os.O_CREAT | os.O_WRONLY, 0o2755, dir_fd=os.open('.', os.O_PATH))",
    "mknod": "os.mknod('h', 0o104755)",
}


async def test_no_file_that_runs_as_its_owner_is_made(scope: PlainScope, tmp_path: Path) -> None:
    environment = scope.place(_mode=scope.mode, workdir=tmp_path)
    async with client(scope, environment) as c:
        denied(await assault(c, SUID))
    assert not any(p.stat().st_mode & 0o6000 for p in tmp_path.iterdir())


# ---- network ---------------------------------------------------------------------------------------------------------

NETWORK = {
    "TCP": "socket.create_connection(('127.0.0.1', PORT), 1)",
    "UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "IPv6": "socket.socket(socket.AF_INET6)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "vsock": "socket.socket(40, socket.SOCK_STREAM)",
    "path": "s = socket.socket(socket.AF_UNIX); s.connect(STREAM)",
    "abstract": "s = socket.socket(socket.AF_UNIX); s.bind('\\0asyncrlm')",
    "datagram pair": "a, b = socket.socketpair(type=socket.SOCK_DGRAM); a.sendto(b'x', DATAGRAM)",
    "raw pair": "a, b = socket.socketpair(type=socket.SOCK_RAW); a.sendto(b'x', DATAGRAM)",
    "stream pair": "a, b = socket.socketpair(); a.connect(STREAM)",
    "packet pair": "a, b = socket.socketpair(type=socket.SOCK_SEQPACKET); a.connect(STREAM)",
    "upper half": f"raw({41 if X86 else 198}, (1 << 32) | 2, 1, 0)",
}


async def test_there_is_no_network(scope: PlainScope, tmp_path: Path) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    stream, datagram = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    stream.bind(str(tmp_path / "s"))
    stream.listen()
    datagram.bind(str(tmp_path / "d"))
    values = {"PORT": server.getsockname()[1], "STREAM": str(tmp_path / "s"), "DATAGRAM": str(tmp_path / "d")}
    with server, stream, datagram:
        environment = scope.place(_mode=scope.mode, read_paths=(tmp_path,))
        async with client(scope, environment) as c:
            denied(await assault(c, NETWORK, **values))
        async with client(scope, scope.place(_mode=scope.mode, isolation="none")) as c:
            control = {k: NETWORK[k] for k in ("TCP", "UDP", "path", "datagram pair", "raw pair", "upper half")}
            assert through(await assault(c, control, **values)) == list(control)


# ---- other processes and the kernel ----------------------------------------------------------------------------------

ON_PROCESS = {
    "signal": "os.kill(PID, 0)",
    "stop": "os.kill(PID, signal.SIGSTOP)",
    "thread signal": f"raw({200 if X86 else 130}, PID, 0)",
    "pidfd": "os.pidfd_open(PID)",
    "prlimit": "resource.prlimit(PID, resource.RLIMIT_CORE, (0, 0))",
    "priority": "os.setpriority(os.PRIO_PROCESS, PID, 1)",
    "affinity": "os.sched_setaffinity(PID, {0})",
    "scheduler": "os.sched_setscheduler(PID, os.SCHED_BATCH, os.sched_param(0))",
    "ptrace": f"raw({101 if X86 else 117}, 16, PID, 0, 0)",
    "seize": f"raw({101 if X86 else 117}, 0x4206, PID, 0, 0)",
    "read memory": f"raw({310 if X86 else 270}, PID, 0, 0, 0, 0, 0)",
    "write memory": f"raw({311 if X86 else 271}, PID, 0, 0, 0, 0, 0)",
    "memory file": "open(f'/proc/{PID}/mem', 'r+b')",
    "adjust OOM": "open(f'/proc/{PID}/oom_score_adj', 'w')",
}
ON_USER = {
    "priority of the user": "os.setpriority(os.PRIO_USER, 0, 1)",
    "I/O priority of the user": f"raw({251 if X86 else 30}, 3, 0, (2 << 13) | 7)",
}


async def test_other_processes_are_out_of_reach(scope: PlainScope) -> None:
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    environment = scope.place(_mode=scope.mode)
    async with client(scope, environment) as neighbour, client(scope, environment) as c:
        template = scope.template._process._popen.pid
        neighbour_pid = _pid(neighbour)
        for pid in (os.getpid(), template, neighbour_pid, _parent(neighbour_pid), _parent(_pid(c))):
            denied(await assault(c, ON_PROCESS, PID=pid))
        denied(await assault(c, ON_USER))
        assert os.getpriority(os.PRIO_PROCESS, 0) == priority
        # From inside, where pid 1 or the parent is the warden: may seem to work, must do nothing.
        if await c.value("print(os.getppid())"):  # 0: outside of the namespace, and os.kill(0, 9) would be suicide
            await c.run("os.kill(os.getppid(), 9)")
        if scope.template.facts.mode == "pidns":
            await c.run("os.kill(1, 9)")
        await c.run("signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(-1, signal.SIGTERM)")
        assert await c.value("print(1)") == 1
        assert await neighbour.value("print(2)") == 2
        assert scope.template._process._popen.poll() is None
    if scope.template.facts.mode == "pidns":
        return  # even without confinement the host is not to be seen there
    async with client(scope, scope.place(_mode=scope.mode, isolation="none")) as c:
        control = {k: ON_PROCESS[k] for k in ("pidfd", "prlimit", "affinity")}
        affinity = os.sched_getaffinity(0)
        try:
            assert through(await assault(c, control, PID=os.getpid())) == list(control)
        finally:
            os.sched_setaffinity(0, affinity)


def _pid(c: Client) -> int:
    text = Path(f"/proc/self/fdinfo/{c.sandbox._pidfd}").read_text()
    return int(text.partition("Pid:\t")[2].split()[0])


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


KERNEL = {
    "io_uring": "raw(425, 1, 0)",
    "bpf": f"raw({321 if X86 else 280}, 0, 0, 0)",
    "add_key": f"raw({248 if X86 else 217}, b'user', b'x', b'y', 1, -3)",
    "keyctl": f"raw({250 if X86 else 219}, 0, -3, 0)",
    "perf": f"raw({298 if X86 else 241}, 0, 0, -1, -1, 0)",
    "userfaultfd": f"raw({323 if X86 else 282}, 0)",
    "mount": f"raw({165 if X86 else 40}, b'none', b'.', b'tmpfs', 0, 0)",
    "open_tree": "raw(428, -100, b'.', 1)",
    "mount_setattr": "raw(442, -100, b'/', 0x8000, struct.pack('QQQQ', 0, 1, 0, 0), 32)",
    "user namespace": f"raw({272 if X86 else 97}, 0x10000000)",
    "user namespace by clone": f"raw({56 if X86 else 220}, 0x10000011, 0, 0, 0, 0)",
    "clone3": "raw(435, struct.pack('Q', 0x10000000) + bytes(80), 88)",
    "setns": f"raw({308 if X86 else 268}, os.open('/proc/self/ns/net', os.O_RDONLY), 0)",
    "chroot": "os.chroot('.')",
    "another user": "os.setresuid(12345, 12345, 12345)",
    "more rights": "os.setgroups([0, 1, 2])",
    "System V memory": f"raw({29 if X86 else 194}, 0, 4096, 0o1600)",
    "System V memory of others": f"raw({30 if X86 else 196}, 0, 0, 0)",
    "message queue": f"raw({240 if X86 else 180}, b'asyncrlm', 0o102, 0o600, 0)",
    "kernel log": f"raw({103 if X86 else 116}, 3, ctypes.create_string_buffer(64), 64)",
    "file handle": (
        f"raw({303 if X86 else 264}, -100, b'/', b'\\x80' + bytes(255), ctypes.create_string_buffer(8), 0)"
    ),
    "news of files": f"raw({294 if X86 else 26}, 0)",
    "news of a folder": f"raw({254 if X86 else 27}, 0, b'/root', 0x100)",
    "marks on files": f"raw({301 if X86 else 263}, 0, 1, 0, 0x20, -100, b'/')",
    "openat2": "raw(437, -100, b'/etc/passwd', struct.pack('QQQ', 0, 0, 0), 24)",
}
# Whatever the descriptor is of: attributes of files, typing into a terminal; last of all one that is no one's secret.
CONTROLS = (0x40086602, 0x40046602, 0x401C5820, 0x40087602, 0x5412, 0x541C, 0x5401)
CONTROLLING = """
errors = []
for request in CONTROLS:
    try:
        fcntl.ioctl(0, request, bytes(28))
    except OSError as error:
        errors.append(error.errno)
print(errors)
"""
FOREIGN = """
code = bytes.fromhex('53b814000000cd805bc3')  # push rbx; mov eax, 20 (getpid of i386); int 0x80; pop rbx; ret
page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
page.write(code)
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
pid = os.fork()
if pid == 0:
    os._exit(1 if call() > 0 else 0)
status = os.waitpid(pid, 0)[1]
print(1 if status == 256 else 0)
"""


async def test_the_kernel_is_small(scope: PlainScope) -> None:
    environment = scope.place(_mode=scope.mode)
    async with client(scope, environment) as c:
        denied(await assault(c, KERNEL))
        await c.run(f"{CONTROLS=}")
        assert await c.value(CONTROLLING) == [errno.EPERM] * 6 + [errno.ENOTTY]
        if X86:
            assert await c.attempt("raw(0x40000000 | 39)")
            assert await c.value(FOREIGN) == 0
    async with client(scope, scope.place(_mode=scope.mode, isolation="none")) as c:
        # Not clone3: where it works there are two processes that go on with the cell.
        control = {k: KERNEL[k] for k in ("user namespace", "userfaultfd")}
        came = through(await assault(c, control))
        if not os.getuid():
            assert "user namespace" in came
