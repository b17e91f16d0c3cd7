"""Checks of contexts: each kind, small, odd and large, arrives as it was."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.util
import io
import tempfile
import unittest
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, cast

import httpx2
import msgspec

from ... import ConfigurationError, Environment, Repl, Web
from .base import Conformance, check, expect, printed, same, working
from .web import serving

ODD = "é 中 \U0001f600 e\u0301 \u202e, NUL \0, \r\n and \r and \u2028, \x01\x01\x01, \ufeff, \ud800 \udfff\n"

COLUMNS: dict[str, list[Any]] = {"n": [1, None], "é": ["x", "\r\n"]}
TABLES: dict[str, tuple[str, dict[str, list[Any]], dict[str, Any]]] = {
    "pandas": ("DataFrame", COLUMNS, {"index": ["a", "b"]}),
    "polars": ("DataFrame", {**COLUMNS, "l": [[1], []]}, {}),
    "pyarrow": ("table", {**COLUMNS, "l": [[1], []]}, {}),
}
"""A table of each library: what makes it, its columns, and what else it is made with."""
SEED = 6
"""Of what random values are made."""
DIGEST = """
import hashlib
def digest(value):
    h = hashlib.sha256()
    def add(v):
        if isinstance(v, str): v = v.encode('utf-8', 'surrogatepass')
        if isinstance(v, bytes): h.update(b'%d:' % len(v)); h.update(v)
        elif isinstance(v, dict):
            for k in v: add(k); add(v[k])
        else:
            for x in v: add(x)
    add(value)
    return h.hexdigest()
print(type({0}).__name__, len({0}), digest({0}))
"""


def _digest(value: Any) -> str:
    """As `DIGEST` does it in a cell."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        if isinstance(data, bytes):
            found.update(b"%d:" % len(data))
            found.update(data)
        elif isinstance(data, dict):
            for item in cast("dict[Any, Any]", data).items():
                add(item)
        else:
            for item in data:
                add(item)

    add(value)
    return found.hexdigest()


def _any_text(random: Random) -> str:
    return "".join([chr(random.choice((random.randrange(0x110000), random.randrange(128)))) for _ in range(20)])


def _any_value(random: Random, depth: int = 0) -> Any:
    """Something of what JSON knows, and of what it does not: bytes, tuples, keys that are no text, odd numbers."""
    odd = (random.getrandbits(200), random.uniform(-1e9, 1e9), float("inf"), -0.0, float("nan"))
    leaf: Any = random.choice(
        (None, True, random.randrange(-9, 9), random.choice(odd), _any_text(random), random.randbytes(9))
    )
    if depth == 4 or random.random() < 0.3:
        return leaf
    inner = [_any_value(random, depth + 1) for _ in range(random.randrange(5))]
    keys = (_any_text(random), random.randrange(99), (1, _any_text(random)), None, b"k")
    return random.choice((inner, tuple(inner), dict(zip(random.sample(keys, len(inner)), inner, strict=True))))


@contextmanager
def _file(data: bytes) -> Generator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "context.txt")
        path.write_bytes(data)
        yield path


@dataclasses.dataclass
class _Card:
    name: str
    place: tuple[int, int]


class _Note(msgspec.Struct):
    name: str
    card: _Card


async def _pieces(*pieces: Any) -> AsyncGenerator[Any]:
    for piece in pieces:
        yield piece


