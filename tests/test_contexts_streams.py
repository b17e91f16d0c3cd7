"""Open files, asynchronous iterators and documents of the web as contexts."""

from __future__ import annotations

import errno
import gzip
import io
import ipaddress
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx2
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, Repl, Web
from asyncrlm.events import ContextProgress
from asyncrlm.repl import context as context_module
from asyncrlm.repl import web as web_module
from asyncrlm.repl.gather import gathered
from asyncrlm.repl.spool import Spool
from asyncrlm.repl.web import is_public

from .helpers import scripted, submit, told

pytestmark = pytest.mark.anyio
BODY = bytes(range(32, 127)) * 50
LOCAL = Web(allow_private=True, attempts=3)


async def pieces(*values: Any) -> AsyncIterator[Any]:
    for value in values:
        yield value


async def run(prompt: Any, expression: str, **options: Any) -> str:
    root = scripted(submit(expression))
    with anyio.fail_after(10):
        return (await AsyncRLM(backend=root).acompletion(prompt, "What?", **options)).response


async def test_iterators_of_text_and_of_bytes(no_leaks: None) -> None:
    assert await run(pieces("hé", "", "llo\r\n"), "repr(context)") == repr("héllo\r\n")
    assert await run(pieces("a\ud800", "b"), "ascii(context)") == ascii("a\ud800b")
    assert await run(pieces(b"a\xff", bytearray(b"b")), "repr(context)") == repr(b"a\xffb")
    assert await run(pieces(), "repr(context)") == "''"
    assert await run(pieces("héllo" * 3), "type(context).__name__ + context[1:3]", lazy=True) == "Textél"
    for wrong in ((b"a", "b"), ("a", 5), (None,)):
        with pytest.raises(ConfigurationError, match="gives str or bytes, all of one kind"):
            await run(pieces(*wrong), "1")


async def test_open_files(no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"012345")
    with path.open("rb") as file:
        file.seek(2)
        assert await run(file, "repr(context)") == repr(b"2345")
        assert file.tell() == 2
    assert await run(io.BytesIO(b"ab"), "repr(context)") == repr(b"ab")
    with path.open() as text, pytest.raises(ConfigurationError, match="opened as text"):
        await run(text, "1")
    monkeypatch.setattr(context_module, "MAX_PATH_BYTES", 3)
    assert await run(io.BytesIO(b"abcdef"), "repr((context.read(2), context.seek(-1, 2), context.read()))") == repr(
        (b"ab", 5, b"f")
    )


async def test_what_a_stream_raises_is_said(no_leaks: None) -> None:
    async def broken() -> AsyncIterator[str]:
        yield "a"
        raise RuntimeError("the line went dead")

    class Broken:
        def read(self, size: int) -> bytes:
            raise LookupError("no such sector")

    with pytest.raises(ConfigurationError, match="iterator given as prompt raised RuntimeError: the line went dead"):
        await run(broken(), "context")
    with pytest.raises(ConfigurationError, match="can't be read: LookupError: no such sector"):
        await run(Broken(), "context")


async def test_a_repl_takes_streams_and_keeps_them_for_the_next_worker(no_leaks: None) -> None:
    with anyio.fail_after(10):
        async with Repl(context=pieces("x", "yz")) as repl:
            await repl.execute("import os; os._exit(1)")
            assert (await repl.execute("print(context)")).stdout == "xyz\n"


# ---- the web ---------------------------------------------------------------------------------------------------------


