"""Whose pacer a client's requests go through: one for each account and model on an event loop."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from anyio.lowlevel import RunVar

from .pacer import BURST, Pacer
from .retrying import load

if TYPE_CHECKING:
    from ..base import LMClient

KNOWN: RunVar[WeakValueDictionary[Hashable, Pacer]] = RunVar("the pacers in use on this event loop")
"""Of each event loop its own, gone with it. A pacer is known for as long as an engine scope holds it."""


class Pacers:
    """The pacers of one engine scope: those given, and for each other account and model the one that all engines on
    this event loop share."""

    def __init__(self, given: Pacer | Mapping[str, Pacer] | None = None) -> None:
        load()
        self._given = given
        self._pacers: dict[Hashable, Pacer] = {}

    def of(self, client: LMClient) -> Pacer:
        """The pacer that every client of this client's account and model shares."""
        given = self._given if not isinstance(self._given, Mapping) else self._given.get(client.model)
        if given is not None:
            given.bind()
            return given
        key = (client.account, client.model)
        pacer = self._pacers.get(key)
        if pacer is None:
            known = KNOWN.get(None)
            if known is None:
                KNOWN.set(known := WeakValueDictionary())
            pacer = known.get(key)
            if pacer is None:
                pacer = known[key] = Pacer(name=f"{client.account} {client.model}")
                pacer.burst = client.burst or BURST
                pacer.bind()
            self._pacers[key] = pacer
        return pacer
