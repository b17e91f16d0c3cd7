"""A GGUF model inside this process, run by llama.cpp in a worker thread."""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from ..errors import ConfigurationError, LMError
from ..ledger import Price
from .arguments import argument_problem
from .base import LMClient, LMDelta, LMReply, LMRequest, LMUsage
from .http.endpoints import fingerprint_of
from .http.replies import classify, whole_text
from .openai.stream import CompletionStream
from .spec import OUR_KWARGS, ClientSpec, Shared, optional_sdk, price_and_window, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

LLAMA_KWARGS = (
    "model_path",
    "n_ctx",
    "n_gpu_layers",
    "n_threads",
    "n_batch",
    "chat_format",
    "seed",
    "flash_attn",
    "use_mmap",
    "use_mlock",
    "main_gpu",
    "tensor_split",
    "verbose",
)
"""What `backend_kwargs` of "llamacpp_local" may hold, beside what all may; handed to `llama_cpp.Llama`."""

DEFAULT_CONTEXT = 8192
"""Tokens of context where nobody says: a model's own may be more than the memory holds."""


def llamacpp_local_spec(kwargs: dict[str, Any], sampling: dict[str, Any]) -> ClientSpec:
    """The spec of `backend="llamacpp_local"`: a file, named by `model_path` or "llamacpp_local//path/to/it.gguf"."""
    refuse_unknown("llamacpp_local", kwargs, (*LLAMA_KWARGS, *OUR_KWARGS))
    named = kwargs.pop("model_name", None)
    path = kwargs.pop("model_path", None) or named
    if path is None or not Path(path).is_file():
        raise ConfigurationError(
            f'backend="llamacpp_local" needs a GGUF file{"" if path is None else f", and {str(path)!r} is none"}: give '
            'backend_kwargs={"model_path": ...}. One that is small and writes code: '
            "`hf download Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF qwen2.5-coder-1.5b-instruct-q4_k_m.gguf`"
        )
    optional_sdk("llama_cpp", "local", load=False)
    model = named if named and named != str(path) else Path(path).stem
    price, window = price_and_window(model, kwargs)
    settings = {"n_ctx": window or DEFAULT_CONTEXT, "verbose": False, **kwargs, "model_path": str(path)}
    key = ("llamacpp_local", fingerprint_of(settings))

    async def opener(shared: Shared) -> LMClient:
        return LlamaClient(await shared(key, lambda: _loaded(settings)), model, sampling_args=sampling)

    return ClientSpec(
        model=model,
        backend="llamacpp_local",
        key=(key, model, fingerprint_of(sampling)),
        asked_with={**sampling, **settings},
        where=_file_name(Path(path)),
        price=price or Price(0.0),
        window=window or cast("int", settings["n_ctx"]) or None,
        needs_price=False,
        attempts=1,
        opener=opener,
    )


def _file_name(path: Path) -> str:
    found = path.stat()  # another model may stand there later
    return f"{path.resolve()}:{found.st_size}:{found.st_mtime_ns}"


class _Loaded:
    """A model in memory. It does one thing at a time."""

    def __init__(self, llama_cpp: Any, llama: Any) -> None:
        self.llama = llama
        self.turn = anyio.Semaphore(1)
        self._stop = ctypes.create_string_buffer(2)
        self._callback: Any = None
        setting = getattr(llama_cpp, "llama_set_abort_callback", None)
        context = getattr(getattr(llama, "_ctx", None), "ctx", None)
        if setting is not None and context is not None:
            # llama.cpp asks at each node of its graph, so nothing of Python may answer: it would wait for the event
            # loop each time. The length of a C string answers: 0, go on, or 1.
            length = ctypes.cast(_c_library().strlen, ctypes.c_void_p).value
            self._callback = llama_cpp.ggml_abort_callback(length)
            setting(context, self._callback, ctypes.cast(self._stop, ctypes.c_void_p))

    async def run(self, work: Callable[[], T], due: float | None = None) -> T:
        """What `work` gives, in a thread. A cancelled one is stopped in the middle, and so is one that is over due.

        Raises:
            LMError: as llama.cpp fails; of kind "timeout" if it was over due.
        """
        outcome: T | LMError | None = None
        ended = stopped = False

        async def watch() -> None:
            nonlocal stopped
            try:
                await (anyio.sleep_forever() if due is None else anyio.sleep_until(due))
            finally:
                if not ended:
                    stopped, self._stop[0] = True, b"\x01"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            try:
                outcome = await _in_thread(work)
            except LMError as error:
                outcome = error
            finally:
                ended, self._stop[0] = True, b"\x00"
            tasks.cancel_scope.cancel()
        if stopped:
            await anyio.lowlevel.checkpoint()  # if it was cancelled, that comes first
        if isinstance(outcome, LMError):
            if stopped:
                raise LMError("it was over due", kind="timeout") from outcome
            raise outcome
        return cast("T", outcome)


