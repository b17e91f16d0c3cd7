"""Cells in containers of a real Docker Engine, started for these tests."""

from __future__ import annotations

import os
from typing import Any

import anyio
import httpx
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, Repl, SandboxLost
from asyncrlm.environments import environment
from asyncrlm.testing import ScriptedLM

pytest.importorskip("aiodocker", reason="the Docker environment's SDK is not installed")

from .docker_engine import ours

pytestmark = pytest.mark.anyio

CAP = 60.0
SLOT = "answer['content'], answer['ready'] = {}, True"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # its SDK runs on nothing else


async def answer(messages: list[dict[str, str]]) -> str:
    return messages[-1]["content"].upper()


def cell(code: str) -> str:
    return f"```repl\n{code}\n```"


async def test_what_works_elsewhere_works_in_a_container(docker: httpx.AsyncClient) -> None:
    context = "é\0\udc80\r\n" + "x" * 100_000_000
    async with Repl("docker", context=context, lm=answer, custom_tools={"add": lambda a, b: a + b}) as repl:
        for code, printed in (
            ("import os; x = 5; print(os.getuid(), len(context))", "65534 100000005"),
            ("print(ascii(context[:5]))", "'\\xe9\\x00\\udc80\\r\\n'"),
            ("print(x, add(2, 3))", "5 5"),
            ("print(len(llm_query_batched(['a'] * 500)), llm_query('a'))", "500 A"),
            ("import subprocess; print(subprocess.check_output(['id', '-u'], text=True))", "65534"),
            ("open('note', 'w').write('kept'); print(open('note').read())", "kept"),
        ):  # fmt: skip
            result = await repl.execute(code)
            assert (result.stdout.strip(), result.error) == (printed, None)
        result = await repl.execute("print('a' * 10_000_000); 1 / 0")
        assert len(result.stdout) < 200_000
        assert result.error is not None
        assert "ZeroDivisionError" in result.error


async def test_children_have_containers_of_their_own(docker: httpx.AsyncClient) -> None:
    def reply(request: Any) -> str:
        root = "QUESTION" in request.messages[1].content
        return cell(SLOT.format("str(rlm_query_batched(['one', 'two']))" if root else "context[::-1]"))

    async with AsyncRLM(ScriptedLM(reply), environment="docker", max_depth=2) as rlm:
        with anyio.fail_after(CAP):
            completion = await rlm.acompletion("CTX", "QUESTION")
    assert completion.response == "['eno', 'owt']"


async def test_an_endless_cell_is_stopped_and_its_variables_stay(docker: httpx.AsyncClient) -> None:
    async with Repl("docker", environment_kwargs={"cell_timeout": 0.5}) as repl:
        await repl.execute("x = 7")
        with anyio.fail_after(CAP):
            result = await repl.execute("while True: pass")
        assert result.error is not None
        assert "cell_timeout" in result.error
        assert (await repl.execute("print(x)")).stdout == "7\n"


FORKS = """import os, time
for _ in range(200):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
"""


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        ("import socket; socket.create_connection(('1.1.1.1', 80), 2)", "Error"),
        ("import socket; socket.create_connection(('172.17.0.1', 80), 2)", "Error"),
        ("open('/etc/x', 'w')", "Read-only file system"),
        ("open('/usr/local/lib/x', 'w')", "Read-only file system"),
        ("import os; os.setuid(0)", "Operation not permitted"),
        ("import os; os.kill(1, 9); open('/proc/1/mem', 'rb')", "Permission denied"),
        ("f = open('/tmp/big', 'wb')\nfor _ in range(100): f.write(bytes(1 << 20))", "No space left on device"),
        (FORKS, "Resource temporarily unavailable"),
    ],
)  # fmt: skip
async def test_the_container_holds_what_the_worker_does_not(docker: httpx.AsyncClient, attack: str, said: str) -> None:
    kwargs = {"isolation": "none", "tmp_size": "64MB", "max_processes": 32, "max_file_size": None}
    async with Repl("docker", environment_kwargs=kwargs) as repl:
        with anyio.fail_after(CAP):
            result = await repl.execute(attack)
        assert result.error is not None
        assert said in result.error
        assert (await repl.execute("print(1)")).stdout == "1\n"


