"""aiohttp with nothing around it but the JSON: no retries, no checks, no usage."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from .base import Ask, Bare

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class AiohttpBare(Bare):
    package = "aiohttp"
    import_statement = "import aiohttp"

    @asynccontextmanager
    async def open(self, base_url: str, width: int) -> AsyncGenerator[Ask]:
        import aiohttp

        url = f"{base_url}/chat/completions"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=width)) as session:

            async def ask(messages: list[dict[str, str]]) -> str:
                async with session.post(url, json={"model": "sub-model", "messages": messages}) as response:
                    response.raise_for_status()
                    return json.loads(await response.read())["choices"][0]["message"]["content"]

            yield ask
