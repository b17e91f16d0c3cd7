"""The specs of OpenAI and its presets: arguments checked, host and key paired."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import ConfigurationError
from ...ledger import Price
from ..http.connection import Connection
from ..http.endpoints import (
    Preset,
    checked_api_key,
    checked_base_url,
    checked_headers,
    checked_key,
    checked_text,
    fingerprint_of,
    from_environment,
    is_ambient,
    is_loopback,
    is_openai,
    key_from_environment,
    key_variable_for,
    missing_key,
    needs_key,
    origin_of,
)
from ..http.pool import ConnectionSettings
from ..spec import OUR_KWARGS, ClientSpec, Shared, attempts_of, common_settings, price_and_window, refuse_unknown
from .client import OpenAIClient, open_connection

if TYPE_CHECKING:
    from ..base import LMClient

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


def openai_spec(backend: str, preset: Preset, kwargs: dict[str, Any], sampling: dict[str, Any]) -> ClientSpec:
    for name in REFUSED_SDK_KWARGS:
        if kwargs.get(name) is not None:
            raise ConfigurationError(
                f"{name} is not supported yet: api_key may be an async callable that gives a token"
            )
    refuse_unknown(backend, kwargs, (*SDK_KWARGS, *OUR_KWARGS))
    model = kwargs.pop("model_name", None) or preset.default_model
    if not isinstance(model, str):
        raise ConfigurationError(
            f'backend="{backend}" needs backend_kwargs={{"model_name": ...}}',
            argument="model_name",
            problem=f'backend="{backend}" needs a model',
        )
    given_price = kwargs.get("price")
    price, window = price_and_window(model, kwargs)
    attempts = attempts_of(kwargs)
    settings = _connection_settings(backend, preset, kwargs)
    origin = None if settings.base_url is None else origin_of(settings.base_url)
    openai = origin is None or is_openai(origin)
    at_home = preset.base_url is not None and origin == origin_of(preset.base_url)
    free = preset.free and origin is not None and is_loopback(origin)
    if given_price is None and preset.own:
        price = Price(0.0) if free else None

    async def opener(shared: Shared) -> LMClient:
        connection: Connection = await shared(settings.key, lambda: open_connection(settings))
        return OpenAIClient(
            connection,
            model,
            sampling_args=sampling,
            body=preset.body if at_home else None,
            cap_name="max_completion_tokens" if openai else "max_tokens",
        )

    return ClientSpec(
        model=model,
        backend=backend,
        key=(settings.key, model, fingerprint_of(sampling)),
        asked_with=sampling,
        where=settings.where(sampling),
        price=price,
        window=window,
        needs_price=not free,
        attempts=attempts,
        early=True,
        opener=opener,
    )


def _connection_settings(backend: str, preset: Preset, kwargs: dict[str, Any]) -> ConnectionSettings:
    base_url = _base_url(backend, preset, kwargs)
    for name in ("organization", "project"):
        checked_text(name, kwargs.get(name))
    api_key = checked_api_key(kwargs.pop("api_key", None))
    origin = origin_of(base_url) if base_url is not None else ("https", "api.openai.com", 443)
    headers = checked_headers(kwargs.get("default_headers"))
    withheld = None
    if api_key is None and not headers & {"authorization", "api-key", "x-api-key"}:
        api_key = key_from_environment(origin)
        api_key = checked_key(api_key) if api_key else None
        if api_key is None and needs_key(origin):
            raise missing_key(backend, key_variable_for(origin))
        if api_key is None and not is_ambient(origin) and from_environment("OPENAI_API_KEY"):
            withheld = "OPENAI_API_KEY"
    return ConnectionSettings(
        base_url=base_url,
        api_key=api_key,
        withheld=withheld,
        **common_settings(kwargs),
        sdk_kwargs={name: value for name, value in kwargs.items() if value is not None},
    )


def _base_url(backend: str, preset: Preset, kwargs: dict[str, Any]) -> str | None:
    base_url = kwargs.pop("base_url", None)
    if kwargs.get("data_residency") is not None:
        if base_url is not None or backend != "openai":
            raise ConfigurationError("data_residency names one of OpenAI's own hosts: it can't go with another")
        return None
    if base_url is None and backend == "openai":
        base_url = from_environment("OPENAI_BASE_URL")
    base_url = base_url if base_url is not None else preset.base_url
    if base_url is None:
        raise ConfigurationError(
            f'backend="{backend}" needs backend_kwargs={{"base_url": ...}}, such as "http://127.0.0.1:8000/v1"',
            argument="base_url",
            problem=f'backend="{backend}" needs the address of its server',
        )
    return checked_base_url(base_url)
