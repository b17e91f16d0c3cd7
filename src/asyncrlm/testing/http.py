"""One HTTP/1.1 connection of a fake server: `h11` on an anyio stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.abc
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

try:
    import h11
except ImportError as error:  # pragma: no cover - the test extra has it
    raise ImportError('the fake servers need h11: pip install "asyncrlm[testing]"') from error

_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)


class HttpRequest(Struct, frozen=True):
    """One request, read whole."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class HttpConnection:
    """Reads requests from a stream and writes responses to it, one after the other."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.SERVER)

    async def next_request(self) -> HttpRequest | None:
        """The next request, or None when the client has gone or does not speak HTTP."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        head: h11.Request | None = None
        body: list[bytes] = []
        try:
            while True:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    if self._http.they_are_waiting_for_100_continue:
                        go_on = h11.InformationalResponse(status_code=100, headers=[])
                        await self._stream.send(self._http.send(go_on) or b"")
                    self._http.receive_data(await self._receive())
                elif isinstance(event, h11.Request):
                    head = event
                elif isinstance(event, h11.Data):
                    body.append(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage) and head is not None:
                    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
                    return HttpRequest(head.method.decode(), head.target.decode(), headers, b"".join(body))
                else:
                    return None
        except (h11.RemoteProtocolError, *_GONE):
            return None

    async def _receive(self) -> bytes:
        try:
            return await self._stream.receive()
        except anyio.EndOfStream:
            return b""

    async def while_connected(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Do `work`, unless the client goes away meanwhile; whether it was done."""
        done = False

        async def watch() -> None:
            try:
                while data := await self._receive():
                    self._http.receive_data(data)
            except _GONE:
                pass
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await work()
            done = True
            tasks.cancel_scope.cancel()
        return done

    async def send(self, status: int, headers: Mapping[str, str], body: bytes, *, cut: bool = False) -> bool:
        """Send a response of known length, or with `cut` its first half; whether the connection can go on."""
        head = h11.Response(status_code=status, headers=[*headers.items(), ("content-length", str(len(body)))])
        part = body[: len(body) // 2] if cut else body
        data = (self._http.send(head) or b"") + (self._http.send(h11.Data(data=part)) or b"")
        return await self._finish(data, cut=cut)

    async def send_chunks(
        self,
        status: int,
        headers: Mapping[str, str],
        chunks: Iterable[bytes],
        *,
        cut: bool = False,
        before: Callable[[int], Awaitable[None]] | None = None,
    ) -> bool:
        """Send a response piece by piece, or with `cut` only its first half; `before` each piece, await that."""
        pieces = list(chunks)
        head = h11.Response(status_code=status, headers=[*headers.items(), ("transfer-encoding", "chunked")])
        try:
            await self._stream.send(self._http.send(head) or b"")
            for number, piece in enumerate(pieces[: len(pieces) // 2] if cut else pieces):
                if before is not None:
                    await before(number)
                await self._stream.send(self._http.send(h11.Data(data=piece)) or b"")
        except _GONE:
            return False
        return await self._finish(b"", cut=cut)

    async def _finish(self, data: bytes, *, cut: bool) -> bool:
        if not cut:
            data += self._http.send(h11.EndOfMessage()) or b""
        try:
            await self._stream.send(data)
        except _GONE:
            return False
        return not cut and self._http.our_state is not h11.MUST_CLOSE
