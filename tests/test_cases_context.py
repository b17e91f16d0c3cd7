"""Cases about what a context may be, and that it arrives in the cell as it was."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
import tempfile
import textwrap
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncrlm import AsyncRLM, ConfigurationError

from .cases import covers
from .cases.models import ScriptedRoot, SubModel, submit, whole
from .cases.runs import run_case

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio

both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
one = pytest.mark.parametrize("anyio_backend", ["asyncio"])


@both
@covers("X02")
async def test_a_stray_byte_is_no_reason_to_fail() -> None:
    with anyio.fail_after(10):
        outcome = await run_case("X02", "ab\udc97cd")
    assert outcome.answer == "5"
    for request in outcome.root.own:
        whole(request).encode()


@covers("X03")
def test_the_locale_of_the_host_plays_no_part() -> None:
    program = textwrap.dedent(
        """
        import sys, locale
        from asyncrlm import RLM
        async def model(messages):
            return "```repl\\nprint(context)\\nanswer.update(content=context, ready=True)\\n```"
        text = "na\\u00efve \\u4f60\\u597d"
        result = RLM(backend=model).completion(text)
        assert result.response == text, ascii(result.response)
        print(locale.getpreferredencoding(False))
        """
    )
    env = dict(os.environ, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert b"utf" not in done.stdout.lower(), "the host ran in UTF-8, so this proved nothing"


@one
@covers("X04")
async def test_what_is_no_context_is_refused_before_a_model_is_asked() -> None:
    table = type("DataFrame", (), {"__module__": "pandas.core.frame"})()
    root = ScriptedRoot([submit("'ok'")])
    with pytest.raises(ConfigurationError, match="DataFrame") as refused:
        await AsyncRLM(backend=root).acompletion(table)
    for name in ("str", "bytes", "dict", "list", "Path"):
        assert name in str(refused.value)
    assert root.asked == 0


@one
@covers("X04")
async def test_a_table_is_a_table() -> None:
    pandas = pytest.importorskip("pandas")
    with anyio.fail_after(20):
        outcome = await run_case("X04", pandas.DataFrame({"n": [1, 2, 3], "s": ["a", "b", "c"]}))
    assert outcome.answer == "6"


@both
@covers("X05")
async def test_bytes_arrive_as_bytes() -> None:
    with anyio.fail_after(10):
        assert (await run_case("X05", b"\x00\xff\x0a\x41")).answer == "bytes:4"


@both
@covers("X06")
async def test_keys_and_values_keep_their_types() -> None:
    with anyio.fail_after(10):
        outcome = await run_case("X06", {1: {"when": dt.date(2024, 5, 1), "tags": {"x", "y"}}})
    assert outcome.answer == "int,2024,2"


@both
@covers("X07")
async def test_a_list_of_anything_loads() -> None:
    with anyio.fail_after(10):
        assert (await run_case("X07")).answer == "6"


@one
@covers("X08")
async def test_a_context_of_150_mb_never_reaches_a_prompt() -> None:
    with anyio.fail_after(30):
        outcome = await run_case("X08", "x" * 150_000_000)
    assert outcome.answer == "150000000"
    assert max(len(whole(r)) for r in outcome.root.own) < 50_000


@one
@covers("X09")
async def test_the_callers_own_object_is_not_changed() -> None:
    mine = {"rows": [1]}
    with anyio.fail_after(10):
        assert (await run_case("X09", mine)).answer == "ok"
    assert mine == {"rows": [1]}


@one
@covers("X10")
@pytest.mark.parametrize("empty", ["", [], {}], ids=repr)
async def test_an_empty_context_loads(empty: Any) -> None:
    with anyio.fail_after(10):
        assert (await run_case("X10", empty)).answer == repr(empty)


@one
@covers("X11")
async def test_a_quote_in_the_temporary_folder_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / 'it\'s "so"'
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with anyio.fail_after(10):
        assert (await run_case("X11")).answer == "CTX"
        large = "CTX" * 1_000_000  # a size that has to go through a file
        assert (await run_case("X11", large)).answer == large
    assert list(folder.iterdir()) == []


HOSTILE = [
    "a\\",
    '"""',
    "'''",
    "a\x00b",
    "a\r\nb",
    '""" + str(1/0) + """',
    "{x} %s \\N{DASH}",
    'ends in "',
    "\ud800",
    "a\u2028b",
]


@one
@covers("X13")
@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
async def test_hostile_text_arrives_unchanged(text: str) -> None:
    with anyio.fail_after(10):
        assert (await run_case("X13", text)).answer == text


@both
@covers("X14")
async def test_a_context_larger_than_a_command_line_loads() -> None:
    with anyio.fail_after(10):
        assert (await run_case("X14", "y" * 1_000_000)).answer == "1000000"


@one
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"environment": "nowhere"}, "local"),
        ({"backend": "anthropic"}, "anthropic"),
        ({"backend": "azure_openai"}, "azure_openai"),
        ({"backend": "nobody"}, "openai"),
    ],
    ids=lambda value: str(value),
)
async def test_what_is_not_built_yet_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        AsyncRLM(**({"backend": ScriptedRoot([]), "other_backends": [SubModel()]} | settings))
