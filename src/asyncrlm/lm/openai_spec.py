"""The specs of OpenAI and its presets: arguments checked, host and key paired."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ..errors import ConfigurationError
from .endpoints import (
    Preset,
    checked_key,
    header_problem,
    is_openai,
    key_from_environment,
    key_variable_for,
    missing_key,
    needs_key,
    origin_of,
)
from .openai_client import (
    DEFAULT_TIMEOUT,
    ApiKey,
    Connection,
    ConnectionSettings,
    OpenAIClient,
    fingerprint,
    open_connection,
)
from .retrying import DEFAULT_ATTEMPTS
from .spec import OUR_KWARGS, ClientSpec, Shared, price_and_window, refuse_unknown

if TYPE_CHECKING:
    from .base import LMClient

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
        raise ConfigurationError(f'backend="{backend}" needs backend_kwargs={{"model_name": ...}}')
    price, window = price_and_window(model, kwargs)
    settings = _connection_settings(backend, preset, kwargs)
    retries = kwargs.pop("max_retries", None)
    if retries is not None and (not isinstance(retries, int) or retries < 0):
        raise ConfigurationError(f"max_retries must be 0 or more, not {retries!r}")
    origin = None if settings.base_url is None else origin_of(settings.base_url)
    openai = origin is None or is_openai(origin)
    at_home = preset.base_url is not None and origin == origin_of(preset.base_url)

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
        key=(settings.key, model, fingerprint(repr(sorted(sampling.items(), key=str)))),
        price=price,
        window=window,
        asked_with=sampling,
        attempts=DEFAULT_ATTEMPTS if retries is None else retries + 1,
        opener=opener,
    )


def _connection_settings(backend: str, preset: Preset, kwargs: dict[str, Any]) -> ConnectionSettings:
    base_url = _base_url(backend, preset, kwargs)
    given: Any = kwargs.pop("api_key", None)
    api_key: ApiKey | None = None
    if isinstance(given, str):
        api_key = checked_key(given) or None
    elif callable(given):
        api_key = cast("ApiKey", given)
    elif given is not None:
        raise ConfigurationError("api_key must be a str or an async callable that gives one")
    origin = origin_of(base_url) if base_url is not None else ("https", "api.openai.com", 443)
    headers = _checked_headers(kwargs.get("default_headers"))
    if api_key is None and not headers & {"authorization", "api-key", "x-api-key"}:
        api_key = key_from_environment(origin)
        api_key = checked_key(api_key) if api_key else None
        if api_key is None and needs_key(origin):
            raise missing_key(backend, key_variable_for(origin))
    if not isinstance(kwargs.get("default_query") or {}, Mapping):
        raise ConfigurationError("default_query must be a dict")
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


def _checked_headers(headers: Any) -> set[str]:
    """The names of the caller's default headers, in lower case."""
    if headers is None:
        return set()
    if not isinstance(headers, Mapping):
        raise ConfigurationError("default_headers must be a dict")
    given = cast("Mapping[Any, Any]", headers)
    for name, value in given.items():
        if problem := header_problem(name, value):
            raise ConfigurationError(f"default_headers: {problem}")
    return {str(name).lower() for name in given}


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
