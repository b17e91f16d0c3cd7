"""What a tool may be: data, source, a callable, or an object, and how each gets to cells and into the prompt."""

from __future__ import annotations

import datetime
import functools
import math
import sqlite3
import threading
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import anyio
import anyio.lowlevel
import pytest
from repl_fakes import Worker, fake_session

from asyncrlm import AsyncRLM, ConfigurationError, ProtocolError, Repl
from asyncrlm.repl.tools import HostTools

from .helpers import cell, scripted, submit

pytestmark = pytest.mark.anyio


class Database:
    """Rows by name."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # which can't be pickled
        self.secret = "s3cret"
        self.rows = {"a": 1}

    def get(self, name: str, default: int = 0) -> int:
        """The number under a name.

        More about it.
        """
        return self.rows.get(name, default)

    async def put(self, name: str, value: int) -> None:
        await anyio.lowlevel.checkpoint()
        self.rows[name] = value

    @property
    def evaluated(self) -> int:
        raise RuntimeError("nobody may look")

    @staticmethod
    def kind() -> str:
        return "rows"

    def _private(self) -> None: ...


class Unpickled:
    """Pickles; a sandbox that has no module of this name can't undo that."""

    def double(self, number: int) -> int:
        return number * 2


async def printed(repl: Repl, code: str) -> str:
    result = await repl.execute(code)
    assert result.error is None, result.error
    return result.stdout


def tried(code: str) -> str:
    return f"try:\n    {code}\nexcept Exception as error:\n    print(type(error).__name__, error)"


# ---- objects ---------------------------------------------------------------------------------------------------------


async def test_an_object_that_cant_be_sent_stays_on_the_host_behind_its_functions() -> None:
    database = Database()
    with anyio.fail_after(10):
        async with Repl(custom_tools={"db": database}) as repl:
            code = "db.put('b', 2)\nprint(db.get('a'), db.get('b'), db.get('c', default=9), db.kind())"
            assert await printed(repl, code) == "1 2 9 rows\n"
            assert database.rows == {"a": 1, "b": 2}
            text = await printed(repl, tried("db.secret"))
            assert text.startswith("AttributeError <db is an object of the host; functions: ")
            assert "no function 'secret'" in text
            assert await printed(repl, "import inspect\nprint(inspect.signature(db.get))") == (
                "(name: str, default: int = 0) -> int\n"
            )
            assert (await printed(repl, tried("db._private()"))).startswith("AttributeError")
            assert (await printed(repl, tried("db.get = 5"))).startswith("AttributeError")
            assert (await printed(repl, tried("db.get({}, 1, 2)"))).startswith("TypeError")
            assert await printed(repl, "db = None") == ""
            assert await printed(repl, "print(db.get('a'))") == "1\n"


@dataclass
class Owners:
    """Owners by name."""

    db: sqlite3.Connection
    key: Any = len
    shout = functools.lru_cache(str.upper)
    calls: ClassVar[Any] = Mock()

    def __post_init__(self) -> None:
        self.hook = print

    def of(self, name: str) -> str:
        return f"of {name}"

    @classmethod
    def new(cls) -> str:
        return cls.__name__

    @functools.cached_property
    def evaluated(self) -> int:
        raise RuntimeError("nobody may look")


async def test_what_an_object_holds_is_data_also_if_it_can_be_called() -> None:
    with closing(sqlite3.connect(":memory:")) as db, anyio.fail_after(10):
        tools = HostTools({"owners": Owners(db), "names": SimpleNamespace(upper=str.upper, db=db)})
        assert sorted(tools.names) == ["names.upper", "owners.new", "owners.of", "owners.shout"]
        async with Repl(custom_tools={"owners": Owners(db)}) as repl:
            assert await printed(repl, "print(owners.of('x'), owners.new())") == "of x Owners\n"
            for name in ("db", "key", "hook", "calls"):
                text = await printed(repl, tried(f"owners.{name}('select 1')"))
                assert f"no function '{name}'" in text


async def test_an_object_whose_module_the_sandbox_lacks_stays_on_the_host_too() -> None:
    with anyio.fail_after(10):
        async with Repl(custom_tools={"thing": Unpickled()}) as repl:
            assert await printed(repl, "print(thing.double(4))") == "8\n"


@dataclass
class Price:
    crowns: int


