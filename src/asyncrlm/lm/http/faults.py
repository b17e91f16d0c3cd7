"""What sending can raise, as an error of ours: what it says of the server, and whether to try again."""

from __future__ import annotations

import socket
import ssl
from typing import Any

from ...caught import described
from ...errors import LMError
from .endpoints import is_loopback
from .secrecy import redacted

_REFUSED = "connection refused"


def classified(
    fault: Exception, library: Any, host: str, where: str, secrets: tuple[str, ...], *, begun: bool = False
) -> LMError:
    """The error for a request that got no response, or with `begun` only a part of one."""
    causes = _chain(fault)
    # The SDKs' aiohttp transports report a lost connection as one that was never had: the cause tells.
    deepest = next((cause for cause in causes if type(cause).__module__.startswith("aiohttp")), fault)
    text = redacted(described(deepest).rstrip(": "), secrets)
    connecting = type(deepest).__name__ in ("ConnectTimeout", "PoolTimeout", "ConnectionTimeoutError")
    if isinstance(deepest, TimeoutError | library.TimeoutException):
        return LMError(
            f"no {'whole ' if begun else ''}reply from {host} in time ({text})",
            kind="timeout",
            retryable=True,
            charged=begun or not connecting,
        )
    if deepest is fault:
        refused = isinstance(fault, library.ConnectError | library.ProxyError | library.UnsupportedProtocol)
    else:
        refused = any(base.__name__ == "ClientConnectorError" for base in type(deepest).__mro__)
    permanent = isinstance(fault, library.UnsupportedProtocol | library.LocalProtocolError) or any(
        isinstance(cause, ssl.SSLCertVerificationError) for cause in causes
    )
    lost = begun or not refused
    why = _unreachable(causes) or text
    error = LMError(
        f"lost the connection to {host} ({text})"
        if lost
        else f"no connection to {where}: {why}; is the server running, and is base_url right?",
        kind="connection",
        retryable=begun or not permanent,
        charged=begun or (not refused and not permanent),
    )
    if not lost and why == _REFUSED and is_loopback(("", host, 0)):
        error.enough = 2  # it is not on its way here: nobody listens
    return error


def _unreachable(causes: list[BaseException]) -> str | None:
    """Why there is nobody, where the system says it in one of these; None where it does not."""
    errors = [*causes, *(getattr(cause, "os_error", None) for cause in causes)]
    for cause in causes:
        errors += getattr(cause, "exceptions", ())  # of each address, where there are several
    if any(isinstance(error, socket.gaierror) for error in errors):
        return "the name of the host is not known"
    if any(isinstance(error, ConnectionRefusedError) for error in errors):
        return _REFUSED
    return None


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    while error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__ or error
    return chain
