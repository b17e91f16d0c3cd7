"""Arguments of the wrong form, each told apart at once and named with the right form; keys that nothing shows."""

from __future__ import annotations

import inspect
import io
import json
import logging
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from asyncrlm import RLM, AsyncRLM, ConfigurationError, LMError, RLMError, RLMLogger
from asyncrlm.cli import main
from asyncrlm.rlm import completions_of
from asyncrlm.testing import FakeOpenAIServer, FakeRequest

from .helpers import cell, scripted, submit


class Odd:
    """No value of any argument; its repr must not be needed."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


WRONG: dict[str, tuple[list[Any], str]] = {
    "backend": ([5, None, Odd(), {"openai": 1}], "backend must be a name"),
    "backend_kwargs": (["ab", 5, Odd(), [{}]], "backend_kwargs must be a dict"),
    "other_backends": (["openai", 5, Odd(), {"openai": 1}], "other_backends must be a list"),
    "other_backend_kwargs": ([{"model_name": "m"}, "ab", 5, Odd()], "other_backend_kwargs must be a list"),
    "sampling_args": (["ab", 5, ["temperature"], Odd(), {1: 2}], "sampling_args must be a dict"),
    "sub_sampling_args": (["ab", 5, ["temperature"], Odd()], "sub_sampling_args must be a dict"),
    "environment": ([5, None, Odd(), AsyncRLM], "environment must be a name"),
    "environment_kwargs": (["ab", 5, [("cell_timeout", 5)], Odd()], "environment_kwargs must be a dict"),
    "custom_system_prompt": ([5, ["a"], Odd()], "custom_system_prompt must be a str"),
    "prompts": (["ab", 5, Odd()], "prompts must be a Prompts"),
    "user_prologue": ([5, ["a"], Odd()], "user_prologue must be a str"),
    "orchestrator": ([1, "no", None, Odd()], "orchestrator must be True or False"),
    "verbose": ([1, "no", None, Odd()], "verbose must be True or False"),
    "persistent": ([1, "no", None, Odd()], "persistent must be True or False"),
    "compaction": ([1, "no", None, Odd(), len], "compaction must be True or False"),
    "compaction_threshold_pct": (
        ["0.5", 0, 85, True, None, Odd()],
        "compaction_threshold_pct must be a number above 0",
    ),
    "custom_tools": (["ab", 5, ["f"], [print], Odd()], "custom_tools must be a dict"),
    "custom_sub_tools": (["ab", 5, ["f"], Odd()], "custom_sub_tools must be a dict"),
    "mcp_servers": (["files", {"name": "files"}, 5, Odd()], "mcp_servers must be a list of MCPServer"),
    "pacer": (["fast", 5, [], {"scripted": 5}, Odd()], "pacer must be a Pacer"),
    "tenant": ([5, [], Odd()], "tenant must be a str"),
    **{name: ([5, "", b"x", Odd(), __file__], f"{name} must be a folder") for name in ("cache", "record")},
    "replay": ([5, "", b"x", Odd(), __file__, "/nowhere/at/all"], "replay must be a folder"),
    "cache_size": (["much", 0, -1, 1.5, b"x", True], "use a number of bytes or a size"),
    "logger": ([5, "logs", RLMLogger, Odd()], "logger must be an RLMLogger"),
} | {
    name: ([5, "print", Odd()], f"{name} must be a function or a coroutine function")
    for name in ("approve", "on_subcall_start", "on_subcall_complete", "on_iteration_start", "on_iteration_complete")
}
LIMITS: dict[str, tuple[list[Any], str]] = (
    {
        name: ([-1, "3", [3], True, 1.5, float("nan"), float("inf"), Odd()], f"{name} must be a whole number")
        for name in ("max_tokens", "max_errors", "max_subcalls")
    }
    | {
        name: ([-1, "3", [3], True, 1.5, None, float("nan"), Odd()], f"{name} must be a whole number")
        for name in ("max_depth", "max_iterations", "max_concurrent_subcalls", "max_concurrent_requests")
    }
    | {
        name: ([-1, "3", [3], True, float("nan"), Odd()], f"{name} must be a number, 0 or more, or None")
        for name in ("max_budget", "max_timeout", "subcall_timeout", "tool_timeout")
    }
    | {
        "limits": (["firm", 5, None, [], Odd()], 'limits must be "soft" or "hard"'),
        "on_limit": (["stop", 5, None, [], Odd()], 'on_limit must be "raise" or "answer"'),
        "on_subcall_error": (["ignore", 5, None, [], Odd()], 'on_subcall_error must be "return" or "raise"'),
    }
)
OVERRIDES = LIMITS | {name: WRONG[name] for name in ("sampling_args", "custom_tools", "tenant")}


def _cases(table: dict[str, tuple[list[Any], str]]) -> list[Any]:
    return [
        pytest.param(name, value, says, id=f"{name}-{number}")
        for name, (values, says) in table.items()
        for number, value in enumerate(values)
    ]


def test_no_argument_is_left_out() -> None:
    assert {*WRONG, *LIMITS} == {*inspect.signature(AsyncRLM).parameters} - {"more", "unknown"}


@pytest.mark.parametrize("face", [RLM, AsyncRLM])
def test_the_first_four_arguments_need_no_names(face: Any) -> None:
    with pytest.raises(ConfigurationError, match="cell_timeot"):
        face(scripted(), {}, "local", {"cell_timeot": 1})
    with pytest.raises(ConfigurationError, match="can't be run"):
        face(scripted(), None, "local", {"python": "/nowhere/python"})
    model = face("openai", {"model_name": "m-7", "api_key": "sk-1"})
    assert "m-7" in repr(model)
    with pytest.raises(ConfigurationError, match="environment_kwargs, in this order, may be given without their names"):
        face("openai", {}, "local", {}, 0)


@pytest.mark.parametrize(("name", "value", "says"), _cases(WRONG | LIMITS))
def test_a_wrong_argument_is_named_with_its_right_form(name: str, value: Any, says: str) -> None:
    given = {"backend": scripted(), name: value}
    if name == "other_backend_kwargs":
        given["other_backends"] = [scripted()]
    with pytest.raises(ConfigurationError) as caught:
        AsyncRLM(**given)
    assert says in str(caught.value)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(("name", "value", "says"), _cases(OVERRIDES))
async def test_a_wrong_override_is_named_with_its_right_form(
    name: str, value: Any, says: str, anyio_backend: str
) -> None:
    rlm = AsyncRLM(scripted())
    if name in ("custom_tools", "sampling_args") and value is None:
        return
    with pytest.raises(ConfigurationError) as caught:
        await rlm.acompletion("CTX", **{name: value})
    assert says in str(caught.value)
    with pytest.raises(ConfigurationError):
        async with rlm.astream("CTX", **{name: value}):
            pass


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"root_prompt": 5}, "root_prompt must be a str"),
        ({"root_prompt": ["a"]}, "root_prompt must be a str"),
        ({"tags": "ab"}, "tags must be a dict"),
        ({"tags": ["a"]}, "tags must be a dict"),
        ({"prompt": None}, "of type NoneType"),
    ],
)
async def test_what_a_call_is_asked_with_is_checked_too(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        await AsyncRLM(scripted()).acompletion(**{"prompt": "CTX", **arguments})


def test_numbers_of_other_kinds_are_numbers() -> None:
    from fractions import Fraction

    AsyncRLM(scripted(), max_timeout=Fraction(1, 2), max_depth=2.0, max_tokens=10**6)  # type: ignore[arg-type]


# ---- keys ------------------------------------------------------------------------------------------------------------

KEY = "MARKED5ecretValue0123456789"
SECRETS: list[dict[str, Any]] = [
    {"backend_kwargs": {"model_name": "m", "api_key": KEY, "base_url": "{url}"}},
    {
        "backend_kwargs": {
            "model_name": "m",
            "base_url": "{url}",
            "default_headers": {"X-Api-Key": KEY},
            "default_query": {"key": KEY},
        }
    },
    {
        "backend_kwargs": {"model_name": "m", "base_url": "{url}"},
        "other_backends": ["vllm", "vllm"],
        "other_backend_kwargs": [
            {"model_name": "a", "api_key": KEY, "base_url": "{url}"},
            {"model_name": "b", "default_headers": {"Authorization": f"Bearer {KEY}"}, "base_url": "{url}"},
        ],
    },
    {
        "backend_kwargs": {"model_name": "m", "base_url": "{url}"},
        "sampling_args": {"extra_headers": {"X-Token": KEY}, "extra_query": {"key": KEY}},
    },
]


def _with_url(value: Any, url: str) -> Any:
    if isinstance(value, dict):
        return {name: _with_url(item, url) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_url(item, url) for item in value]
    return url if value == "{url}" else value


def _echoing(request: FakeRequest) -> str:
    if request.fields["model"] != "m":
        return "fine"
    if len(request.fields["messages"]) < 4:
        return cell("print(llm_query('x'), llm_query('y'))")
    return submit("'done'")


def _async_face(rlm: Any) -> AsyncRLM:
    return rlm._rlm if isinstance(rlm, RLM) else rlm


@pytest.mark.parametrize("face", [AsyncRLM, RLM])
@pytest.mark.parametrize("given", SECRETS, ids=["key", "headers and query", "others", "sampling"])
def test_no_key_in_any_repr(given: dict[str, Any], face: type) -> None:
    rlm = face("vllm", **_with_url(given, "http://127.0.0.1:1/v1"))
    for one in (rlm, pickle.loads(pickle.dumps(rlm))):
        inner = _async_face(one)
        completions = completions_of(inner)
        shown = [repr(x) for x in (one, vars(one), inner, vars(inner), vars(completions))]
        shown.append(repr(completions.configuration.router.specs))
        shown += [str(one), str(vars(inner)["_given"])]
        assert KEY not in "".join(shown)
    # What was pickled is all of it, the key too.
    again = pickle.loads(pickle.dumps(rlm))
    assert _async_face(again)._given.by_name == _async_face(rlm)._given.by_name


@pytest.mark.parametrize("given", SECRETS, ids=["key", "headers and query", "others", "sampling"])
def test_no_key_in_logs_events_and_progress(
    given: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "asyncrlm")
    with FakeOpenAIServer.serve_in_thread(_echoing) as server:
        arguments = _with_url(given, server.base_url)
        with RLM("vllm", **arguments, logger=RLMLogger(tmp_path), verbose=True) as rlm:
            completion = rlm.completion("CTX", "What?")
            shown = [repr(rlm), repr(vars(rlm)), repr(vars(rlm._rlm))]
    assert completion.response == "done"
    sent = "".join(f"{request.path} {request.headers}" for request in server.requests)
    assert KEY in sent
    out, err = capfd.readouterr()
    shown += [out, err, caplog.text, json.dumps(completion.to_dict(), default=str)]
    shown += [path.read_text() for path in tmp_path.iterdir()]
    assert KEY not in "".join(shown)


@pytest.mark.parametrize("given", SECRETS, ids=["key", "headers and query", "others", "sampling"])
def test_no_key_in_errors(given: dict[str, Any]) -> None:
    given = _with_url(given, "http://127.0.0.1:1/v1")
    given["backend_kwargs"]["max_retries"] = 0
    with RLM("vllm", **given) as rlm, pytest.raises(LMError) as caught:
        rlm.completion("CTX", "What?")
    assert KEY not in _all_of(caught.value)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"api_key": KEY + "\n" + KEY},
        {"api_key": [KEY]},
        {"api_key": KEY, "api_kee": KEY},
        {"default_headers": {"X": KEY + "\n"}},
        {"default_headers": {"X": [KEY]}},
        {"default_headers": [KEY]},
        {"default_query": KEY},
        {"base_url": f"http://h/v1?key={KEY}"},
        {"base_url": f"http://user:{KEY}@h/v1"},
        {"base_url": f"htp://h/v1?key={KEY}"},
        {"base_url": f"h/v1?key={KEY}"},
        {"base_url": f"http://h:port/v1?key={KEY}"},
    ],
    ids=lambda kwargs: "-".join(kwargs),
)
@pytest.mark.parametrize("where", ["backend_kwargs", "other_backend_kwargs"])
def test_no_key_in_what_refuses_an_argument(kwargs: dict[str, Any], where: str) -> None:
    given = {"model_name": "m", "base_url": "http://h/v1", **kwargs}
    arguments: dict[str, Any] = {"backend": "vllm", "backend_kwargs": given}
    if where == "other_backend_kwargs":
        arguments = {"backend": scripted(), "other_backends": ["vllm"], "other_backend_kwargs": [given]}
    with pytest.raises(ConfigurationError) as caught:
        AsyncRLM(**arguments)
    assert KEY not in _all_of(caught.value)


def _all_of(error: RLMError) -> str:
    texts = [repr(vars(error)), *traceback.format_exception(error)]
    chain: BaseException | None = error
    while chain is not None:
        texts += [str(chain), repr(chain)]
        chain = chain.__cause__
    return "".join(texts)


@pytest.mark.parametrize("url", [f"http://h/v1?key={KEY}", f"htp://h/v1?key={KEY}", f"http://u:{KEY}@h/v1"])
def test_no_key_on_the_command_line_s_standard_error(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"text")))
    monkeypatch.setattr(sys, "argv", ["asyncrlm", "run", "-", "-q", "x", "--base-url", url, "--model", "m"])
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capfd.readouterr()
    assert exit_.value.code == 2
    assert KEY not in out + err


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["max_budget", "max_timeout", "subcall_timeout"])
async def test_an_infinite_limit_is_none(name: str) -> None:
    options: dict[str, Any] = {name: float("inf")}
    assert (await AsyncRLM(scripted("ok"), max_depth=0, **options).acompletion("x")).response == "ok"
    assert (await AsyncRLM(scripted("ok"), max_depth=0).acompletion("x", **options)).response == "ok"


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (
            {"model": "m"},
            'unknown argument \'model\': give backend="openai/gpt-5.4-mini" or backend_kwargs={"model_name": …}; known',
        ),
        ({"api_key": "k"}, 'backend_kwargs={"api_key": …}; known'),
        ({"base_url": "u"}, 'backend_kwargs={"base_url": …}; known'),
        ({"max_turns": 3}, "did you mean 'max_iterations'?"),
        ({"max_iteration": 3}, "did you mean 'max_iterations'?"),
        ({"backend": "gpt-5.4-mini"}, "did you mean 'openai/gpt-5.4-mini'?"),
        ({"backend": "claude-sonnet-4-5"}, "did you mean 'anthropic/claude-sonnet-4-5'?"),
        ({"backend": "gemini-2.5-pro"}, "did you mean 'gemini/gemini-2.5-pro'?"),
        ({"backend": "nope"}, "unknown backend 'nope'; known: "),
        ({"max_retries": 3}, 'backend_kwargs={"max_retries": …}'),
        ({"backend": "offline/foo"}, "leave model_name='foo' out"),
        ({"backend": "gemnii"}, "did you mean 'gemini'?"),
    ],
)
def test_a_newcomers_argument_is_pointed_to_its_place(argument: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        AsyncRLM(**argument)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ({"question": "x"}, "did you mean 'root_prompt'?"),
        ({"max_turns": 3}, "did you mean 'max_iterations'?"),
        ({"max_token": 3}, "did you mean 'max_tokens'?"),
        ({"verbose": True}, "verbose is given to the constructor; for one call you can give: max_depth"),
        ({"model": "m"}, 'backend_kwargs={"model_name": …} is given to the constructor; '),
        ({"zzz": 1}, "unknown argument 'zzz'; for one call you can give: max_depth"),
    ],
)
def test_a_newcomers_override_is_pointed_to_its_place(override: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        completions_of(AsyncRLM("offline")).prepare(override)
    assert says in str(caught.value)
