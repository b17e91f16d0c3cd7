"""Where OpenAI-compatible requests go, and which key goes with them: a key is sent to no host but its own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from msgspec import Struct

from ...errors import ConfigurationError
from .secrecy import path_secrets, redacted

ApiKey = str | Callable[[], Awaitable[str]]


class Preset(Struct, frozen=True, kw_only=True):
    """An OpenAI-compatible service by name."""

    base_url: str | None
    """None where the caller has to say it."""
    key_variable: str | None = None
    """The environment variable with the key; it is only ever sent to the host of `base_url`."""
    default_model: str | None = None
    body: dict[str, Any] = {}
    """Always sent, unless the caller's sampling_args say otherwise."""
    own: bool = False
    """Whether somebody runs it on machines of their own: no vendor's list price holds there."""
    free: bool = False
    """Whether it is such a one, and costs nothing on the caller's machine."""


DEFAULT_MODEL = "gpt-5.4-mini"
"""The model asked when `backend="openai"` is given no `model_name`."""

PRESETS: Mapping[str, Preset] = {
    "openai": Preset(
        base_url="https://api.openai.com/v1",
        key_variable="OPENAI_API_KEY",
        default_model=DEFAULT_MODEL,
    ),
    "vllm": Preset(base_url=None, own=True),
    "openrouter": Preset(
        base_url="https://openrouter.ai/api/v1", key_variable="OPENROUTER_API_KEY", body={"usage": {"include": True}}
    ),
    "vercel": Preset(base_url="https://ai-gateway.vercel.sh/v1", key_variable="AI_GATEWAY_API_KEY"),
    "prime": Preset(
        base_url="https://api.pinference.ai/api/v1", key_variable="PRIME_API_KEY", body={"usage": {"include": True}}
    ),
    "ollama": Preset(base_url="http://127.0.0.1:11434/v1", own=True, free=True),
    "lmstudio": Preset(base_url="http://127.0.0.1:1234/v1", own=True, free=True),
    "llamacpp": Preset(base_url="http://127.0.0.1:8080/v1", default_model="default", own=True, free=True),
}

Origin = tuple[str, str, int]
"""Scheme, host and port: what a key is meant for."""


def origin_of(base_url: str) -> Origin:
    """The origin of a URL that is safe to send a key to if the origin is.

    Raises:
        ConfigurationError: for anything that two parsers could read differently, and for what is no HTTP URL.
    """
    parts, port = None, None
    if base_url.isascii() and base_url.isprintable() and not set(base_url) & set(' \\"<>^`{|}'):
        try:
            parts = urlsplit(base_url)
            port = parts.port  # raises, as urlsplit does, for what is none
        except ValueError:
            parts = None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(
            f'base_url must be an http or https URL such as "http://127.0.0.1:8000/v1", not {_shown(base_url)!r}'
        )
    if "@" in parts.netloc:
        raise ConfigurationError(
            "base_url must not carry a user or password: give api_key= or default_headers=",
            argument="default_headers",
            problem="base_url must not carry a user or password",
        )
    if parts.query or parts.fragment:
        raise ConfigurationError(
            "base_url must not carry a query: give default_query=",
            argument="default_query",
            problem="base_url must not carry a query",
        )
    return parts.scheme, parts.hostname, port if port is not None else {"http": 80, "https": 443}[parts.scheme]


def _shown(base_url: str) -> str:
    shown = base_url.rpartition("@")[2].partition("?")[0].partition("#")[0]
    return redacted(shown, path_secrets(f"//host/{shown}"))[:100]


def is_loopback(origin: Origin) -> bool:
    """Whether this is the caller's own machine."""
    return origin[1] in ("localhost", "::1") or origin[1].startswith("127.")


def is_openai(origin: Origin) -> bool:
    """Whether this is OpenAI's own API, one of its regions included."""
    scheme, host, port = origin
    return scheme == "https" and port == 443 and (host == "api.openai.com" or host.endswith(".api.openai.com"))


def is_ambient(origin: Origin) -> bool:
    """Whether what OPENAI_* variables say (key, organization, headers) is meant for this origin."""
    return is_openai(origin) or is_named(origin, "OPENAI_BASE_URL")


def is_named(origin: Origin, variable: str) -> bool:
    """Whether the URL in this environment variable is of this origin."""
    named = from_environment(variable)
    return named is not None and origin_of(named) == origin


