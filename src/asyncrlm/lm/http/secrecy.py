"""What keeps keys out of messages and logs."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import quote

_CUT = 10
"""Characters of a secret's beginning that are still none of anybody's business."""

_SHORTEST = 8
"""Characters of the shortest text that is held to be a secret: "true" and "v1" are none."""

_WORD = re.compile(r"[^\s\"'{}\[\]()<>:;,=&]{8,}")


def secret_texts(values: Iterable[object]) -> tuple[str, ...]:
    """The texts that must not show up in any message because of these values: headers, arguments of a query, keys.

    A value may hold a secret among other things, such as "Bearer ..." or a JSON object: its words count too, if they
    could be one.
    """
    found: dict[str, None] = {}
    for value in values:
        text = value if isinstance(value, str) else "" if value is None else str(value)
        if len(text) < _SHORTEST:
            continue
        found[text] = None
        for word in _WORD.findall(text):
            if len(word) >= 2 * _SHORTEST or any(character.isdigit() for character in word):
                found[word] = None
    return tuple(found)


def redacted(text: str, secrets: Iterable[str]) -> str:
    """`text` without the secrets in it, as they are or as they stand in a URL or in JSON, and without the beginning of
    one that was cut in the middle."""
    for given in secrets:
        for secret in dict.fromkeys((given, quote(given, safe=""), json.dumps(given)[1:-1])):
            if len(secret) >= _SHORTEST:
                text = text.replace(secret, "[redacted]")
            length = _CUT
            while length < len(secret) and secret[: length + 1] in text:
                length += 1
            if length < len(secret):
                text = text.replace(secret[:length], "[redacted]")
    return text


class _WithoutQuery(logging.Filter):
    """Takes the query out of the URLs of one host: it may hold a key, and the http client logs every URL."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self._host = host

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(self._shown(argument) for argument in cast("tuple[Any, ...]", record.args))
        return True

    def _shown(self, argument: Any) -> Any:
        ours = type(argument).__name__ == "URL" and argument.host == self._host and argument.query
        return argument.copy_with(query=None) if ours else argument


@contextmanager
def unlogged_queries(library: str, host: str) -> Generator[None]:
    """What this http library logs of requests to this host is without their queries."""
    logger, quiet = logging.getLogger(library), _WithoutQuery(host)
    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)
