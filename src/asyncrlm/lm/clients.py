"""From what a user names to a client: `client_spec` checks everything at once, opens nothing."""

from __future__ import annotations

import difflib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, cast

from msgspec import Struct

from asyncrlm.errors import ConfigurationError
from asyncrlm.ledger import Price

from . import catalog
from .base import LMClient, LMReply, LMRequest
from .callable import CallableClient
from .endpoints import (
    PRESETS,
    Preset,
    checked_key,
    key_from_environment,
    key_variable_for,
    missing_key,
    needs_key,
    origin_of,
)
from .fallback import FallbackClient
from .openai_client import DEFAULT_TIMEOUT, Connection, ConnectionSettings, OpenAIClient, open_connection
from .pacing import DEFAULT_ATTEMPTS

Backend = str | LMClient | Callable[..., Awaitable[Any]] | Sequence[Any]
"""A name, "provider/model", a client, an async callable, or a list of those: the later ones stand in for the first."""

Shared = Callable[[Hashable, Callable[[], AbstractAsyncContextManager[Any]]], Awaitable[Any]]
"""`Scope.shared`."""

OUR_KWARGS = ("model_name", "price", "context_window", "sampling_args")
"""What `backend_kwargs` may hold for every backend."""

SDK_KWARGS = (
    "api_key",
    "base_url",
    "organization",
    "project",
    "timeout",
    "max_retries",
    "default_headers",
    "default_query",
    "http_client",
    "data_residency",
    "admin_api_key",
    "webhook_secret",
    "websocket_base_url",
)
"""What the OpenAI SDK's client takes and `backend_kwargs` may hold for its backends."""

REFUSED_SDK_KWARGS = ("workload_identity", "provider")
"""What the SDK's client takes that needs its own way of sending."""

LATER_BACKENDS = ("azure_openai", "anthropic", "gemini", "portkey", "ollama", "lmstudio", "llamacpp")
"""Vendors whose own clients come with a later release."""

BACKENDS = (*PRESETS, "offline")
"""The names that `backend` may be."""

