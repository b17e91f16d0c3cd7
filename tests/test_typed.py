"""Answers of a type: stated to the model, checked on the host, had as a value."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
from typing import Any, Literal, TypedDict

import msgspec
import pytest
from helpers import cell, scripted, submit, told

from asyncrlm import RLM, AsyncRLM, ConfigurationError, LMError, TokenLimitExceededError
from asyncrlm.testing import ScriptedLM
from asyncrlm.types import RLMChatCompletion

pydantic = pytest.importorskip("pydantic")

pytestmark = pytest.mark.anyio


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


class Model(pydantic.BaseModel):
    name: str
    age: int


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
OPENAI = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
PLAIN = {"name": "Ada", "age": 36}
FITS = "{'name': 'Ada', 'age': 36}"
FORMS = [
    (Person, Person("Ada", 36)),
    (Card, Card("Ada", 36)),
    (Row, PLAIN),
    (Model, Model(name="Ada", age=36)),
    (SCHEMA, PLAIN),
    (OPENAI, PLAIN),
    ({"type": "json_object"}, PLAIN),
]


async def ask(*replies: str, response_format: Any, **given: Any) -> tuple[RLMChatCompletion, ScriptedLM]:
    model = scripted(*replies)
    return await AsyncRLM(model, **given).acompletion("text", "Who?", response_format=response_format), model


@pytest.mark.parametrize(("form", "value"), FORMS)
async def test_the_answer_is_a_value(form: Any, value: Any) -> None:
    completion, model = await ask(submit(FITS), response_format=form)
    assert completion.parsed == value
    assert type(completion.parsed) is type(value)
    assert msgspec.json.decode(completion.response) == PLAIN
    assert (completion.stop_reason, completion.error) == ("answer", None)
    assert "Answer this:\nWho?" in told(model, 1)
    assert '"type": "object"' in told(model, 1)
    assert completion.to_dict()["parsed"] == PLAIN


@pytest.mark.parametrize(
    "content",
    [
        FITS,
        """'{"name": "Ada", "age": 36}'""",
        """'Here it is:\\n' + '`' * 3 + 'json\\n{"name": "Ada",\\n "age": 36}\\n' + '`' * 3""",
        """'~~~\\n{"name": "Ada", "age": 36}\\n~~~'""",
    ],
)
async def test_it_may_be_an_object_json_or_fenced_json(content: str) -> None:
    completion, _ = await ask(submit(content), response_format=Person)
    assert completion.parsed == Person("Ada", 36)
    assert msgspec.json.decode(completion.response) == PLAIN


@pytest.mark.parametrize(
    ("form", "content", "value", "response"),
    [
        (list[Person], f"[{FITS}]", [Person("Ada", 36)], None),
        (list[Model], f"[{FITS}]", [Model(name="Ada", age=36)], None),
        (list[int], "[1, 2]", [1, 2], "[1, 2]"),
        (str, "'plain words'", "plain words", '"plain words"'),
        (str, "'42'", "42", '"42"'),
        (int, "42", 42, "42"),
        (int | None, "'null'", None, "null"),
        (Literal["yes", "no"], "'yes'", "yes", '"yes"'),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "integer"}}}, "[1]", [1], "[1]"),
        (pydantic.TypeAdapter(list[int]), "[1]", [1], "[1]"),
    ],
)
async def test_other_types(form: Any, content: str, value: Any, response: str | None) -> None:
    completion, _ = await ask(submit(content), response_format=form)
    assert completion.parsed == value
    assert response is None or completion.response == response


class Order(msgspec.Struct):
    day: dt.date
    price: decimal.Decimal
    of: Card
    tags: set[str]


async def test_what_json_does_not_know_may_be_among_it() -> None:
    code = """
import dataclasses, datetime, decimal
@dataclasses.dataclass
class Card:
    name: str
    age: int
