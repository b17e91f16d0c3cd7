"""How Google's SDK would send a request: it is asked once for each model and set of arguments, and nothing is sent.

The SDK knows the addresses, the headers and the names of all arguments, and checks them; it knows asyncio only, and
its own way of sending costs ten times as much as ours. So it writes one request, to a transport that ends in this
process, and that is the pattern for all that follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from ...errors import ConfigurationError
from ..spec import optional_sdk

if TYPE_CHECKING:
    import httpx2

    from ..http.pool import ConnectionSettings

PLACEHOLDER = "placeholder-for-the-secret"
"""What the SDK is given in the place of a key or a token: patterns hold no secret."""

PATTERNS = 256
"""How many patterns are kept."""

_OWN = {"extra_body", "extra_headers", "extra_query", "timeout"}
_WRITTEN_BY_US = {"system_instruction", "http_options", "automatic_continuation", "continuation_token"}
_OF_THE_WIRE = {"host", "accept", "accept-encoding", "connection", "content-length"}
_ANSWER = {"candidates": [{"content": {"parts": [{"text": "-"}], "role": "model"}, "finishReason": "STOP"}]}


class Pattern(Struct, frozen=True):
    """A request as the SDK writes it, without the conversation."""

    url: httpx2.URL
    headers: Mapping[str, str]
    body: Mapping[str, Any]

    @property
    def stream_url(self) -> httpx2.URL:
        """The address of the same request for a streamed reply."""
        path = self.url.path.removesuffix(":generateContent") + ":streamGenerateContent"
        return self.url.copy_with(path=path).copy_merge_params({"alt": "sse"})


def mapped_sampling(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` under the SDK's names; the names that OpenAI has for the same things are understood."""
    mapped: dict[str, Any] = {}
    for name, value in arguments.items():
        if value is None or name in _OWN:
            continue
        match name:
            case "max_tokens" | "max_completion_tokens" | "max_output_tokens":
                mapped["max_output_tokens"] = min(value, mapped.get("max_output_tokens", value))
            case "stop":
                mapped["stop_sequences"] = [value] if isinstance(value, str) else list(value)
            case "n":
                mapped["candidate_count"] = value
            case "reasoning_effort":
                mapped["thinking_config"] = {"thinking_level": str(value).upper()}
            case "response_format":
                mapped |= _output_format(value)
            case _ if name in _WRITTEN_BY_US:
                raise ConfigurationError(f"sampling_args can't hold {name!r}: it is written for each request")
            case _:
                mapped[name] = value
    return mapped


def _output_format(value: Any) -> dict[str, Any]:
    match value:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"response_mime_type": "application/json"}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"response_mime_type": "application/json", "response_json_schema": schema}
        case _:
            raise ConfigurationError(
                'gemini takes a response_format of type "text", "json_object" or "json_schema" (with its schema)'
            )


class Dialect:
    """Patterns from the SDK for one connection."""

    def __init__(self, settings: ConnectionSettings, *, project: str | None = None, signed: bool = True) -> None:
        genai = optional_sdk("google.genai", "gemini")
        self._types = types = optional_sdk("google.genai.types", "gemini")
        self._written: list[Any] = []
        self._patterns: dict[str, Pattern] = {}
        self._signed = signed
        import httpx2  # noqa: PLC0415 - comes with the SDK

        given = settings.sdk_kwargs
        # Both of them: without, the SDK builds TLS contexts for connections of its own.
        wires: dict[str, Any] = {
            "httpx_client": httpx2.Client(transport=httpx2.MockTransport(self._write), trust_env=False),
            "httpx_async_client": httpx2.AsyncClient(transport=httpx2.MockTransport(self._write), trust_env=False),
        }
        options = types.HttpOptions(
            base_url=settings.base_url,
            api_version=given.get("api_version"),
            headers=dict(settings.default_headers) or None,
            **wires,
        )
        self._sdk = genai.Client(http_options=options, **self._identity(settings, project))

    @staticmethod
    def _identity(settings: ConnectionSettings, project: str | None) -> dict[str, Any]:
        given = settings.sdk_kwargs
        if not given.get("vertexai"):
            return {"vertexai": False, "api_key": PLACEHOLDER}
        if settings.api_key is not None:
            return {"vertexai": True, "api_key": PLACEHOLDER}
        oauth2 = optional_sdk("google.oauth2.credentials", "gemini")
        credentials = oauth2.Credentials(token=PLACEHOLDER)
        return {
            "vertexai": True,
            "project": given.get("project") or project,
            "location": given.get("location") or "global",
            "credentials": credentials,
        }

    def _write(self, request: Any) -> Any:
        import httpx2  # noqa: PLC0415 - comes with the SDK

        self._written.append(request)
        return httpx2.Response(200, json=_ANSWER)

    def pattern(self, model: str, arguments: Mapping[str, Any]) -> Pattern:
        """How the SDK would send a request to `model` with these sampling arguments.

        Raises:
            ConfigurationError: if it would not.
        """
        key = repr((model, sorted(arguments.items())))
        found = self._patterns.get(key)
        if found is None:
            if len(self._patterns) >= PATTERNS:
                self._patterns.clear()
            found = self._patterns[key] = self._ask(model, mapped_sampling(arguments))
        return found

    def _ask(self, model: str, config: dict[str, Any]) -> Pattern:
        self._written.clear()
        try:
            self._sdk.models.generate_content(
                model=model, contents="-", config=self._types.GenerateContentConfig(**config)
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"the google-genai SDK refuses this: {_said(error)}") from error
        request = self._written[0]
        headers = {name: value for name, value in request.headers.items() if name not in _OF_THE_WIRE}
        if not self._signed:
            headers = {name: value for name, value in headers.items() if PLACEHOLDER not in value}
        body = cast("dict[str, Any]", json.loads(request.content))
        return Pattern(request.url, headers, {n: part for n, part in body.items() if part and n != "contents"})


def _said(error: Exception) -> str:
    errors: Any = getattr(error, "errors", None)
    if callable(errors):  # a pydantic error: its text also shows the values
        found = cast("list[dict[str, Any]]", errors())
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)
    return str(error)
