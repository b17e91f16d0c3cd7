"""Documents of the web as contexts: streamed to a file, bounded, resumed, from addresses that may be asked."""

from __future__ import annotations

import codecs
import ipaddress
import socket
import ssl
import zlib
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.to_thread
from msgspec import Struct

from .._version import __version__
from ..errors import ConfigurationError
from .files import HostFile, Tell
from .spool import Spool

if TYPE_CHECKING:
    import httpx2

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

REDIRECTS = 10
"""Redirects followed."""
_TEXTS = ("json", "xml", "javascript", "yaml", "toml", "csv", "x-ndjson", "sql", "x-sh")
_PACKED = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Ways of packing that are taken though nobody asked for them → the form of it that zlib knows."""
_PIECE = 1 << 20
"""Bytes unpacked at a time."""
_EMBEDDED = [ipaddress.ip_network(network) for network in ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")]
"""Whose last 32 bits are an address of IPv4."""
_LOCAL = [ipaddress.ip_network(network) for network in ("64:ff9b:1::/48", "fec0::/10")]
_PATIENCE = 1.0
"""Seconds before the second attempt; each one after waits twice as long."""


class Web(Struct, frozen=True, kw_only=True):
    """How documents of the web are fetched."""

    max_bytes: int = 1 << 30
    """Bytes that a document may have, once unpacked."""
    allow_private: bool = False
    """Whether addresses that are not of the public internet may be asked: loopback, private networks."""
    timeout: float = 60.0
    """Seconds to connect in, and to wait for the next bytes."""
    attempts: int = 5
    """How often to try; where the server can, it goes on where the last one was cut off."""
    verify: ssl.SSLContext | None = None
    """What servers' certificates are held against; None: the authorities that httpx2 trusts."""


class _CutError(Exception):
    """This attempt came to nothing; another may not."""


def is_url(value: Any) -> bool:
    """Whether it is a `URL` of httpx or httpx2. A str never is."""
    kind = cast("Any", type(value))
    return kind.__name__ == "URL" and kind.__module__.partition(".")[0] in ("httpx", "httpx2")


async def fetch(url: str, web: Web, threads: anyio.CapacityLimiter, tell: Tell) -> HostFile:
    """The document at `url`: a text where its type or charset says so, or nothing says anything and it is UTF-8.

    Raises:
        ConfigurationError: if it can't be had.
    """
    import httpx2  # noqa: PLC0415 - loaded where it is used

    download = _Download(httpx2.URL(url), web, threads, tell)
    faults = (httpx2.TransportError, _CutError)
    # Nothing of the environment: a proxy would connect where nobody checks the address.
    verify = True if web.verify is None else web.verify
    async with httpx2.AsyncClient(trust_env=False, verify=verify, timeout=httpx2.Timeout(web.timeout)) as client:
        for attempt in range(web.attempts):
            try:
                return await download.attempt(client)
            except faults as error:
                if (refused := _certificate(error)) is not None:
                    raise ConfigurationError(
                        f"{download.name} could not be fetched: its certificate was refused: {refused}"
                    ) from error
                if attempt + 1 == web.attempts:
                    raise ConfigurationError(
                        f"{download.name} could not be fetched, tried {web.attempts} times: "
                        f"{str(error) or type(error).__name__}"
                    ) from error
            except httpx2.InvalidURL as error:
                raise ConfigurationError(f"{download.name} is no address to fetch: {error}") from error
            except UnicodeError as error:
                raise ConfigurationError(
                    f"{download.name} is not the {download.charset} that it says: {error}"
                ) from error
            except OSError as error:
                raise ConfigurationError(f"{download.name} could not be kept in a file: {error}") from error
            await anyio.sleep(_PATIENCE * 2**attempt)
    raise ConfigurationError("Web(attempts=...) is at least 1")


