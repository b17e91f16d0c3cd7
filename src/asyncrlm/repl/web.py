"""Documents of the web as contexts: streamed to a file, bounded, resumed, from addresses that may be asked."""

from __future__ import annotations

import codecs
import ipaddress
import socket
import ssl
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
_EMBEDDED = ipaddress.ip_network("64:ff9b::/96")
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
            except UnicodeDecodeError as error:
                raise ConfigurationError(
                    f"{download.name} is not the {error.encoding} that it says: {error}"
                ) from error
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
        if status == 206 and headers.get("content-range", "").startswith(f"bytes {self._received}-"):
            return
        if status in (206, 408, 416, 429) or status >= 500:
            self._validator = None  # so that the next attempt asks for all of it
            raise _CutError(f"the server answered {status}")
        if status != 200:
            raise ConfigurationError(f"{self.name} could not be fetched: the server answered {status}")
        self._spool.clear()
        self._received = 0
        self._validator = None
        if "content-encoding" not in headers:
            tag = headers.get("etag", "")
            self._validator = tag if tag.startswith('"') else headers.get("last-modified")
        self._text, self._decoder = self._form(headers.get("content-type", ""), response.charset_encoding)

    def _form(self, content_type: str, charset: str | None) -> tuple[bool | None, Any]:
        kind = content_type.partition(";")[0].strip().lower()
        if charset is not None:
            try:
                "".encode(charset)  # bytes would be taken by what is no charset
            except LookupError:
                raise ConfigurationError(f"{self.name} says it is {charset[:40]!r}, a charset not known here") from None
            return True, codecs.getincrementaldecoder(charset)("strict")
        if not kind or kind.startswith("text/") or kind.endswith(_TEXTS):
            return None, codecs.getincrementaldecoder("utf-8")("strict")
        return False, None

    async def _take(self, response: httpx2.Response) -> None:
        length = response.headers.get("content-length", "")
        total = self._received + int(length) if length.isdecimal() and self._validator else None
        if total is not None and total > self._web.max_bytes:
            raise self._too_large()
        before = response.num_bytes_downloaded
        problem: Exception | None = None
        # Left in the middle, the generators inside would be told of as never closed: closed, the response ends them.
        try:
            async for data in response.aiter_bytes():
                if problem is not None:
                    continue
                try:
                    written = await anyio.to_thread.run_sync(self._write, data, limiter=self._threads)
                    if written > self._web.max_bytes:
                        raise self._too_large()
                except (ConfigurationError, UnicodeDecodeError, OSError) as error:
                    problem = error
                    await response.aclose()
                    continue
                self._received += response.num_bytes_downloaded - before
                before = response.num_bytes_downloaded
                self._tell(self.name, written, total)
        except Exception:
            if problem is None:
                raise
        if problem is not None:
            raise problem
        self._write(b"", final=True)
        self._tell(self.name, self._spool.size, self._spool.size)

    def _write(self, data: bytes, *, final: bool = False) -> int:
        if self._text is True:
            data = self._decoder.decode(data, final).encode("utf-8", "surrogatepass")
        elif self._text is None:
            try:
                self._decoder.decode(data, final)
            except UnicodeDecodeError:
                self._text = False
        self._spool.write(data)
        return self._spool.size

    def _too_large(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self.name} has more than {self._web.max_bytes:,} bytes; web=Web(max_bytes=...) allows more"
        )


def is_public(address: Address) -> bool:
    """Whether it is an address of the public internet, also where it stands for another."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _EMBEDDED:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(part is not None and not is_public(part) for part in inner):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast
