"""Where an engine is found, and how images come to it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import http.server
import io
import json
import logging
import socket
import tarfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from asyncrlm import ConfigurationError, Repl, SandboxLost
from asyncrlm.environments.docker_endpoints import find_engine

pytest.importorskip("aiodocker", reason="the Docker environment's SDK is not installed")

from asyncrlm.environments import docker_engine as driver

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # its SDK runs on nothing else


# ---- where it is ----


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with nothing in it."""
    for name in ("HOST", "CONTEXT", "CONFIG", "CERT_PATH", "TLS_VERIFY"):
        monkeypatch.delenv(f"DOCKER_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path


def make_context(home: Path, name: str, **endpoint: Any) -> Path:
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta = home / ".docker" / "contexts" / "meta" / digest / "meta.json"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"Name": name, "Endpoints": {"docker": endpoint}}))
    return home / ".docker" / "contexts" / "tls" / digest / "docker"


def use_context(home: Path, name: str) -> None:
    (home / ".docker").mkdir(exist_ok=True)
    (home / ".docker" / "config.json").write_text(json.dumps({"currentContext": name}))


def test_what_names_an_engine_goes_in_this_order(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "three"):
        make_context(home, name, Host=f"tcp://{name}:1")
    use_context(home, "one")
    assert find_engine().url == "tcp://one:1"
    monkeypatch.setenv("DOCKER_CONTEXT", "two")
    assert find_engine().url == "tcp://two:1"
    monkeypatch.setenv("DOCKER_HOST", "unix:///named")
    assert find_engine().url == "unix:///named"
    assert find_engine(context="three").url == "tcp://three:1"
    assert find_engine(host="ssh://me@host").url == "ssh://me@host"


def test_sockets_of_rootless_engines_and_of_podman_are_looked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_context(home, "default")
    there = {f"{home}/run/podman/podman.sock"}
    monkeypatch.setattr(Path, "is_socket", lambda path: str(path) in there)
    assert find_engine().url == f"unix://{home}/run/podman/podman.sock"
    there.add(f"{home}/.docker/run/docker.sock")
    assert find_engine().url == f"unix://{home}/.docker/run/docker.sock"
    there.clear()
    with pytest.raises(ConfigurationError, match="no Docker Engine was found"):
        find_engine()


