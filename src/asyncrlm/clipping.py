"""Text cut down to its head and tail."""

from __future__ import annotations


def clip(text: str, limit: int) -> str:
    """`text` if it has at most `limit` characters, else its head and tail with a line between that counts the rest."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    note = f"\n[... {len(text) - limit:,} of {len(text):,} characters left out ...]\n"
    return text[:head] + note + (text[-tail:] if tail else "")
