"""Text cut down to its head and tail."""

from __future__ import annotations

LEFT_OUT = "\n[... {left} of {all} characters left out ...]\n"


def clip(text: str, limit: int, note: str = LEFT_OUT) -> str:
    """`text` if it has at most `limit` characters, else its head and tail; `note` between them counts the rest."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 2, limit // 2
    note = note.replace("{left}", f"{len(text) - limit:,}").replace("{all}", f"{len(text):,}")
    return text[:head] + note + (text[-tail:] if tail else "")
