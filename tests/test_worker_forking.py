"""What a worker has by being forked from a template that put its handlers of forks off."""

from __future__ import annotations

import sys

import anyio
import pytest

from asyncrlm import Repl

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")]

FORKED = """
import os, threading
busy = threading.Thread(target=threading.Event().wait, daemon=True)
busy.start()
print(threading.main_thread().native_id == threading.get_native_id() == os.getpid())
pid = os.fork()
if not pid:
    os._exit(len(threading.enumerate()) - 1)
print(os.waitpid(pid, 0)[1], type(os.register_at_fork).__name__)
"""


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_its_threads_and_forks_are_those_of_any_process() -> None:
    with anyio.fail_after(10):
        async with Repl() as first, Repl() as second:
            for repl in (first, second):
                assert (await repl.execute(FORKED)).stdout == "True\n0 builtin_function_or_method\n"
            numbers = {(await repl.execute("import random; print(random.random())")).stdout for repl in (first, second)}
            assert len(numbers) == 2
