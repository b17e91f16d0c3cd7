"""One question asked from the command line."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec

from .. import AsyncRLM, ConfigurationError, RLMChatCompletion, RLMLogger, Web
from ..engine.groups import one_error
from ..engine.overrides import Overrides
from ..environments.units import parse_bytes
from ..observe.progress import Progress
from .exits import FAILED, USAGE, fail, say, write, write_json
from .spoken import no_text

Detail = Literal["brief", "full"]
"""How much of a run's progress is told."""

Price = tuple[float, float]
"""Of a model's input and its output: USD per million tokens."""


def read_prompt(file: str) -> Any:
    """What to ask about: a path to a readable file, a folder or a pattern, an address, or the text of standard input or
    of a pipe."""
    if file.startswith(("http://", "https://")):
        import httpx2  # noqa: PLC0415 - loaded where it is used

        return httpx2.URL(file)
    try:
        if file == "-":
            if sys.stdin is None or sys.stdin.isatty():
                what = "closed" if sys.stdin is None else "a terminal"
                fail(f"standard input is {what}; pipe a text into it or name a FILE", USAGE)
            return _decoded(sys.stdin.buffer.read(), "standard input")
        if Path(file).is_dir() or (set("*?[").intersection(file) and not Path(file).exists()):
            return Path(file).absolute()
        with Path(file).open("rb") as opened:
            # A pipe can be read once only, so its text is taken here; a file the worker reads by itself.
            if not stat.S_ISREG(Path(file).stat().st_mode):
                return _decoded(opened.read(), file)
        return Path(file).resolve()
    except OSError as error:
        fail(f"{file}: {error.strerror or error}", USAGE)
    except ValueError as error:
        fail(f"{file!r}: {error}", USAGE)


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(f"{name}: not UTF-8 text (byte {error.start})", USAGE)


def context_arguments(*, lazy: bool, max_download: str | None, allow_private: bool) -> Overrides:
    """The options that say how the context is had, as arguments of `AsyncRLM.acompletion`."""
    web = Web(allow_private=allow_private)
    if max_download is not None:
        web = msgspec.structs.replace(web, max_bytes=parse_bytes("--max-download", max_download) or web.max_bytes)
    return Overrides(lazy=lazy, web=web)


def backend_arguments(
    backend: str,
    *,
    model: str | None,
    sub_model: str | None,
    base_url: str | None,
    price: Price | None = None,
    sub_price: Price | None = None,
) -> dict[str, Any]:
    """The options that say which models to ask, as arguments of `AsyncRLM`."""
    shared: dict[str, Any] = {} if base_url is None else {"base_url": base_url}
    root = shared if model is None else shared | {"model_name": model}
    if price is not None:
        root = root | {"price": price}
    arguments: dict[str, Any] = {"backend": backend}
    if root:
        arguments["backend_kwargs"] = root
    if sub_model is not None:
        arguments["other_backends"] = [backend.partition("/")[0]]
        sub = shared | {"model_name": sub_model}
        arguments["other_backend_kwargs"] = [sub if sub_price is None else sub | {"price": sub_price}]
    return arguments


def ask(
    prompt: Any,
    question: str,
    arguments: dict[str, Any],
    *,
    name: str,
    log_dir: str | None = None,
    progress: Detail | None = None,
    as_json: bool = False,
    overrides: Overrides | None = None,
) -> None:
    """Run to the answer and print it, with progress lines unless that is None.

    Raises:
        RLMError: as `AsyncRLM.acompletion`.
    """
    rlm = AsyncRLM(**arguments, logger=_logger(log_dir))
    of_call: Overrides = overrides or {}

    async def complete() -> RLMChatCompletion:
        if progress is None:
            return await rlm.acompletion(prompt, question, **of_call)
        tell = Progress(brief=progress == "brief", reasons=False)  # which is the last line of the command
        completion: RLMChatCompletion | None = None
        with one_error():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(tell.keep_moving)
                async with rlm.astream(prompt, question, **of_call) as events:
                    async for event in events:
                        tell(event)
                    completion = events.result
                tasks.cancel_scope.cancel()
        if completion is None:
            raise RuntimeError("a run ended without a result or an error")
        return completion

    try:
        completion = anyio.run(complete)
    except ConfigurationError as error:
        if (problem := no_text(str(error))) is not None:
            fail(f"{name}: {problem}", USAGE)
        raise
    _show(completion, name, as_json=as_json)


def _logger(log_dir: str | None) -> RLMLogger | None:
    try:
        return None if log_dir is None else RLMLogger(log_dir)
    except ConfigurationError as error:
        why = error.__cause__
        fail(f"--log-dir {log_dir}: {(why.strerror if isinstance(why, OSError) else None) or error}", USAGE)


def _show(completion: RLMChatCompletion, name: str, *, as_json: bool) -> None:
    answered = completion.error is None or bool(completion.response.strip())
    if completion.limit_reached is not None:
        say(f"asyncrlm: limit met: {completion.limit_reached}; the answer may lack parts")
    elif answered and completion.stop_reason == "max_iterations":
        say("asyncrlm: stopped by max_iterations; the answer is from what there was by then")
    if as_json:
        # The text itself is what the caller has already; the trajectory is the log's.
        write_json(completion.to_dict() | {"prompt": name, "metadata": None})
    elif answered:
        write(completion.response)
    if not answered:
        fail(completion.error or "no answer", FAILED)
