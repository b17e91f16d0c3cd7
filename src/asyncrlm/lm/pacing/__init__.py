"""When a request goes, and to which of several models: turns at an account, what it may do, retries, reservations."""

from __future__ import annotations

from .accounts import Pacers
from .pacer import BURST, Gate, Pacer, reply_text

__all__ = ["BURST", "Gate", "Pacer", "Pacers", "reply_text"]