day, price = datetime.date(2026, 12, 3), decimal.Decimal("1.50")
answer.update(content={"day": day, "price": price, "of": Card("Ada", 36), "tags": {"a"}}, ready=True)
"""
    completion, _ = await ask(cell(code), response_format=Order)
    assert completion.parsed == Order(dt.date(2026, 12, 3), decimal.Decimal("1.50"), Card("Ada", 36), {"a"})


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        (Person, "Expected `int`, got `str` - at `$.age`"),
        (Card, "Expected `int`, got `str` - at `$.age`"),
        (Row, "Expected `int`, got `str` - at `$.age`"),
        (Model, "valid integer, unable to parse string as an integer, got 'old' - at `$.age`"),
        (SCHEMA, "'old' is not of type 'integer' - at `$.age`"),
    ],
)
async def test_a_misfit_goes_back_to_the_model_and_costs_a_turn(form: Any, problem: str) -> None:
    wrong = submit("{'name': 'Ada', 'age': 'old'}") + "\n" + cell("print('never run')")
    completion, model = await ask(wrong, cell("print(1)"), submit(FITS), response_format=form)
    assert completion.parsed is not None
    assert len(model.calls) == 3
    assert problem in told(model, 2)
    assert "1 later block of your reply did not run, because the answer was refused" in told(model, 2)
    assert "never run" not in told(model, 2)
    assert problem in told(model, 3)  # it still stands


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        (Literal["yes", "no"], "Invalid enum value 'maybe'"),
        (dt.date, "Invalid RFC3339 encoded"),
        ({"type": "string", "maxLength": 3}, "'maybe' is too long"),
        ({"enum": ["yes", "no"]}, "'maybe' is not one of ['yes', 'no']"),
    ],
)
async def test_a_text_that_does_not_fit_is_told_why(form: Any, problem: str) -> None:
    right = "'2026-12-03'" if form is dt.date else "'yes'"
    _, model = await ask(submit("'maybe'"), submit(right), response_format=form)
    assert problem in told(model, 2)


async def test_words_are_no_json() -> None:
    _, model = await ask(submit("'about 36'"), submit(FITS), response_format=Person)
    assert "it is not JSON" in told(model, 2)


async def test_an_answer_that_never_fits_is_an_error_with_what_there_was() -> None:
    wrong = "{'name': 'Ada'}"
    with pytest.raises(
        LMError, match=r"all 2 turns are used up, then the last one, and no answer fits.*missing required field `age`"
    ) as caught:
        await ask(submit(wrong), submit(wrong), submit(wrong), response_format=Person, max_iterations=2)
    assert caught.value.kind == "schema"
    assert caught.value.partial_answer == '{"name": "Ada"}'


@pytest.mark.parametrize(
    "last", ['{"name": "Ada", "age": 36}', '```json\n{"name": "Ada", "age": 36}\n```', submit(FITS)]
)
async def test_the_last_turn_may_give_it(last: str) -> None:
    completion, model = await ask(submit("'?'"), last, response_format=Person, max_iterations=1)
    assert (completion.parsed, completion.stop_reason) == (Person("Ada", 36), "max_iterations")
    assert "Your whole reply must be the JSON" in told(model, 2)


@pytest.mark.parametrize("last", ["no idea", cell("x = 1")])
async def test_what_was_never_said_to_be_ready_counts_where_it_fits(last: str) -> None:
    draft = cell(f'answer["content"] = {FITS}')
    completion, _ = await ask(draft, last, response_format=Person, max_iterations=1)
    assert (completion.parsed, completion.stop_reason) == (Person("Ada", 36), "max_iterations")
    with pytest.raises(LMError, match="no answer fits"):
        await ask(cell('answer["content"] = 1'), last, response_format=Person, max_iterations=1)


async def test_a_limit_is_met_before_it_fits() -> None:
    wrong = submit("'?'")
    with pytest.raises(TokenLimitExceededError) as caught:
        await ask(wrong, wrong, response_format=Person, max_tokens=4_200)
    assert caught.value.partial_answer == "?"
    good = '{"name": "Ada", "age": 36}'
    completion, _ = await ask(cell("print(1)"), good, response_format=Person, max_tokens=5_000, on_limit="answer")
    assert completion.parsed == Person("Ada", 36)


async def test_without_a_repl() -> None:
    completion, model = await ask('{"name": 1}', '{"name": "Ada", "age": 36}', response_format=Person, max_depth=0)
    assert (completion.parsed, completion.stop_reason) == (Person("Ada", 36), "text")
    assert "reply with the JSON and nothing else" in told(model, 1)
    assert "Expected `str`, got `int` - at `$.name`" in told(model, 2)
    with pytest.raises(LMError, match="asked twice") as caught:
        await ask("no", "no", response_format=Person, max_depth=0)
    assert caught.value.kind == "schema"


async def test_the_stream_has_it() -> None:
    rlm = AsyncRLM(scripted(submit(FITS)))
    async with rlm.astream("text", response_format=Person) as events:
        async for _ in events:
            pass
    assert events.result is not None
    assert events.result.parsed == Person("Ada", 36)


def test_blocking_code_has_it() -> None:
    with RLM(scripted(submit(FITS))) as rlm:
        assert rlm.completion("text", response_format=Person).parsed == Person("Ada", 36)


async def test_any_text_is_asked_for_with_none() -> None:
    for form in (None, {"type": "text"}):
        completion, _ = await ask(submit("'words'"), response_format=form)
        assert (completion.response, completion.parsed) == ("words", None)


@pytest.mark.parametrize(
    "form",
    [
        "json",
        7,
        object,
        print,
        PLAIN,
        Person("Ada", 36),
        {"type": "jsonschema"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}},
        {"$ref": "https://example.com/schema.json"},
        {"type": "object", "properties": {"a": str}},
    ],
)
async def test_what_is_no_form_fails_at_once(form: Any) -> None:
    model = scripted()
    with pytest.raises(ConfigurationError, match="response_format"):
        await AsyncRLM(model).acompletion("text", response_format=form)
    assert not model.calls
