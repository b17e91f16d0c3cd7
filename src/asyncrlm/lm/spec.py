"""A client that is described and checked, but not open yet; and the checks that all of them share."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.to_thread
from msgspec import Struct

from ..errors import ConfigurationError
from ..ledger import Price
from . import catalog
from .arguments import argument_problem, endless
from .base import text_size
from .http.endpoints import checked_query
from .http.pool import DEFAULT_TIMEOUT
from .pacing.retrying import DEFAULT_ATTEMPTS

if TYPE_CHECKING:
    from .base import LMClient

Shared = Callable[[Hashable, Callable[[], AbstractAsyncContextManager[Any]]], Awaitable[Any]]
"""`Scope.shared`."""

OUR_KWARGS = ("model_name", "price", "context_window", "sampling_args")
"""What `backend_kwargs` may hold for every backend."""

NOT_SAMPLING = {
    "model": 'name it in backend_kwargs={"model_name": ...}',
    "messages": "the engine writes them",
    "stream": "the engine asks for a stream where it wants one",
    "stream_options": "the engine asks for a stream where it wants one",
}
"""What can't be a sampling argument, and what to do instead."""


class ClientSpec(Struct, frozen=True, kw_only=True, eq=False):
    """A checked description of a client that is not open yet."""

    model: str
    """The name the model is known by in routing, usage and prices."""
    backend: str
    key: Hashable
    """Equal for specs whose clients are interchangeable. Holds no secret in clear."""
    price: Price | None = None
    window: int | None = None
    """Tokens of input at most, where known."""
    needs_price: bool = True
    """False where requests cost nothing."""
    asked_with: Mapping[str, Any] = {}
    """What is sent with every request and may change its reply: it tells cached replies apart."""
    where: str | None
    """Which server or function answers, and what it is told on the way: two of one model name are not alike to a cache.
    None for one that can't be told from others: it is not cached. May hold secrets: for hashes only."""
    attempts: int = DEFAULT_ATTEMPTS
    """How often to send one request at most."""
    fallbacks: tuple[ClientSpec, ...] = ()
    """Of a list of models all of them, the first one too, which have clients of their own; else none."""
    early: bool = False
    """Whether it is opened when an `AsyncRLM` is entered: all it takes is time of this process."""
    opener: Callable[[Shared], Awaitable[LMClient]]
    """Builds the client; what it opens is entered through the `Shared` it is given."""

    @property
    def each(self) -> tuple[ClientSpec, ...]:
        """The models that one attempt may ask, in their order: this one, or its fallbacks."""
        return self.fallbacks or (self,)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[LMClient]:
        """The client, with connections of its own. Holds no task group or cancel scope open."""
        async with AsyncExitStack() as stack:
            opened: dict[Hashable, Any] = {}

            async def shared(key: Hashable, factory: Callable[[], AbstractAsyncContextManager[Any]]) -> Any:
                if key not in opened:
                    opened[key] = await stack.enter_async_context(factory())
                return opened[key]

            yield await self.opener(shared)

    async def connect(self, shared: Shared) -> LMClient:
        """The client, its connections shared with all specs of the same account: `shared` is a scope's method."""
        return await self.opener(shared)

    def argument_bytes(self, own: Mapping[str, Any]) -> int:
        """What sampling arguments add to the input at most, a request's `own` ones included: the model reads tools and
        schemas, too."""
        return sum(text_size(repr(dict(given))) for given in (self.asked_with, own) if given)

    def __repr__(self) -> str:
        return f"<ClientSpec {self.backend}: {self.model}>"


def optional_sdk(module: str, extra: str, *, load: bool = True) -> Any:
    """A vendor's SDK; with `load=False` only whether it is there.

    Raises:
        ConfigurationError: saying how to install it.
    """
    try:
        if load:
            return importlib.import_module(module)
        found = importlib.util.find_spec(module)
    except ImportError:
        found = None
    if found is None:
        raise ConfigurationError(f'{module} is not installed: pip install "asyncrlm[{extra}]"')
    return None


async def loaded_sdk(module: str, extra: str) -> Any:
    """`optional_sdk`, loaded beside the event loop: it takes half a second or more, and much of it reads the disk."""
    limiter = anyio.CapacityLimiter(1)
    return await anyio.to_thread.run_sync(optional_sdk, module, extra, abandon_on_cancel=True, limiter=limiter)


