"""The bodies of responses, read within bounds: no server may fill the memory."""

from __future__ import annotations

from typing import Any

import anyio

from ...errors import LMError

MAX_BODY = 64 * 1024 * 1024
"""Bytes of a body at most, unpacked."""

_ENCODINGS = ("", "identity", "gzip", "deflate")
"""Ways of packing that make a chunk a thousand times smaller at most."""


def check_encoding(response: Any) -> None:
    """See that a response can be unpacked in pieces that are not too large.

    Raises:
        LMError: of kind "bad_reply", if it can't.
    """
    if response.headers.get("content-encoding", "").strip().lower() not in _ENCODINGS:
        raise LMError("the server packs its reply in a way that nobody asked for", kind="bad_reply", charged=True)


async def body_of(response: Any, faults: tuple[type[Exception], ...]) -> bytes:
    """All of an open response's body; the response is closed then.

    Args:
        response: Of httpx2 or httpx.
        faults: What reading raises.

    Raises:
        LMError: of kind "bad_reply", if it is larger than `MAX_BODY`.
    """
    pieces, size, chunks = list[bytes](), 0, response.aiter_bytes()
    try:
        check_encoding(response)
        async for chunk in chunks:
            pieces.append(chunk)
            size += len(chunk)
            if size > MAX_BODY:
                raise LMError(f"the server's reply has more than {MAX_BODY:,} bytes", kind="bad_reply", charged=True)
    except BaseException:
        with anyio.move_on_after(5, shield=True):
            await response.aclose()
            await exhausted(chunks, faults)
        raise
    return b"".join(pieces)


async def exhausted(chunks: Any, faults: tuple[type[Exception], ...]) -> None:
    """End the generators that read a closed response, so that none is left to the garbage collector."""
    try:
        async for _ in chunks:
            pass
    except (*faults, RuntimeError):
        return  # what reading from a closed response raises
