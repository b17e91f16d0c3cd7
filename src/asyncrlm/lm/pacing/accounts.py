"""Which account a client's requests go through: one for each account and model on an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Hashable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from .account import BURST, Account
from .pacer import Pacer, account_of
from .retrying import is_loaded, load

if TYPE_CHECKING:
    from ..base import LMClient

KNOWN: RunVar[WeakValueDictionary[Hashable, Account]] = RunVar("the accounts in use on this event loop")
"""Of each event loop its own, gone with it. An account is known for as long as an engine scope holds it."""


@asynccontextmanager
async def open_accounts(given: Pacer | Mapping[str, Pacer] | None = None) -> AsyncGenerator[Accounts]:
    """The accounts of one engine scope, once all is loaded that they need."""
    if not is_loaded():  # else no thread: a test's clock that jumps where all wait would not wait for it
        await anyio.to_thread.run_sync(load, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
    yield Accounts(given)


class Accounts:
    """The accounts of one engine scope: those of the pacers given, and for each other account and model the one that
    all engines on this event loop share."""

    def __init__(self, given: Pacer | Mapping[str, Pacer] | None = None) -> None:
        self._given = given
        self._accounts: dict[Hashable, Account] = {}

    def of(self, client: LMClient) -> Account:
        """What every client of this client's account and model shares."""
        given = self._given if not isinstance(self._given, Mapping) else self._given.get(client.model)
        if given is not None:
            return account_of(given)
        key = (client.account, client.model)
        account = self._accounts.get(key)
        if account is None:
            known = KNOWN.get(None)
            if known is None:
                KNOWN.set(known := WeakValueDictionary())
            account = known.get(key)
            if account is None:
                name = f"{client.account} {client.model}"
                account = known[key] = Account(name=name, burst=client.burst or BURST)
            self._accounts[key] = account
        return account