def key_variable_for(origin: Origin) -> str | None:
    """The environment variable whose key is meant for `origin`, or None for a host of the caller's own."""
    if is_ambient(origin):
        return "OPENAI_API_KEY"
    for preset in PRESETS.values():
        if preset.base_url is not None and preset.key_variable is not None and origin_of(preset.base_url) == origin:
            return preset.key_variable
    return None


def needs_key(origin: Origin) -> bool:
    """Whether a request to `origin` is hopeless without a key."""
    return is_openai(origin) or any(
        preset.base_url is not None and preset.key_variable is not None and origin_of(preset.base_url) == origin
        for preset in PRESETS.values()
    )


def key_from_environment(origin: Origin) -> str | None:
    """The key in the environment that is meant for `origin`, if there is one."""
    variable = key_variable_for(origin)
    return from_environment(variable) if variable is not None else None


def checked_key(key: str) -> str:
    """`key` without surrounding white space.

    Raises:
        ConfigurationError: if it can't stand in a header. The message does not show it.
    """
    key = key.strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigurationError(
            "api_key holds characters that no HTTP header can carry: is it the key, whole and alone?"
        )
    return key


def checked_api_key(key: Any) -> ApiKey | None:
    """`key`, a str or an async function that gives one.

    Raises:
        ConfigurationError: if it is neither, or can't stand in a header. The message does not show it.
    """
    if isinstance(key, str):
        return checked_key(key) or None
    if key is not None and not callable(key):
        raise ConfigurationError("api_key must be a str or an async callable that gives one")
    return cast("ApiKey | None", key)


def checked_text(name: str, value: Any) -> str | None:
    """`value`, which goes into a URL or a header and may be None.

    Raises:
        ConfigurationError: if it can't.
    """
    if value is not None and not (isinstance(value, str) and value.isprintable()):
        kind = "one that holds others" if isinstance(value, str) else type(value).__name__
        raise ConfigurationError(f"{name} must be a str of printable characters, not {kind}")
    return value


def header_problem(name: object, value: object) -> str | None:
    """Why this can't be a header, or None if it can. Does not show the value."""
    if not isinstance(name, str) or not isinstance(value, str):
        return f"header {name!r} must be a str with a str value"
    if not name or not name.isascii() or not name.isprintable() or set(name) & set(' :"') or not value.isprintable():
        return f"header {name!r} holds characters that no HTTP header can carry"
    return None


def fingerprint(secret: str) -> str:
    """Tells secrets apart without giving them away."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def fingerprint_of(arguments: Mapping[str, Any]) -> str:
    """Tells arguments apart, in whatever order they are given, without giving away what is secret among them."""
    return fingerprint(repr(sorted(arguments.items(), key=str)))


def from_environment(*variables: str) -> str | None:
    """The first of these environment variables that says anything, without surrounding white space."""
    return next((value for name in variables if (value := os.environ.get(name, "").strip())), None)


def checked_headers(headers: Any) -> set[str]:
    """The names of the caller's default headers, in lower case.

    Raises:
        ConfigurationError: for what is no header.
    """
    if headers is None:
        return set()
    if not isinstance(headers, Mapping):
        raise ConfigurationError("default_headers must be a dict")
    given = cast("Mapping[Any, Any]", headers)
    for name, value in given.items():
        if problem := header_problem(name, value):
            raise ConfigurationError(f"default_headers: {problem}")
    return {str(name).lower() for name in given}


def checked_query(query: Any) -> Mapping[str, object]:
    """The caller's `default_query`, which may be None.

    Raises:
        ConfigurationError: if it is no dict. The message does not show it.
    """
    if query is not None and not isinstance(query, Mapping):
        raise ConfigurationError("default_query must be a dict")
    return cast("Mapping[str, object]", query or {})


def checked_base_url(base_url: Any) -> str:
    """`base_url` without slashes at its end.

    Raises:
        ConfigurationError: if it is none that a key can be trusted with.
    """
    base_url = str(base_url).rstrip("/")
    origin_of(base_url)
    return base_url


def missing_key(backend: str, variable: str | None) -> ConfigurationError:
    """How to get going without a key."""
    where = f"set {variable}" if variable else "set the key's environment variable"
    return ConfigurationError(
        f'backend="{backend}" needs an API key. Three ways to get going: {where}, or pass '
        'backend_kwargs={"api_key": ...}; use a local server, backend="vllm", backend_kwargs={"base_url": '
        '"http://127.0.0.1:8000/v1", "model_name": ...}; or try the library without any model, backend="offline".',
        argument="api_key",
        problem=f'backend="{backend}" needs an API key: {where}',
    )
