"""What a context may be, and that it arrives as it was."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import hashlib
import json
import math
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrlm import ConfigurationError, Repl
from asyncrlm.repl import context as context_module
from asyncrlm.repl.context import check_prompt_type, describe, plan_load, plan_tool
from asyncrlm.repl.worker import codec

ODD_TEXTS = [
    "",
    'ends in a quote"',
    "ends in a backslash\\",
    "'''\"\"\"",
    "nul \x00 nul",
    "lone \ud800 and \udfff surrogates \ud83d\ude00",
    "\r\n carriage \r returns \n\r",
    "\u2028 \u2029 \x85 \x0c",
    "é😀 中文 \U0010ffff",
    "\ufeffbom",
    "{braces} %s $x",
]


@dataclasses.dataclass
class Fields:
    a: Any


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "a lie"


# ---- plans -----------------------------------------------------------------------------------------------------------


@given(st.text(st.characters(codec=None), max_size=200), st.integers(1, 7))
def test_slices_of_text_join_exactly(text: str, size: int) -> None:
    slices, inline = context_module.SLICE, context_module.INLINE
    context_module.SLICE, context_module.INLINE = size, -1
    try:
        plan = plan_load("context", text)
        pieces = list(plan.chunks())
    finally:
        context_module.SLICE, context_module.INLINE = slices, inline
    assert plan.form == "text"
    assert b"".join(pieces).decode("utf-8", "surrogatepass") == text
    assert all(len(piece) <= 4 * size for piece in pieces)


def test_other_threads_go_on_while_a_list_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = threading.Event()
    began = 0.0
    encode = codec.encode

    def encode_and_tell(*arguments: Any, **options: Any) -> Any:
        nonlocal began
        result = encode(*arguments, **options)
        began = time.perf_counter()
        encoded.set()
        return result

    def plan() -> None:
        plan_load("context", value)

    value = [{"number": number} for number in range(300_000)]
    monkeypatch.setattr(context_module.codec, "encode", encode_and_tell)
    planning = threading.Thread(target=plan)
    planning.start()
    assert encoded.wait(10)
    held_up = time.perf_counter() - began
    planning.join()
    assert held_up < (time.perf_counter() - began) / 2


@pytest.mark.parametrize(
    ("value", "form", "inline"),
    [
        ("x", "json", True),
        (Text("x"), "json", True),
        ("x" * 300_000, "text", False),
        (b"x", "json", True),
        (bytearray(b"x" * 300_000), "bytes", False),
        ([1, "x"], "json", True),
        (["x" * 2_000_000], "json", False),
        ({"a": (1, {2})}, "json", True),
        (5, "json", True),
    ],
)
def test_small_values_travel_in_the_frame_and_large_ones_in_a_file(value: Any, form: str, inline: bool) -> None:
    before = copy.deepcopy(value)
    plan = plan_load("context", value)
    assert plan.form == form
    data = b"".join(plan.chunks())
    if inline:
        assert not data
        assert codec.decode(plan.value) == value
    elif form == "json":
        assert codec.decode(json.loads(data)) == value
    else:
        assert data == (value.encode() if isinstance(value, str) else value)
    assert value == before


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, {"b": object()}]}, r"context\['a'\]\[1\]\['b'\]: a value of type object"),
        ([{1: print}], r"context\[0\]\[1\]"),
        (object(), "context is of type object; it may be a str, bytes, a number"),
        (iter([]), "context is of type list_iterator"),
        (Fields(object()), r"context\['a'\]: a value of type object"),
    ],
)
def test_what_can_not_be_a_context_is_refused_by_name(value: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        plan_load("context", value)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigurationError, match="contains itself"):
        plan_load("context", loop)
    assert describe(loop).count == 1


@pytest.mark.parametrize("value", [None, object(), print, iter([]), Path])
def test_prompts_are_data(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="the prompt is of type"):
        check_prompt_type(value)
    for good in ("", b"", [], {}, Path("x"), 5, 1.5, True, (1,), {1}, datetime.date(2026, 1, 1), Fields(1), range(3)):
        check_prompt_type(good)


def test_a_frame_of_pandas_is_refused_with_a_cure() -> None:
    class DataFrame:
        __module__ = "pandas.core.frame"

    with pytest.raises(ConfigurationError, match=r"pandas\.core\.frame\..*DataFrame; .*\.to_dict\(\)"):
        plan_load("context", DataFrame())


def test_tool_values_may_be_pickled() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=1))
    plan = plan_tool("zone", zone)
    assert plan.form == "pickle"
    assert pickle.loads(b"".join(plan.chunks())) == zone
    assert pickle.loads(b"".join(plan_tool("p", Path("/nowhere")).chunks())) == Path("/nowhere")
    with pytest.raises(ConfigurationError, match="can neither be encoded nor pickled"):
        plan_tool("zone", lambda: 1)


@pytest.mark.parametrize(
    ("value", "kind", "size", "count", "names"),
    [
        ("héllo", "str", 5, None, ()),
        (b"abc", "bytes", 3, None, ()),
        (["ab", ["c", 1.5], None], "list", 6, 3, ()),
        ({"k": "vv", 5: {"x": "y"}}, "dict", 6, 2, ("'k'", "5")),
        ((1, 2), "tuple", 2, 2, ()),
        ({"a"}, "set", 1, 1, ()),
        (12.5, "number", 4, None, ()),
        pytest.param(10**5000, "number", 4983, None, (), id="a long int"),
        (Fields("héllo"), "record", 5, 1, ("'a'",)),
        ([Fields("ab"), Fields("c")], "list", 3, 2, ()),
        (datetime.date(2026, 1, 2), "value", 10, None, ()),
        (dict.fromkeys(range(100), "x"), "dict", 290, 100, tuple(map(str, range(20)))),
        pytest.param({10**5000: 1, "é" * 100: 2}, "dict", 5085, 2, ("<int>", repr("é" * 80)), id="long keys"),
    ],
)
def test_descriptions(value: Any, kind: str, size: int, count: int | None, names: tuple[str, ...]) -> None:
    info = describe(value)
    assert (info.kind, info.size, info.count, info.names) == (kind, size, count, names)


def test_paths_must_lead_to_text_files_of_bounded_size(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("hello")
    assert describe(text).size == 5
    assert describe(text).names == ("'a.txt'",)
    link = tmp_path / "link"
    link.symlink_to(text)
    assert b"".join(plan_load("context", link).chunks()) == b"hello"
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(256 * 1024 * 1024 + 1)
    assert (describe(large).kind, plan_load("context", large).form) == ("text", "lazy")
    os.mkfifo(tmp_path / "fifo")
    for path, error in (
        (tmp_path / "fifo", "no regular file"),
        (Path("/dev/zero"), "no regular file"),
        (tmp_path / "none", "No such file"),
        (Path("nul\0"), "can't be read"),
    ):
        for use in (describe, lambda path: plan_load("context", path)):
            with pytest.raises(ConfigurationError, match=error):
                use(path)


# ---- in cells --------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    *ODD_TEXTS,
    b"\x00\xff",
    [float("nan"), float("inf"), -0.0, 10**40, None, True],
    {1: "a", "b": {2.5: (1, 2)}, (1, 2): {3}, None: frozenset({4})},
    {"$": "tuple", "v": [1]},
    [datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC), datetime.timedelta(1, 2, 3)],
    {"nested": [{"deep": [b"x", "\ud800"]}]},
    [],
    {},
]


@pytest.mark.anyio
async def test_values_arrive_as_they_were(no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "crlf.txt": b"a\r\nb\rc\n",
        "bom.txt": "\ufeffé😀".encode(),
        "empty.txt": b"",
    }
    values: list[Any] = list(VALUES)
    expected: list[Any] = list(VALUES)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        values.append(tmp_path / name)
        expected.append(data.decode())
    seen: list[Any] = []
    before = copy.deepcopy(values)
    with anyio.fail_after(10):
        async with Repl(custom_tools={"see": seen.append}) as repl:
            for inline in (True, False):
                if not inline:
                    monkeypatch.setattr(context_module, "INLINE", -1)
                    monkeypatch.setattr(context_module, "INLINE_JSON", -1)
                for value in values:
                    await repl.load("context", value)
                    result = await repl.execute("see(context)\nassert type(context) in (str, bytes, list, dict)")
                    assert result.error is None
    assert repr(seen) == repr(expected * 2)
    assert [type(value) for value in seen] == [type(value) for value in expected * 2]
    assert math.isnan(seen[len(ODD_TEXTS) + 1][0])
    assert repr(values) == repr(before)


@pytest.mark.anyio
async def test_files_and_large_texts_arrive_whole(no_leaks: None, tmp_path: Path) -> None:
    text = "0123456789abcdé\n" * 3_200_000  # 51 MB
    path = tmp_path / "text"
    path.write_text(text, encoding="utf-8")
    code = "import hashlib; print(len(context), hashlib.sha1(context.encode()).hexdigest())"
    outputs: set[str] = set()
    with anyio.fail_after(10):
        for value in (text, path):
            async with Repl(context=value) as repl:
                outputs.add((await repl.execute(code)).stdout)
    assert outputs == {f"{len(text)} {hashlib.sha1(text.encode()).hexdigest()}\n"}


@pytest.mark.anyio
async def test_files_that_are_no_text_or_gone_are_refused(no_leaks: None, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"\xff\xfe\x00")
    with anyio.fail_after(10):
        async with Repl() as repl:
            with pytest.raises(ConfigurationError, match="context could not be loaded: "):
                await repl.load("context", path)
            await repl.load("context", "fine")
            path.write_bytes(b"text")
            await repl.load("context_1", path)
            path.unlink()
            assert (await repl.execute("print(context, context_1)")).stdout == "fine text\n"
            await repl.execute("import os; os._exit(1)")
            with pytest.raises(ConfigurationError, match="context_1"):
                await repl.execute("1")
