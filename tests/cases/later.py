"""The cases that need something later than the core, each with what it waits for."""

from __future__ import annotations

_DOCKER = "the docker environment, which is there now; the cases are still to be written"
_CLOUD = "the cloud environments (modal, e2b, daytona, prime)"
_REMOTE = "environments other than local; the local half is tested already"
_SESSIONS = "conversations, which are there now (test_sessions.py); the cases are still to be written"

LATER = {
    "X04": "tables as contexts; until then they are refused, which is tested",
    "X13": _REMOTE,
    "X14": _REMOTE,
    "Z04": _REMOTE,
    "Z05": _REMOTE,
    "M01": _SESSIONS,
    "M02": _SESSIONS,
    "M03": _SESSIONS,
    "B06": _DOCKER,
    "B07": _DOCKER,
    "B08": _DOCKER,
    "B09": _DOCKER,
    "B10": _CLOUD,
    "B13": _DOCKER,
}
"""Case id → the feature it waits for."""
