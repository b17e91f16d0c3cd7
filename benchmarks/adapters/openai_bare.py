"""The OpenAI SDK's async client as it comes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from .base import Ask, Bare

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class OpenAIBare(Bare):
    package = "openai"
    import_statement = "from openai import AsyncOpenAI"

    @asynccontextmanager
    async def open(self, base_url: str, width: int) -> AsyncGenerator[Ask]:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=base_url, api_key="x") as client:

            async def ask(messages: list[dict[str, str]]) -> str:
                reply = await client.chat.completions.create(model="sub-model", messages=cast("Any", messages))
                return reply.choices[0].message.content or ""

            yield ask
