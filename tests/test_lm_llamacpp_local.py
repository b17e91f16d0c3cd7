"""A model inside the process, with a stand-in for llama.cpp, which takes minutes to build."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
from lm_serving import ask, timeless

from asyncrlm.errors import ConfigurationError, LMError
from asyncrlm.ledger import Price
from asyncrlm.lm.base import LMReply, LMUsage
from asyncrlm.lm.clients import client_spec

pytestmark = pytest.mark.anyio


class Llama:
    """Has the signature and the shapes of `llama_cpp.Llama`."""

    made: ClassVar[list[Llama]] = []
    stop: ClassVar[Any] = None
    """What llama.cpp asks whether to go on, and what it hands to it."""

    def __init__(self, model_path: str, n_ctx: int = 512, verbose: bool = True) -> None:
        if "broken" in model_path:
            raise ValueError("Failed to load model")
        self.settings = {"model_path": model_path, "n_ctx": n_ctx, "verbose": verbose}
        self.asked: list[dict[str, Any]] = []
        self.threads: set[int] = set()
        self.closed = False
        self.busy = 0
        self.n_tokens = 0
        self._ctx = types.SimpleNamespace(ctx="context")
        self.reading = threading.Event()
        Llama.made.append(self)

    def create_chat_completion(
        self, messages: list[Any], temperature: float = 0.2, stop: Any = None, max_tokens: int | None = None,
        stream: bool = False,
    ) -> Iterator[dict[str, Any]]:  # fmt: skip
        assert stream
        self.asked.append({"messages": messages, "temperature": temperature, "stop": stop, "max_tokens": max_tokens})
        if messages[-1]["content"] == "too long":
            raise ValueError("Requested tokens (9000) exceed context window of 8192")
        if messages[-1]["content"] == "a long prompt":
            return self._reads()
        if messages[-1]["content"] == "fail":
            raise RuntimeError("llama_decode returned -3")
        return self._chunks()

    def _reads(self) -> Iterator[dict[str, Any]]:
        stop, data = Llama.stop
        self.reading.set()
        until = time.monotonic() + 10
        while not stop(data):
            assert time.monotonic() < until, "nobody stops it"
        raise RuntimeError("llama_decode returned 2")
        yield {}

    def _chunks(self) -> Iterator[dict[str, Any]]:
        assert self.busy == 0, "two requests at once"
        self.busy += 1
        try:
            yield {"model": "file", "choices": [{"index": 0, "delta": {"role": "assistant"}}]}
            for word in ("one ", "two ", "three"):
                self.threads.add(threading.get_ident())
                yield {"model": "file", "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
            self.n_tokens = 10
            yield {"model": "file", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        finally:
            self.busy -= 1

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("llama_cpp")
    module.Llama = Llama  # type: ignore[attr-defined]
    module.ggml_abort_callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)  # type: ignore[attr-defined]

    def set_abort_callback(context: str, callback: Any, data: Any) -> None:
        assert context == "context"
        Llama.stop = (callback, data)

    module.llama_set_abort_callback = set_abort_callback  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    Llama.made.clear()
    file = tmp_path / "small-q4.gguf"
    file.write_bytes(b"GGUF")
    return str(file)


async def test_a_file_answers_in_a_thread(path: str) -> None:
    spec = client_spec(f"llamacpp_local/{path}", None, {"temperature": 0, "max_completion_tokens": 9})
    assert (spec.model, spec.price, spec.needs_price, spec.window) == ("small-q4", Price(0.0), False, 8192)
    async with spec.open() as client:
        reply = await client.acomplete(ask("hi", output_cap=5))
        deltas = [delta async for delta in client.astream(ask("hi"))]
    usage = LMUsage(input_tokens=7, output_tokens=3)
    assert timeless(reply) == LMReply(text="one two three", finish_reason="stop", usage=usage, model="small-q4")
    assert [delta.text for delta in deltas] == ["one ", "two ", "three", ""]
    (llama,) = Llama.made
    assert llama.settings == {"model_path": path, "n_ctx": 8192, "verbose": False}
    assert [asked["max_tokens"] for asked in llama.asked] == [5, 9]
    assert llama.asked[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert threading.get_ident() not in llama.threads
    assert llama.closed


async def test_requests_take_turns_and_one_that_is_left_frees_its_turn(path: str) -> None:
    async with client_spec("llamacpp_local", {"model_path": path}).open() as client:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for _ in range(5):
                    tasks.start_soon(client.acomplete, ask())
            async with aclosing(client.astream(ask())) as deltas:
                async for _ in deltas:
                    break
            assert (await client.acomplete(ask())).text == "one two three"


async def test_failures_are_classified(path: str) -> None:
    async with client_spec("llamacpp_local", {"model_path": path}).open() as client:
        for text, arguments, kind in (
            ("too long", {}, "too_long"),
            ("fail", {}, "other"),
            ("hi", {"frequenzy": 1}, "bad_request"),
            ("hi", {"timeout": 1e-9}, "timeout"),
        ):
            with pytest.raises(LMError) as caught:
                await client.acomplete(ask(text, sampling_args=arguments))
            assert (caught.value.kind, caught.value.retryable) == (kind, False)
        assert (await client.acomplete(ask())).text == "one two three"


async def test_what_is_missing_says_how_to_get_it(path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for given in (None, "/nowhere/x.gguf"):
        with pytest.raises(ConfigurationError, match=r"hf download .*gguf"):
            client_spec("llamacpp_local", {"model_path": given})
    with pytest.raises(ConfigurationError, match=r"n_ctxx.*n_ctx"):
        client_spec("llamacpp_local", {"model_path": path, "n_ctxx": 1})
    with pytest.raises(ConfigurationError, match="no 'frequenzy'"):
        async with client_spec("llamacpp_local", {"model_path": path}, {"frequenzy": 1}).open():
            pass
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"can't load .*broken\.gguf: Failed"):
        async with client_spec("llamacpp_local", {"model_path": str(broken)}).open():
            pass
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ConfigurationError, match=r'pip install "asyncrlm\[local\]"'):
        client_spec("llamacpp_local", {"model_path": path})


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
async def test_who_waits_no_longer_stops_the_reading_of_a_prompt(path: str, how: str) -> None:
    async with client_spec("llamacpp_local", {"model_path": path}).open() as client:
        (llama,) = Llama.made
        with anyio.fail_after(10):
            if how == "timeout":
                with pytest.raises(LMError, match=r"has not finished within 0\.05 s") as caught:
                    await client.acomplete(ask("a long prompt", sampling_args={"timeout": 0.05}))
                assert caught.value.kind == "timeout"
            else:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(client.acomplete, ask("a long prompt"))
                    await anyio.to_thread.run_sync(llama.reading.wait, 10)
                    tasks.cancel_scope.cancel()
            assert (await client.acomplete(ask())).text == "one two three"