async def test_a_memory_bomb_stays_inside(docker: httpx.AsyncClient) -> None:
    kwargs = {"isolation": "none", "memory": "200MB", "memory_limit": None}
    async with Repl("docker", environment_kwargs=kwargs) as repl:
        with anyio.fail_after(CAP):
            result = await repl.execute("x = b'x' * (1 << 30)")
        assert result.error is not None
        assert "the process that ran the cell is gone" in result.error
        assert "its container ran out of memory (memory='200MB')" in result.error
        assert (await repl.execute("print(1)")).stdout == "1\n"


async def test_nothing_of_the_host_is_seen_and_the_container_is_hardened(
    docker: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    async with Repl("docker") as repl:
        seen = await repl.execute("import os; print(dict(os.environ), os.listdir('/'))")
        assert "sk-secret" not in seen.stdout
        (container,) = await ours(docker)
        described = (await docker.get(f"/containers/{container['Id']}/json")).json()
    host = described["HostConfig"]
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["CapDrop"]) == ("none", True, ["ALL"])
    assert (host["SecurityOpt"], host["Memory"], host["PidsLimit"]) == (["no-new-privileges"], 4 << 30, 66)
    assert described["Config"]["NetworkDisabled"]
    assert (host["CpuQuota"], host["CpuPeriod"], host["Binds"]) == (200_000, 100_000, [])
    assert (host["LogConfig"]["Type"], described["Config"]["User"]) == ("none", "65534:65534")


async def test_each_default_can_be_another(docker: httpx.AsyncClient) -> None:
    kwargs: dict[str, Any] = {"user": "0:0", "read_only": False, "cap_add": ("NET_RAW",), "no_new_privileges": False}
    kwargs |= {"memory": None, "cpus": None, "max_processes": None, "tmp_size": "32MB", "isolation": "none"}
    look = (
        "import os\nopen('/made', 'w').close()\nhad = open('/proc/self/status').read()\n"
        "tmp = os.statvfs('/tmp')\nprint(os.getuid(), had.split('CapEff:')[1].split()[0], tmp.f_blocks * tmp.f_frsize)"
    )
    async with Repl("docker", environment_kwargs=kwargs) as repl:
        result = await repl.execute(look)
        (container,) = await ours(docker)
        host = (await docker.get(f"/containers/{container['Id']}/json")).json()["HostConfig"]
    assert (result.stdout, result.error) == (f"0 {1 << 13:016x} {32 << 20}\n", None)
    assert (host["SecurityOpt"], host["Memory"], host["PidsLimit"], host["CpuQuota"]) == ([], 0, None, 0)


LISTENS = """import socket
tcp = socket.create_server(("0.0.0.0", 4711))
named = socket.socket(socket.AF_UNIX); named.bind("\\0asyncrlm-neighbour"); named.listen()
local = socket.socket(socket.AF_UNIX); local.bind("/tmp/neighbour.sock"); local.listen()
open("/dev/shm/neighbour", "w").write("secret")
import subprocess
neighbour = subprocess.Popen(["sleep", "1000"])
print([socket.create_connection(("127.0.0.1", 4711)).fileno() > 0, neighbour.pid])
"""
REACHES = """import os, socket
failed = []
def fails(name, attempt):
    try:
        attempt()
    except OSError:
        failed.append(name)
fails("tcp", lambda: socket.create_connection(("127.0.0.1", 4711), 2))
fails("address", lambda: socket.create_connection(("172.17.0.2", 4711), 2))
fails("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0asyncrlm-neighbour"))
fails("path", lambda: socket.socket(socket.AF_UNIX).connect("/tmp/neighbour.sock"))
fails("memory", lambda: open("/dev/shm/neighbour").close())
fails("engine", lambda: socket.socket(socket.AF_UNIX).connect("/var/run/docker.sock"))
seen = [open(f"/proc/{pid}/cmdline").read() for pid in os.listdir("/proc") if pid.isdigit()]
fails("process", lambda: os.stat("/none") if not any("sleep" in line for line in seen) else None)
print(failed)
"""