class Contexts(Conformance):
    """Contexts."""

    async def _arrives(self, repl: Repl, name: str, value: Any) -> None:
        wanted = f"{type(value).__name__} {len(value)} {_digest(value)}\n"
        same(await printed(repl, DIGEST.replace("{0}", name)), wanted, f"{name}, a {type(value).__name__}")

    @check()
    async def test_a_context_of_every_kind(self, environment: Environment) -> None:
        values: list[Any] = ["", "a text", ODD, ODD * 20_000, b"", bytes(range(256)), bytes(range(256)) * 5_000]
        values += [{}, {"k": {"l": ["m", b"n"]}, ODD: ODD}, [], ["a", ["b", {"c": "d"}], ODD], [ODD] * 20_000]
        async with working(Repl(environment, context="the first")) as repl:
            same(await printed(repl, "print(context)"), "the first\n", "context")
            for number, value in enumerate(values):
                await repl.load(f"context_{number}", value)
                await self._arrives(repl, f"context_{number}", value)
            value = {"a": [1, 2.5, None, True, (1, 2), {3: 4}, float("-inf"), 10**30], "b": "x" * 300_000}
            await repl.load("context", value)
            text = await printed(repl, "context['b'] = len(context['b'])\nprint(context)")
            same(text, f"{value | {'b': 300_000}}\n", "a context of many types")

    @check()
    async def test_any_value_there_and_back(self, environment: Environment) -> None:
        random, seen = Random(SEED), list[Any]()  # noqa: S311 -- the same values everywhere
        async with working(Repl(environment, custom_tools={"see": seen.append})) as repl:
            for _ in range(5):
                values = [_any_value(random) for _ in range(40)]
                await repl.load("context", values)
                await printed(repl, "see(context)")
                same(repr(seen.pop()), repr(values), f"values made of the seed {SEED}")

    @check()
    async def test_a_file_as_context(self, environment: Environment) -> None:
        text = ODD.replace("\ud800 \udfff", "")
        with _file((text * 20_000).encode()) as path:
            async with working(Repl(environment, context=path)) as repl:
                await self._arrives(repl, "context", text * 20_000)
                path.write_text("another")
                await repl.load("context_1", path)
                await self._arrives(repl, "context_1", "another")
                await self._arrives(repl, "context", text * 20_000)

    @check()
    async def test_records_streams_and_folders(self, environment: Environment) -> None:
        with _file("é\r\n".encode()) as path:
            (path.parent / "odd.bin").write_bytes(b"\xff")
            given: dict[str, tuple[Any, str]] = {
                "(c.name, c.place)": (_Card("é", (1, 2)), "('é', (1, 2))"),
                "(c['name'], c.card.place)": (_Note("é", _Card("", (1, 2))), "('é', (1, 2))"),
                "c": (io.BytesIO(b"\xff\0"), "b'\\xff\\x00'"),
                "c + '.'": (_pieces("é", "\r\n"), "'é\\r\\n.'"),
                "c + b'.'": (_pieces(b"\xff", b"\n"), "b'\\xff\\n.'"),
                "[(d.name, d) for d in c]": (path.parent, "[('context.txt', 'é\\r\\n'), ('odd.bin', b'\\xff')]"),
                "(c.names, c[0])": (path.parent / "*.txt", "(['context.txt'], 'é\\r\\n')"),
                "c['context.txt'] * len(c)": ([path, path.parent / "odd.bin"], "'é\\r\\né\\r\\n'"),
            }
            if importlib.util.find_spec("pydantic") is not None:
                model = importlib.import_module("pydantic").create_model("Model", at=(datetime.date, ...), n=(int, 5))
                given["(c.at.year, c['n'])"] = (model(at="2026-01-02"), "(2026, 5)")
            async with working(Repl(environment)) as repl:
                for expression, (value, wanted) in given.items():
                    await repl.load("c", value)
                    same(await printed(repl, f"print(repr({expression}))"), f"{wanted}\n", repr(value))

    @check()
    async def test_tables_where_their_library_is(self, environment: Environment) -> None:
        installed = [library for library in TABLES if importlib.util.find_spec(library) is not None]
        if not installed:
            raise unittest.SkipTest(f"none of {', '.join(TABLES)} is installed")
        async with working(Repl(environment)) as repl:
            for library in installed:
                maker, columns, options = TABLES[library]
                table = getattr(importlib.import_module(library), maker)(columns, **options)
                there = f"import importlib.util\nprint(importlib.util.find_spec({library!r}) is not None)"
                if await printed(repl, there) == "True\n":
                    await repl.load("c", table)
                    code = f"import {library}\nmade = {library}.{maker}({columns!r}, **{options!r})\n"
                    code += "print(type(c).__module__.split('.')[0], c.equals(made))"
                    same(await printed(repl, code), f"{library} True\n", f"a table of {library}")
                    continue
                try:
                    await repl.load("c", table)
                except ConfigurationError as error:
                    wanted = f"here there is no {library}: install it where cells run"
                    expect(wanted in str(error), f"an error that says what to install: {error}")
                else:
                    raise AssertionError(f"a table of {library} came where there is no {library}")

    @check()
    async def test_a_document_of_the_web(self, environment: Environment) -> None:
        def page(method: str, body: bytes) -> tuple[str, str, bytes]:
            return "200 OK", "text/html; charset=utf-16", "é 中".encode("utf-16")

        async with serving(page) as address:
            url = httpx2.URL(address)
            async with working(Repl(environment, context=url, web=Web(allow_private=True))) as repl:
                same(await printed(repl, "print(repr(context))"), "'é 中'\n", "a document in its charset")
                try:
                    await repl.load("context_1", url, web=Web())
                except ConfigurationError as error:
                    expect("no address of the public internet" in str(error), f"a refusal that says why: {error}")
                else:
                    raise AssertionError("an address of this machine was asked, and nobody had allowed it")

    @check()
    async def test_files_that_stay_files(self, environment: Environment) -> None:
        text = "0123456789é\n" * 1_000
        with _file(text.encode()) as path:
            (path.parent / "odd.bin").write_bytes(bytes(range(256)))
            async with working(Repl(environment, context=path, lazy=True)) as repl:
                code = (
                    "print(type(context).__name__, len(context), context[-3:], context.find('é', 20), context.nbytes)"
                )
                same(await printed(repl, code), "Text 12000 9é\n 22 13000\n", "a file that stays a file")
                await repl.load("context_1", path.parent, lazy=True)
                code = "a, b = context_1\nprint(context_1.names, a[:3], a.count('é'), len(a), b.raw(-2))"
                wanted = "['context.txt', 'odd.bin'] 012 1000 12000 b'\\xfe\\xff'\n"
                same(await printed(repl, code), wanted, "a folder whose files stay files")

    @check()
    async def test_cells_can_not_lose_the_context(self, environment: Environment) -> None:
        async with working(Repl(environment, context="kept")) as repl:
            for code in ("context = 5", "del context", "globals().clear()", "import builtins\nbuiltins.context = 1"):
                await repl.execute(code)
                same(await printed(repl, "print(context, callable(llm_query))"), "kept True\n", f"after {code!r}")

    @check(slow=True)
    async def test_a_large_str(self, environment: Environment) -> None:
        await self._large(environment, ("0123456789" * (self.big // 10))[:-1] + "é")

    @check(slow=True)
    async def test_large_bytes(self, environment: Environment) -> None:
        await self._large(environment, bytes(range(250)) * (self.big // 250))

    @check(slow=True)
    async def test_a_large_dict(self, environment: Environment) -> None:
        await self._large(environment, {f"part {n}": f"{n:03} é\n" * (self.big // 600) for n in range(100)})

    @check(slow=True)
    async def test_a_large_list(self, environment: Environment) -> None:
        await self._large(environment, [f"{n:09} " * 100 for n in range(self.big // 1_000)])

    @check(slow=True)
    async def test_a_large_file(self, environment: Environment) -> None:
        text = "0123456\r\n" * (self.big // 9)
        with _file(text.encode()) as path:
            async with working(Repl(environment, context=path)) as repl:
                await self._arrives(repl, "context", text)

    async def _large(self, environment: Environment, value: Any) -> None:
        async with working(Repl(environment, context=value)) as repl:
            await self._arrives(repl, "context", value)
            result = await repl.execute("import os\nos._exit(1)")
            expect(result.error, "a worker that died with a large context was not told of")
            same(await printed(repl, "print(len(context))"), f"{len(value)}\n", "the context of the next worker")
