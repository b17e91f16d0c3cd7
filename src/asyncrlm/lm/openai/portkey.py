"""Portkey's gateway: chat completions, with headers that say which provider, key and rules to use.

Portkey's own SDK wraps a copy of OpenAI's on httpx, retries once by itself and leaves a pool of connections open for
each client. Its gateway takes the requests of any OpenAI client that sends its headers, and documents that way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from ...errors import ConfigurationError
from ..http.endpoints import Preset, checked_base_url, checked_key, from_environment, missing_key, origin_of
from ..spec import OUR_KWARGS, ClientSpec, refuse_unknown
from .spec import openai_spec

BASE_URL = "https://api.portkey.ai/v1"

KEY_VARIABLE = "PORTKEY_API_KEY"

PORTKEY_OPTIONS = (
    "virtual_key",
    "config",
    "provider",
    "trace_id",
    "metadata",
    "debug",
    "cache_namespace",
    "cache_force_refresh",
    "custom_host",
    "forward_headers",
    "request_timeout",
    "strict_open_ai_compliance",
    "openai_project",
    "openai_organization",
    "aws_secret_access_key",
    "aws_access_key_id",
    "aws_session_token",
    "aws_region",
    "aws_s3_bucket",
    "aws_s3_object_key",
    "aws_bedrock_model",
    "vertex_project_id",
    "vertex_region",
    "vertex_storage_bucket_name",
    "provider_file_name",
    "provider_model",
    "workers_ai_account_id",
    "azure_resource_name",
    "azure_deployment_id",
    "azure_api_version",
    "azure_endpoint_name",
    "huggingface_base_url",
    "anthropic_beta",
    "anthropic_version",
    "mistral_fim_completion",
    "fireworks_account_id",
)
"""The gateway's own options: each becomes a header, `x-portkey-` and its name."""

PORTKEY_KWARGS = (
    *("api_key", "base_url", "authorization", *PORTKEY_OPTIONS),
    *("timeout", "max_retries", "default_headers", "default_query", "http_client"),
)
"""What `backend_kwargs` of "portkey" may hold, beside what all may."""


def portkey_spec(kwargs: dict[str, Any], sampling: dict[str, Any]) -> ClientSpec:
    """The spec of `backend="portkey"`."""
    refuse_unknown("portkey", kwargs, (*PORTKEY_KWARGS, *OUR_KWARGS))
    base_url = checked_base_url(kwargs.pop("base_url", None) or BASE_URL)
    key = kwargs.pop("api_key", None)
    if key is not None and not isinstance(key, str):
        raise ConfigurationError("api_key of portkey must be a str")
    if key is None and origin_of(base_url) == origin_of(BASE_URL):
        key = from_environment(KEY_VARIABLE)
        if key is None:
            raise missing_key("portkey", KEY_VARIABLE)
    options = {"strict_open_ai_compliance": False} | {name: kwargs.pop(name, None) for name in PORTKEY_OPTIONS}
    headers = gateway_headers(options | {"api_key": checked_key(key) if key else None})
    if authorization := kwargs.pop("authorization", None):
        if not isinstance(authorization, str):
            raise ConfigurationError("authorization of portkey must be a str")
        bearer = authorization.removeprefix("Bearer ")
        headers["authorization"] = f"Bearer {checked_key(bearer)}"
    given: Any = kwargs.pop("default_headers", None)
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ConfigurationError("default_headers must be a dict")
    headers |= cast("Mapping[str, str]", given)
    return openai_spec(
        "portkey",
        Preset(base_url=BASE_URL),
        kwargs | {"base_url": base_url, "default_headers": headers},
        sampling,
    )


def gateway_headers(options: Mapping[str, Any]) -> dict[str, str]:
    """The gateway's headers for its options, as its own SDK writes them.

    Raises:
        ConfigurationError: naming the option of a wrong type.
    """
    names = options.get("forward_headers") or ()
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in cast("list[Any]", names)):
        raise ConfigurationError('forward_headers of portkey must be a list of names, such as ["x-request-id"]')
    forwarded = {name.replace("_", "-") for name in cast("list[str]", names)}
    headers: dict[str, str] = {}
    for option, value in options.items():
        name = option.replace("_", "-")
        if isinstance(value, bool):
            text = str(value).lower()
        elif option == "forward_headers":
            text = ",".join(cast("list[str]", names))
        elif isinstance(value, Mapping):
            text = _json(option, cast("Mapping[str, Any]", value))
        elif value is None or isinstance(value, str | int | float):
            text = str(value or "")
        else:
            raise ConfigurationError(f"{option} of portkey must be a str or a dict, not {type(value).__name__}")
        if text:
            headers[name if name in forwarded else f"x-portkey-{name}"] = text
    return headers


def _json(option: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{option} of portkey can't be written as JSON: {error}") from error
