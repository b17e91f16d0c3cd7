"""Tables of pandas, polars and pyarrow as contexts. Each test is skipped where its library is missing."""

from __future__ import annotations

import sys
from typing import Any

import anyio
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, Repl
from asyncrlm.repl.context import describe
from asyncrlm.repl.worker import loading

from .helpers import scripted, submit, told
from .remote_support import remote

SAME = {
    "pandas": "pandas.testing.assert_{kind}_equal(context, expected, check_freq=True)",
    "polars": "polars.testing.assert_{kind}_equal(context, expected, check_exact=True)",
    "pyarrow": "assert context.equals(expected, check_metadata=True), (context, expected)",
}
TABLES = {
    "pandas": {
        "columns": "DataFrame({'n': [1, 2, None], 'é\\n': ['x', '\\r\\n', None], 3: [True, False, True]})",
        "times": "DataFrame({'t': to_datetime(['2026-01-02T03:04:05.678901234+02:00'], format='ISO8601')})",
        "kinds": "DataFrame({'c': ['a', 'b', 'a']}).astype({'c': 'category'})",
        "nullable": "DataFrame({'i': [1, None]}, dtype='Int64')",
        "objects": "DataFrame({'o': [[1, 2], {'k': (1,)}, b'\\xff']})",
        "index": "DataFrame({'n': [1, 2]}, index=MultiIndex.from_tuples([('a', 1), ('b', 2)], names=['x', None]))",
        "names": "DataFrame([[1, 2]], columns=MultiIndex.from_tuples([('a', 1), ('a', 2)]))",
        "dates": "DataFrame({'n': [1, 2]}, index=date_range('2026-01-01', periods=2, freq='h'))",
        "twice": "DataFrame([[1, 2]], columns=['a', 'a'])",
        "empty": "DataFrame()",
        "no rows": "DataFrame({'a': Series([], dtype='float32')})",
        "series": "Series([1.5, float('nan')], name='s', index=['a', 'b'])",
    },
    "polars": {
        "columns": "DataFrame({'n': [1, None], 'é\\n': ['x', '\\r\\n'], 'b': [b'\\xff', None], 'l': [[1], []]})",
        "kinds": "DataFrame({'e': Series(['a', 'b'], dtype=Enum(['b', 'a'])), 's': [{'k': 1}, {'k': None}]})",
        "small": "DataFrame({'i': Series([1, 255], dtype=UInt8), 'd': Series(['1.10', '2.00']).cast(Decimal(10, 2))})",
        "times": "DataFrame({'t': Series([0]).cast(Datetime('ns', 'Europe/Vienna')), 'd': Series([1]).cast(Date)})",
        "empty": "DataFrame()",
        "no rows": "DataFrame(schema={'a': Float32})",
        "series": "Series('s', [1, None, 3])",
        "no name": "Series([1.5])",
    },
    "pyarrow": {
        "columns": "table({'n': [1, None], 'é\\n': ['x', '\\r\\n'], 'b': [b'\\xff', None], 'l': [[1], []]})",
        "metadata": "table({'a': [1]}, schema=schema([field('a', int8(), metadata={'k': 'v'})], metadata={'m': 'n'}))",
        "chunks": "table({'a': chunked_array([['x'], ['y', 'z']]).dictionary_encode()})",
        "times": "table({'t': array([0], timestamp('ns', 'Europe/Vienna')), 'd': array([1], date32())})",
        "empty": "table({})",
        "no rows": "table({'a': array([], float32())})",
        "batch": "record_batch({'a': [1, 2], 'b': ['x', None]})",
        "empty batch": "record_batch({'a': array([], int16())})",
    },
}


def made(library: str, source: str) -> Any:
    module = pytest.importorskip(library)
    return eval(source, vars(module))


