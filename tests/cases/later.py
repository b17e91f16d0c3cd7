"""The cases that need something later than the core, each with what it waits for."""

from __future__ import annotations

LATER = {
    "X04": "tables as contexts; until then they are refused, which is tested",
}
"""Case id → the feature it waits for."""