async def test_an_object_without_functions_is_data_where_cells_lack_its_class() -> None:
    @dataclass
    class Local:  # which no pickle finds
        prices: list[Price]

    tools = {"price": Price(3), "many": [Price(4), {"a": Price(5)}], "local": Local([Price(6)])}
    code = "print(price, price.crowns, many[0].crowns, many[1]['a']['crowns'], local.prices[0].crowns)"
    with anyio.fail_after(10):
        async with Repl(custom_tools=tools) as repl:
            assert await printed(repl, code) == "Price(crowns=3) 3 4 5 6\n"
        with pytest.raises(ConfigurationError, match="can neither be encoded nor pickled"):
            async with Repl(custom_tools={"bad": [Local([]), threading.Lock()]}):
                pass


async def test_a_model_of_pydantic_is_data_too() -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Price", crowns=(int, ...))
    assert HostTools({"price": model(crowns=3)}).names == {}
    with anyio.fail_after(10):
        async with Repl(custom_tools={"price": model(crowns=3)}) as repl:
            assert await printed(repl, "print(price.crowns, price)") == "3 Price(crowns=3)\n"


async def test_an_object_that_can_be_pickled_is_there_itself_and_not_called_on_the_host() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=2))
    with anyio.fail_after(10):
        async with Repl(custom_tools={"zone": zone, "path": Path("/a/b"), "price": Decimal("1.5")}) as repl:
            assert await printed(repl, "print(zone.utcoffset(None), path.name, price * 2)") == "2:00:00 b 3.0\n"


async def test_a_worker_that_calls_what_it_was_not_offered_is_ended() -> None:
    async def script(worker: Worker) -> None:
        await worker.hello()
        await worker.cell()
        assert worker.init.get("tools", {}) == {}
        assert [frame["form"] for frame in worker.loads] == ["pickle"]
        await worker.send(t="call", id=1, kind="tool", name="zone.utcoffset", args=[None])
        await anyio.sleep_forever()

    zone = datetime.timezone(datetime.timedelta(hours=2))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            session, _ = fake_session(tasks, script, tools=HostTools({"zone": zone}))
            async with session:
                with pytest.raises(ProtocolError, match=r"unknown tool 'zone\.utcoffset'"):
                    await session.execute("x")
            tasks.cancel_scope.cancel()


async def test_a_module_is_its_functions() -> None:
    with anyio.fail_after(10):
        async with Repl(custom_tools={"m": math}) as repl:
            assert await printed(repl, "print(m.floor(2.7), m.gcd(12, 18))") == "2 6\n"


async def test_data_that_can_be_sent_no_way_is_named() -> None:
    with anyio.fail_after(10):
        with pytest.raises(ConfigurationError, match="'locks' holds a list"):
            async with Repl(custom_tools={"locks": [threading.Lock()]}):
                pass


async def test_a_fresh_worker_gets_objects_anew() -> None:
    with anyio.fail_after(20):
        async with Repl(custom_tools={"db": Database()}) as repl:
            assert (await repl.execute("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")).error is not None
            assert await printed(repl, "print(db.get('a'))") == "1\n"


async def test_functions_of_an_object_have_its_limits() -> None:
    with anyio.fail_after(10):
        async with Repl(custom_tools={"db": {"tool": Database(), "max_calls": 1}}) as repl:
            assert await printed(repl, "print(db.get('a'), db.kind())") == "1 rows\n"
            text = await printed(repl, tried("db.get('a')"))
            assert text == "RuntimeError db.get may be called 1 times in all, and was\n"


# ---- source ----------------------------------------------------------------------------------------------------------

SOURCE = '''
    import re

    def words(text: str, *, least: int = 1) -> list[str]:
        """The words of a text."""
        return [word for word in re.findall(r"[a-z]+", text) if len(word) >= least]
'''


async def test_source_runs_in_the_sandbox() -> None:
    tools = {
        "words": SOURCE,
        "Point": "class Point:\n    '''A place.'''\n    x = 3",
        "double": "lambda x: x * 2",
        "text": "def is no definition,\nbut a text of two lines",
        "note": "a lambda is a letter",
    }
    with anyio.fail_after(10):
        async with Repl(custom_tools=tools) as repl:
            assert await printed(repl, "print(words('a bc def', least=2), Point.x, double(4))") == "['bc', 'def'] 3 8\n"
            assert await printed(repl, "print(text, note)") == f"{tools['text']} {tools['note']}\n"
            assert await printed(repl, "words = 5") == ""
            assert await printed(repl, "print(words('x'))") == "['x']\n"
    text = HostTools(tools).describe("")
    for line in (
        "- `words(text: str, *, least: int=1) -> list[str]` - The words of a text.",
        "- `class Point` - A place.",
        "- `double(x)`",
        "- `text`: str",
    ):
        assert line in text.splitlines()


