"""A web server on loopback for the checks that need one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.abc

Answer = Callable[[str, bytes], tuple[str, str, bytes]]
"""Method and body of a request → status line, content type and body."""


@asynccontextmanager
async def serving(answer: Answer) -> AsyncGenerator[str]:
    """The address of a server that answers so, and closes the connection after each answer."""

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            data = b""
            while b"\r\n\r\n" not in data:
                data += await stream.receive()
            head, _, body = data.partition(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.splitlines()[1:])
            while len(body) < int(fields.get(b"content-length", b"0")):
                body += await stream.receive()
            status, kind, reply = answer(head.split()[0].decode(), body)
            lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(reply)}"]
            await stream.send("\r\n".join([*lines, "connection: close", "", ""]).encode() + reply)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 - not Django's
        yield f"http://127.0.0.1:{port}/"
        tasks.cancel_scope.cancel()
