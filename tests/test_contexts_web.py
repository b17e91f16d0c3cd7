"""Documents of the web over TLS, and through every door."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.abc
import httpx2
import pytest
from anyio.streams.tls import TLSListener

from asyncrlm import AsyncRLM, ConfigurationError, Repl, Web
from asyncrlm.cli import main
from asyncrlm.repl import web as web_module

from .helpers import scripted, submit

BODY = "The héllo came over a long wire."


class Authority(NamedTuple):
    trusted: ssl.SSLContext
    """What trusts it, and nobody else."""
    server: Callable[..., ssl.SSLContext]
    """That of a server with these names, and a certificate that is over after so many days."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("authority")
    now = dt.datetime.now(dt.UTC)
    root_key = ec.generate_private_key(ec.SECP256R1())
    root_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "An authority of the tests")])

    def certificate(subject: Any, key: Any, days: int, *extensions: tuple[Any, bool]) -> Any:
        builder = x509.CertificateBuilder(
            issuer_name=root_name,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - dt.timedelta(days=10),
            not_valid_after=now + dt.timedelta(days=days),
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(root_key, hashes.SHA256())

    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    root_id = x509.SubjectKeyIdentifier.from_public_key(root_key.public_key())
    basic = x509.BasicConstraints(ca=True, path_length=None)
    root = certificate(root_name, root_key, 100, (basic, True), (usage, True), (root_id, False))

    def server(*names: str, days: int = 100) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives: list[Any] = []
        for name in names:
            try:
                alternatives.append(x509.IPAddress(ipaddress.ip_address(name)))
            except ValueError:
                alternatives.append(x509.DNSName(name))
        leaf = certificate(
            x509.Name([]),
            key,
            days,
            (x509.SubjectAlternativeName(alternatives), True),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key()), False),
        )
        path = folder / f"{'-'.join(names)}-{days}.pem"
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(secret + leaf.public_bytes(serialization.Encoding.PEM))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context

    return Authority(ssl.create_default_context(cadata=root.public_bytes(serialization.Encoding.PEM).decode()), server)


@asynccontextmanager
async def serving(context: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[str]]]:
    """A server that gives everybody `BODY`; its port, and for each request the name it was greeted by and its head."""
    seen: list[str] = []
    greeted: list[str] = []
    if context is not None:
        context.sni_callback = lambda _socket, name, _context: greeted.append(str(name))

    async def serve(stream: Any) -> None:
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                head += await stream.receive()
            seen.append(f"{greeted[-1:]} {head.decode()}")
            body = BODY.encode()
            await stream.send(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
                % len(body)
                + body
            )

    plain = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = plain.extra(anyio.abc.SocketAttribute.local_port)
    listener: Any = plain if context is None else TLSListener(plain, context, standard_compatible=False)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield port, seen
        group.cancel_scope.cancel()


async def asked(url: str, web: Web) -> str:
    with anyio.fail_after(10):
        return (await AsyncRLM(scripted(submit("context"))).acompletion(httpx2.URL(url), "What?", web=web)).response


@pytest.mark.anyio
async def test_a_document_over_tls(no_leaks: None, authority: Authority) -> None:
    """Asked for at the address that was checked, its certificate is held against its name."""
    web = Web(allow_private=True, verify=authority.trusted)
    async with serving(authority.server("localhost")) as (port, seen):
        assert await asked(f"https://localhost:{port}/a", web) == BODY
    assert seen[0].startswith("['localhost'] GET /a HTTP/1.1\r\n")
    assert f"\r\nhost: localhost:{port}\r\n" in seen[0].lower()
    async with serving(authority.server("127.0.0.1")) as (port, _):
        assert await asked(f"https://127.0.0.1:{port}/a", web) == BODY


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("names", "days", "trusts", "why"),
    [
        (["localhost"], 100, False, "unable to get local issuer certificate|self.signed"),
        (["example.org", "127.0.0.1"], 100, True, "[Hh]ostname mismatch"),
        (["localhost"], -1, True, "certificate has expired"),
    ],
    ids=["unknown", "another", "over"],
)
async def test_a_certificate_that_does_not_hold(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, names: list[str], days: int, trusts: bool, why: str
) -> None:
    monkeypatch.setattr(web_module, "_PATIENCE", 1e6)  # nothing is tried twice
    web = Web(allow_private=True, verify=authority.trusted if trusts else None)
    async with serving(authority.server(*names, days=days)) as (port, seen):
        with pytest.raises(ConfigurationError, match=f"could not be fetched: its certificate was refused: .*({why})"):
            await asked(f"https://localhost:{port}/", web)
    assert seen == []


@pytest.mark.anyio
async def test_a_repl_is_told_how_to_fetch(no_leaks: None) -> None:
    async with serving() as (port, _):
        url = httpx2.URL(f"http://127.0.0.1:{port}/")
        with anyio.fail_after(10):
            async with Repl(context=url, web=Web(allow_private=True)) as repl:
                await repl.load("context_1", url)
                assert (await repl.execute("print(context == context_1, context)")).stdout == f"True {BODY}\n"
                with pytest.raises(ConfigurationError, match="more than 3 bytes"):
                    await repl.load("context_2", url, web=Web(allow_private=True, max_bytes=3))
            with pytest.raises(ConfigurationError, match="no address of the public internet"):
                async with Repl(context=url):
                    pass
    with pytest.raises(ConfigurationError, match="web is a Web"):
        Repl(web={})  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_the_command_is_told_how_to_fetch(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> tuple[Any, str]:
        monkeypatch.setattr(
            sys, "argv", ["asyncrlm", "run", *arguments, "-q", "What came over a wire?", "--backend", "offline"]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return ended.value.code, out + err

    async with serving() as (port, _):
        url = f"http://127.0.0.1:{port}/{Path(__file__).name}"
        with anyio.fail_after(20):
            status, text = await anyio.to_thread.run_sync(run, url, "--allow-private")
            assert (status or 0, BODY in text) == (0, True), text
            status, text = await anyio.to_thread.run_sync(run, url, "--allow-private", "--max-download", "3")
    assert status == 2
    assert "more than 3 bytes; --max-download allows more" in text
