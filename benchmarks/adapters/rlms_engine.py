"""The reference implementation, `rlms`: blocking, so each completion gets a thread of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import Complete, Engine, Options, Unsupported

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class RlmsEngine(Engine):
    package = "rlms"
    import_statement = "from rlm import RLM"

    @asynccontextmanager
    async def open(self, base_url: str, options: Options) -> AsyncGenerator[Complete]:
        if options.model:
            raise Unsupported("no callable models")
        from rlm import RLM

        given = self.settings(base_url, options)
        if options.max_concurrent_requests is not None:
            self.widen_batches(options.max_concurrent_requests)
        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(256)

        def blocking(context: str, question: str) -> str:
            return RLM(**given).completion(context, root_prompt=question).response

        async def complete(context: str | Path, question: str) -> str:
            if isinstance(context, Path):
                raise Unsupported("no files as context")
            return await loop.run_in_executor(threads, blocking, context, question)

        try:
            yield complete
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def settings(self, base_url: str, options: Options) -> dict[str, Any]:
        host = {"base_url": base_url, "api_key": "x"}
        given: dict[str, Any] = {
            "backend": "openai",
            "backend_kwargs": {"model_name": "root-model", **host},
            "other_backends": ["openai"],
            "other_backend_kwargs": [{"model_name": "sub-model", **host}],
            "environment": "local",
            "max_iterations": options.max_iterations,
            "max_depth": 2 if options.children else 1,
        }
        width = options.max_concurrent_subcalls or options.max_concurrent_requests
        if width is not None:
            given["max_concurrent_subcalls"] = width
        if options.cell_timeout is not None:
            given["max_timeout"] = options.cell_timeout  # the nearest it has
        return given

    def widen_batches(self, width: int) -> None:
        """No public setting reaches the 16 it sends at once from a batch; with it, it would only be slower."""
        from rlm.core.lm_handler import LMHandler

        defaults = LMHandler.__init__.__defaults__
        LMHandler.__init__.__defaults__ = (*defaults[:-1], width)
