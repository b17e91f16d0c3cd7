"""What tells one call to a model from another, and where replies are kept."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
from msgspec import Struct

from ...observe.text import plain
from ..http.naming import TRAVELLING, named
from ..http.secrecy import without_secrets

if TYPE_CHECKING:
    from ..base import LMRequest

CacheMode = Literal["cache", "record", "replay"]
"""cache: equal calls are asked once. record: each call is asked and kept. replay: nothing is asked, only looked up."""

NOT_PART_OF_A_CALL = frozenset({*TRAVELLING, "timeout"})
"""Sampling arguments that say how a request travels, not what is asked; some hold secrets."""


class Seen:
    """Which kept calls one tree has made so far, and whose recording it follows."""

    __slots__ = ("calls", "follows", "run")

    def __init__(self, run: str = "") -> None:
        self.run = f"{time.time_ns():020d}-{run or uuid.uuid4().hex}"
        """What a recording of this tree is kept under; later ones sort behind."""
        self.follows: str | None = None
        """The recorded tree whose replies this one gets, as long as it has them."""
        self.calls: dict[tuple[str, bytes], set[int]] = {}
        """Recorded tree and key → which of the equal calls of that key were made, from 0."""

    def next(self, key: bytes) -> int:
        """The number of one more call that is recorded."""
        numbers = self.calls.setdefault((self.run, key), set())
        numbers.add(len(numbers))
        return len(numbers) - 1


class CacheSettings(Struct, frozen=True):
    """Where replies are kept, and what for."""

    folder: Path
    mode: CacheMode
    max_bytes: int | None = None
    """Of a cache: bytes of replies that it keeps at most; those that were not used for longest go. None for no end."""


class Asked(Struct, frozen=True):
    """What identifies a call: everything that may change its reply, and no secret."""

    backend: str
    model: str
    messages: list[tuple[str, str]]
    """Role and hash of each."""
    args: dict[str, Any]
    """To be shown: without what looks like a secret, and cut short. `args_hash` is of all of them."""
    cap: int | None
    args_hash: str = ""
    where: str | None = ""
    """Who answers; None for one that can't be told from others: its replies are nobody else's."""

    @classmethod
    def of(
        cls,
        backend: str,
        model: str,
        request: LMRequest,
        args: Mapping[str, Any],
        cap: int | None,
        *,
        where: str | None = "",
    ) -> Self:
        """The identity of `request`, sent with `args` besides its own to the server or function that `where` names.

        An empty `where` leaves out who answers, and what a request says on its way there.
        """
        given = {**args, **request.sampling_args}
        kept = {name: value for name, value in given.items() if name not in NOT_PART_OF_A_CALL}
        return cls(
            backend=backend,
            model=model,
            messages=[(message.role, text_hash(message.content)) for message in request.messages],
            args=plain(without_secrets(kept), redacting=True),
            cap=cap,
            args_hash=text_hash(json.dumps(kept, sort_keys=True, default=repr)) if kept else "",
            where=named(where, request.sampling_args) if where else where,
        )

    @property
    def text(self) -> str:
        return json.dumps(msgspec.structs.asdict(self), sort_keys=True)

    @property
    def key(self) -> bytes:
        return hashlib.sha256(self.text.encode()).digest()


class Call(Struct, frozen=True):
    """One call that is recorded."""

    key: bytes
    number: int
    """Which of equal calls."""
    run: str
    """Which tree made it."""
    place: str
    asked: Asked
    """With `request`: kept as well, so that a miss can be told from it."""
    request: LMRequest


class CutOff(Struct, frozen=True):
    """What a recorded call came to that was given up before there was a reply."""


def text_hash(text: str) -> str:
    return hashlib.sha256(text_bytes(text)).hexdigest()[:32]


def text_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