async def test_source_that_is_wrong_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'f' is source .* no Python"):
        HostTools({"f": "def f(:\n    pass"})
    with anyio.fail_after(10):
        with pytest.raises(ConfigurationError, match=r"(?s)f could not be loaded: .*ModuleNotFoundError"):
            async with Repl(custom_tools={"f": "import nothing_of_the_kind\ndef f(): pass"}):
                pass


# ---- what the prompt says --------------------------------------------------------------------------------------------


async def test_the_prompt_has_signatures_types_and_docstrings() -> None:
    def find(item: str, limit: int | None = None, *tags: str, deep: bool = False) -> dict[str, int]:
        """Find an item.

        With a second paragraph.
        """
        raise NotImplementedError

    model = scripted(submit("'done'"))
    tools = {"find": find, "db": Database(), "m": math, "K": {"a": 1}, "about": {"tool": 5, "description": "five"}}
    with anyio.fail_after(10):
        await AsyncRLM(model, custom_tools=tools).acompletion("CTX")
    lines = model.calls[0].messages[0].content.splitlines()
    start = lines.index("## More names in the REPL") + 1
    section = lines[start:]
    parameters = "item: str, limit: int | None = None, *tags: str, deep: bool = False"
    assert section[0] == f"- `find({parameters}) -> dict[str, int]` - Find an item."
    assert section[2] == "  With a second paragraph."
    for line in (
        "- `db`: Database - Rows by name.",
        "  - `db.get(name: str, default: int = 0) -> int` - The number under a name.",
        "  - `db.put(name: str, value: int) -> None`",
        "  - `db.kind() -> str`",
        "- `m`: module - This module provides access to the mathematical functions",
        "- `K`: dict",
        "- `about`: int - five",
    ):
        assert line in section
    assert not any("_private" in line or "evaluated" in line or "s3cret" in line for line in lines)
    assert any(line.startswith("  - `m.acos`, ") and ", … (+" in line for line in section)


# ---- children --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sub_tools", "finds"),
    [(None, "root tool"), ({}, "NameError"), ({"f": lambda: "child tool"}, "child tool")],
)
async def test_children_have_the_tools_of_the_root_or_their_own(sub_tools: Any, finds: str) -> None:
    from asyncrlm.testing import ScriptedLM

    seen: list[str] = []

    def reply(request: Any) -> str:
        text = "\n".join(message.content for message in request.messages)
        root = "ROOT" in text
        if not root:
            seen.append(request.messages[0].content)
        code = "rlm_query('child')" if root else "f()"
        return cell(
            f"try:\n    answer.update(content={code}, ready=True)\n"
            "except NameError as error:\n    answer.update(content=type(error).__name__, ready=True)"
        )

    rlm = AsyncRLM(ScriptedLM(reply), max_depth=2, custom_tools={"f": lambda: "root tool"}, custom_sub_tools=sub_tools)
    with anyio.fail_after(10):
        assert (await rlm.acompletion("CTX", "ROOT")).response == finds
    assert ("`f()`" in seen[0]) == (sub_tools is None or bool(sub_tools))


# ---- entries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"tool": max, "timeuot": 5}, "unknown key 'timeuot'.*known are: tool, description, timeout, max_calls"),
        ({"tool": max, "timeout": "5"}, "timeout of 'f' must be a number of seconds"),
        ({"tool": max, "timeout": -1}, "timeout of 'f' must be a number of seconds"),
        ({"tool": max, "timeout": float("nan")}, "timeout of 'f' must be a number of seconds"),
        ({"tool": max, "max_calls": 0}, "max_calls of 'f' must be a whole number"),
        ({"tool": max, "max_calls": True}, "max_calls of 'f' must be a whole number"),
        ({"tool": 5, "max_calls": 1}, "'f' is not called on the host, so it can't have max_calls"),
        ({"tool": "def f(): pass", "timeout": 1}, "'f' is not called on the host, so it can't have timeout"),
    ],
)
@pytest.mark.parametrize("argument", ["custom_tools", "custom_sub_tools"])
def test_a_wrong_entry_is_named_in_the_constructor(entry: Any, says: str, argument: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        AsyncRLM(scripted(), **{argument: {"f": entry}})
    HostTools({"f": {"tool": max, "timeout": None, "max_calls": None}, "d": {"tool": {"tool": 1}}})
