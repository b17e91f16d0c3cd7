"""Cases about the log and the console: strict, small, without secrets, whole after a failure."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, LMError, RLMLogger
from asyncrlm.events import FORMAT_VERSION

from .cases import CASES, covers, scripted
from .cases.http import serving
from .cases.models import ScriptedRoot, cell, submit
from .cases.runs import run, run_case

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio

one = pytest.mark.parametrize("anyio_backend", ["asyncio"])
both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


def _strict(line: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(line, parse_constant=refuse)


def _log(folder: Path) -> Path:
    (path,) = folder.glob("rlm_*.jsonl")
    return path


def _records(folder: Path) -> list[dict[str, Any]]:
    text = _log(folder).read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [_strict(line) for line in text.split("\n")[:-1]]


@both
@covers("L01")
async def test_every_line_of_the_log_is_strict_json(tmp_path: Path) -> None:
    turns = [
        *scripted(CASES["L01"])[:1],
        cell("print(float('nan'), '\\ud83d', '\\x1b[31m', '\\u2028', '\\0')"),
        submit("'ok'"),
    ]
    with anyio.fail_after(10):
        outcome = await run(turns, logger=RLMLogger(log_dir=tmp_path))
    assert outcome.answer == "ok"
    records = _records(tmp_path)
    assert FORMAT_VERSION in records[0].values()
    assert stat.S_IMODE(_log(tmp_path).stat().st_mode) == 0o600
    assert len(records) > 3


@one
@covers("L03")
async def test_the_log_holds_no_copy_of_the_context(tmp_path: Path) -> None:
    with anyio.fail_after(10):
        outcome = await run_case("L03", "z" * 2_000_000, logger=RLMLogger(log_dir=tmp_path))
    assert outcome.answer == "ok"
    assert _log(tmp_path).stat().st_size < 100_000
    assert len(json.dumps(outcome.completion.metadata)) < 100_000


@one
@covers("L03")
async def test_big_values_are_clipped_in_the_log(tmp_path: Path) -> None:
    turns = [cell("big = [context] * 3\ndeep = {'k': context}"), *[cell(f"x = {i}") for i in range(20)], submit("'ok'")]
    with anyio.fail_after(10):
        outcome = await run(turns, "z" * 1_000_000, logger=RLMLogger(log_dir=tmp_path))
    assert outcome.answer == "ok"
    assert _log(tmp_path).stat().st_size < 200_000


@one
@covers("L04")
async def test_no_secret_of_the_settings_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with serving(lambda _asked: scripted(CASES["L04"])[0]) as server:
        rlm = AsyncRLM(
            backend_kwargs={
                "model_name": "root-model",
                "base_url": server.url,
                "api_key": "S3CRET-0",
                "default_headers": {"X-Authorization": "Bearer S3CRET-1", "X-Token": "S3CRET-2"},
                "default_query": {"api_key": "S3CRET-3"},
            },
            logger=RLMLogger(log_dir=tmp_path),
            verbose=True,
        )
        with anyio.fail_after(10):
            result = await rlm.acompletion("CTX")
    assert result.response == "ok"
    assert "Bearer S3CRET-0" in server.asked[0].headers.values()  # it was in use, and went where it should
    printed = capfd.readouterr()
    shown = [_log(tmp_path).read_text(), json.dumps(result.metadata), printed.out, printed.err, repr(rlm), repr(result)]
    assert [text for text in shown if "S3CRET" in text] == []


@one
@covers("L04")
@pytest.mark.parametrize(
    "kwargs",
    [{"token": "S3CRET-2"}, {"extra": {"api_key": "S3CRET-3"}}, {"api_kye": "S3CRET-4"}],
    ids=lambda k: next(iter(k)),
)
async def test_an_unknown_setting_is_refused_without_its_value(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        AsyncRLM(backend_kwargs={"model_name": "root-model", "api_key": "S3CRET-0"} | kwargs)
    assert next(iter(kwargs)) in str(refused.value)
    assert "api_key" in str(refused.value)
    assert "S3CRET" not in f"{refused.value!r} {refused.value}"


@one
@covers("L05")
async def test_model_text_is_printed_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    with anyio.fail_after(10):
        outcome = await run_case("L05", verbose=True)
    assert outcome.answer == "[/x] fin"
    printed = capfd.readouterr()
    assert "[/x] fin" in printed.out + printed.err


@one
@covers("L06")
async def test_a_run_that_fails_midway_leaves_its_turns_on_disk(tmp_path: Path) -> None:
    root = ScriptedRoot([scripted(CASES["L06"])[0], RuntimeError("boom")])
    rlm = AsyncRLM(backend=root, logger=RLMLogger(log_dir=tmp_path))
    with anyio.fail_after(10), pytest.raises(LMError, match="boom"):
        await rlm.acompletion("CTX")
    records = _records(tmp_path)
    assert FORMAT_VERSION in records[0].values()
    kinds = [record.get("type") for record in records]
    assert "TurnFinished" in kinds
    assert kinds[-1] == "RunFinished"
    assert any("x = 1" in json.dumps(record) for record in records)


@one
async def test_each_run_at_once_has_its_own_file(tmp_path: Path) -> None:
    root = ScriptedRoot([submit("'ok'")] * 3)
    rlm = AsyncRLM(backend=root, logger=RLMLogger(log_dir=tmp_path))

    async def ask() -> None:
        await rlm.acompletion("CTX")

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(ask)
    files = list(tmp_path.glob("rlm_*.jsonl"))
    assert len(files) == 3
    for path in files:
        runs = {record["run_id"] for record in map(_strict, path.read_text().splitlines()) if "run_id" in record}
        assert len(runs) == 1
