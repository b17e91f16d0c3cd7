"""A marked key, planted wherever one can be configured, comes out nowhere: all output of whole runs is searched."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import logging
import os
import pickle
import subprocess
import sys
import traceback
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from lm_backends import BACKENDS, FAMILIES, Backend
from msgspec import Struct, structs

from asyncrlm import AsyncRLM, ConfigurationError, LMError, RLMLogger
from asyncrlm.lm.clients import client_spec
from asyncrlm.lm.http.endpoints import PRESETS
from asyncrlm.lm.openai import portkey
from asyncrlm.testing import FakeOpenAIServer, FakeReply, FakeRequest

from .helpers import cell, submit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio

MARK = "marked0credential1of2no3known4shape"
"""No pattern knows it for a key: only who was given it can."""

SHOWN = MARK[:12]
"""So much of it gives it away."""

CONVERSATION = ("messages", "contents", "system", "systemInstruction")

LOOK = cell("""
import os, glob
said = [llm_query("refuse"), llm_query("break")]
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    try:
        said.append(open(path, errors="replace").read())
    except OSError:
        pass
print(dict(os.environ), *map(str, said))
""")


async def _given() -> str:
    return MARK


class Place(Struct, frozen=True):
    """Somewhere a key can be configured, for the backends that have it."""

    name: str
    kwargs: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    variable: str | None = None
    only: tuple[str, ...] = ()
    sent: bool = True
    wrapped: str = ""
    """Where else than in `backend_kwargs` and `sampling_args` these go."""


FAMILY_NAMES = tuple(backend.name for backend in FAMILIES)

THREE = ("openai", "anthropic", "gemini")
"""One of each dialect: what is around the clients is the same for all."""

PLACES = [
    Place("api_key", {"api_key": MARK}),
    Place("api_key from a function", {"api_key": _given}, only=("openai", "ollama", "anthropic", "gemini")),
    Place("a header", {"default_headers": {"X-Extra": MARK}}),
    Place("api_key of a fallback", {"api_key": MARK}, wrapped="fallback"),
    Place("a header of a fallback", {"default_headers": {"X-Extra": MARK}}, only=THREE, wrapped="fallback"),
    Place("api_key of one that fails", {"api_key": MARK}, only=THREE, wrapped="failing"),
    Place("api_key of a sub-model", {"api_key": MARK}, only=THREE, wrapped="sub"),
    Place("a header of a sub-model", {"default_headers": {"X-Extra": MARK}}, only=THREE, wrapped="sub"),
    Place("a header of each sub-call", sampling={"extra_headers": {"X-Extra": MARK}}, only=THREE, wrapped="subs"),
    Place("a header of one call", sampling={"extra_headers": {"X-Extra": MARK}}, only=THREE, wrapped="call"),
    Place("sampling_args in backend_kwargs", {"sampling_args": {"extra_query": {"sig": MARK}}}, only=THREE),
    Place("a header of the http client", {"headers": {"X-Extra": MARK}}, only=THREE, wrapped="http"),
    Place("the query of the http client", {"params": {"sig": MARK}}, only=THREE, wrapped="http"),
    Place("the login of the http client", {"auth": ("user", MARK)}, only=THREE, wrapped="http"),
    Place("an authorization header", {"default_headers": {"Authorization": f"Bearer {MARK}"}}),
    Place("the query", {"default_query": {"sig": MARK}}),
    Place("a header of each request", sampling={"extra_headers": {"X-Extra": MARK}}),
    Place("the query of each request", sampling={"extra_query": {"sig": MARK}}),
    Place("the body of each request", sampling={"extra_body": {"byok": {"api_key": MARK}}}),
    Place("headers in the body", sampling={"extra_body": {"tools": [{"headers": {"X-Any": MARK}}]}}, only=THREE),
    Place("the body of each sub-call", sampling={"extra_body": {"authorization": MARK}}, only=THREE, wrapped="subs"),
    Place("the body of one call", sampling={"extra_body": {"x": {"token": MARK}}}, only=THREE, wrapped="call"),
    Place("the path of base_url", only=(*THREE, "azure_openai"), wrapped="path"),
    Place("auth_token", {"api_key": None, "auth_token": MARK}, only=("anthropic",)),
    Place("azure_ad_token", {"api_key": None, "azure_ad_token": MARK}, only=("azure_openai",)),
    Place(
        "azure_ad_token_provider", {"api_key": None, "azure_ad_token_provider": lambda: MARK}, only=("azure_openai",)
    ),
    Place("virtual_key", {"virtual_key": MARK}, only=("portkey",)),
    Place("config", {"config": {"api_key": MARK}}, only=("portkey",)),
    Place("authorization", {"authorization": MARK}, only=("portkey",)),
    Place("aws_secret_access_key", {"aws_secret_access_key": MARK}, only=("portkey",)),
    Place("aws_session_token", {"aws_session_token": MARK}, only=("portkey",)),
    Place("OPENROUTER_API_KEY", {"api_key": None}, variable="OPENROUTER_API_KEY", only=("openrouter",)),
    Place("AI_GATEWAY_API_KEY", {"api_key": None}, variable="AI_GATEWAY_API_KEY", only=("vercel",)),
    Place("PRIME_API_KEY", {"api_key": None}, variable="PRIME_API_KEY", only=("prime",)),
    Place("PORTKEY_API_KEY", {"api_key": None}, variable="PORTKEY_API_KEY", only=("portkey",)),
    Place("admin_api_key", {"admin_api_key": MARK}, only=("openai", "ollama"), sent=False),
    Place("webhook_secret", {"webhook_secret": MARK}, only=("openai",), sent=False),
    Place("OPENAI_API_KEY", {"api_key": None}, variable="OPENAI_API_KEY", only=("openai",)),
    Place("ANTHROPIC_API_KEY", {"api_key": None}, variable="ANTHROPIC_API_KEY", only=("anthropic",)),
    Place("ANTHROPIC_AUTH_TOKEN", {"api_key": None}, variable="ANTHROPIC_AUTH_TOKEN", only=("anthropic",)),
    Place("GEMINI_API_KEY", {"api_key": None}, variable="GEMINI_API_KEY", only=("gemini",)),
    Place("AZURE_OPENAI_API_KEY", {"api_key": None}, variable="AZURE_OPENAI_API_KEY", only=("azure_openai",)),
    Place("AZURE_OPENAI_AD_TOKEN", {"api_key": None}, variable="AZURE_OPENAI_AD_TOKEN", only=("azure_openai",)),
]

URL_VARIABLES = {
    "openai": "OPENAI_BASE_URL",
    "anthropic": "ANTHROPIC_BASE_URL",
    "gemini": "GOOGLE_GEMINI_BASE_URL",
    "azure_openai": "AZURE_OPENAI_ENDPOINT",
}

ALL = tuple(backend.name for backend in BACKENDS)

CASES = [
    pytest.param(
        *(loop, backend, place),
        id=f"{loop}-{backend.name}: {place.name}",
        marks=pytest.mark.soak if loop == "trio" else (),
    )
    for backend in BACKENDS
    for place in PLACES
    if backend.name in (place.only or (FAMILY_NAMES if place.name not in ("api_key", "api_key of a fallback") else ALL))
    for loop in ("asyncio", "trio")[: 2 if place.name in ("api_key", "the query of each request") else 1]
]


def _echoing(*, breaking: bool = True) -> tuple[Callable[[FakeRequest], Any], list[str]]:
    """A server's script: two turns, and sub-calls that are told all that their request carried; and what it got.

    What is carried besides the conversation comes first: errors show but the beginning of what a server says.
    """
    turns, got = itertools.count(), list[str]()

    def answer(request: FakeRequest) -> Any:
        rest = {name: value for name, value in request.fields.items() if name not in CONVERSATION}
        headers = {name: value for name, value in request.headers.items() if name not in ("accept", "user-agent")}
        carried = [json.dumps(rest), request.path, json.dumps(headers)]
        got.append("".join(carried))
        carried = " ".join(carried[len(got) % 3 :] + carried[: len(got) % 3] + [json.dumps(request.fields)])
        if request.text == "refuse" or (request.text == "break" and not breaking):
            return FakeReply.fault(401, carried)
        if request.text == "break":
            return FakeReply(body=carried.encode())
        match next(turns):
            case 0:
                return LOOK
            case 1:
                return submit("'done'")
            case _:
                return FakeReply.fault(403, carried)

    return answer, got


def _reached(value: Any, seen: set[int], depth: int = 0) -> list[str]:
    """The reprs of an object of ours and of all that its attributes lead to."""
    if id(value) in seen or depth > 6:
        return []
    seen.add(id(value))
    # What the caller gave is kept in one place that nothing prints: `_Arguments` and the settings of a connection.
    if type(value).__name__ in ("_Arguments", "ConnectionSettings") or not type(value).__module__.startswith(
        "asyncrlm"
    ):
        return [repr(value)] if type(value).__module__.startswith("asyncrlm") else []
    names = [*getattr(value, "__dict__", ()), *getattr(value, "__struct_fields__", ())]
    inside = [_reached(getattr(value, name), seen, depth + 1) for name in names]
    return [repr(value), *itertools.chain(*inside)]


async def _planted(
    stack: AsyncExitStack, name: str, kwargs: dict[str, Any], place: Place
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `AsyncRLM` and of one call, with the mark where `place` says."""
    marked = kwargs | place.kwargs
    down = kwargs | {next(n for n in kwargs if n in ("base_url", "azure_endpoint")): "http://127.0.0.1:1/v1"}
    match place.wrapped:
        case "fallback":
            return {"backend": [name, name], "backend_kwargs": [down, marked]}, {}
        case "failing":
            # Its own server is not the one that answers, though it is told the key.
            return {"backend": [name, name], "backend_kwargs": [marked, kwargs]}, {}
        case "sub":
            return {
                "backend": name,
                "backend_kwargs": kwargs,
                "other_backends": [name],
                "other_backend_kwargs": [marked],
            }, {}
        case "path":
            (name_of_url,) = (n for n in kwargs if n in ("base_url", "azure_endpoint"))
            marked |= {name_of_url: f"{kwargs[name_of_url]}/{MARK}"}
            return {"backend": name, "backend_kwargs": marked}, {}
        case "subs":
            return {"backend": name, "backend_kwargs": kwargs, "sub_sampling_args": place.sampling}, {}
        case "call":
            return {"backend": name, "backend_kwargs": kwargs}, {"sampling_args": place.sampling}
        case "http":
            http = await stack.enter_async_context(httpx2.AsyncClient(**place.kwargs))
            return {"backend": name, "backend_kwargs": kwargs | {"http_client": http}}, {}
        case _:
            return {"backend": name, "backend_kwargs": marked, "sampling_args": place.sampling}, {}