def _certificate(error: BaseException | None) -> str | None:
    """What was wrong with the server's certificate, if that is what an error came of."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message or str(error)
        error = error.__cause__ or error.__context__
    return None


class _Download:
    """One document, over as many attempts as it takes."""

    def __init__(self, url: httpx2.URL, web: Web, threads: anyio.CapacityLimiter, tell: Tell) -> None:
        self._url, self._web, self._threads, self._tell = url, web, threads, tell
        self.name = f"{url.scheme}://{url.host}{url.path}"  # neither a password nor a query, which may hold a key
        self._spool = Spool()
        self._received = 0  # bytes as they were sent
        self._validator: str | None = None  # of what is there, where more of the same can be asked for
        self._whole: int | None = None  # how many there are, where a part of them was sent
        self.charset = "utf-8"
        """What it is said to be."""
        self._packed = ""
        self._unpacker: Any = None
        self._decoder: Any = None
        self._text: bool | None = None  # None: whether it is UTF-8 is seen as it comes

    async def attempt(self, client: httpx2.AsyncClient) -> HostFile:
        """Fetch it, or what is missing of it."""
        headers = {"accept-encoding": "identity", "user-agent": f"asyncrlm/{__version__}"}
        if self._received and self._validator is not None:
            headers |= {"range": f"bytes={self._received}-", "if-range": self._validator}
        response = await self._ask(client, headers)
        try:
            await self._begin(response)
            await self._take(response)
        finally:
            await response.aclose()
        return HostFile.spooled(self.name, self._spool, text=self._text is not False)

    async def _ask(self, client: httpx2.AsyncClient, headers: dict[str, str]) -> httpx2.Response:
        url = self._url
        for _ in range(REDIRECTS + 1):
            if url.scheme not in ("http", "https") or not url.host:
                raise ConfigurationError(f"{self.name} leads to {str(url)[:200]!r}; only http and https can be fetched")
            response = await self._connect(client, url, headers)
            if not response.has_redirect_location:
                return response
            await response.aclose()
            url = url.join(response.headers["location"])
        raise ConfigurationError(f"{self.name} leads through more than {REDIRECTS} redirects")

    async def _connect(self, client: httpx2.AsyncClient, url: httpx2.URL, headers: dict[str, str]) -> httpx2.Response:
        """Ask the host at an address that was checked: at that one, whatever its name means by the next moment."""
        import httpx2  # noqa: PLC0415 - as above

        addresses = await self._addresses(url)
        for left in range(len(addresses) - 1, -1, -1):
            request = client.build_request(
                "GET",
                url.copy_with(host=str(addresses[-1 - left])),
                headers={**headers, "host": url.netloc.decode("ascii")},
                extensions={"sni_hostname": url.host},
            )
            try:
                return await client.send(request, stream=True, follow_redirects=False)
            except httpx2.ConnectError:
                if not left:
                    raise
        raise _CutError(f"{url.host} has no address")

    async def _addresses(self, url: httpx2.URL) -> list[Address]:
        try:
            found = await anyio.getaddrinfo(url.host, url.port or 443, type=socket.SOCK_STREAM)
        except OSError as error:
            raise _CutError(f"{url.host}: {error}") from error
        addresses = [ipaddress.ip_address(place[4][0].partition("%")[0]) for place in found]
        allowed = [address for address in dict.fromkeys(addresses) if self._web.allow_private or is_public(address)]
        if addresses and not allowed:
            raise ConfigurationError(
                f"{self.name} leads to {url.host} at {addresses[0]}, which is no address of the public internet; "
                "web=Web(allow_private=True) allows it"
            )
        return allowed

    async def _begin(self, response: httpx2.Response) -> None:
        status, headers = response.status_code, response.headers
        packed = headers.get("content-encoding", "").strip().lower().replace("identity", "")
        if status == 206 and not packed and self._goes_on(headers):
            return
        if status in (206, 408, 416, 429) or status >= 500:
            self._validator = None  # so that the next attempt asks for all of it
            raise _CutError(f"the server answered {status}")
        if status != 200:
            raise ConfigurationError(f"{self.name} could not be fetched: the server answered {status}")
        if packed and packed not in _PACKED:
            raise ConfigurationError(f"{self.name} comes packed as {packed[:40]!r}, which nobody asked for")
        self._spool.clear()
        self._received = 0
        self._validator = self._whole = None
        if not packed:
            tag = headers.get("etag", "")
            self._validator = tag if _is_tag(tag) else headers.get("last-modified")
        self._packed, self._unpacker = packed, zlib.decompressobj(_PACKED[packed]) if packed else None
        self._text, self._decoder = self._form(headers.get("content-type", ""), response.charset_encoding)

    def _goes_on(self, headers: httpx2.Headers) -> bool:
        """Whether what comes is the part that was asked for, of what is there."""
        if self._validator is None:  # all of it was asked for
            return False
        span, _, whole = headers.get("content-range", "").partition("/")
        tag = headers.get("etag", self._validator)
        if not span.startswith(f"bytes {self._received}-") or (_is_tag(self._validator) and tag != self._validator):
            return False
        self._whole = int(whole) if whole.isdecimal() else None
        return True

    def _form(self, content_type: str, charset: str | None) -> tuple[bool | None, Any]:
        kind = content_type.partition(";")[0].strip().lower()
        if charset is not None:
            try:
                "".encode(charset)  # bytes would be taken by what is no charset
            except (LookupError, UnicodeError):
                raise ConfigurationError(f"{self.name} says it is {charset[:40]!r}, a charset not known here") from None
            self.charset = charset
            return True, codecs.getincrementaldecoder(charset)("strict")
        if not kind or kind.startswith("text/") or kind.endswith(_TEXTS):
            return None, codecs.getincrementaldecoder("utf-8")("strict")
        return False, None

    async def _take(self, response: httpx2.Response) -> None:
        length = response.headers.get("content-length", "")
        total = self._received + int(length) if length.isdecimal() and self._validator else None
        if total is not None and total > self._web.max_bytes:
            raise self._too_large()
        problem: Exception | None = None
        # Left in the middle, the generators inside would be told of as never closed: closed, the response ends them.
        try:
            async for data in response.aiter_raw():
                if problem is not None:
                    continue
                try:
                    await anyio.to_thread.run_sync(self._write, data, limiter=self._threads)
                except (ConfigurationError, UnicodeError, OSError) as error:
                    problem = error
                    await response.aclose()
                    continue
                self._received += len(data)
                self._tell(self.name, self._spool.size, total)
        except Exception:
            if problem is None:
                raise
        if problem is not None:
            raise problem
        if self._whole is not None and self._received < self._whole:
            raise _CutError(f"{self._received:,} of {self._whole:,} bytes came")
        if self._unpacker is not None and self._received and not self._unpacker.eof:
            raise _CutError(f"what came ends in the middle of its {self._packed}")
        self._keep(b"", final=True)
        self._tell(self.name, self._spool.size, self._spool.size)

    def _write(self, data: bytes) -> None:
        if self._unpacker is None:
            self._keep(data)
            return
        more = True
        while more and not self._unpacker.eof:
            piece = self._unpack(data)
            self._keep(piece)
            data = self._unpacker.unconsumed_tail
            more = bool(data) or len(piece) == _PIECE
            if self._unpacker.unused_data.startswith(b"\x1f\x8b"):  # one packed file after another is one, too
                data, self._unpacker = self._unpacker.unused_data, zlib.decompressobj(_PACKED[self._packed])
                more = True

    def _unpack(self, data: bytes) -> bytes:
        try:
            return self._unpacker.decompress(data, _PIECE)
        except zlib.error as error:
            if self._packed == "deflate" and not self._received:  # without its head, as some servers mean it
                self._packed, self._unpacker = "raw deflate", zlib.decompressobj(-zlib.MAX_WBITS)
                return self._unpack(data)
            raise ConfigurationError(f"{self.name} is not the {self._packed} that it says: {error}") from error

    def _keep(self, data: bytes, *, final: bool = False) -> None:
        if self._text is True:
            data = self._decoder.decode(data, final).encode("utf-8", "surrogatepass")
        elif self._text is None:
            try:
                self._decoder.decode(data, final)
            except UnicodeDecodeError:
                self._text = False
        self._spool.write(data)
        if self._spool.size > self._web.max_bytes:
            raise self._too_large()

    def _too_large(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self.name} has more than {self._web.max_bytes:,} bytes; web=Web(max_bytes=...) allows more"
        )


def _is_tag(validator: str) -> bool:
    return validator.startswith('"')


def is_public(address: Address) -> bool:
    """Whether it is an address of the public internet, also where it stands for another."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if any(address in network for network in _LOCAL):
            return False
        if any(address in network for network in _EMBEDDED):
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(part is not None and not is_public(part) for part in inner):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast
