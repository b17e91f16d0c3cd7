"""asyncrlm, through its public door on asyncio."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from .base import Complete, Engine, Options

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path


class AsyncRLMEngine(Engine):
    package = "asyncrlm"
    import_statement = "import asyncrlm"

    @asynccontextmanager
    async def open(self, base_url: str, options: Options) -> AsyncGenerator[Complete]:
        from asyncrlm import AsyncRLM

        async with AsyncRLM(**self.models(base_url, options), **self.settings(options)) as rlm:

            async def complete(context: str | Path, question: str) -> str:
                return (await rlm.acompletion(context, root_prompt=question)).response

            yield complete

    def models(self, base_url: str, options: Options) -> dict[str, Any]:
        if options.model:
            return {"backend": options.model}
        host = {"base_url": base_url, "api_key": "x"}
        return {
            "backend": "openai",
            "backend_kwargs": {"model_name": "root-model", **host},
            "other_backends": ["openai"],
            "other_backend_kwargs": [{"model_name": "sub-model", **host}],
        }

    def settings(self, options: Options) -> dict[str, Any]:
        given: dict[str, Any] = {
            "environment": "local",
            "max_iterations": options.max_iterations,
            "max_depth": 2 if options.children else 1,
        }
        if options.max_concurrent_requests is not None:
            given["max_concurrent_requests"] = options.max_concurrent_requests
        if options.max_concurrent_subcalls is not None:
            given["max_concurrent_subcalls"] = options.max_concurrent_subcalls
        if options.cache is not None:
            given["cache"] = options.cache
        asked = {"cell_timeout": options.cell_timeout, "pool_size": options.at_once}
        given["environment_kwargs"] = {name: value for name, value in asked.items() if value is not None}
        return given
