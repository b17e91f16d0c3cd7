"""Vendors' SDKs are loaded when an engine is entered, and never on the event loop."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, threading

import anyio
from asyncrlm import AsyncRLM, LMError

loaded = []
sys.addaudithook(lambda event, args: event == "import" and loaded.append((args[0], threading.current_thread().name)))


async def main():
    settings = {"base_url": "http://127.0.0.1:9", "model_name": "m", "api_key": "k", "max_retries": 0}
    rlm = AsyncRLM(sys.argv[1], backend_kwargs=settings)
    before = len(loaded)
    if sys.argv[3] == "entered":
        await rlm.__aenter__()
    entering = len(loaded)
    try:
        await rlm.acompletion("x", "?")
    except LMError as error:
        assert error.kind == "connection", error
    await rlm.aclose()
    print(json.dumps([loaded[before:entering], loaded[entering:]]))


anyio.run(main, backend=sys.argv[2])
"""


@pytest.mark.parametrize(
    ("backend", "sdk", "loop", "entered"),
    [
        ("vllm", "openai", "asyncio", True),
        pytest.param("anthropic", "anthropic", "trio", False, marks=pytest.mark.soak),
    ],
)
def test_what_a_request_needs_is_loaded_at_entering_and_beside_the_loop(
    backend: str, sdk: str, loop: str, entered: bool
) -> None:
    pytest.importorskip(sdk)
    command = [sys.executable, "-c", PROGRAM, backend, loop, "entered" if entered else ""]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    ours = {"asyncrlm", *sys.stdlib_module_names}
    found = json.loads(ran.stdout)
    entering, later = ([each for each in part if each[0].partition(".")[0] not in ours] for part in found)
    names = {name for name, _ in (entering if entered else later)}
    assert names >= {f"{sdk}.types", "tenacity.retry"}
    assert not (later if entered else entering)
    assert not [name for name, thread in entering + later if thread == "MainThread"]
