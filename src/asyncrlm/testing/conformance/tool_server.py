"""A program that speaks the Model Context Protocol on its standard input and output, and needs nothing installed."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

NUMBER = {"type": "integer"}
TOOLS: list[dict[str, Any]] = [
    {
        "name": "add",
        "description": "Adds two numbers.",
        "inputSchema": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a"]},
        "outputSchema": {"type": "object", "properties": {"result": NUMBER}, "required": ["result"]},
    },
    {"name": "variables", "description": "Its environment.", "inputSchema": {"type": "object"}},
    {"name": "fail", "description": "Fails.", "inputSchema": {"type": "object"}},
    {"name": "hidden", "description": "Nobody asked for it.", "inputSchema": {"type": "object"}},
]


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The result of a tool."""
    if name == "add":
        result = {"result": arguments["a"] + arguments.get("b", 1)}
        return {"content": [{"type": "text", "text": json.dumps(result)}], "structuredContent": result}
    text = "it is broken" if name == "fail" else " ".join(sorted(os.environ))
    return {"content": [{"type": "text", "text": text}], "isError": name == "fail"}


def answered(method: str, given: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a request; None if there is no such method."""
    if method == "initialize":
        about = {"name": "tools", "version": "1"}
        return {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": TOOLS}
    return called(given["name"], given.get("arguments") or {}) if method == "tools/call" else None


def reply(line: bytes | str) -> bytes | None:
    """The message that answers one; None if none does."""
    request = json.loads(line)
    if "id" not in request:
        return None
    result = answered(request["method"], request.get("params") or {})
    body = {"result": result} if result is not None else {"error": {"code": -32601, "message": "no such method"}}
    return json.dumps({"jsonrpc": "2.0", "id": request["id"], **body}).encode()


def over_http(method: str, body: bytes) -> tuple[str, str, bytes]:
    """The same as a web server: status line, content type and body of the answer to a request."""
    if method != "POST":
        return "405 Method Not Allowed", "text/plain", b""
    message = reply(body)
    return ("200 OK", "application/json", message) if message is not None else ("202 Accepted", "text/plain", b"")


def main() -> None:
    """Serve until standard input ends."""
    for line in sys.stdin:
        message = reply(line)
        if message is not None:
            sys.stdout.buffer.write(message + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
