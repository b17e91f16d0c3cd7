"""The client for Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from ...errors import ConfigurationError, LMError
from ..http.connection import Call, Connection, Endpoint, HttpClient, connected
from ..http.encoding import encoded
from ..http.endpoints import Origin, is_named, origin_of
from ..http.pool import ConnectionSettings, http_client, sdk_of
from ..openai.client import fresh_key
from ..spec import loaded_sdk
from .replies import MessageStream, parse_message

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

    from ..base import LMRequest, Message

BASE_URL = "https://api.anthropic.com"

DEFAULT_MAX_TOKENS = 32_768
"""Most output tokens of one reply where nobody says: the API wants a number."""

SAMPLING_VERSION = "2023-06-01"
"""The version of the API that still takes `temperature`, `top_p` and `top_k`: sent along with these."""

OLDER_SAMPLING = frozenset({"temperature", "top_p", "top_k"})
"""Arguments that only `SAMPLING_VERSION` of the API takes."""

SAMPLING = OLDER_SAMPLING | {
    "max_tokens",
    "stop_sequences",
    "thinking",
    "output_config",
    "metadata",
    "service_tier",
    "speed",
    "inference_geo",
    "workspace_id",
    "user_profile_id",
    "container",
    "diagnostics",
    "cache_control",
    "tools",
    "tool_choice",
    "extra_body",
    "extra_headers",
    "extra_query",
    "timeout",
}
"""Anthropic's own names of what `sampling_args` may hold."""

_MARK = {"type": "ephemeral"}


def is_anthropic(origin: Origin) -> bool:
    """Whether what ANTHROPIC_* variables say is meant for this origin."""
    return origin == origin_of(BASE_URL) or is_named(origin, "ANTHROPIC_BASE_URL")


