"""Who sends the requests of one tree: finds the clients of a spec, their accounts, and sends."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from msgspec import structs

from .accounts import open_accounts
from .fallback import Member
from .sending import Way, sent

if TYPE_CHECKING:
    from ...ledger import Ledger, Need, Settlement
    from ..base import LMReply, LMRequest
    from ..spec import ClientSpec, Shared
    from .fair import Flow
    from .gate import Gate
    from .pacer import Pacer
    from .retrying import OnWait


async def open_early(specs: Sequence[ClientSpec], shared: Shared, pacer: Pacer | Mapping[str, Pacer] | None) -> None:
    """Open what no request is to wait for, of these specs; raises as their clients do."""
    early = [each for spec in specs for each in spec.each if each.early]
    for each in early:
        await each.connect(shared)
    if early:
        await shared("accounts", lambda: open_accounts(pacer))


class Sender:
    """Sends requests to the models of any spec, each member of a list in the turns of its own account.

    Args:
        shared: Of the scope that outlives the tree: there clients are open, and accounts and refusals known.
        pacer: The caller's pacers.
        gate: How many requests of the tree may be in flight.
        ledger: The tree's.
        flow: Whose requests these are, where runs take turns.
        deadline: When their time is up, on the event loop's clock.
    """

    def __init__(
        self,
        shared: Shared,
        pacer: Pacer | Mapping[str, Pacer] | None,
        *,
        gate: Gate,
        ledger: Ledger,
        flow: Flow,
        deadline: float = math.inf,
    ) -> None:
        self._shared = shared
        self._pacer = pacer
        self._gate = gate
        self._ledger = ledger
        self._flow = flow
        self._deadline = deadline
        self._members: dict[Hashable, Sequence[Member]] = {}

    async def send(
        self,
        spec: ClientSpec,
        request: LMRequest,
        need: Need,
        *,
        on_wait: OnWait | None = None,
        bill: list[Settlement] | None = None,
    ) -> LMReply:
        """The reply to `request`; `need` is what it may cost with the dearest model of the spec.

        Raises:
            LMError, LimitError: as `sent`.
        """
        members = self._members.get(spec.key)
        if members is None:
            members = self._members[spec.key] = await self._of(spec)
        if spec.fallbacks:
            each = zip(members, spec.fallbacks, strict=True)
            ways = [Way(m, structs.replace(need, model=one.model, price=one.price, models=1)) for m, one in each]
        else:
            ways = [Way(members[0], need)]
        return await sent(
            ways,
            request,
            gate=self._gate,
            ledger=self._ledger,
            cap=self._ledger.output_cap(need),
            flow=self._flow,
            deadline=self._deadline,
            on_wait=on_wait,
            attempts=spec.attempts,
            bill=bill,
        )

    async def _of(self, spec: ClientSpec) -> Sequence[Member]:
        clients = [await each.connect(self._shared) for each in spec.each]
        accounts = await self._shared("accounts", lambda: open_accounts(self._pacer))
        turns = [accounts.of(client) for client in clients]
        if len(clients) == 1:
            return [Member(clients[0], turns[0])]
        names = [client.model for client in clients]
        members: list[Member] = []
        for number, (client, turn) in enumerate(zip(clients, turns, strict=True), 1):
            alike = names.count(client.model) > 1
            place = f"{number} of {len(clients)}, {client.account}" if alike else ""
            members.append(Member(client, turn, shares=turns.count(turn) > 1, place=place))
        return await self._shared(("members", spec.key), lambda: nullcontext(members))
