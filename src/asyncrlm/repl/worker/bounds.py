"""The figures of the protocol, which both sides go by."""

from __future__ import annotations

PROTOCOL_VERSION = 1
MAX_FRAME = 64 * 1024 * 1024
"""Longest frame a worker may send, in bytes."""
CREDIT = 128 * 1024 * 1024
"""Bytes of call frames a worker may have unanswered; the reply to a call gives its bytes back."""
MAX_CALLS = 65_536
"""Calls a worker may have unanswered, whatever their bytes: each costs the host more than those."""
MAX_CONTAINERS = 1_000_000
"""Lists and dicts in one frame. Each costs the host twenty times its bytes, and every garbage collection walks them."""
MAX_VARIABLES = 200
"""Variables that `done` may name."""
