"""The spec of `backend="gemini"`: arguments checked, host and key paired."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ...errors import ConfigurationError
from ..http.endpoints import (
    Origin,
    checked_api_key,
    checked_base_url,
    checked_headers,
    checked_text,
    fingerprint_of,
    from_environment,
    is_named,
    missing_key,
    origin_of,
)
from ..http.pool import ConnectionSettings
from ..spec import (
    OUR_KWARGS,
    ClientSpec,
    Shared,
    attempts_of,
    common_settings,
    optional_sdk,
    price_and_window,
    refuse_unknown,
)
from .client import BASE_URL, GeminiClient, GeminiConnection, open_connection
from .dialect import mapped_sampling

if TYPE_CHECKING:
    from ..base import LMClient

GEMINI_KWARGS = (
    "api_key",
    "vertexai",
    "project",
    "location",
    "credentials",
    "base_url",
    "api_version",
    "timeout",
    "max_retries",
    "default_headers",
    "default_query",
    "http_client",
)
"""What `backend_kwargs` of "gemini" may hold, beside what all may."""

DEFAULT_MODEL = "gemini-2.5-flash"
"""The model asked when `backend="gemini"` is given no `model_name`: the reference's."""

BASE_URL_VARIABLE = "GOOGLE_GEMINI_BASE_URL"

KEY_VARIABLES = ("GEMINI_API_KEY", "GOOGLE_API_KEY")


def gemini_spec(kwargs: dict[str, Any], sampling: dict[str, Any]) -> ClientSpec:
    """Check what is for Gemini and say how to open it."""
    refuse_unknown("gemini", kwargs, (*GEMINI_KWARGS, *OUR_KWARGS))
    model = checked_text("model_name", kwargs.pop("model_name", None)) or DEFAULT_MODEL
    optional_sdk("google.genai", "gemini", load=False)
    mapped_sampling(sampling)
    price, window = price_and_window(model, kwargs)
    attempts = attempts_of(kwargs)
    settings = _settings(kwargs)

    async def opener(shared: Shared) -> LMClient:
        connection: GeminiConnection = await shared(settings.key, lambda: open_connection(settings))
        return GeminiClient(connection, model, sampling_args=sampling)

    return ClientSpec(
        model=model,
        backend="gemini",
        key=(settings.key, model, fingerprint_of(sampling)),
        asked_with=sampling,
        where=settings.where(sampling),
        price=price,
        window=window,
        attempts=attempts,
        early=not settings.sdk_kwargs["vertexai"],  # which asks the network for credentials
        opener=opener,
    )


def _settings(kwargs: dict[str, Any]) -> ConnectionSettings:
    vertex = kwargs.pop("vertexai", None)
    if vertex is not None and not isinstance(vertex, bool):
        raise ConfigurationError(f"vertexai must be True or False, not {type(vertex).__name__}")
    if vertex is None:
        vertex = os.environ.get("GOOGLE_GENAI_USE_VERTEXAI", "").strip().lower() in ("true", "1")
    base_url = kwargs.pop("base_url", None)
    if base_url is None and not vertex:
        base_url = from_environment(BASE_URL_VARIABLE) or BASE_URL
    base_url = checked_base_url(base_url) if base_url is not None else None
    key = checked_api_key(kwargs.pop("api_key", None))
    headers = checked_headers(kwargs.get("default_headers"))
    has_own = bool(headers & {"authorization", "x-goog-api-key"})
    if not key and not vertex and not has_own and base_url is not None:
        key = _key_from_environment(origin_of(base_url))
    project = checked_text("project", kwargs.pop("project", None)) or os.environ.get("GOOGLE_CLOUD_PROJECT") or None
    location = checked_text("location", kwargs.pop("location", None)) or os.environ.get("GOOGLE_CLOUD_LOCATION") or None
    credentials = kwargs.pop("credentials", None)
    if not vertex and credentials is not None:
        raise ConfigurationError("credentials go with vertexai=True; the Gemini API takes an api_key")
    if vertex and base_url is not None and credentials is None and not key and not has_own:
        raise ConfigurationError("vertexai=True with a base_url of its own needs credentials= or api_key=")
    return ConnectionSettings(
        vendor="gemini",
        base_url=base_url,
        api_key=checked_api_key(key),
        **common_settings(kwargs),
        sdk_kwargs={
            "vertexai": vertex,
            "project": project,
            "location": location,
            "credentials": credentials,
            "api_version": checked_text("api_version", kwargs.pop("api_version", None)),
            "signed": not has_own,
        },
    )


def _key_from_environment(origin: Origin) -> str | None:
    at_home = origin == origin_of(BASE_URL)
    if not at_home and not is_named(origin, BASE_URL_VARIABLE):
        return None
    key = from_environment(*KEY_VARIABLES)
    if key is None and at_home:
        raise missing_key("gemini", KEY_VARIABLES[0])
    return key