@pytest.mark.parametrize(("anyio_backend", "backend", "place"), CASES)
async def test_a_marked_key_comes_out_nowhere(
    backend: Backend,
    place: Place,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    answer, got = _echoing()
    shown: list[str] = []
    async with backend.server(answer) as server, AsyncExitStack() as stack:
        address = getattr(server, backend.url_of)
        if place.wrapped == "path":
            takes = backend.server._takes
            monkeypatch.setattr(backend.server, "_takes", lambda self, path: takes(self, path.replace(f"/{MARK}", "")))
        if place.variable is not None:
            monkeypatch.setenv(place.variable, MARK)
            if backend.name in URL_VARIABLES:
                monkeypatch.setenv(URL_VARIABLES[backend.name], address)
            elif backend.name in PRESETS:
                monkeypatch.setitem(PRESETS, backend.name, structs.replace(PRESETS[backend.name], base_url=address))
            else:
                monkeypatch.setattr(portkey, "BASE_URL", address)
        kwargs = {backend.url_name: address, "model_name": "m", "api_key": "a-key", "max_retries": 0, **backend.kwargs}
        given, call = await _planted(stack, backend.name, kwargs, place)
        rlm = AsyncRLM(
            **given,
            logger=RLMLogger(tmp_path / "log"),
            record=tmp_path / "kept",
            verbose=True,
        )
        async with rlm:
            async with rlm.astream("CTX", **call) as events:
                shown += [repr(event) async for event in events]
            assert events.result is not None
            assert events.result.response == "done"
            shown += [repr(events.result), json.dumps(events.result.to_dict()), json.dumps(events.result.metadata)]
            with pytest.raises(LMError) as caught:
                await rlm.acompletion("CTX", **call)
            shown += _reached(rlm, set())
        shown += traceback.format_exception(caught.value)
        shown += [repr(caught.value), repr(vars(caught.value)), repr(vars(rlm)), str(rlm)]
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):  # functions without a name, clients
            shown += _reached(pickle.loads(pickle.dumps(rlm)), set())
        shown += _reached(pickle.loads(pickle.dumps(caught.value)), set())
    carried = "".join(got)
    assert place.sent is (MARK in carried or base64.b64encode(f"user:{MARK}".encode()).decode() in carried)
    kept = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(name.endswith(".jsonl") for name in kept)
    for name, content in kept.items():
        assert SHOWN.encode() not in content, name
    printed = "".join(capfd.readouterr())
    assert "refuse" in printed
    for text in (*shown, printed, caplog.text):
        assert SHOWN not in text, text


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
async def test_what_is_refused_is_not_repeated(backend: Backend) -> None:
    url, key = backend.url_name, "a-key"
    wrong: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({url: f"http://user:{MARK}@127.0.0.1:1/v1"}, {}),
        ({url: f"http://{MARK}@127.0.0.1:1/v1"}, {}),
        ({url: f"http://127.0.0.1:1/v1?key={MARK}"}, {}),
        ({url: f"http://127.0.0.1:1/v1#{MARK}"}, {}),
        ({url: f"ftp://user:{MARK}@127.0.0.1/"}, {}),
        ({url: f"ftp://127.0.0.1/{MARK}"}, {}),
        ({url: f"http://127.0.0.1:1/{MARK}"}, {}),
        ({url: f"http://127.0.0.1:1//{MARK}/v1"}, {}),
        ({"api_kee": MARK}, {}),
        ({"api_key": f"{MARK} and more"}, {}),
        ({"api_key": f"{MARK}\u00e9"}, {}),
        ({"default_headers": {"X-Extra": f"{MARK}\n"}}, {}),
        ({"default_headers": {"X-Extra": [MARK]}}, {}),
        ({"default_query": MARK}, {}),
        ({"http_client": MARK}, {}),
        ({}, {"extra_headers": {"X-Extra": f"{MARK}\n"}}),
        ({}, {"messages": [MARK]}),
    ]
    for kwargs, sampling in wrong:
        given = {url: "http://127.0.0.1:1/v1", "model_name": "m", "api_key": key, "max_retries": 0, **backend.kwargs}
        with pytest.raises((ConfigurationError, LMError)) as caught:
            await AsyncRLM(backend.name, backend_kwargs=given | kwargs, sampling_args=sampling).acompletion("CTX")
        assert SHOWN not in "".join(traceback.format_exception(caught.value)), kwargs


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_server_that_is_not_there_and_a_proxy_are_told_without_their_keys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    for backend in BACKENDS:
        given = {backend.url_name: "http://127.0.0.1:1/v1", "model_name": "m", "api_key": MARK, "max_retries": 0}
        given |= {**backend.kwargs, "default_query": {"sig": MARK}}
        async with httpx2.AsyncClient(proxy=f"http://user:{MARK}@127.0.0.1:1") as proxied:
            for more in ({}, {"http_client": proxied}):
                spec = client_spec(backend.name, given | more)
                rlm = AsyncRLM(backend.name, backend_kwargs=given | more)
                with pytest.raises(LMError) as caught:
                    await rlm.acompletion("CTX")
                shown = "".join(traceback.format_exception(caught.value)) + repr(spec) + repr(rlm)
                assert SHOWN not in shown, backend.name
    assert SHOWN not in caplog.text


def test_the_command_keeps_the_key_to_itself(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("CTX")
    answer, got = _echoing(breaking=False)
    command = [sys.executable, "-m", "asyncrlm", "run", str(text), "-q", "what?", "--model", "m", "--verbose"]
    with FakeOpenAIServer.serve_in_thread(answer) as server:
        environment = os.environ | {"OPENAI_API_KEY": MARK, "OPENAI_BASE_URL": server.base_url}
        ran = [
            subprocess.run(
                [*command, "--log-dir", str(tmp_path / "log")],
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
            for _ in range(2)
        ]
    assert [done.returncode for done in ran] == [0, 1]
    assert MARK in "".join(got)
    logged = [path.read_text() for path in (tmp_path / "log").iterdir()]
    assert len(logged) == 2
    assert "403" in ran[1].stderr
    for output in (*logged, *(done.stdout + done.stderr for done in ran)):
        assert SHOWN not in output