def test_certificates_come_from_the_context_or_from_where_docker_looks(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_context(home, "safe", Host="tcp://safe:1", SkipTLSVerify=True).mkdir(parents=True)
    found = find_engine(context="safe")
    assert found.certificates is not None
    assert not found.verify
    assert not found.tls().check_hostname
    monkeypatch.setenv("DOCKER_HOST", "tcp://other:1")
    assert find_engine().certificates is None
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", "/certificates")
    assert find_engine().certificates == "/certificates"
    assert find_engine().tls().check_hostname


@pytest.mark.parametrize("content", [None, "{", '{"Endpoints": {}}'])
def test_a_context_that_can_not_be_used_is_told(home: Path, content: str | None) -> None:
    use_context(home, "mine")
    make_context(home, "other", Host="tcp://x:1")
    if content is not None:
        make_context(home, "mine", Host="")
        digest = hashlib.sha256(b"mine").hexdigest()
        (home / ".docker" / "contexts" / "meta" / digest / "meta.json").write_text(content)
    with pytest.raises(ConfigurationError, match="docker context 'mine' can't be used"):
        find_engine()


def test_a_broken_configuration_of_the_command_is_told(home: Path) -> None:
    use_context(home, "mine")
    (home / ".docker" / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"config\.json can't be read"):
        find_engine()


@pytest.mark.parametrize("url", ["carrier-pigeon://loft", "ssh://nobody@localhost"])
async def test_addresses_that_lead_nowhere(home: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import aiodocker.ssh

    monkeypatch.setattr(aiodocker.ssh, "asyncssh", None)
    with pytest.raises(ConfigurationError, match=r"no address of a Docker Engine|asyncssh is required"):
        async with Repl("docker", environment_kwargs={"docker_host": url}):
            pass


async def test_an_engine_behind_tcp(docker: httpx.AsyncClient, docker_host: str) -> None:
    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
            sink.write_eof()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        forwarding.append(asyncio.current_task())
        far_reader, far_writer = await asyncio.open_unix_connection(docker_host.removeprefix("unix://"))
        try:
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        finally:
            for end in (writer, far_writer):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    forwarding: list[Any] = []
    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    async with server:
        host = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Repl("docker", context="x" * 3_000_000, environment_kwargs={"docker_host": host}) as repl:
            assert (await repl.execute("print(len(context))")).stdout == "3000000\n"
        assert forwarding
        await asyncio.gather(*forwarding)


# ---- images ----


class Registry(http.server.BaseHTTPRequestHandler):
    """Has one image, of a file that is no program."""

    protocol_version = "HTTP/1.1"
    blobs: ClassVar[dict[str, tuple[str, bytes]]] = {}
    refuse = False

    def do_GET(self) -> None:
        kind, body = self.blobs.get(self.path, ("", b""))
        if self.refuse:
            return self._answer(401, "application/json", b'{"errors": [{"code": "UNAUTHORIZED"}]}')
        if not kind and self.path != "/v2/":
            return self._answer(404, "application/json", b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}')
        return self._answer(200, kind or "application/json", body)

    do_HEAD = do_GET

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Docker-Content-Digest", digest(body))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@pytest.fixture
def registry() -> Iterator[str]:
    """The name of the image, which begins with the registry's address."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        info = tarfile.TarInfo("note")
        info.size = 1 << 20
        tar.addfile(info, io.BytesIO(bytes(1 << 20)))
    packed = gzip.compress(layer.getvalue(), 0)
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Volumes": {"/declared": {}}},
            "rootfs": {"type": "layers", "diff_ids": [digest(layer.getvalue())]},
        }
    ).encode()
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    layers = [
        {
            "mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip",
            "size": len(packed),
            "digest": digest(packed),
        }
    ]
    described = {
        "mediaType": "application/vnd.docker.container.image.v1+json",
        "size": len(config),
        "digest": digest(config),
    }
    manifest = json.dumps({"schemaVersion": 2, "mediaType": kind, "config": described, "layers": layers}).encode()
    Registry.refuse = False
    Registry.blobs = {f"/v2/thing/manifests/{name}": (kind, manifest) for name in ("1", digest(manifest))}
    Registry.blobs |= {
        f"/v2/thing/blobs/{digest(data)}": ("application/octet-stream", data) for data in (packed, config)
    }
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}/thing:1"
        server.shutdown()
        thread.join()


async def test_an_image_that_is_missing_is_pulled_once_with_progress(
    docker: httpx.AsyncClient, registry: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(driver, "TOLD_EVERY", 0)
    caplog.set_level(logging.INFO, "asyncrlm")
    pulled = f"pulled a Docker image' image='{registry}'"
    for times in (1, 1, 2):
        # There is no Python in it.
        kwargs = {"image": registry, "pull": "always" if times == 2 else "missing"}
        with pytest.raises(ConfigurationError, match=f"could not be started: .*python3.*{registry}"):
            async with Repl("docker", environment_kwargs=kwargs):
                pass
        assert sum(pulled in record.getMessage() for record in caplog.records) == times
    assert any("of 1'" in record.getMessage() for record in caplog.records)
    (await docker.delete(f"/images/{registry}")).raise_for_status()


async def test_an_image_that_its_registry_does_not_give(docker: httpx.AsyncClient, registry: str) -> None:
    with pytest.raises(ConfigurationError, match=r"can't be pulled.*docker pull .*thing:2"):
        async with Repl("docker", environment_kwargs={"image": registry[:-1] + "2"}):
            pass
    Registry.refuse = True
    with pytest.raises(ConfigurationError, match=r"can't be pulled.*docker pull .*thing:1"):
        async with Repl("docker", environment_kwargs={"image": registry}):
            pass


async def test_a_registry_that_does_not_answer(docker: httpx.AsyncClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(SandboxLost, match="can't be pulled"):
        async with Repl("docker", environment_kwargs={"image": f"127.0.0.1:{port}/thing:1"}):
            pass