NOT_SAMPLING = {
    "model": 'name it in backend_kwargs={"model_name": ...}',
    "messages": "the engine writes them",
    "stream": "replies are taken whole",
    "stream_options": "replies are taken whole",
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
    attempts: int = DEFAULT_ATTEMPTS
    """How often to send one request at most."""
    opener: Callable[[Shared], Awaitable[LMClient]]
    """Builds the client; what it opens is entered through the `Shared` it is given."""

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

    def __repr__(self) -> str:
        return f"<ClientSpec {self.backend}: {self.model}>"


def client_spec(
    backend: Backend,
    backend_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    sampling_args: Mapping[str, Any] | None = None,
) -> ClientSpec:
    """Check what names a client and say how to open it.

    Args:
        backend: See `Backend`.
        backend_kwargs: For the client; a list of them, one each, where `backend` is a list.
        sampling_args: Sent with every request, under the names given here. They win over those in `backend_kwargs`.

    Raises:
        ConfigurationError: naming what would be right.
    """
    if isinstance(backend, list | tuple):
        return _fallback_spec(cast("Sequence[Backend]", backend), backend_kwargs, sampling_args)
    if backend_kwargs is not None and not isinstance(backend_kwargs, Mapping):
        raise ConfigurationError("backend_kwargs must be a dict (a list of dicts goes with a list of backends)")
    kwargs: dict[str, Any] = dict(backend_kwargs or {})
    sampling = _checked_sampling(kwargs.pop("sampling_args", None), sampling_args)
    if isinstance(backend, LMClient):
        return _object_spec(backend, kwargs, sampling)
    if isinstance(backend, str):
        name, _, model = backend.partition("/")
        if model and kwargs.setdefault("model_name", model) != model:
            raise ConfigurationError(f"two models named: {backend!r} and model_name={kwargs['model_name']!r}")
        if name == "offline":
            return _offline_spec(kwargs, sampling)
        if name in PRESETS:
            return _openai_spec(name, PRESETS[name], kwargs, sampling)
        raise _unknown_backend(name)
    if callable(backend):
        return _callable_spec(backend, kwargs, sampling)
    raise ConfigurationError(
        f"backend must be a name ({', '.join(BACKENDS)}), 'provider/model', an LMClient, an async callable or a list "
        f"of those, not {type(backend).__name__}"
    )


def _unknown_backend(name: str) -> ConfigurationError:
    if name in LATER_BACKENDS:
        return ConfigurationError(
            f'backend="{name}" comes with a later release. Until then: an OpenAI-compatible endpoint of that service '
            '(backend="vllm" with its base_url and api_key), or an async callable of your own.'
        )
    close = difflib.get_close_matches(name, BACKENDS, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return ConfigurationError(f"unknown backend {name!r}{hint}; known: {', '.join(BACKENDS)}")


def _refuse_unknown(backend: str, kwargs: Mapping[str, Any], known: Iterable[str]) -> None:
    known = sorted(known)
    for name in kwargs:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigurationError(
                f"backend_kwargs of {backend!r} don't include {name!r}{hint}; known: {', '.join(known)}"
            )


def _checked_sampling(*layers: Mapping[str, Any] | None) -> dict[str, Any]:
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
    return merged


def _price_and_window(model: str | None, kwargs: dict[str, Any]) -> tuple[Price | None, int | None]:
    """What `price=` and `context_window=` say, else the catalogue. Takes both out of `kwargs`."""
    price, window = kwargs.pop("price", None), kwargs.pop("context_window", None)
    if window is not None and (not isinstance(window, int) or window <= 0):
        raise ConfigurationError(f"context_window must be a positive number of tokens, not {window!r}")
    if window is None and model is not None:
        window = catalog.window(model)
    return (catalog.price(model) if price is None and model is not None else _as_price(price)), window


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
    amounts = [fields.get("input"), fields.get("output"), fields.get("cached", 0.0)]
    known = set(fields) <= {"input", "output", "cached"}
    if not known or any(not isinstance(amount, int | float) or not 0 <= amount < float("inf") for amount in amounts):
        raise ConfigurationError(
            'price must be (input, output) or {"input": ..., "output": ..., "cached": ...} in USD per million tokens, '
            f"not {price!r}"
        )
    return Price(**fields)


def _openai_spec(backend: str, preset: Preset, kwargs: dict[str, Any], sampling: dict[str, Any]) -> ClientSpec:
    for name in REFUSED_SDK_KWARGS:
        if kwargs.get(name) is not None:
            raise ConfigurationError(
                f"{name} is not supported yet: api_key may be an async callable that gives a token"
            )
    _refuse_unknown(backend, kwargs, (*SDK_KWARGS, *OUR_KWARGS))
    model = kwargs.pop("model_name", None) or preset.default_model
    if not isinstance(model, str):
        raise ConfigurationError(f'backend="{backend}" needs backend_kwargs={{"model_name": ...}}')
    price, window = _price_and_window(model, kwargs)
    settings = _connection_settings(backend, preset, kwargs)
    retries = kwargs.pop("max_retries", None)
    if retries is not None and (not isinstance(retries, int) or retries < 0):
        raise ConfigurationError(f"max_retries must be 0 or more, not {retries!r}")
    own_host = preset.base_url is None or settings.base_url != preset.base_url

    async def opener(shared: Shared) -> LMClient:
        connection: Connection = await shared(settings.key, lambda: open_connection(settings))
        return OpenAIClient(
            connection,
            model,
            sampling_args=sampling,
            body=preset.body,
            cap_name="max_tokens" if own_host else preset.cap_name,
        )

    return ClientSpec(
        model=model,
        backend=backend,
        key=(settings.key, model, repr(sorted(sampling.items()))),
        price=price,
        window=window,
        attempts=DEFAULT_ATTEMPTS if retries is None else retries + 1,
        opener=opener,
    )


def _connection_settings(backend: str, preset: Preset, kwargs: dict[str, Any]) -> ConnectionSettings:
    base_url = _base_url(backend, preset, kwargs)
    api_key: Any = kwargs.pop("api_key", None)
    if isinstance(api_key, str):
        api_key = checked_key(api_key) or None
    elif api_key is not None and not callable(api_key):
        raise ConfigurationError("api_key must be a str or an async callable that gives one")
    origin = origin_of(base_url) if base_url is not None else ("https", "api.openai.com", 443)
    headers = {name.lower() for name in kwargs.get("default_headers") or ()}
    if api_key is None and not headers & {"authorization", "api-key", "x-api-key"}:
        api_key = key_from_environment(origin)
        api_key = checked_key(api_key) if api_key else None
        if api_key is None and needs_key(origin):
            raise missing_key(backend, key_variable_for(origin))
    timeout = kwargs.pop("timeout", DEFAULT_TIMEOUT)
    if isinstance(timeout, int | float) and not timeout > 0:
        raise ConfigurationError(f"timeout must be a positive number of seconds, not {timeout!r}")
    return ConnectionSettings(
        base_url=base_url,
        api_key=api_key,
        timeout=timeout,
        default_headers=kwargs.pop("default_headers", None) or {},
        default_query=kwargs.pop("default_query", None) or {},
        organization=kwargs.pop("organization", None),
        project=kwargs.pop("project", None),
        http_client=kwargs.pop("http_client", None),
        sdk_kwargs={name: value for name, value in kwargs.items() if name != "max_retries" and value is not None},
    )


def _base_url(backend: str, preset: Preset, kwargs: dict[str, Any]) -> str | None:
    base_url = kwargs.pop("base_url", None)
    if kwargs.get("data_residency") is not None:
        if base_url is not None or backend != "openai":
            raise ConfigurationError("data_residency names one of OpenAI's own hosts: it can't go with another")
        return None
    if base_url is None and backend == "openai":
        base_url = os.environ.get("OPENAI_BASE_URL", "").strip() or None
    base_url = base_url if base_url is not None else preset.base_url
    if base_url is None:
        raise ConfigurationError(
            f'backend="{backend}" needs backend_kwargs={{"base_url": ...}}, such as "http://127.0.0.1:8000/v1"'
        )
    base_url = str(base_url).rstrip("/")
    origin_of(base_url)
    return base_url


def _offline_spec(kwargs: dict[str, Any], sampling: dict[str, Any]) -> ClientSpec:
    from .offline import OfflineLM  # noqa: PLC0415 - only loaded where it is asked for

    _refuse_unknown("offline", kwargs, OUR_KWARGS)
    kwargs.pop("model_name", None)
    return _object_spec(OfflineLM(), kwargs, sampling, backend="offline")


def _object_spec(
    client: LMClient, kwargs: dict[str, Any], sampling: dict[str, Any], backend: str | None = None
) -> ClientSpec:
    backend = backend or type(client).__name__
    _refuse_unknown(backend, kwargs, ("price", "context_window", "sampling_args"))
    price, window = _price_and_window(client.model, kwargs)
    if price is None and not client.needs_price:
        price = Price(0.0)
    bound = _WithSampling(client, sampling) if sampling else client

    async def opener(shared: Shared) -> LMClient:
        return bound

    return ClientSpec(
        model=client.model,
        backend=backend,
        key=("object", id(client), repr(sorted(sampling.items()))),
        price=price,
        window=window,
        needs_price=client.needs_price,
        opener=opener,
    )


def _callable_spec(function: Callable[..., Any], kwargs: dict[str, Any], sampling: dict[str, Any]) -> ClientSpec:
    model = kwargs.pop("model_name", None)
    client = CallableClient(function, model=model)
    if sampling:
        raise ConfigurationError("a callable gets only the messages: sampling_args have no way to reach it")
    return _object_spec(client, kwargs, {}, backend="callable")


def _fallback_spec(
    backends: Sequence[Backend],
    backend_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None,
    sampling_args: Mapping[str, Any] | None,
) -> ClientSpec:
    if not backends:
        raise ConfigurationError("a list of backends needs at least one")
    if any(isinstance(backend, list | tuple) for backend in backends):
        raise ConfigurationError("a list of fallbacks can't hold another list")
    each: Sequence[Mapping[str, Any] | None]
    if backend_kwargs is None:
        each = [None] * len(backends)
    elif isinstance(backend_kwargs, Mapping):
        raise ConfigurationError("with a list of backends, backend_kwargs is a list too: one dict (or None) each")
    else:
        each = list(backend_kwargs)
    if len(each) != len(backends):
        raise ConfigurationError(f"{len(backends)} backends but {len(each)} backend_kwargs: one dict (or None) each")
    specs = [
        client_spec(backend, kwargs, sampling_args if isinstance(backend, str | LMClient) else None)
        for backend, kwargs in zip(backends, each, strict=True)
    ]
    if len(specs) == 1:
        return specs[0]
    windows = [spec.window for spec in specs if spec.window is not None]

    async def opener(shared: Shared) -> LMClient:
        return FallbackClient([await spec.connect(shared) for spec in specs], prices=[spec.price for spec in specs])

    return ClientSpec(
        model=specs[0].model,
        backend="fallback",
        key=("fallback", *(spec.key for spec in specs)),
        price=_dearest([spec.price for spec in specs]),
        window=min(windows) if windows else None,
        needs_price=any(spec.needs_price for spec in specs),
        attempts=max(spec.attempts for spec in specs),
        opener=opener,
    )


def _dearest(prices: Sequence[Price | None]) -> Price | None:
    """What any of them may cost at most; None if one is not known."""
    known = [price for price in prices if price is not None]
    if not known or len(known) < len(prices):
        return None
    cached = max(price.input if price.cached is None else price.cached for price in known)
    return Price(input=max(p.input for p in known), cached=cached, output=max(p.output for p in known))


class _WithSampling(LMClient):
    """A caller's client with sampling arguments of ours under those of each request."""

    def __init__(self, client: LMClient, sampling_args: Mapping[str, Any]) -> None:
        self.model = client.model
        self._client = client
        self._sampling_args = dict(sampling_args)

    @property
    def account(self) -> str:
        return self._client.account

    @property
    def needs_price(self) -> bool:
        return self._client.needs_price

    async def acomplete(self, request: LMRequest) -> LMReply:
        merged = self._sampling_args | request.sampling_args
        return await self._client.acomplete(
            LMRequest(messages=request.messages, sampling_args=merged, output_cap=request.output_cap)
        )
