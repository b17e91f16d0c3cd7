"""The spec of `backend="anthropic"`: arguments checked, host and key paired."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import ConfigurationError
from ..http.endpoints import (
    checked_api_key,
    checked_base_url,
    checked_headers,
    checked_key,
    fingerprint_of,
    from_environment,
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
from .client import (
    BASE_URL,
    DEFAULT_MAX_TOKENS,
    AnthropicClient,
    is_anthropic,
    mapped_sampling,
    open_connection,
)

if TYPE_CHECKING:
    from ..base import LMClient
    from ..http.connection import Connection

ANTHROPIC_KWARGS = (
    "api_key",
    "auth_token",
    "base_url",
    "timeout",
    "max_retries",
    "default_headers",
    "default_query",
    "http_client",
    "max_tokens",
    "prompt_caching",
)
"""What `backend_kwargs` of "anthropic" may hold, beside what all may."""


def anthropic_spec(kwargs: dict[str, Any], sampling: dict[str, Any]) -> ClientSpec:
    """Check what is for Anthropic and say how to open it."""
    refuse_unknown("anthropic", kwargs, (*ANTHROPIC_KWARGS, *OUR_KWARGS))
    model = kwargs.pop("model_name", None)
    if not isinstance(model, str):
        raise ConfigurationError(
            'backend="anthropic" needs a model: "anthropic/claude-...", or model_name',
            argument="model_name",
            problem='backend="anthropic" needs a model',
        )
    optional_sdk("anthropic", "anthropic", load=False)
    mapped_sampling(sampling)
    price, window = price_and_window(model, kwargs)
    attempts = attempts_of(kwargs)
    most, caching = kwargs.pop("max_tokens", DEFAULT_MAX_TOKENS), kwargs.pop("prompt_caching", True)
    if not isinstance(most, int) or most < 1:
        raise ConfigurationError(f"max_tokens must be a positive number of tokens, not {most!r}")
    if not isinstance(caching, bool):
        raise ConfigurationError(f"prompt_caching must be True or False, not {caching!r}")
    settings = _settings(kwargs)

    async def opener(shared: Shared) -> LMClient:
        connection: Connection = await shared(settings.key, lambda: open_connection(settings))
        return AnthropicClient(connection, model, sampling_args=sampling, max_tokens=most, prompt_caching=caching)

    return ClientSpec(
        model=model,
        backend="anthropic",
        key=(settings.key, model, most, caching, fingerprint_of(sampling)),
        asked_with={**sampling, "max_tokens default": most},
        where=settings.where(sampling),
        price=price,
        window=window,
        attempts=attempts,
        early=True,
        opener=opener,
    )


def _settings(kwargs: dict[str, Any]) -> ConnectionSettings:
    named = from_environment("ANTHROPIC_BASE_URL")
    base_url = checked_base_url(kwargs.pop("base_url", None) or named or BASE_URL)
    headers = checked_headers(kwargs.get("default_headers"))
    key, token = checked_api_key(kwargs.pop("api_key", None)), kwargs.pop("auth_token", None)
    if key is not None and token is not None:
        raise ConfigurationError("give api_key or auth_token, not both")
    origin = origin_of(base_url)
    withheld, signed = None, bool(key or token is not None or headers & {"authorization", "x-api-key"})
    if not signed and not is_anthropic(origin):
        names = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
        withheld = next((name for name in names if from_environment(name)), None)
    elif not signed:
        key = from_environment("ANTHROPIC_API_KEY")
        token = None if key else from_environment("ANTHROPIC_AUTH_TOKEN")
        if key is None and token is None and origin == origin_of(BASE_URL):
            raise missing_key("anthropic", "ANTHROPIC_API_KEY")
    return ConnectionSettings(
        vendor="anthropic",
        base_url=base_url,
        api_key=checked_api_key(key),
        withheld=withheld,
        **common_settings(kwargs),
        sdk_kwargs={"auth_token": checked_key(token)} if token else {},
    )