@pytest.mark.parametrize("library", TABLES)
@pytest.mark.anyio
async def test_tables_arrive_as_they_were(no_leaks: None, library: str) -> None:
    sources = list(TABLES[library].values())
    with anyio.fail_after(60):
        async with Repl(context=made(library, sources[0])) as repl:
            for source in sources:
                table = made(library, source)
                await repl.load("context", table)
                kind = "series" if type(table).__name__ == "Series" else "frame"
                same = SAME[library].format(kind=kind)
                code = f"import {library}" + (f", {library}.testing" if library != "pyarrow" else "")
                code += f"\nexpected = eval({source!r}, vars({library}))"
                result = await repl.execute(f"{code}\nassert type(context) is type(expected)\n{same}")
                assert result.error is None, (source, result.error)
            await repl.execute("import os; os._exit(1)")
            assert (await repl.execute("print(type(context).__name__)")).stdout == type(table).__name__ + "\n"


@pytest.mark.parametrize("library", TABLES)
@pytest.mark.anyio
async def test_a_large_table_goes_into_a_remote_sandbox(no_leaks: None, library: str) -> None:
    source = {
        "pandas": "DataFrame({'n': range(200_000)})",
        "polars": "DataFrame({'n': range(200_000)})",
        "pyarrow": "table({'n': list(range(200_000))})",
    }[library]
    table = made(library, source)
    assert describe(table).size >= 1_600_000
    with anyio.fail_after(60):
        async with Repl(remote(isolation="none"), context=table) as repl:
            code = "print(context['n'].to_numpy().sum())"
            assert (await repl.execute(code)).stdout == f"{sum(range(200_000))}\n"


@pytest.mark.parametrize("library", TABLES)
@pytest.mark.anyio
async def test_the_model_is_told_of_a_table(library: str) -> None:
    table = made(library, ("table" if library == "pyarrow" else "DataFrame") + "({'n': [1, 2], 'x y': ['a', 'b']})")
    kind = "pyarrow.Table" if library == "pyarrow" else f"{library}.DataFrame"
    root = scripted(submit("len(context)"))
    with anyio.fail_after(30):
        assert (await AsyncRLM(root).acompletion(table, "What?")).response == "2"
        assert f"`context` is a {kind}, 2 rows, " in told(root, 1)
        assert "Columns: 'n', 'x y'." in told(root, 1)
        plain = scripted("fine")
        await AsyncRLM(plain, max_depth=0).acompletion(table, "What?")
    assert told(plain, 1).replace('"', "").replace(",n,", "n,").replace("0,1,", "1,").replace("1,2,", "2,") == (
        "What?\n\nn,x y\n1,a\n2,b\n"
    )


def test_sizes_are_those_of_the_data() -> None:
    pandas = pytest.importorskip("pandas")
    objects = pandas.DataFrame({"o": pandas.Series(["x" * 10_000, "y" * 10_000], dtype=object)})
    info = describe(objects)
    assert (info.kind, info.count, info.type) == ("table", 2, "pandas.DataFrame")
    assert info.size > 20_000
    many = pandas.DataFrame([range(100)])
    assert describe(many).names == tuple(f"'{n}'" for n in range(20))


@pytest.mark.anyio
async def test_a_table_that_can_not_be_written_is_refused() -> None:
    polars = pytest.importorskip("polars")
    table = polars.DataFrame({"o": [object()]})
    with anyio.fail_after(10), pytest.raises(ConfigurationError, match=r"can't be written .* 'o' holds Python objects"):
        await AsyncRLM(scripted("never used")).acompletion(table)


@pytest.mark.parametrize("library", TABLES)
def test_a_sandbox_without_the_library_says_so(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (library, f"{library}.ipc"):
        monkeypatch.setitem(sys.modules, name, None)
    kind = library if library == "pandas" else f"{library}.Table"
    # A pickle that names pandas.DataFrame, which is all it takes.
    with pytest.raises(ImportError, match=f"the context is a table of {library}, and here there is no {library}"):
        loading.table(kind, b"cpandas\nDataFrame\n.")
