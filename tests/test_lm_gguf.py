"""A real model in the process: runs where ASYNCRLM_GGUF names the file of a small chat model that writes Python.

With Qwen2.5-Coder-1.5B-Instruct (Q4_K_M) it takes a minute or two on two cores that have nothing else to do.
"""

from __future__ import annotations

import os
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import pytest
from lm_serving import ask

from asyncrlm import AsyncRLM, LMError
from asyncrlm.events import SubcallFinished
from asyncrlm.lm.clients import client_spec

FILE = os.environ.get("ASYNCRLM_GGUF", "")

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.soak,
    pytest.mark.skipif(not FILE, reason="ASYNCRLM_GGUF does not name a GGUF file"),
]

# A small model is lost in a prompt of a thousand tokens, which it also takes a minute to read.
SYSTEM = """You answer a question about a text in the Python variable `context`, which you can't see. Write Python \
in a block that begins with ```repl, and its output is shown to you. llm_query(prompt) asks a language model and \
returns its answer as a str.
To answer, run:
```repl
answer["content"] = llm_query("Where does X live? Answer with one word.\\n" + context)
answer["ready"] = True
```"""


@pytest.fixture(autouse=True)
def llama() -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_real_model_drives_a_loop_and_its_recording_is_replayed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "backend_kwargs": {"model_path": FILE, "n_ctx": 2048},
        "sampling_args": {"temperature": 0.0, "max_tokens": 200},
        "custom_system_prompt": SYSTEM,
        "max_iterations": 4,
    }
    text = "Alice lives in Paris. Bob lives in Rome. Carol lives in Oslo."
    rlm = AsyncRLM("llamacpp_local", record=tmp_path, **settings)
    with anyio.fail_after(550):
        async with rlm, rlm.astream(text, "Where does Bob live?") as events:
            subcalls = [event async for event in events if isinstance(event, SubcallFinished)]
        recorded = events.result
    assert recorded is not None
    assert "Rome" in recorded.response
    assert recorded.stop_reason == "answer"
    assert subcalls
    assert subcalls[0].answered_by == Path(FILE).stem
    usage = recorded.usage_summary
    assert usage.total_calls >= 2
    assert usage.total_input_tokens > 100
    assert (usage.total_output_tokens > 10, usage.total_cost, usage.complete) == (True, 0.0, True)
    with anyio.fail_after(20):  # nothing is loaded
        replayed = await AsyncRLM("llamacpp_local", replay=tmp_path, **settings).acompletion(
            text, "Where does Bob live?"
        )
    assert (replayed.response, replayed.usage_summary) == (recorded.response, recorded.usage_summary)


async def test_what_a_real_model_can_not_take_is_told_and_one_that_is_cancelled_frees_it() -> None:
    spec = client_spec("llamacpp_local", {"model_path": FILE, "n_ctx": 256}, {"temperature": 0.0})
    async with spec.open() as client:
        with pytest.raises(LMError) as caught:
            await client.acomplete(ask("word " * 400))
        assert (caught.value.kind, caught.value.retryable) == ("too_long", False)
        pieces = 0
        with anyio.fail_after(200):
            async with aclosing(client.astream(ask("Count from 1 to 100."))) as deltas:
                with anyio.CancelScope() as scope:
                    async for _ in deltas:
                        pieces += 1
                        if pieces == 5:
                            scope.cancel()
            assert pieces == 5
            reply = await client.acomplete(ask("Say yes.", output_cap=4))
    assert reply.text.strip()
    assert reply.usage.output_tokens is not None
    assert 1 <= reply.usage.output_tokens <= 4
    assert reply.usage.input_tokens is not None
    assert 5 < reply.usage.input_tokens < 60
