"""What type checkers know of a typed answer: pyright holds each `assert_type` here, the run itself the values."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypedDict, assert_type

import msgspec
import pytest

from asyncrlm import RLM, AsyncRLM, BlockingEventStream, EventStream, RLMChatCompletion
from asyncrlm.testing import ScriptedLM


class Person(msgspec.Struct):
    name: str
    age: int


@dataclasses.dataclass
class Card:
    name: str
    age: int


class Row(TypedDict):
    name: str
    age: int


SUBMIT = "```repl\nanswer.update(content={}, ready=True)\n```"
ADA = "{'name': 'Ada', 'age': 36}"


def says(expression: str) -> ScriptedLM:
    return ScriptedLM(lambda _: SUBMIT.format(expression))


@pytest.mark.anyio
async def test_the_value_has_the_type_that_was_asked_for() -> None:
    async with AsyncRLM(says(ADA)) as rlm:
        assert_type((await rlm.acompletion("x", response_format=Person)).parsed, Person)
        assert_type((await rlm.acompletion("x", "Who?", tags={}, max_depth=1, response_format=Card)).parsed, Card)
        row = (await rlm.acompletion("x", response_format=Row)).parsed
        assert assert_type(row, Row) == {"name": "Ada", "age": 36}
        async with rlm.session() as chat:
            person = (await chat.acompletion("x", response_format=Person)).parsed
            assert assert_type(person, Person) == Person("Ada", 36)
            async with chat.astream("x", response_format=Card) as events:
                _ = [event async for event in events]
            card = assert_type(events.result, RLMChatCompletion[Card] | None)
            assert card is not None
            assert card.parsed == Card("Ada", 36)
        async with rlm.astream("x", response_format=Person) as stream:
            assert_type(stream, EventStream[Person])


def test_so_it_has_in_blocking_code() -> None:
    with RLM(says(ADA)) as rlm:
        assert assert_type(rlm.completion("x", response_format=Person).parsed, Person).name == "Ada"
        with rlm.session() as chat:
            assert assert_type(chat.completion("x", response_format=Row).parsed, Row)["age"] == 36
            with chat.stream("x", response_format=Card) as events:
                assert_type(events, BlockingEventStream[Card])
        with rlm.stream("x", response_format=Person) as stream:
            assert_type(stream.result, RLMChatCompletion[Person] | None)
    with RLM(says("[1, 2]")) as rlm:
        assert sum(assert_type(rlm.completion("x", response_format=list[int]).parsed, list[int])) == 3


def test_a_form_that_is_no_class_may_be_anything() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"age": {"type": "integer"}}}
    with RLM(says(ADA)) as rlm:
        assert assert_type(rlm.completion("x", response_format=schema).parsed, Any)["age"] == 36
        assert assert_type(rlm.completion("x").parsed, Any) is None
    either: Any = Literal["yes", "no"]
    with RLM(says("'no'")) as rlm:
        assert rlm.completion("x", response_format=either).parsed == "no"


def test_a_completion_of_any_kind_needs_no_parameter() -> None:
    def told(completion: RLMChatCompletion) -> str:
        return completion.response

    with RLM(says(ADA)) as rlm:
        completion = rlm.completion("x", response_format=Person)
    assert told(completion) == '{"name": "Ada", "age": 36}'
    again = RLMChatCompletion.from_dict(completion.to_dict())
    assert again.parsed == {"name": "Ada", "age": 36}
