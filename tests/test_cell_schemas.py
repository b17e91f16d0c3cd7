"""`schema=` of sub-calls and children: JSON that fits, or an error the cell can read."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import jsonschema
import pytest

from asyncrlm import AsyncRLM, Repl
from asyncrlm.engine.cell_schemas import measured, shape_of_cell
from asyncrlm.engine.fitting import Steps, TooManySteps
from asyncrlm.engine.shapes import Misfit
from asyncrlm.lm.base import LMRequest
from asyncrlm.testing import FakeOpenAIServer, FakeReply, FakeRequest, ScriptedLM

from .helpers import cell, submit

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
GOOD, BAD = '{"n": 5}', '{"n": "five"}'


DOUBLING = str({"$defs": {**{str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)}, "40": {}}})
LONG_CHAIN = "{'$defs': {**{str(i): {'$ref': f'#/$defs/{i + 1}'} for i in range(2_000)}, '2000': {}}}"
TREE = {"anyOf": [{"type": "object", "properties": {"a": {"$ref": "#"}}}] * 2}
"""Of which each level of a value doubles the work."""


async def asked(replies: list[str], call: str = f"llm_query('how many?', schema={SCHEMA})") -> tuple[str, ScriptedLM]:
    sub = ScriptedLM(replies)
    root = ScriptedLM([cell(f"r = {call}"), submit("[r, isinstance(r, FailedReply), getattr(r, 'kind', None)]")])
    with anyio.fail_after(10):
        completion = await AsyncRLM(root, other_backends=[sub]).acompletion("CTX")
    return completion.response, sub


async def test_the_schema_is_stated_and_json_comes_back() -> None:
    response, sub = await asked([f"Sure:\n```json\n{GOOD}\n```"])
    assert json.loads(response) == [GOOD, False, None]
    (request,) = sub.calls
    (message,) = request.messages
    assert message.content.startswith("how many?")
    assert json.dumps(SCHEMA) in message.content


async def test_a_misfit_is_told_once() -> None:
    response, sub = await asked([BAD, GOOD])
    assert json.loads(response)[0] == GOOD
    assert "'five' is not of type 'integer'" in sub.calls[1].messages[-1].content
    response, sub = await asked([BAD, BAD])
    text, failed, kind = json.loads(response)
    assert (failed, kind) == (True, "schema")
    assert "was asked twice" in text
    assert len(sub.calls) == 2


async def test_a_batch_is_checked_slot_by_slot() -> None:
    def reply(request: LMRequest) -> str:
        return GOOD if "good" in request.messages[0].content else "no JSON"

    sub = ScriptedLM(reply)
    look = f"rs = llm_query_batched(['good', 'bad', 'good'], schema={SCHEMA})"
    root = ScriptedLM([cell(look), submit("[isinstance(r, FailedReply) for r in rs]")])
    with anyio.fail_after(10):
        assert (await AsyncRLM(root, other_backends=[sub]).acompletion("CTX")).response == "[false, true, false]"


async def test_a_child_answers_by_it() -> None:
    def reply(request: LMRequest) -> str:
        turns = sum(m.role == "assistant" for m in request.messages)
        if "ROOT" in request.messages[1].content:
            return submit(f"rlm_query('part', schema={SCHEMA})")
        return submit("{'n': 'five'}") if not turns else submit("{'n': 7}")

    model = ScriptedLM(reply)
    with anyio.fail_after(10):
        assert (await AsyncRLM(model, max_depth=2).acompletion("CTX", "ROOT")).response == '{"n":7}'.replace(":", ": ")


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{'type': 'obj'}", "schema= is not a JSON schema"),
        ("'text'", "schema= must be a JSON schema, a dict"),
        ("{'type': 'string', 'pattern': '(a+)+$'}", "can't have 'pattern'"),
        ("{'type': 'object', 'properties': {'a': {'patternProperties': {}}}}", "can't have 'patternProperties'"),
        ("{'$ref': '#/$defs/a', '$defs': {'a': {'anyOf': [{'$ref': '#'}]}}}", "refers to itself without end"),
        ("{'$ref': '#/$defs/b', '$defs': {'a': {}}}", "which its schema does not hold"),
        ("{'enum': list(range(15_000))}", "is too large: at most 10,000 values"),
        ("{'const': 'x' * 200_000}", "is too large"),
        ("{'const': b'x'}", "holds a value of type bytes"),
        ("{'const': float('inf')}", "a number that JSON does not have"),
        ("{'minimum': 10**5000}", "a number that is too large"),
        ("{'const': eval('[' * 70 + ']' * 70)}", "is too large"),
        (f"{{'$ref': '#/$defs/0', **{DOUBLING}}}", "comes to more than 10,000 schemas"),
        (f"{{'$ref': '#/$defs/0', **{LONG_CHAIN}}}", "too long a chain"),
    ],
)
async def test_what_is_no_schema_is_told(schema: str, says: str) -> None:
    response, sub = await asked([], f"llm_query('x', schema={schema})")
    text, failed, kind = json.loads(response)
    assert says in text
    assert (failed, kind) == (True, "bad_request")
    assert sub.calls == []


async def test_a_check_takes_a_bounded_number_of_steps() -> None:
    deep = '{"a": ' * 40 + "5" + "}" * 40
    response, sub = await asked([deep], f"llm_query('x', schema={TREE})")
    text, failed, kind = json.loads(response)
    assert "steps to check" in text
    assert (failed, kind, len(sub.calls)) == (True, "bad_request", 1)


def test_a_check_that_nobody_waits_for_ends() -> None:
    steps = Steps(10**9)
    shape = shape_of_cell(TREE)
    with ThreadPoolExecutor() as pool:
        checking = pool.submit(shape.read, '{"a": ' * 40 + "5" + "}" * 40, steps)
        steps.stop()
        with pytest.raises(TooManySteps):
            checking.result(10)


PARTS: list[Any] = [None, True, False, 0, 1, 1.0, 2.5, -3, "", "a", "abcd", [], {}, [1, 1], [1, "a", None], {"a": 1}]
VALUES = [*PARTS, {"a": "a", "b": [1]}, {"b": None}, [[1], [1]], [{"a": 1}, {"a": 2}], {"a": {"a": {"a": 1}}}]
SCHEMAS: list[Any] = [
    *({"type": each} for each in ("string", "number", "integer", "boolean", "null", "array", "object")),
    *({"const": each} for each in PARTS),
    {"type": ["integer", "null"]},
    {"enum": [1, "a", None, [1, 1], {"a": 1}]},
    {"minimum": 1, "exclusiveMaximum": 2.5},
    {"exclusiveMinimum": 1, "maximum": 2},
    {"multipleOf": 0.5},
    {"multipleOf": 2},
    {"minLength": 1, "maxLength": 2},
    {"minItems": 1, "maxItems": 2, "items": {"type": ["integer", "array"]}},
    {"prefixItems": [{"type": "integer"}, False], "items": False},
    {"uniqueItems": True},
    {"minProperties": 1, "maxProperties": 1},
    {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"additionalProperties": {"type": "array"}},
    {"propertyNames": {"const": "a"}},
    {"properties": {"a": False}},
    {"anyOf": [{"type": "string"}, {"minItems": 1, "type": "array"}]},
    {"oneOf": [{"type": "string"}, {"minLength": 1}, {"type": "array"}]},
    {"allOf": [{"type": "string"}, {"maxLength": 1}]},
    {"not": {"type": "number"}},
    {"if": {"type": "string"}, "then": {"minLength": 1}, "else": {"type": "array"}},
    {"if": {"type": "string"}, "else": False},
    {"type": "object", "additionalProperties": {"anyOf": [{"$ref": "#"}, {"const": 1}]}},
    {"$ref": "#/$defs/x~1y", "$defs": {"x/y": {"type": "integer"}}, "minimum": 1},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_it_says_what_jsonschema_says(schema: dict[str, Any]) -> None:
    peer, shape = jsonschema.Draft202012Validator(schema), shape_of_cell(measured(schema)[0])
    for value in VALUES:
        text = json.dumps(value)
        try:
            fits = shape.check(text, Steps(len(text))) == value
        except Misfit:
            fits = False
        assert fits == peer.is_valid(value), value


async def test_any_other_class_is_told_what_would_be_right() -> None:
    async with Repl(lm=ScriptedLM([])) as repl:
        with anyio.fail_after(10):
            result = await repl.execute("llm_query('x', schema=int)")
    assert "or a pydantic model; the class int is neither" in (result.error or "")


async def test_a_class_of_pydantic_is_a_schema() -> None:
    pytest.importorskip("pydantic", reason="pydantic is not installed")
    code = "from pydantic import BaseModel\nclass A(BaseModel):\n    n: int\nr = llm_query('x', schema=A)\nprint(r)"
    async with Repl(lm=ScriptedLM([GOOD])) as repl:
        with anyio.fail_after(10):
            result = await repl.execute(code)
    assert (result.stdout, result.error) == (f"{GOOD}\n", None)


@pytest.mark.parametrize("takes", [True, False])
async def test_a_provider_is_asked_in_its_own_way_where_it_has_one(takes: bool) -> None:
    forms: list[Any] = []

    def reply(request: FakeRequest) -> Any:
        forms.append(request.fields.get("response_format"))
        return GOOD if takes or not forms[-1] else FakeReply.fault(400)

    call = f"llm_query('x', schema={SCHEMA})"
    root = ScriptedLM([submit(f"[{call}, {call}]")])
    async with FakeOpenAIServer(reply) as server:
        settings = {"base_url": server.base_url, "model_name": "m"}
        rlm = AsyncRLM(root, other_backends=["vllm"], other_backend_kwargs=[settings])
        with anyio.fail_after(10):
            assert json.loads((await rlm.acompletion("CTX")).response) == [GOOD, GOOD]
    sent = {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}}
    assert forms == ([sent, sent] if takes else [sent, None, None])
