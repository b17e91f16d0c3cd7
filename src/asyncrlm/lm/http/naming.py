"""What names a server to a cache: where it is, and what requests say on their way that may change the reply."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

TRAVELLING = ("extra_headers", "extra_query")
"""Sampling arguments that say how a request travels."""

SIGNATURES = ("authorization", "api-key", "x-api-key", "x-goog-api-key", "x-portkey-api-key")
"""Headers that say who pays."""

_NOT_HEEDED = frozenset(
    {
        *(*SIGNATURES, "proxy-authorization", "cookie", "idempotency-key"),
        *("x-portkey-trace-id", "x-request-id", "x-client-request-id", "traceparent", "tracestate"),
        *("accept", "accept-encoding", "connection", "content-type", "user-agent"),
    }
)
"""Headers that change no reply: they tell requests and payers apart."""


def named(where: str, *given: Mapping[str, Any]) -> str:
    """A name for `where`, sent to with the headers and queries in these sampling arguments. Shows neither."""
    said: list[object] = [where]
    for arguments in given:
        headers, query = (_sorted(arguments.get(name)) for name in TRAVELLING)
        said.append([pair for pair in headers if pair[0].lower() not in _NOT_HEEDED])
        said.append(query)
    return hashlib.sha256(repr(said).encode("utf-8", "surrogatepass")).hexdigest()


def _sorted(given: object) -> list[tuple[str, str]]:
    if not isinstance(given, Mapping):
        return [] if given is None else [("", repr(given))]
    pairs = cast("Mapping[Any, Any]", given).items()
    return sorted((str(name), repr(value)) for name, value in pairs)
