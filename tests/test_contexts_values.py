"""Any plain value and any text goes into a cell and comes back unchanged; objects arrive as their fields."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import anyio
import anyio.from_thread
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrlm import AsyncRLM, Repl
from asyncrlm.repl.worker import loading

from .helpers import scripted, submit, told
from .test_worker_codec import same, values

texts = st.text(st.characters(codec=None), max_size=300)
json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)
prompts = texts | values | json_like


class Cell:
    """A Repl that a plain function can use."""

    def __init__(self, portal: Any, repl: Repl, seen: list[Any]) -> None:
        self._portal, self._repl, self._seen = portal, repl, seen

    def there_and_back(self, value: Any) -> Any:
        self._seen.clear()
        self._portal.call(self._repl.load, "context", value)
        result = self._portal.call(self._repl.execute, "see(context)")
        assert result.error is None
        [back] = self._seen
        return back


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def cell(request: pytest.FixtureRequest) -> Iterator[Cell]:
    seen: list[Any] = []
    repl = Repl(custom_tools={"see": seen.append})
    with anyio.from_thread.start_blocking_portal(request.param) as portal, portal.wrap_async_context_manager(repl):
        yield Cell(portal, repl, seen)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=prompts)
def test_any_value_goes_into_a_cell_and_comes_back(cell: Cell, value: Any) -> None:
    assert same(cell.there_and_back(value), value)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts, length=st.integers(0, 400_000))
def test_any_text_goes_into_a_cell_and_comes_back(cell: Cell, text: str, length: int) -> None:
    long = (text * (length // len(text) + 1))[:length] if text else text
    assert cell.there_and_back(long) == long
    assert same(cell.there_and_back([long, {long[:50]: long}]), [long, {long[:50]: long}])


# ---- objects with fields ---------------------------------------------------------------------------------------------


class Point(NamedTuple):
    x: int
    y: int


class Author(msgspec.Struct):
    name: str
    born: dt.date


@dataclasses.dataclass(frozen=True)
class Book:
    title: str
    author: Author
    tags: set[str]
    items: tuple[int, ...] = (1, 2)


BOOK = Book("é\r\n\ud800", Author("Ann", dt.date(2000, 1, 2)), {"x"})
FIELDS = """
from datetime import date
assert context.title == context["title"] == "\\u00e9\\r\\n\\ud800", ascii(context.title)
assert context.author.born == date(2000, 1, 2) and context.tags == {"x"} and context["items"] == (1, 2)
assert isinstance(context, dict) and list(context.items())[0][0] == "title"
assert repr(context.author) == "Author(name='Ann', born=datetime.date(2000, 1, 2))"
"""


@pytest.mark.anyio
async def test_objects_arrive_as_their_fields(no_leaks: None) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Model(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow")
        title: str
        points: list[Point]
        when: dt.datetime

    class Many(pydantic.RootModel[list[int]]):
        pass

    when = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    model = Model(title="t", points=[Point(1, 2)], when=when, more=Many([1, 2]))
    with anyio.fail_after(10):
        async with Repl(context=BOOK) as repl:
            assert (await repl.execute(FIELDS)).error is None
            await repl.load("context", model)
            text = (
                "print(context.title, context.points[0].y, context['points'] == [(1, 2)], context.when, context.more)"
            )
            assert (await repl.execute(text)).stdout == "t 2 True 2026-01-02 00:00:00+00:00 [1, 2]\n"
            await repl.load("context", [BOOK, model])
            shown = (await repl.execute("context")).stdout
            assert shown.startswith("[Book{'title': 'é\\r\\n\\ud800', 'author': Author{'name': 'Ann',")
            assert (await repl.execute("import json; print(json.dumps(context[1], default=str)[:14])")).stdout == (
                '{"title": "t",\n'
            )
    assert dataclasses.replace(BOOK) == BOOK


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (5, "`context` is of type int, 1 character."),
        ((1, "ab"), "a tuple, 2 items, 3 characters of text in all."),
        ({"k": 1, 2: b"x"}, "a dict, 2 items, 4 characters of text in all. Its first keys: 'k', 2."),
        (BOOK, "a record of type Book (a dict whose keys are attributes too), 4 fields"),
        (Point(1, 2), "a tuple, 2 items, 2 characters of text in all. Its items have names: 'x', 'y'."),
        (bytearray(b"ab"), "a bytes object, 2 bytes."),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_the_model_is_told_what_it_has(prompt: Any, says: str) -> None:
    root = scripted(submit("type(context).__name__"))
    with anyio.fail_after(10):
        completion = await AsyncRLM(backend=root).acompletion(prompt, "What is it?")
    assert says in told(root, 1)
    assert completion.response in ("int", "tuple", "dict", "Record", "Row", "bytes")


@pytest.mark.anyio
async def test_a_model_without_a_repl_reads_objects_as_json() -> None:
    root = scripted("fine")
    with anyio.fail_after(10):
        await AsyncRLM(backend=root, max_depth=0).acompletion(dataclasses.replace(BOOK, title="t"))
    told_as = json.loads(told(root, 1))
    assert told_as["author"] == {"name": "Ann", "born": "2000-01-02"}
    assert (told_as["tags"], told_as["items"]) == (["x"], [1, 2])


def test_a_file_that_shrinks_while_it_is_loaded_is_an_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it mapped, the worker would be killed."""
    path = tmp_path / "text"
    path.write_text("0123456789" * 1_000)
    read = os.pread

    def shrink_and_read(fd: int, size: int, start: int) -> bytes:
        os.truncate(path, 5)
        return read(fd, size, start)

    monkeypatch.setattr(os, "pread", shrink_and_read)
    frame = {"form": "text", "descriptor": True}
    with pytest.raises(OSError, match="has become shorter than its 10,000 bytes"):
        loading.load(frame, deque([os.open(path, os.O_RDONLY)]), None)