async def test_containers_do_not_reach_each_other(docker: httpx.AsyncClient) -> None:
    kwargs = {"isolation": "none"}  # the worker's own confinement makes no socket at all
    async with Repl("docker", environment_kwargs=kwargs) as one, Repl("docker", environment_kwargs=kwargs) as other:
        there = await one.execute(LISTENS)
        assert (there.stdout[:6], there.error) == ("[True,", None)
        with anyio.fail_after(CAP):
            result = await other.execute(REACHES)
        wanted = ["tcp", "address", "abstract", "path", "memory", "engine", "process"]
        assert (result.stdout, result.error) == (f"{wanted}\n", None)


async def test_each_container_has_a_network_namespace_of_its_own_with_nothing_in_it(docker: httpx.AsyncClient) -> None:
    look = "import os; print(os.readlink('/proc/self/ns/net'), open('/proc/net/dev').read().count(':'))"
    async with Repl("docker") as one, Repl("docker") as other:
        seen = {(await repl.execute(look)).stdout for repl in (one, other)}
    names = {line.split()[0] for line in seen}
    assert {line.split()[1] for line in seen} == {"1"}  # the loopback device
    assert len(names | {os.readlink("/proc/self/ns/net")}) == 3


async def test_volumes_and_a_network_are_given_where_asked_for(docker: httpx.AsyncClient, tmp_path: Any) -> None:
    (tmp_path / "data").write_text("shared")
    tmp_path.chmod(0o777)
    kwargs = {"volumes": {str(tmp_path): "/data:rw"}, "env": {"TOKEN": "t"}, "network": "host"}
    async with Repl("docker", environment_kwargs=kwargs) as repl:
        result = await repl.execute(
            "import os, socket; print(open('/data/data').read(), os.environ['TOKEN'])\n"
            "open('/data/new', 'w').write('x')\n"
            "print(socket.socket().fileno() > 0)"
        )
        assert (result.stdout, result.error) == ("shared t\nTrue\n", None)
    assert (tmp_path / "new").read_text() == "x"


async def test_cancelled_at_any_stage_it_leaves_no_container(docker: httpx.AsyncClient) -> None:
    for i in range(12):
        with anyio.move_on_after(i * 0.05):
            async with Repl("docker", lm=answer) as repl:
                await repl.execute("import time; time.sleep(60)")


async def test_ten_at_once(docker: httpx.AsyncClient) -> None:
    got: list[str] = []

    async def one(number: int) -> None:
        async with Repl("docker") as repl:
            got.append((await repl.execute(f"print({number})")).stdout.strip())

    with anyio.fail_after(CAP):
        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(one, number)
    assert sorted(map(int, got)) == list(range(10))


@pytest.mark.parametrize(
    ("kwargs", "error", "said"),
    [
        ({"image": "nowhere.invalid/none:1"}, SandboxLost, "'nowhere.invalid/none:1' is not there and can't be pulled"),
        ({"image": "none:1", "pull": "never"}, ConfigurationError, "'none:1' is not there"),
        ({"python": "/no/python"}, ConfigurationError, "could not be started: .*/no/python"),
        ({"network": "nowhere"}, SandboxLost, "could not be started: .*nowhere"),
        ({"runtime": "nothing"}, ConfigurationError, "could not be started: .*nothing"),
    ],
)
async def test_what_can_not_be_had_is_told(
    docker: httpx.AsyncClient, kwargs: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said), anyio.fail_after(CAP):
        async with Repl("docker", environment_kwargs=kwargs):
            pass


async def test_no_engine_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"no Docker Engine answers at .*DOCKER_HOST"):
        async with Repl("docker", environment_kwargs={"docker_host": "unix:///nowhere.sock"}):
            pass


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_another_event_loop_is_refused(anyio_backend: str) -> None:
    with pytest.raises(ConfigurationError, match="environment 'docker' runs on asyncio only"):
        async with Repl("docker"):
            pass


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": "much"},
        {"tmp_size": 0},
        {"pull": "often"},
        {"cpus": 0},
        {"pool_size": -1},
        {"volumes": {"/x": "data"}},
        {"isolation": "x"},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        environment("docker", wrong)