def refuse_unknown(backend: str, kwargs: Mapping[str, Any], known: Iterable[str]) -> None:
    known = sorted(known)
    for name in kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigurationError(
                f"backend_kwargs of {backend!r} don't include {name!r}{hint}; known: {', '.join(known)}"
            )


def checked_sampling(*layers: Mapping[str, Any] | None) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for layer in layers:
        if layer is None:
            continue
        if not isinstance(cast("object", layer), Mapping):
            raise ConfigurationError("sampling_args must be a dict")
        merged.update(layer)
    for name, instead in NOT_SAMPLING.items():
        if merged.get(name):
            raise ConfigurationError(f"sampling_args can't hold {name!r}: {instead}")
        merged.pop(name, None)
    if problem := argument_problem(merged):
        raise ConfigurationError(problem)
    for name in ("n", "best_of", "candidate_count"):
        if merged.get(name) not in (None, 1):
            raise ConfigurationError(f"{name} in sampling_args must be 1: one reply is used, and each is paid for")
    for name, value in merged.items():
        if name != "timeout" and (number := endless(value)) is not None:
            raise ConfigurationError(f"{name} in sampling_args can't hold {number}: JSON has no such number")
    return merged


def checked_timeout(timeout: Any) -> Any:
    """Seconds of one attempt, None for any number, or an http library's own object.

    Raises:
        ConfigurationError: if it is none of them.
    """
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is None or type(timeout).__name__ == "Timeout" or (number and timeout > 0):
        return timeout
    said = timeout if number else type(timeout).__name__
    raise ConfigurationError(f"timeout must be a positive number of seconds, an httpx2.Timeout or None, not {said}")


def common_settings(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Fields of `ConnectionSettings` that every vendor's connection is given alike. Takes them out of `kwargs`."""
    return {
        "timeout": checked_timeout(kwargs.pop("timeout", DEFAULT_TIMEOUT)),
        "default_headers": kwargs.pop("default_headers", None) or {},
        "default_query": checked_query(kwargs.pop("default_query", None)),
        "http_client": kwargs.pop("http_client", None),
    }


def attempts_of(kwargs: dict[str, Any]) -> int:
    """How often to send a request, by `max_retries`, which is taken out of `kwargs`."""
    retries = kwargs.pop("max_retries", None)
    if retries is None:
        return DEFAULT_ATTEMPTS
    if not isinstance(retries, int) or retries < 0:
        raise ConfigurationError(f"max_retries must be 0 or more, not {retries!r}")
    return retries + 1


def price_and_window(model: str | None, kwargs: dict[str, Any]) -> tuple[Price | None, int | None]:
    """What `price=` and `context_window=` say, else the catalogue. Takes both out of `kwargs`."""
    price, window = kwargs.pop("price", None), kwargs.pop("context_window", None)
    if window is not None and (not isinstance(window, int) or window <= 0):
        raise ConfigurationError(f"context_window must be a positive number of tokens, not {window!r}")
    if window is None and model is not None:
        window = catalog.window(model)
    return (catalog.price(model) if price is None and model is not None else _as_price(price)), window


_OWN_PRICES = ("cached", "cache_write", "cache_write_1h")
"""Of parts of the input; where they are not given, that input costs as other."""


def _as_price(price: Any) -> Price | None:
    if price is None or isinstance(price, Price):
        return price
    match price:
        case Mapping():
            fields: dict[str, Any] = dict(cast("Mapping[str, Any]", price))
        case (entered, left):
            fields = {"input": entered, "output": left}
        case _:
            fields = {}
    amounts = [fields.get("input"), fields.get("output"), *(fields.get(name, 0.0) for name in _OWN_PRICES)]
    known = set(fields) <= {"input", "output", *_OWN_PRICES}
    if not known or any(not isinstance(amount, int | float) or not 0 <= amount < float("inf") for amount in amounts):
        raise ConfigurationError(
            'price must be (input, output) or {"input": ..., "output": ..., "cached": ..., "cache_write": ..., '
            f'"cache_write_1h": ...}} in USD per million tokens, not {price!r}'
        )
    return Price(**fields)
