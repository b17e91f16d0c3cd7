"""What a newcomer writes who comes from elsewhere, and what is said to it."""

from __future__ import annotations

import gc
import inspect
import pickle
import typing
import warnings
from typing import Any

import anyio
import msgspec
import pytest

from asyncrlm import RLM, AsyncRLM, ConfigurationError, Pacer, Prompts, Repl, RLMLogger, TimeoutExceededError
from asyncrlm.engine.overrides import Overrides
from asyncrlm.engine.settings import Limits
from asyncrlm.environments.local import LocalEnvironment
from asyncrlm.events import AnyEvent, Event
from asyncrlm.rlm import completions_of
from asyncrlm.testing import ScriptedLM

from .helpers import cell, scripted, submit


def said(build: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        build()
    return str(caught.value)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("model", "unknown argument 'model': give backend=\"openai/gpt-5.4-mini\""),
        ("temperature", 'give sampling_args={"temperature": …}; known are: backend'),
        ("sub_model", 'give other_backends=["openai/gpt-5.4-mini"]; '),
        ("recursion_depth", "did you mean 'max_depth'? "),
        ("concurrency", "give max_concurrent_requests=…; "),
        ("sandbox", "did you mean 'environment'? "),
        ("response_format", "response_format is given to a call; "),
        ("question", "root_prompt is given to a call; "),
        ("cell_timeout", 'setting of the environment: environment_kwargs={"cell_timeout": …}; '),
        ("pool_size", 'setting of the environment: environment_kwargs={"pool_size": …}; '),
        ("log_dir", "give logger=RLMLogger(log_dir=…); "),
        ("stream", "use astream(…)"),
        ("wibble", "unknown argument 'wibble'; known are: backend"),
    ],
)
def test_an_argument_of_the_constructor(argument: str, says: str) -> None:
    assert says in said(lambda: AsyncRLM("offline", **{argument: "x"}))  # type: ignore[arg-type]
    assert says in said(lambda: RLM("offline", **{argument: "x"}))


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("context", "did you mean 'prompt'? "),
        ("query", "did you mean 'root_prompt'? "),
        ("temperature", 'give sampling_args={"temperature": …}; '),
        ("schema", "did you mean 'response_format'? "),
        ("model", "is given to the constructor; "),
        ("cell_timeout", 'setting of the environment: environment_kwargs={"cell_timeout": …}; '),
        ("verbose", ": verbose is given to the constructor; "),
        ("max_tokes", "did you mean 'max_tokens'? "),
    ],
)
def test_an_argument_of_a_call(argument: str, says: str) -> None:
    assert says in said(lambda: completions_of(AsyncRLM("offline")).prepare({argument: "x"}))


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("cell_timeout", "environment_kwargs"),
        ("model", "did you mean 'lm'?"),
        ("api_key", 'backend_kwargs={"api_key": …}'),
        ("backend_kwargs", "for the client of lm: give it too"),
        ("zzz", "known are: environment, env"),
    ],
)
def test_an_argument_of_a_repl(argument: str, says: str) -> None:
    assert says in said(lambda: Repl(**{argument: "x"}))  # type: ignore[arg-type]


async def ask(messages: Any) -> str:
    return "ok"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"backend": ScriptedLM}, "backend must be an object, not the class itself: ScriptedLM(…)"),
        ({"backend": lambda messages: "x"}, "write `async def model(messages)`"),
        ({"environment": LocalEnvironment}, "not the class itself: an object of it, LocalEnvironment(…)"),
        ({"logger": RLMLogger}, "not the class itself: an object of it, RLMLogger(…)"),
        ({"pacer": Pacer}, "not the class itself: an object of it, Pacer(…)"),
        ({"prompts": Prompts}, "not the class itself: an object of it, Prompts(…)"),
        ({"prompts": "Be brief."}, "prompts must be a Prompts"),
    ],
)
def test_a_class_in_place_of_an_object(arguments: dict[str, Any], says: str) -> None:
    assert says in said(lambda: AsyncRLM(**{"backend": ask, **arguments}))


