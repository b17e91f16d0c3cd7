"""How a contender's process tells the fake server what to do and asks what it saw."""

from __future__ import annotations

import http.client
import json
from typing import Any

Params = dict[str, Any]
"""Sizes of a row."""
Figures = dict[str, Any]
"""What one run of one contender came to."""


class Server:
    """The control side of the fake server. Blocking: used outside what is timed."""

    def __init__(self, host: str, port: int) -> None:
        self.address = (host, port)
        self.url = f"http://{host}:{port}/v1"

    def _ask(self, method: str, path: str, body: bytes = b"") -> Any:
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        try:
            connection.request(method, path, body)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def configure(self, **config: Any) -> None:
        self._ask("POST", "/ctl/config", json.dumps(config).encode())

    def stats(self) -> dict[str, Any]:
        return self._ask("GET", "/ctl/stats")
