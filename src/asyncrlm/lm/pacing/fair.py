"""A queue that is fair between runs: whoever asks for ten does not wait behind whoever asks for ten thousand."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from ...errors import LMError
    from .pace import Permit

Flow = tuple[Hashable, Hashable]
"""The tenant and the run that a request belongs to. A run without a tenant is a tenant of its own."""


def flow_of(run_id: str, tenant: Hashable) -> Flow:
    """That of a run; `tenant` may be None."""
    return (run_id if tenant is None else ("tenant", tenant), run_id)


class Waiter:
    """One request in the queue."""

    __slots__ = ("failure", "gone", "permit", "poked", "tokens")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.permit: Permit | None = None
        """Set when it is its turn."""
        self.gone = False
        """Cancelled: skipped when its turn comes."""
        self.failure: LMError | None = None
        """Why it is no use to wait."""
        self.poked = anyio.Event()
        """Set when it is granted, or when it has to look after the queue."""


class FairQueue:
    """Takes turns between tenants, then between the runs of one, then first come first served."""

    __slots__ = ("_tenants", "waiting")

    def __init__(self) -> None:
        # Invariant: no tenant without a run, no run without a waiter (though it may be gone).
        self._tenants: OrderedDict[Hashable, OrderedDict[Hashable, deque[Waiter]]] = OrderedDict()
        self.waiting = 0
        """Waiters that are not gone."""

    def push(self, flow: Flow, waiter: Waiter, *, first: bool) -> None:
        """Add a waiter; `first` puts it before the others of its run."""
        tenant, run = flow
        line = self._tenants.setdefault(tenant, OrderedDict()).setdefault(run, deque())
        if first:
            line.appendleft(waiter)
        else:
            line.append(waiter)
        self.waiting += 1

    def head(self) -> Waiter:
        """Whose turn it is. Raises StopIteration if nobody waits."""
        while True:
            tenant = next(iter(self._tenants))
            runs = self._tenants[tenant]
            run = next(iter(runs))
            line = runs[run]
            if not line[0].gone:
                return line[0]
            line.popleft()
            if not line:
                self._drop(tenant, run)

    def pop(self) -> Waiter:
        """Whose turn it was: its run and its tenant are last now."""
        waiter = self.head()
        tenant = next(iter(self._tenants))
        runs = self._tenants[tenant]
        run = next(iter(runs))
        runs[run].popleft()
        self.waiting -= 1
        if not runs[run]:
            self._drop(tenant, run)
        else:
            runs.move_to_end(run)
        if tenant in self._tenants:
            self._tenants.move_to_end(tenant)
        return waiter

    def forget(self, waiter: Waiter) -> None:
        """This one waits no longer."""
        waiter.gone = True
        self.waiting -= 1
        if not self.waiting:
            self._tenants.clear()

    def clear(self) -> list[Waiter]:
        """Nobody waits any longer. Returns who did."""
        waiters = [w for runs in self._tenants.values() for line in runs.values() for w in line if not w.gone]
        for waiter in waiters:
            self.forget(waiter)
        return waiters

    def _drop(self, tenant: Hashable, run: Hashable) -> None:
        runs = self._tenants[tenant]
        del runs[run]
        if not runs:
            del self._tenants[tenant]