def response(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = [f"HTTP/1.1 {status}", f"content-length: {size}", "connection: close", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


@asynccontextmanager
async def server(*answers: bytes | Callable[[str], bytes]) -> AsyncIterator[tuple[str, list[str]]]:
    """Gives these answers in order; yields its address and the requests it got."""
    asked: list[str] = []
    left = list(answers)

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                head += await stream.receive()
            asked.append(head.decode())
            answer = left.pop(0)
            await stream.send(answer if isinstance(answer, bytes) else answer(head.decode()))

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}", asked
        group.cancel_scope.cancel()


async def fetched(url: str, web: Web = LOCAL) -> Any:
    with anyio.fail_after(10):
        file = await gathered(
            httpx2.URL(url), lazy=False, web=web, threads=anyio.CapacityLimiter(2), tell=lambda *_: None
        )
    data = b"".join(context_module._contents(file))
    return data.decode() if file.text else data


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_module, "_PATIENCE", 0.001)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("body", "header", "wanted"),
    [
        ("hé".encode(), "content-type: text/plain", "hé"),
        ("hé".encode("latin-1"), "content-type: text/html; charset=ISO-8859-1", "hé"),
        ("hé".encode("utf-16"), "content-type: text/plain; charset=utf-16", "hé"),
        (b"a\xff", "content-type: text/plain", b"a\xff"),
        (b"{}", "content-type: application/json", "{}"),
        (b"%PDF", "content-type: application/pdf", b"%PDF"),
        (b"plain", "x: y", "plain"),
        (zlib.compress(b"z" * 1000), "content-encoding: deflate", "z" * 1000),
        (zlib.compress(b"z" * 1000)[2:-4], "content-encoding: deflate", "z" * 1000),
        (gzip.compress(b"y") + gzip.compress(b"z" * 3_000_000), "content-encoding: GZIP", "y" + "z" * 3_000_000),
        (b"", "content-encoding: gzip", ""),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_documents_and_their_charsets(no_leaks: None, body: bytes, header: str, wanted: Any) -> None:
    async with server(response(body, header)) as (url, asked):
        assert await fetched(url) == wanted
    assert "accept-encoding: identity" in asked[0].lower()


async def test_the_model_asks_about_a_document(no_leaks: None) -> None:
    root = scripted(submit("context"))
    seen: list[Any] = []
    async with server(response("hé".encode(), "content-type: text/plain")) as (url, _):
        with anyio.fail_after(10):
            rlm = AsyncRLM(backend=root)
            async with rlm.astream(httpx2.URL(f"{url}/a?key=secret"), "What?", web=LOCAL) as events:
                async for event in events:
                    seen.append(event)
            assert events.result is not None
            assert events.result.response == "hé"
    assert f"It is the file: '{url.rpartition(':')[0]}/a'." in told(root, 1)
    assert "secret" not in repr(root.calls)
    came = [event for event in seen if isinstance(event, ContextProgress)]
    assert (came[-1].received, came[-1].total) == (3, 3)


async def test_a_cut_connection_is_taken_up_where_it_was_cut(no_leaks: None) -> None:
    tag = 'etag: "v1"'
    rest = response(b"defg", "content-range: bytes 3-6/7", status="206 Partial Content")
    async with server(response(b"abc", tag, length=7), rest) as (url, asked):
        assert await fetched(url) == "abcdefg"
    assert "range: bytes=3-" in asked[1].lower()
    assert 'if-range: "v1"' in asked[1].lower()
    async with server(response(b"abc", tag, length=7), response(b"changed", 'etag: "v2"')) as (url, asked):
        assert await fetched(url) == "changed"
    async with server(response(b"abc", length=7), response(b"whole")) as (url, asked):
        assert await fetched(url) == "whole"
    assert "range" not in asked[1].lower()
    async with server(response(b"", status="503 Busy"), response(b"whole")) as (url, _):
        assert await fetched(url) == "whole"
    async with server(*[response(b"abc", tag, length=7)] * 3) as (url, _):
        with pytest.raises(ConfigurationError, match="could not be fetched, tried 3 times"):
            await fetched(url)


PART = "206 Partial Content"


@pytest.mark.parametrize(
    "part",
    [
        response(b"DEFG", "content-range: bytes 3-6/7", 'etag: "v2"', status=PART),
        response(gzip.compress(b"DEFG"), "content-range: bytes 3-6/7", "content-encoding: gzip", status=PART),
        response(b"DEFG", "content-range: bytes 2-5/7", status=PART),
    ],
    ids=["another", "packed", "elsewhere"],
)
async def test_a_part_of_something_else_is_not_taken(no_leaks: None, part: bytes) -> None:
    async with server(response(b"abc", 'etag: "v1"', length=7), part, response(b"whole")) as (url, asked):
        assert await fetched(url) == "whole"
    assert "range" not in asked[2].lower()
    async with server(response(b"abc", 'etag: "v1"', length=7), part, part) as (url, _):
        with pytest.raises(ConfigurationError, match="answered 206"):
            await fetched(url)


async def test_a_part_that_is_too_short_is_followed_by_another(no_leaks: None) -> None:
    parts = [response(b"de", "content-range: bytes 3-4/7", status=PART)]
    parts += [response(b"fg", "content-range: bytes 5-6/7", status=PART)]
    async with server(response(b"abc", 'etag: "v1"', length=7), *parts) as (url, asked):
        assert await fetched(url) == "abcdefg"
    assert "range: bytes=5-" in asked[2].lower()


async def test_what_is_packed_and_not_all_there_is_not_taken_for_the_whole(no_leaks: None) -> None:
    cut = response(gzip.compress(BODY)[:-10], "content-encoding: gzip")
    async with server(cut, response(gzip.compress(BODY), "content-encoding: gzip")) as (url, _):
        assert await fetched(url) == BODY.decode()


async def test_no_more_is_unpacked_than_may_be_had(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = Spool.write

    def noted(spool: Spool, data: bytes) -> None:
        sizes.append(len(data))
        write(spool, data)

    monkeypatch.setattr(Spool, "write", noted)
    bomb = response(gzip.compress(bytes(40 << 20)), "content-encoding: gzip")
    async with server(bomb) as (url, _):
        with pytest.raises(ConfigurationError, match="more than 100 bytes"):
            await fetched(url, Web(allow_private=True, max_bytes=100))
    assert sizes == [1 << 20]


async def test_a_disk_that_is_full_is_said(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(spool: Spool, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Spool, "write", full)
    async with server(response(b"abc")) as (url, _):
        with pytest.raises(ConfigurationError, match=r"could not be kept in a file.*No space left"):
            await fetched(url)
    with pytest.raises(ConfigurationError, match=r"could not be kept in a file.*No space left"):
        await run(pieces("abc"), "context")


async def test_what_is_refused(no_leaks: None) -> None:
    async with server() as (url, asked):
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]"):
            with pytest.raises(ConfigurationError, match=r"no address of the public internet; web=Web\(allow_private"):
                await fetched(url.replace("127.0.0.1", host), Web())
    assert asked == []
    big = zlib.compress(b"z" * 10_000)
    small = Web(allow_private=True, max_bytes=100)
    for body, headers in ((b"a" * 200, ['etag: "x"']), (big, ["content-encoding: deflate"]), (b"a" * 200, [])):
        async with server(response(body, *headers)) as (url, _):
            with pytest.raises(ConfigurationError, match="more than 100 bytes"):
                await fetched(url, small)
    for answer, why in (
        (response(b"", status="404 Gone"), "answered 404"),
        (response(b"", "location: ftp://x/y", status="302 Found"), "only http and https"),
        (response(b"a\xff", "content-type: text/plain; charset=utf-8"), "is not the utf-8"),
        (response(b"a", "content-type: text/plain; charset=rot13"), "a charset not known here"),
        (response(b"a", "content-type: text/plain; charset=undefined"), "a charset not known here"),
        (response(b"ab", "content-type: text/plain; charset=utf-16"), "is not the utf-16 that it says"),
        (response(b"abc", "content-encoding: gzip"), "is not the gzip that it says"),
        (response(b"abc", "content-encoding: br"), "comes packed as 'br', which nobody asked for"),
        (response(gzip.compress(b"abc"), "content-encoding: gzip, gzip"), "comes packed as 'gzip, gzip'"),
    ):
        async with server(answer) as (url, _):
            with pytest.raises(ConfigurationError, match=why):
                await fetched(url)
    turn = response(b"", "location: /again", status="302 Found")
    async with server(*[turn] * 11) as (url, _):
        with pytest.raises(ConfigurationError, match="more than 10 redirects"):
            await fetched(url)
    async with server(turn, response(b"there")) as (url, asked):
        assert await fetched(url) == "there"
    assert asked[1].startswith("GET /again")


def test_which_addresses_are_public() -> None:
    for public in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        assert is_public(ipaddress.ip_address(public)), public
    for private in (
        "127.0.0.1", "10.0.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1", "fe80::1", "fd00::1",
        "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "::", "::10.0.0.1", "::ffff:0:10.0.0.1", "fec0::2",
        "64:ff9b:1::808:808",
    ):  # fmt: skip
        assert not is_public(ipaddress.ip_address(private)), private
