"""OpenAI's models on Azure: the same requests under another address, with a key or a token of another kind."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

import anyio.to_thread

from ...caught import is_async
from ...errors import ConfigurationError, LMError
from ..http.connection import Connection, Endpoint, connected
from ..http.endpoints import (
    Origin,
    checked_api_key,
    checked_base_url,
    checked_headers,
    checked_key,
    checked_text,
    fingerprint_of,
    from_environment,
    origin_of,
)
from ..http.pool import ConnectionSettings, http_client, sdk_of
from ..spec import (
    OUR_KWARGS,
    ClientSpec,
    Shared,
    attempts_of,
    common_settings,
    loaded_sdk,
    price_and_window,
    refuse_unknown,
)
from .client import OpenAIClient, fresh_key

if TYPE_CHECKING:
    from openai import AsyncAzureOpenAI

    from ..base import LMClient

AZURE_KWARGS = (
    "api_key",
    "azure_ad_token",
    "azure_ad_token_provider",
    "azure_endpoint",
    "azure_deployment",
    "api_version",
    "base_url",
    "timeout",
    "max_retries",
    "default_headers",
    "default_query",
    "http_client",
)
"""What `backend_kwargs` of "azure_openai" may hold, beside what all may."""

DEFAULT_API_VERSION = "2024-02-01"
"""The reference's. Streams say what they used from 2024-09-01 on."""

AZURE_DOMAINS = (".openai.azure.com", ".cognitiveservices.azure.com", ".services.ai.azure.com", ".azure-api.net")
"""Where an AZURE_OPENAI_API_KEY may go if no AZURE_OPENAI_ENDPOINT says whose it is."""


def azure_openai_spec(kwargs: dict[str, Any], sampling: dict[str, Any]) -> ClientSpec:
    """The spec of `backend="azure_openai"`. A deployment alone is enough; a model's name is then the deployment's."""
    refuse_unknown("azure_openai", kwargs, (*AZURE_KWARGS, *OUR_KWARGS))
    named = checked_text("model_name", kwargs.pop("model_name", None))
    deployment = checked_text("azure_deployment", kwargs.pop("azure_deployment", None))
    deployment = deployment or named or from_environment("AZURE_OPENAI_DEPLOYMENT")
    model = named or deployment
    if model is None or deployment is None:
        raise ConfigurationError('backend="azure_openai" needs azure_deployment (or model_name) in backend_kwargs')
    price, window = price_and_window(model, kwargs)
    attempts = attempts_of(kwargs)
    version = checked_text("api_version", kwargs.pop("api_version", None))
    version = version or from_environment("AZURE_OPENAI_API_VERSION", "OPENAI_API_VERSION")
    settings = _settings(kwargs, version or DEFAULT_API_VERSION)

    async def opener(shared: Shared) -> LMClient:
        key = (settings.key, deployment)  # the deployment stands in the URL
        connection: Connection = await shared(key, lambda: _open_connection(settings, deployment))
        return OpenAIClient(
            connection,
            model,
            sampling_args=sampling,
            cap_name="max_tokens" if settings.sdk_kwargs["api_version"] < "2024-12" else "max_completion_tokens",
            stream_usage=settings.sdk_kwargs["api_version"] >= "2024-09",
        )

    return ClientSpec(
        model=model,
        backend="azure_openai",
        key=(settings.key, deployment, model, fingerprint_of(sampling)),
        asked_with=sampling,
        where=settings.where(sampling, deployment),
        price=price,
        window=window,
        attempts=attempts,
        early=True,
        opener=opener,
    )


