"""When a request goes, and to which of several models: turns at an account, what it may do, retries, reservations."""

from __future__ import annotations

from .accounts import Accounts
from .gate import Gate
from .pacer import Pacer, reply_text

__all__ = ["Accounts", "Gate", "Pacer", "reply_text"]
