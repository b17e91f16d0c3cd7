"""From what a user names to a client: `client_spec` checks everything at once, opens nothing."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from msgspec import structs

from ..errors import ConfigurationError
from ..ledger import Price
from .base import LMClient, LMDelta, LMReply, LMRequest
from .callable import CallableClient
from .http.endpoints import PRESETS, fingerprint_of
from .http.naming import TRAVELLING
from .openai.spec import openai_spec
from .spec import OUR_KWARGS, ClientSpec, Shared, checked_sampling, price_and_window, refuse_unknown

__all__ = ["BACKENDS", "Backend", "ClientSpec", "Shared", "client_spec"]

Backend = str | LMClient | Callable[..., Awaitable[Any]] | Sequence[Any]
"""A name, "provider/model", a client, an async callable, or a list of those: the later ones stand in for the first."""

_VENDORS = {
    "azure_openai": "openai.azure",
    "anthropic": "anthropic.spec",
    "gemini": "gemini.spec",
    "portkey": "openai.portkey",
    "llamacpp_local": "llamacpp_local",
}
"""Name → the module with its spec, loaded where it is asked for."""

_FAMILIES = {
    "gpt-": "openai",
    "o1": "openai",
    "o3": "openai",
    "o4": "openai",
    "claude-": "anthropic",
    "gemini-": "gemini",
}
"""How the name of a model begins → the backend that has it."""

BACKENDS = (*PRESETS, *_VENDORS, "offline")
"""The names that `backend` may be."""


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
    sampling = checked_sampling(kwargs.pop("sampling_args", None), sampling_args)
    if isinstance(backend, LMClient):
        return _object_spec(backend, kwargs, sampling)
    if isinstance(backend, str):
        name, _, model = backend.partition("/")
        if model and kwargs.setdefault("model_name", model) != model:
            raise ConfigurationError(f"two models named: {backend!r} and model_name={kwargs['model_name']!r}")
        return _named_spec(name, kwargs, sampling)
    if isinstance(backend, type):
        raise ConfigurationError(f"backend must be an object, not the class itself: {backend.__name__}(…)")
    if callable(backend):
        return _callable_spec(backend, kwargs, sampling)
    raise ConfigurationError(
        f"backend must be a name ({', '.join(BACKENDS)}), 'provider/model', an LMClient, an async callable or a list "
        f"of those, not {type(backend).__name__}"
    )


def _named_spec(name: str, kwargs: dict[str, Any], sampling: dict[str, Any]) -> ClientSpec:
    if name == "offline":
        return _offline_spec(kwargs, sampling)
    if name in PRESETS:
        return openai_spec(name, PRESETS[name], kwargs, sampling)
    if name not in _VENDORS:
        raise _unknown_backend(name)
    module = importlib.import_module(f".{_VENDORS[name]}", __package__)
    return getattr(module, f"{name}_spec")(kwargs, sampling)


def _unknown_backend(name: str) -> ConfigurationError:
    near = [f"{family}/{name}" for prefix, family in _FAMILIES.items() if name.startswith(prefix)]
    near += difflib.get_close_matches(name, BACKENDS, 1, 0.7)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return ConfigurationError(f"unknown backend {name!r}{hint}; known: {', '.join(BACKENDS)}")


def _offline_spec(kwargs: dict[str, Any], sampling: dict[str, Any]) -> ClientSpec:
    from .offline.client import OfflineLM  # noqa: PLC0415 - only loaded where it is asked for

    refuse_unknown("offline", kwargs, OUR_KWARGS)
    model = kwargs.pop("model_name", None)
    if model not in (None, "offline"):
        raise ConfigurationError(f"the backend offline has no models to choose from: leave model_name={model!r} out")
    return _object_spec(OfflineLM(), kwargs, sampling, backend="offline", where="offline")


def _object_spec(
    client: LMClient,
    kwargs: dict[str, Any],
    sampling: dict[str, Any],
    backend: str | None = None,
    where: str | None = None,
) -> ClientSpec:
    backend = backend or type(client).__name__
    refuse_unknown(backend, kwargs, ("price", "context_window", "sampling_args", "cache_key"))
    named: object = getattr(client, "model", None)
    if not isinstance(named, str) or not named:
        raise ConfigurationError(
            f"an LMClient needs a name, which routing, usage and prices know it by: give {backend} a `model`, such as "
            f'`model = "mine"` in its class, {"that is a str" if named is not None else "which it has not"}'
        )
    cache_key = kwargs.pop("cache_key", client.cache_key)
    if cache_key is not None and (not isinstance(cache_key, str) or not cache_key):
        raise ConfigurationError(f"cache_key must be a str that is not empty, not {cache_key!r}")
    where = f"as told: {cache_key}" if cache_key is not None else where
    price, window = price_and_window(client.model, kwargs)
    if price is None and not client.needs_price:
        price = Price(0.0)
    bound = _WithSampling(client, sampling) if sampling else client

    async def opener(shared: Shared) -> LMClient:
        return bound

    return ClientSpec(
        model=client.model,
        backend=backend,
        key=("object", id(client), fingerprint_of(sampling)),
        price=price,
        window=window,
        needs_price=client.needs_price,
        asked_with=sampling,
        where=where,
        opener=opener,
    )


def _callable_spec(function: Callable[..., Any], kwargs: dict[str, Any], sampling: dict[str, Any]) -> ClientSpec:
    model = kwargs.pop("model_name", None)
    client = CallableClient(function, model=model)
    if sampling:
        raise ConfigurationError("a callable gets only the messages: sampling_args have no way to reach it")
    return _object_spec(client, kwargs, {}, backend="callable", where=_place_of(function))


def _place_of(function: Callable[..., Any]) -> str | None:
    """Where a function of a module is found again; None for one that may be another under the same name next time."""
    name, module = getattr(function, "__qualname__", None), getattr(function, "__module__", None)
    place = sys.modules.get(module) if isinstance(module, str) else None
    if not isinstance(name, str) or getattr(place, name, None) is not function:
        return None
    # Each script is called __main__, and so is a notebook.
    file = getattr(place, "__file__", None)
    return f"{module}.{name} in {file}" if file or module != "__main__" else None


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
        raise TypeError("each of several models has a client of its own")

    return ClientSpec(
        model=specs[0].model,
        backend="fallback",
        key=("fallback", *(spec.key for spec in specs)),
        price=_dearest([spec.price for spec in specs]),
        window=min(windows) if windows else None,
        asked_with={"each": [[spec.backend, spec.model, _said(spec.asked_with)] for spec in specs]},
        where=None if None in (places := [spec.where for spec in specs]) else repr(places),
        needs_price=any(spec.needs_price for spec in specs),
        attempts=max(spec.attempts for spec in specs),
        fallbacks=tuple(specs),
        opener=opener,
    )


def _said(asked_with: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked_with.items() if name not in TRAVELLING}


def _dearest(prices: Sequence[Price | None]) -> Price | None:
    """What any of them may cost at most; None if one is not known."""
    known = [price for price in prices if price is not None]
    if not known or len(known) < len(prices):
        return None
    cached = max(price.input if price.cached is None else price.cached for price in known)
    writes = [price.cache_write for price in known if price.cache_write is not None]
    hours = [price.cache_write_1h for price in known if price.cache_write_1h is not None]
    dearest = max(price.input for price in known)
    return Price(
        input=dearest,
        cached=cached,
        output=max(price.output for price in known),
        cache_write=max(dearest, *writes) if writes else None,
        cache_write_1h=max(dearest, *writes, *hours) if hours else None,
    )


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
        return await self._client.acomplete(self._merged(request))

    def astream(self, request: LMRequest) -> AsyncGenerator[LMDelta]:
        return self._client.astream(self._merged(request))

    def _merged(self, request: LMRequest) -> LMRequest:
        return structs.replace(request, sampling_args=self._sampling_args | request.sampling_args)
