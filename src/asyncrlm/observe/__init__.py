"""Listeners: what is done with the events of a tree of runs."""

from __future__ import annotations

from .jsonl import RLMLogger, TreeLog
from .progress import Progress
from .trajectory import Trajectory

__all__ = ["Progress", "RLMLogger", "Trajectory", "TreeLog"]