def mapped_sampling(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` under Anthropic's names; the names that OpenAI has for the same things are understood.

    Raises:
        ConfigurationError: for what Anthropic has nothing like.
    """
    mapped: dict[str, Any] = {}
    for name, value in arguments.items():
        if value is None:
            continue
        match name:
            case "max_tokens" | "max_completion_tokens":
                mapped["max_tokens"] = min(value, mapped.get("max_tokens", value))
            case "stop":
                mapped["stop_sequences"] = [value] if isinstance(value, str) else list(value)
            case "user":
                mapped["metadata"] = mapped.get("metadata", {}) | {"user_id": value}
            case "reasoning_effort":
                mapped["output_config"] = mapped.get("output_config", {}) | {"effort": value}
            case "response_format":
                mapped |= _output_format(value, mapped.get("output_config", {}))
            case "metadata" | "output_config":
                mapped[name] = mapped.get(name, {}) | value
            case _ if name in SAMPLING:
                mapped[name] = value
            case _:
                raise ConfigurationError(
                    f"anthropic has no {name!r} in sampling_args; known: {', '.join(sorted(SAMPLING))}; "
                    'what is newer than this list goes into {"extra_body": {...}}'
                )
    return mapped


def _output_format(value: Any, config: dict[str, Any]) -> dict[str, Any]:
    match value:
        case {"type": "text"}:
            return {}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"output_config": config | {"format": {"type": "json_schema", "schema": schema}}}
        case _:
            raise ConfigurationError('anthropic takes a response_format of type "json_schema", with its schema')


class AnthropicClient(HttpClient):
    """One Claude model behind an open `Connection`."""

    _parse = staticmethod(parse_message)
    _assembler = MessageStream

    def __init__(
        self,
        connection: Connection,
        model: str,
        *,
        sampling_args: Mapping[str, Any] | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        prompt_caching: bool = True,
    ) -> None:
        super().__init__(connection, model)
        self._sampling_args = dict(sampling_args or {})
        self._arguments = mapped_sampling(self._sampling_args)
        self._max_tokens = max_tokens
        self._prompt_caching = prompt_caching

    def _call(self, request: LMRequest, *, stream: bool) -> Call:
        try:
            own = request.sampling_args
            arguments = mapped_sampling(self._sampling_args | own) if own else dict(self._arguments)
        except ConfigurationError as error:
            raise LMError(str(error), kind="bad_request") from error
        extra_body = cast("Mapping[str, Any]", arguments.pop("extra_body", None) or {})
        headers: dict[str, str | None] = {}
        if OLDER_SAMPLING & arguments.keys():
            headers["anthropic-version"] = SAMPLING_VERSION
        headers |= cast("dict[str, str | None]", arguments.pop("extra_headers", None) or {})
        query, timeout = arguments.pop("extra_query", None), arguments.pop("timeout", None)
        marked = self._prompt_caching and "cache_control" not in arguments and "cache_control" not in extra_body
        body: dict[str, Any] = {"model": self.model, "max_tokens": self._max_tokens}
        body |= _conversation(request.messages, marked=marked)
        body |= arguments
        if stream:
            body["stream"] = True
        body.update(extra_body)
        if request.output_cap is not None:
            body["max_tokens"] = min(request.output_cap, body["max_tokens"])
        return Call(body=encoded(body), headers=headers or None, query=query, timeout=timeout)


def _conversation(messages: tuple[Message, ...], *, marked: bool) -> dict[str, Any]:
    """The messages as the API wants them: what the system says apart, and no empty ones.

    With `marked`, the provider is told to keep what will come again. A history that only grows at its end comes again
    up to its last message; the request before ended where the last reply begins, so a mark there is surely found.
    A single question without history won't come again, and writing to the cache costs extra: it gets no mark.
    """
    count = next((i for i, message in enumerate(messages) if message.role not in _SYSTEM), len(messages))
    system: list[dict[str, Any]] = [
        {"type": "text", "text": message.content} for message in messages[:count] if message.content.strip()
    ]
    turns: list[dict[str, Any]] = [
        {
            "role": "assistant" if message.role == "assistant" else "user",
            "content": [{"type": "text", "text": message.content}],
        }
        for message in messages[count:]
        if message.content.strip()
    ]
    if marked and turns and (system or len(turns) > 1):
        if system:
            system[-1] |= {"cache_control": _MARK}
        last_reply = max((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)
        for index in {len(turns) - 1, last_reply - 1 if last_reply else len(turns) - 1}:
            turns[index]["content"][-1] |= {"cache_control": _MARK}
    return {"system": system, "messages": turns} if system else {"messages": turns}


_SYSTEM = ("system", "developer")


@asynccontextmanager
async def open_connection(settings: ConnectionSettings) -> AsyncGenerator[Connection]:
    """A pool of connections, closed at the end unless the http client is the caller's own."""
    anthropic = await loaded_sdk("anthropic", "anthropic")
    async with http_client(settings, anthropic) as http:
        given = settings.api_key if isinstance(settings.api_key, str) else "-"
        token = settings.sdk_kwargs.get("auth_token")
        # Never both None: the SDK would look into the environment and the profiles on disk, whatever the host.
        key = {"api_key": given} if token is None else {"auth_token": token}
        sdk: AsyncAnthropic = sdk_of(
            anthropic.AsyncAnthropic, anthropic.AnthropicError, settings, http, base_url=settings.base_url, **key
        )
        with connected(settings, http, _endpoint(settings, sdk)) as connection:
            yield connection


def _endpoint(settings: ConnectionSettings, sdk: AsyncAnthropic) -> Endpoint:
    own = {name.lower() for name in settings.default_headers}
    own |= {"accept", "content-type", "user-agent", "anthropic-version"}
    ambient = is_anthropic(origin_of(str(sdk.base_url)))
    signature = {name.lower(): value for name, value in sdk.auth_headers.items()}
    given = {name.lower(): value for name, value in sdk.default_headers.items() if isinstance(value, str)}
    kept = {
        name: value
        for name, value in given.items()
        if name in own or (ambient and name not in signature and not name.startswith("x-stainless-"))
    }
    key = settings.api_key

    async def sign() -> dict[str, str]:
        # The SDK's own way of signing, with the key of this moment in the place of the one it was given.
        fresh = await fresh_key(cast("Any", key))
        return {name: value.removesuffix("-") + fresh for name, value in signature.items()}

    signed = isinstance(key, str) or settings.sdk_kwargs.get("auth_token") is not None
    return Endpoint(
        url=sdk.base_url.join("v1/messages"),
        headers={**(signature if signed else {}), **kept},
        query=sdk.default_query,
        sign=sign if callable(key) else None,
    )
