"""What keeps keys out of messages and logs."""

from __future__ import annotations

import html
import json
import logging
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import quote, unquote, urlsplit

from ...observe.text import names_secret

_CUT = 10
"""Characters of a secret's beginning that are still none of anybody's business."""

_SHORTEST = 8
"""Characters of the shortest text that is held to be a secret: "true" and "v1" are none."""

_LONG = 24
"""Characters of a path's part that is held to be a secret whatever it is made of."""

_SECRET_NAMES = frozenset({"key", "sig", "signature", "login"})

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


def given_secrets(arguments: Mapping[str, Any], *, secret: bool = False) -> Iterator[str]:
    """The texts in these arguments of a request, however deep, that stand under the name of a secret or in headers."""
    for name, value in arguments.items():
        yield from _secrets_in(value, secret=secret or _keeps_secrets(str(name)))


def _keeps_secrets(name: str) -> bool:
    return names_secret(name) or name.lower() in _SECRET_NAMES or name.lower().endswith("headers")


def _secrets_in(value: object, *, secret: bool) -> Iterator[str]:
    if isinstance(value, str):
        if secret:
            yield value
    elif isinstance(value, Mapping):
        yield from given_secrets(cast("Mapping[str, Any]", value), secret=secret)
    elif isinstance(value, list | tuple):
        for item in cast("list[object]", value):
            yield from _secrets_in(item, secret=secret)


def without_secrets(value: Any, *, secret: bool = False) -> Any:
    """These arguments of a request without the texts that `given_secrets` finds in them."""
    if isinstance(value, str):
        return "[redacted]" if secret else value
    if isinstance(value, Mapping):
        given = cast("Mapping[Any, Any]", value).items()
        return {name: without_secrets(item, secret=secret or _keeps_secrets(str(name))) for name, item in given}
    if isinstance(value, list | tuple):
        return [without_secrets(item, secret=secret) for item in cast("list[Any]", value)]
    return value


def path_secrets(url: str) -> tuple[str, ...]:
    """The parts of a URL's path that may be keys: no word is that long, few names are and have digits."""
    parts = unquote(urlsplit(url).path).split("/")
    return tuple(
        part for part in parts if len(part) >= _LONG or (len(part) >= 2 * _SHORTEST and any(map(str.isdigit, part)))
    )


def shown_url(url: str) -> str:
    """`url` without what may be a key in its path."""
    return redacted(url, path_secrets(url))


def redacted(text: str, secrets: Iterable[str]) -> str:
    """`text` without the secrets in it, as they are or as they stand in a URL or in JSON, and without the beginning of
    one that was cut in the middle."""
    for given in secrets:
        escaped = (quote(given, safe=""), json.dumps(given)[1:-1], given.replace("/", "\\/"), html.escape(given))
        for secret in dict.fromkeys((given, *escaped)):
            if len(secret) >= _SHORTEST:
                text = text.replace(secret, "[redacted]")
            length = _CUT
            while length < len(secret) and secret[: length + 1] in text:
                length += 1
            if length < len(secret):
                text = text.replace(secret[:length], "[redacted]")
    return text


class _WithoutKeys(logging.Filter):
    """Takes the query, and keys in the path, out of the URLs of one host: the http client logs every URL."""

    def __init__(self, host: str, secrets: Iterable[str]) -> None:
        super().__init__()
        self._host = host
        self._secrets = tuple(secrets)

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(self._shown(argument) for argument in cast("tuple[Any, ...]", record.args))
        return True

    def _shown(self, argument: Any) -> Any:
        if type(argument).__name__ != "URL" or argument.host != self._host:
            return argument
        return redacted(str(argument.copy_with(query=None)), self._secrets)


@contextmanager
def unlogged_queries(library: str, host: str, secrets: Iterable[str] = ()) -> Generator[None]:
    """What this http library logs of requests to this host is without their queries and without `secrets`."""
    logger, quiet = logging.getLogger(library), _WithoutKeys(host, secrets)
    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)
