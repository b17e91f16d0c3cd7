"""Runs one contender on one row in this process and writes one JSON object. `run.py` starts it; stdlib only."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import re
import resource
import sys
import traceback
from pathlib import Path

from adapters.base import Engine, Unsupported, contender
from control import Figures, Server
from rows import ROWS, Row


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "from its source tree"


async def measure(row: Row, name: str, params: dict[str, object], server: Server) -> Figures:
    given = contender(name)
    figures: Figures = {}
    try:
        if given.package:
            figures["version"] = version(given.package)
        async with asyncio.timeout(row.limit):
            if isinstance(given, Engine):
                return figures | await row.engine(given, params, server)
            assert row.floor
            return figures | await row.floor(given, params, server)
    except TimeoutError:
        return figures | {"error": f"no end within {row.limit:.0f} s"}
    except Unsupported as error:
        return figures | {"unsupported": str(error)}
    except Exception as error:
        traceback.print_exc()
        # Its first words: what follows names files of the machine.
        return figures | {"error": re.split(r"[:'\"/]", f"{type(error).__name__} {error}")[0][:100]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("row", "contender", "params", "port", "out"):
        parser.add_argument(f"--{option}", required=True)
    given = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ.setdefault("OPENAI_API_KEY", "x")
    row = next(row for row in ROWS if row.name == given.row)
    server = Server("127.0.0.1", int(given.port))
    figures = asyncio.run(measure(row, given.contender, json.loads(given.params), server))
    Path(given.out).write_text(json.dumps(figures))
    sys.stdout.flush()
    if given.contender == "rlms":
        os._exit(0)  # threads of cells that never end would keep the process


if __name__ == "__main__":
    main()