def _settings(kwargs: dict[str, Any], version: str) -> ConnectionSettings:
    base_url, endpoint = kwargs.pop("base_url", None), kwargs.pop("azure_endpoint", None)
    if base_url is not None and endpoint is not None:
        raise ConfigurationError("base_url and azure_endpoint exclude each other")
    if base_url is None:
        endpoint = endpoint or from_environment("AZURE_OPENAI_ENDPOINT")
        if endpoint is None:
            raise ConfigurationError(
                'backend="azure_openai" needs azure_endpoint, such as "https://my-resource.openai.azure.com", '
                "in backend_kwargs or in AZURE_OPENAI_ENDPOINT"
            )
        base_url = checked_base_url(endpoint) + "/openai"
    base_url = checked_base_url(base_url)
    headers = checked_headers(kwargs.get("default_headers"))
    api_key, token = checked_api_key(kwargs.pop("api_key", None)), kwargs.pop("azure_ad_token", None)
    provider = kwargs.pop("azure_ad_token_provider", None)
    if sum(given is not None for given in (api_key, token, provider)) > 1:
        raise ConfigurationError("give one of api_key, azure_ad_token and azure_ad_token_provider, not two")
    if provider is not None and not callable(provider):
        raise ConfigurationError("azure_ad_token_provider must be a function, plain or async, that gives a token")
    if api_key is None and token is None and provider is None and not headers & {"authorization", "api-key"}:
        token, api_key = _credentials_from_environment(origin_of(base_url))
    return ConnectionSettings(
        vendor="azure_openai",
        base_url=base_url,
        api_key=checked_api_key(api_key),
        **common_settings(kwargs),
        sdk_kwargs={
            "api_version": version,
            "azure_ad_token": checked_key(token) if token else None,
            "azure_ad_token_provider": provider,
        },
    )


def _credentials_from_environment(origin: Origin) -> tuple[str | None, str | None]:
    """The token and the key in the environment, if they are meant for this origin."""
    named = from_environment("AZURE_OPENAI_ENDPOINT")
    scheme, host, _ = origin
    at_home = origin_of(named) == origin if named else scheme == "https" and host.endswith(AZURE_DOMAINS)
    token, key = from_environment("AZURE_OPENAI_AD_TOKEN"), from_environment("AZURE_OPENAI_API_KEY")
    if at_home and (token or key):
        return (token, None) if token else (None, key)
    why = "" if at_home or not (token or key) else f" (those in the environment are not meant for {host})"
    raise ConfigurationError(
        f'backend="azure_openai" needs api_key, azure_ad_token or azure_ad_token_provider in backend_kwargs, or '
        f"AZURE_OPENAI_API_KEY or AZURE_OPENAI_AD_TOKEN{why}"
    )


@asynccontextmanager
async def _open_connection(settings: ConnectionSettings, deployment: str) -> AsyncGenerator[Connection]:
    openai = await loaded_sdk("openai", "azure_openai")
    async with http_client(settings, openai) as http:
        base_url = cast("str", settings.base_url)
        if "/deployments/" not in base_url:
            base_url += f"/deployments/{quote(deployment, safe='')}"
        version = settings.sdk_kwargs["api_version"]
        # The key is never None: the SDK would look into the environment. The real one is added to each request.
        own = {"api_key": "-", "base_url": base_url, "api_version": version}
        sdk = sdk_of(openai.AsyncAzureOpenAI, openai.OpenAIError, settings, http, **own)
        with connected(settings, http, _endpoint(settings, sdk)) as connection:
            yield connection


def _endpoint(settings: ConnectionSettings, sdk: AsyncAzureOpenAI) -> Endpoint:
    given = {name.lower(): value for name, value in sdk.default_headers.items() if isinstance(value, str)}
    own = {name.lower() for name in settings.default_headers} | {"accept", "content-type", "user-agent"}
    headers = {name: value for name, value in given.items() if name in own}
    key, token = settings.api_key, settings.sdk_kwargs["azure_ad_token"]
    provider = settings.sdk_kwargs["azure_ad_token_provider"]
    if isinstance(key, str):
        headers.setdefault("api-key", key)
    elif token is not None:
        headers.setdefault("authorization", f"Bearer {token}")

    async def sign() -> Mapping[str, str]:
        if callable(key):
            return {"api-key": await fresh_key(key)}
        return {"authorization": f"Bearer {await fresh_key(lambda: _token(provider), 'azure_ad_token_provider')}"}

    return Endpoint(
        url=sdk.base_url.join("chat/completions"),
        headers=headers,
        query=sdk.default_query,
        sign=sign if callable(key) or provider is not None else None,
    )


async def _token(provider: Callable[[], Any]) -> str:
    if is_async(provider):
        return await provider()
    # A plain one asks the network when its token is about to expire.
    token = await anyio.to_thread.run_sync(provider, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
    token = await token if inspect.isawaitable(token) else token
    if not isinstance(token, str) or not token:
        raise LMError("azure_ad_token_provider gave no token", kind="authentication")
    return token
