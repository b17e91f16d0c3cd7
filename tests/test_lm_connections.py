"""The OpenAI-compatible client's connections, its pace, and what it takes from the SDK."""

from __future__ import annotations

import contextlib
import inspect
import os
import resource
import shutil
import ssl
import subprocess
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import anyio
import httpx2
import openai
import pytest
from anyio.streams.tls import TLSStream
from lm_serving import KEY, ask, serving, spec_for
from pacing_support import send

from asyncrlm.errors import ConfigurationError, LMError
from asyncrlm.ledger import Ledger, Need
from asyncrlm.lm.clients import client_spec
from asyncrlm.lm.http.pool import MAX_CONNECTIONS
from asyncrlm.lm.openai.client import OpenAIClient
from asyncrlm.lm.openai.spec import REFUSED_SDK_KWARGS, SDK_KWARGS
from asyncrlm.lm.pacing import Pacer
from asyncrlm.lm.pacing.gate import Gate
from asyncrlm.lm.pacing.limits import open_files_share
from asyncrlm.testing import FakeOpenAIServer, FakeReply

if TYPE_CHECKING:
    from asyncrlm.lm.base import LMClient, LMReply

pytestmark = pytest.mark.anyio


# --- connections ------------------------------------------------------------------------------------------------------


async def test_many_at_once_and_cancelled_ones_leave_the_pool_whole() -> None:
    async def handler(request: Any) -> FakeReply:
        return FakeReply(request.text, latency=60 if request.text == "slow" else 0)

    async with serving(handler) as (server, client):
        for _ in range(5):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    before = len(server.requests)
                    for _ in range(40):
                        tasks.start_soon(client.acomplete, ask("slow"))
                    with anyio.fail_after(10):
                        while len(server.requests) < before + 40:
                            await anyio.sleep(0.005)
                    scope.cancel()
            got: list[str] = []

            async def one(text: str, got: list[str] = got) -> None:
                got.append((await client.acomplete(ask(text))).text)

            with anyio.fail_after(10):
                async with anyio.create_task_group() as tasks:
                    for number in range(40):
                        tasks.start_soon(one, str(number))
            assert sorted(got, key=int) == [str(number) for number in range(40)]
            assert server.open_connections <= 80
        with anyio.fail_after(10):
            while server.aborted != 200:
                await anyio.sleep(0.005)
        assert server.open_connections <= 40


async def test_a_thousand_calls_one_after_the_other_share_a_connection() -> None:
    async with serving(lambda request: "ok") as (server, client):
        for _ in range(100):
            await client.acomplete(ask())
    assert (server.connections, server.open_connections) == (1, 0)


async def test_specs_of_one_account_share_connections_through_a_scope() -> None:
    async with FakeOpenAIServer(lambda request: request.body["model"]) as server, AsyncExitStack() as stack:
        opened: dict[Any, Any] = {}

        async def shared(key: Any, factory: Any) -> Any:
            if key not in opened:
                opened[key] = await stack.enter_async_context(factory())
            return opened[key]

        one, two = spec_for(server, model_name="one"), spec_for(server, model_name="two")
        foreign = spec_for(server, api_key="another-key-altogether")
        clients = [await spec.connect(shared) for spec in (one, two, foreign)]
        assert [(await client.acomplete(ask())).text for client in clients] == ["one", "two", "m"]
        assert len(opened) == 2
        assert server.connections == 2
        assert clients[0].account == clients[1].account != clients[2].account
        assert len({one.key, two.key, foreign.key}) == 3


async def test_the_callers_http_client_is_used_and_not_closed() -> None:
    async with httpx2.AsyncClient() as mine:
        async with serving("a", http_client=mine) as (server, client):
            assert (await client.acomplete(ask())).text == "a"
        assert not mine.is_closed
    assert server.connections == 1


def test_one_spec_serves_any_number_of_event_loops(no_leaks: None, anyio_backend: str) -> None:
    with FakeOpenAIServer.serve_in_thread(lambda request: "ok") as server:
        spec = spec_for(server)

        async def main() -> list[str]:
            replies: list[str] = []

            async def one() -> None:
                replies.append((await client.acomplete(ask())).text)

            async with spec.open() as client, anyio.create_task_group() as tasks:
                for _ in range(12):
                    tasks.start_soon(one)
            return replies

        for _ in range(3):
            assert anyio.run(main, backend=anyio_backend) == ["ok"] * 12