def _c_library() -> Any:
    return ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)


@asynccontextmanager
async def _loaded(settings: Mapping[str, Any]) -> AsyncGenerator[_Loaded]:
    llama_cpp = optional_sdk("llama_cpp", "local")
    try:
        llama = await anyio.to_thread.run_sync(lambda: llama_cpp.Llama(**settings), limiter=anyio.CapacityLimiter(1))
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise ConfigurationError(f"llama.cpp can't load {settings['model_path']}: {error}") from error
    try:
        yield _Loaded(llama_cpp, llama)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(llama.close, limiter=anyio.CapacityLimiter(1))


class LlamaClient(LMClient):
    """One model in memory. Requests wait for each other; a cancelled one ends at once."""

    def __init__(self, loaded: _Loaded, model: str, *, sampling_args: Mapping[str, Any] | None = None) -> None:
        self.model = model
        self._loaded = loaded
        self._known = set(inspect.signature(loaded.llama.create_chat_completion).parameters) - {"messages", "stream"}
        self._sampling_args = dict(sampling_args or {})
        self._arguments(self._sampling_args)

    @property
    def account(self) -> str:
        return f"llamacpp_local:{self.model}:{id(self._loaded.llama):x}"

    @property
    def needs_price(self) -> bool:
        return False

    def _arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if problem := argument_problem(given):
            raise ConfigurationError(problem)
        arguments = {name: value for name, value in given.items() if value is not None}
        if (cap := arguments.pop("max_completion_tokens", None)) is not None:
            arguments["max_tokens"] = min(cap, arguments.get("max_tokens", cap))
        for name in arguments.keys() - self._known - {"timeout"}:
            raise ConfigurationError(f"llama.cpp has no {name!r}; known: {', '.join(sorted(self._known))}")
        return arguments

    async def acomplete(self, request: LMRequest) -> LMReply:
        reply: LMReply | None = None
        async for delta in self.astream(request):
            reply = delta.reply
        return cast("LMReply", reply)

    async def astream(self, request: LMRequest) -> AsyncGenerator[LMDelta]:
        try:
            arguments = self._arguments(self._sampling_args | request.sampling_args)
        except ConfigurationError as error:
            raise LMError(str(error), kind="bad_request") from error
        if request.output_cap is not None:
            arguments["max_tokens"] = min(request.output_cap, arguments.get("max_tokens", request.output_cap))
        timeout = arguments.pop("timeout", None)
        messages = [{"role": m.role, "content": whole_text(m.content)} for m in request.messages]
        llama, assembler, pieces = self._loaded.llama, CompletionStream(), 0
        async with self._loaded.turn:
            began = anyio.current_time()
            due = None if timeout is None else began + timeout
            run = self._loaded.run
            chunks: Any = None
            try:
                chunks = await run(
                    lambda: llama.create_chat_completion(messages=messages, stream=True, **arguments), due
                )
                # A step is a token, but the first one, which reads the whole prompt.
                while (chunk := await run(lambda: next(cast("Iterator[Any]", chunks), None), due)) is not None:
                    delta = assembler.feed(msgspec.json.encode(chunk))
                    if delta is not None:
                        pieces += 1
                        yield delta
                    if due is not None and anyio.current_time() > due:
                        raise LMError("it is over due", kind="timeout")
            except LMError as error:
                if error.kind == "timeout":
                    error.args = (f"{self.model} has not finished within {timeout:g} s",)
                raise
            finally:
                if chunks is not None:
                    with anyio.CancelScope(shield=True):
                        await _in_thread(chunks.close)
            held = getattr(llama, "n_tokens", None)
        reply = assembler.reply()
        if reply.usage.output_tokens is None and isinstance(held, int):
            usage = LMUsage(input_tokens=max(0, held - pieces), output_tokens=pieces)
            reply = msgspec.structs.replace(reply, usage=usage)
        # llama.cpp calls it by the path of its file.
        yield LMDelta(reply=msgspec.structs.replace(reply, model=self.model, latency=anyio.current_time() - began))

    def __repr__(self) -> str:
        return f"<LlamaClient {self.model}>"


async def _in_thread(work: Any) -> Any:
    try:
        return await anyio.to_thread.run_sync(work, limiter=anyio.CapacityLimiter(1))
    except (ValueError, RuntimeError, TypeError) as error:
        failure = classify(400, str(error))
        if failure.kind != "too_long":
            failure = LMError(f"llama.cpp failed: {error}", kind="other")
        failure.status = None
        raise failure from error