@pytest.mark.anyio
async def test_the_offline_model_can_give_no_form() -> None:
    with pytest.raises(ConfigurationError, match='response_format needs a model: backend="offline" is none'):
        await AsyncRLM("offline").acompletion("x", response_format=list[int])


@pytest.mark.anyio
async def test_a_prompt_is_called_what_its_caller_calls_it() -> None:
    with pytest.raises(ConfigurationError, match=r"^prompt\[0\]: a value of type object") as caught:
        await AsyncRLM(scripted(submit("'x'"))).acompletion([object()])
    assert "context_0" not in str(caught.value)


@pytest.mark.anyio
async def test_no_time_at_all_is_none() -> None:
    with pytest.raises(TimeoutExceededError, match=r"of 0 s"):
        await AsyncRLM(ask, max_timeout=0).acompletion("x")


@pytest.mark.anyio
async def test_the_face_that_was_not_meant() -> None:
    rlm = AsyncRLM(scripted(submit("'x'")))
    for name, instead in {"completion": "acompletion", "stream": "astream", "close": "aclose"}.items():
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': use .*{instead}"):
            getattr(rlm, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'zzz'$"):
        _ = rlm.zzz  # type: ignore[attr-defined]
    untyped: Any = rlm
    with pytest.raises(TypeError, match="entered with `async with`"), untyped:
        pass
    stream: Any = rlm.astream("x")
    with pytest.raises(TypeError, match="use `async with"):
        async for _ in stream:
            pass
    async with stream as events:
        kinds = [type(event).__name__ async for event in events]
    assert kinds[-1] == "RunFinished"
    assert events.result is not None
    assert pickle.loads(pickle.dumps(ConfigurationError("no", argument="a"))).argument == "a"


def test_the_blocking_face_that_was_not_meant() -> None:
    rlm = RLM(scripted(submit("'x'")))
    for name, instead in {"acompletion": "completion", "astream": "stream", "aclose": "close"}.items():
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': use .*{instead}"):
            getattr(rlm, name)
    untyped: Any = rlm

    async def enter() -> None:
        async with untyped:
            pass

    with pytest.raises(TypeError, match="an RLM is entered with `with`"):
        anyio.run(enter)
    stream: Any = rlm.stream("x")
    with pytest.raises(TypeError, match="use `with"):
        next(iter(stream))
    with rlm, stream as events:
        assert [type(event).__name__ for event in events][-1] == "RunFinished"
        assert events.result.response == "x"


@pytest.mark.anyio
async def test_one_that_was_never_left_is_named() -> None:
    rlm = AsyncRLM(ask)
    await rlm.__aenter__()
    with pytest.warns(ResourceWarning, match=r"unclosed <AsyncRLM ask in 'local', open>: leave its `async with` block"):
        rlm.__del__()
    await rlm.aclose()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del rlm
        gc.collect()


@pytest.mark.anyio
async def test_prompts_are_data_of_the_caller() -> None:
    prompts = msgspec.structs.replace(
        Prompts(), system="You are a pirate. {custom_tools_section}", turn="{turn}!", first_turn="Ahoy, {turn}!"
    )
    lm = scripted(cell("1"), submit("'x'"))
    with anyio.fail_after(10):
        await AsyncRLM(lm, prompts=prompts, orchestrator=False).acompletion("x")
    messages = lm.calls[-1].messages
    assert messages[0].content == "You are a pirate. "
    assert messages[1].content.endswith("Ahoy, 1!")
    assert messages[-1].content.endswith("\n2!")


def test_types_of_a_call_say_what_it_takes() -> None:
    beside = {"sampling_args", "custom_tools", "tenant", "response_format", "lazy", "web"}
    assert set(Overrides.__annotations__) == {*Limits.__struct_fields__, *beside}
    for name, kind in typing.get_type_hints(Limits).items():
        assert typing.get_type_hints(Overrides)[name] == kind, name


def test_every_event_is_in_the_union() -> None:
    kinds = {each for each in Event.__subclasses__() if each.__module__ == Event.__module__}
    assert set(typing.get_args(AnyEvent)) == kinds
    assert all(inspect.getdoc(each) != inspect.getdoc(Event) for each in kinds)