@pytest.fixture(scope="module")
def unknown_certificate(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """The TLS context of a server whose certificate nobody has signed but itself."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=127.0.0.1"
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


async def test_a_certificate_that_does_not_verify_is_not_tried_again(unknown_certificate: ssl.SSLContext) -> None:
    async def handshake(stream: anyio.abc.ByteStream) -> None:
        async with stream:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.EndOfStream, ssl.SSLError):
                async with await TLSStream.wrap(stream, server_side=True, ssl_context=unknown_certificate) as secure:
                    await secure.receive()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        spec = client_spec("vllm", {"base_url": f"https://127.0.0.1:{port}/v1", "model_name": "m"})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, handshake)
            async with spec.open() as client:
                with anyio.fail_after(10), pytest.raises(LMError, match="no connection") as caught:
                    await client.acomplete(ask())
            tasks.cancel_scope.cancel()
    assert (caught.value.kind, caught.value.retryable, caught.value.charged) == ("connection", False, False)


def test_connections_keep_to_the_open_files_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, expected in ((1024, 256), (64, 32), (10**6, MAX_CONNECTIONS), (resource.RLIM_INFINITY, MAX_CONNECTIONS)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert open_files_share(MAX_CONNECTIONS) == expected


# --- with the pacer ---------------------------------------------------------------------------------------------------


async def paced(client: LMClient) -> LMReply:
    need = Need(model="m", input_bytes=10, output_cap=None, price=None)
    return await send(Pacer(name=client.account), client, ask(), gate=Gate(4), ledger=Ledger(), need=need)


async def test_a_rate_limit_is_waited_out_as_long_as_the_server_says() -> None:
    async with serving(FakeReply.fault(429, retry_after=0.4), FakeReply.fault(429, retry_after=0.4), "ok") as (
        server,
        client,
    ):
        started = anyio.current_time()
        assert (await paced(client)).text == "ok"
        assert anyio.current_time() - started >= 0.8
    assert len(server.requests) == 3


async def test_a_wrong_key_is_raised_at_once() -> None:
    async with serving(FakeReply.fault(401), "never") as (server, client):
        with pytest.raises(LMError) as caught:
            await paced(client)
    assert (caught.value.kind, len(server.requests)) == ("authentication", 1)


async def test_faults_of_all_sorts_are_survived() -> None:
    replies = [FakeReply("x", cut="within"), FakeReply("x", cut="before"), FakeReply(body=b"oops"), "ok"]
    async with serving(*replies) as (server, client):
        with anyio.fail_after(10):
            assert (await paced(client)).text == "ok"
    assert len(server.requests) == 4


# --- the SDK ----------------------------------------------------------------------------------------------------------


def test_every_argument_of_the_sdk_is_taken_or_refused_by_name() -> None:
    public = {name for name in inspect.signature(openai.AsyncOpenAI).parameters if not name.startswith("_")}
    assert public == {*SDK_KWARGS, *REFUSED_SDK_KWARGS}


async def test_what_the_sdk_refuses_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = client_spec("openai", {"api_key": KEY, "data_residency": "atlantis"})
    with pytest.raises(ConfigurationError, match="SDK refuses"):
        async with spec.open():
            pass
    async with client_spec("openai", {"api_key": KEY, "data_residency": "eu"}).open() as client:
        assert isinstance(client, OpenAIClient)
        assert "eu.api.openai.com" in client.account


def test_naming_a_client_loads_no_sdk_and_no_listener() -> None:
    code = (
        "import sys\n"
        "from asyncrlm import AsyncRLM\n"
        "AsyncRLM('openai', backend_kwargs={'api_key': 'k'})\n"
        "heavy = {'openai', 'httpx2', 'aiohttp', 'tenacity', 'pydantic'} & set(sys.modules)\n"
        "heavy |= {f'asyncrlm.observe.{name}' for name in ('jsonl', 'progress', 'trajectory')} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
