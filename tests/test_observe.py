"""Diagnostics, and making hostile text fit for logs and terminals."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import pytest
import structlog

from asyncrlm.observe.log import get_logger
from asyncrlm.observe.text import REDACTED, one_line, plain, printable, redact


def test_diagnostics_go_to_logging_and_nothing_is_printed(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING, "asyncrlm"):
        get_logger().warning("something", why="because")
        get_logger().info("quiet")
    assert [(r.name, r.levelname) for r in caplog.records] == [("asyncrlm", "WARNING")]
    assert "why='because'" in caplog.text
    assert capsys.readouterr().out == ""


def test_diagnostics_follow_a_configured_structlog() -> None:
    try:
        with structlog.testing.capture_logs() as records:
            get_logger().warning("something", why="because")
    finally:
        structlog.reset_defaults()
    assert records == [{"event": "something", "why": "because", "log_level": "warning"}]


def test_observing_does_not_load_structlog() -> None:
    code = "import sys, asyncrlm.observe; print('structlog' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\nline", "plain\ttext\nline"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[H\x1b[?25lx", "x"),
        ("a\x1b]0;title\x07b\x1b]8;;http://x\x1b\\link", "ablink"),
        ("a\x1bPq#0\x1b\\b", "ab"),
        ("\x9b31mC1", "C1"),
        ("\x9d0;t\x9cx", "x"),
        ("a\rb\x08\x00\x7f", "ab"),
        ("crlf\r\nnext", "crlf\nnext"),
        ("\u202egnp.exe", "gnp.exe"),
        ("\x1b", ""),
        ("\x1b]0;never closed", ""),
        ("[/bold] [red]", "[/bold] [red]"),
        ("é 漢字 🙂", "é 漢字 🙂"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert not any(c < " " and c not in "\t\n" for c in printable(text))


@pytest.mark.parametrize(
    ("text", "line"), [("a\n  b", "a b"), ("abcdefghij", "abcdefghij"), ("abcdefghijk", "abcdefg..."), ("", "")]
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text, 10) == line


@pytest.mark.parametrize(
    "secret",
    ["sk-proj-abcdefghij0123456789", "Bearer abcdef0123456789", "hf_abcdefghijklmnopqrstuvwx", "AKIAABCDEFGHIJKLMNOP"],
)
def test_what_looks_like_a_key_is_redacted(secret: str) -> None:
    key = secret.removeprefix("Bearer ")
    assert key not in redact(f"Incorrect key provided: {secret}.")
    assert REDACTED in redact(secret)


@pytest.mark.parametrize(
    "text", ["skateboardingchampionships2026", "Bearer of bad news", "pk_learn", "a-sk-b", "Basic English"]
)
def test_ordinary_words_stay(text: str) -> None:
    assert redact(text) == text


class Odd:
    def __str__(self) -> str:
        raise RuntimeError("no str")


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (1.5, 1.5),
        (True, True),
        (None, None),
        (2**63, "0x8000000000000000"),
        (-(2**63), "-0x8000000000000000"),
        ((1, "x"), [1, "x"]),
        ({1: 2}, {"1": 2}),
        ("\udc80", "\\udc80"),
        (b"ab", "b'ab'"),
        (OrderedDict(a=OrderedDict()), {"a": {}}),
        ({"api_key": "S", "Authorization": "S", "token": "S", "x": {"accessToken": "S"}}, None),
        ({"input_tokens": 3, "max_tokens": 4, "question": "q"}, {"input_tokens": 3, "max_tokens": 4, "question": "q"}),
        (Odd(), "<Odd, whose str raised RuntimeError>"),
    ],
)
def test_plain_is_strict_json(value: Any, kept: Any) -> None:
    result = plain(value, redacting=True)
    text = json.dumps(result, allow_nan=False)
    text.encode("utf-8")
    if kept is None and value is not None:
        assert '"S"' not in text
    else:
        assert result == kept


def test_plain_keeps_what_looks_like_a_secret_unless_told() -> None:
    value = {"api_key": "S", "text": "Bearer abcdef0123456789"}
    assert plain(value) == value


def test_plain_bounds_what_refers_to_itself_and_what_is_long() -> None:
    assert "<list>" in json.dumps(plain(LOOP))
    assert len(plain(list(range(5000)))) == 1001
    assert plain(dict.fromkeys(range(5000)))["..."] == "4,000 items left out"
    assert len(plain("x" * 10_000, limit=100)) < 200
    assert len(plain(1 << 100_000, limit=100)) < 200
