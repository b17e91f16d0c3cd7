"""What crashed hosts left behind, removed."""

from __future__ import annotations

import importlib.util

import anyio.to_thread

from .. import ConfigurationError
from ..environments.local_process import sweep_homes
from ..environments.remote import describe


async def pruned(docker_host: str | None, docker_context: str | None) -> tuple[list[str], str | None]:
    """Remove it; what was removed, and what kept more from being looked for, if anything did."""
    removed = [f"folder {home}" for home in await anyio.to_thread.run_sync(sweep_homes)]
    if not (docker_host or docker_context) and importlib.util.find_spec("aiodocker") is None:
        return removed, None  # no container was made from here
    try:
        from ..environments.docker import prune  # noqa: PLC0415 - it needs what may not be installed

        removed += [f"container {name}" for name in await prune(docker_host, docker_context)]
    except ConfigurationError as error:
        return removed, str(error)
    except Exception as error:  # noqa: BLE001 - an engine or its SDK may raise anything
        return removed, f"containers could not be removed: {describe(error)}"
    return removed, None
