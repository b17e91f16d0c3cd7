"""The log on disk."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import asyncrlm.observe.jsonl as jsonl
from asyncrlm.errors import ConfigurationError
from asyncrlm.events import CellFinished, ModelReplied, RunFinished, RunStarted, TurnStarted
from asyncrlm.observe.jsonl import RLMLogger, TreeLog

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


def strict(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def read(path: Path | None) -> list[dict[str, Any]]:
    assert path is not None
    text = path.read_text("utf-8")
    assert text.endswith("\n")
    return [strict(line) for line in text.splitlines()]


async def until_lines(log: TreeLog, count: int) -> None:
    assert log.path is not None
    with anyio.fail_after(10):
        while not log.path.exists() or log.path.read_bytes().count(b"\n") < count:
            await anyio.sleep(0.002)


async def test_one_file_per_tree_written_as_it_happens(tmp_path: Path, no_leaks: None) -> None:
    logger = RLMLogger(tmp_path / "new" / "logs")
    log = logger.for_tree("0b8e-77")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.run)
        log(RunStarted(run_id="0b8e-77", root_model="m", time=1.0))
        await until_lines(log, 2)
        log(TurnStarted(run_id="0b8e-77", turn=1, max_turns=2))
        log(TurnStarted(run_id="child", parent_id="0b8e-77", depth=1, turn=1, max_turns=2))
        await until_lines(log, 4)
        await log.aclose()
    assert log.path is not None
    assert re.fullmatch(r"rlm_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_0b8e-77\.jsonl", log.path.name)
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    header, started, turn, child = read(log.path)
    assert header["format"] == "asyncrlm"
    assert header["version"] == 1
    assert header["run_id"] == "0b8e-77"
    assert started["type"] == "RunStarted"
    assert started["root_model"] == "m"
    assert (turn["type"], turn["depth"], turn["parent_id"]) == ("TurnStarted", 0, None)
    assert (child["run_id"], child["depth"], child["parent_id"]) == ("child", 1, "0b8e-77")
    await log.aclose()


async def test_nothing_is_lost_when_the_tree_is_cancelled(tmp_path: Path, no_leaks: None) -> None:
    log = RLMLogger(tmp_path).for_tree("r")
    with anyio.CancelScope() as scope:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(log.run)
                for turn in range(500):
                    log(TurnStarted(run_id="r", turn=turn, max_turns=500))
                    if turn % 100 == 99:
                        await anyio.sleep(0)
                scope.cancel()
                await anyio.sleep(0)
        finally:
            log(RunFinished(run_id="r", stop_reason="cancelled"))
            await log.aclose()
    lines = read(log.path)
    assert [line["turn"] for line in lines[1:-1]] == list(range(500))
    assert lines[-1]["stop_reason"] == "cancelled"


async def test_without_a_writer_task_closing_writes_all(tmp_path: Path) -> None:
    log = RLMLogger(tmp_path, file_name="mine").for_tree("r")
    log(TurnStarted(run_id="r", turn=1, max_turns=1))
    await log.aclose()
    assert log.path is not None
    assert log.path.name.startswith("mine_")
    assert len(read(log.path)) == 2
    log(TurnStarted(run_id="r", turn=2, max_turns=2))
    assert len(read(log.path)) == 2


async def test_many_trees_share_a_logger(tmp_path: Path, no_leaks: None) -> None:
    logger = RLMLogger(tmp_path)

    async def tree(name: str) -> None:
        log = logger.for_tree(name)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(log.run)
            for turn in range(20):
                log(TurnStarted(run_id=name, turn=turn, max_turns=20))
                await anyio.sleep(0)
            await log.aclose()

    async with anyio.create_task_group() as tasks:
        for number in range(30):
            tasks.start_soon(tree, f"run{number}")
    files = sorted(tmp_path.iterdir())
    assert len(files) == 30
    for path in files:
        lines = read(path)
        assert {line["run_id"] for line in lines} == {lines[0]["run_id"]}
        assert [line["turn"] for line in lines[1:]] == list(range(20))


async def test_lines_are_strict_json_and_bounded(tmp_path: Path) -> None:
    log = RLMLogger(tmp_path, max_text=1000).for_tree("r")
    log(
        RunStarted(
            run_id="r",
            root_model="m",
            limits={"max_budget": math.inf},
            tags={"x": math.nan, "headers": {"Cookie": "S3"}},
        )
    )
    log(CellFinished(run_id="r", turn=1, cell=1, stdout="\ud800" + "o" * 2_000_000, variables={"loss": "float"}))
    log(
        ModelReplied(
            run_id="r", turn=1, model="m", prompt=[{"role": "user", "content": "z" * 9999}], text="Bearer abc123def456"
        )
    )
    await log.aclose()
    _, started, cell, replied = read(log.path)
    assert started["limits"]["max_budget"] == "inf"
    assert started["tags"]["x"] == "nan"
    assert started["tags"]["headers"] == {"Cookie": "[redacted]"}
    assert cell["stdout"].startswith("\\ud800ooo")
    assert "characters left out" in cell["stdout"]
    assert "abc123" not in replied["text"]
    assert log.path is not None
    assert log.path.stat().st_size < 10_000


async def test_a_log_that_cannot_be_written_raises_once_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    log = RLMLogger(tmp_path).for_tree("r")
    assert log.path is not None
    write = os.write
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.run)
        log(RunStarted(run_id="r", root_model="m"))
        await until_lines(log, 2)
        monkeypatch.setattr(jsonl.os, "write", lambda fd, data: _half(write, fd, data))
        log(TurnStarted(run_id="r", turn=1, max_turns=1))
        with pytest.raises(OSError, match="No space left"):
            await _call_until_it_raises(log)
        log(TurnStarted(run_id="r", turn=3, max_turns=3))
    await log.aclose()
    assert [line.get("type") for line in read(log.path)] == [None, "RunStarted"]


async def _call_until_it_raises(log: TreeLog) -> None:
    with anyio.fail_after(10):
        while True:
            log(TurnStarted(run_id="r", turn=2, max_turns=2))
            await anyio.sleep(0.002)


def _half(write: Any, fd: int, data: bytes) -> int:
    """A disk with room for ten more bytes."""
    if b"{" not in bytes(data[:1]):
        raise OSError(errno.ENOSPC, "No space left on device")
    return write(fd, bytes(data)[:10])


async def test_a_failure_at_the_very_end_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = RLMLogger(tmp_path).for_tree("r")
    log(TurnStarted(run_id="r", turn=1, max_turns=1))

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl.os, "write", full)
    await log.aclose()
    assert "No space left" in caplog.text
    assert not any(tmp_path.iterdir())  # no file, rather than one without its first line


async def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = RLMLogger().for_tree("r")
    log(TurnStarted(run_id="r", turn=1, max_turns=1))
    with anyio.fail_after(10):
        await log.run()
        await log.aclose()
    assert log.path is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"file_name": "a/b"}, "file_name='a/b'"),
        ({"file_name": ""}, "file_name=''"),
        ({"max_text": 0}, "max_text=0"),
        ({"log_dir": __file__}, "File exists"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        RLMLogger(**arguments)


def test_repr_says_where(tmp_path: Path) -> None:
    assert repr(RLMLogger()) == "<RLMLogger in memory>"
    assert str(tmp_path) in repr(RLMLogger(tmp_path))
