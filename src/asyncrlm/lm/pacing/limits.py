"""What may be sent in a minute: as the caller says, as the server says, and as the process has files for.

Times are seconds of the event loop's clock. Nothing here waits.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime

from msgspec import Struct

from ...types import RateHints

DEFAULT_ACCOUNT_WIDTH = 2000
"""Requests of one account in flight at most, over all trees of an engine scope; fewer where files are few."""

MINUTE = 60.0

LONGEST_PAUSE = 900.0
"""Seconds for which one reply may stop a whole account. Who says more may be mistaken: the next request asks."""

_LATE = 1.02
"""A window of ours is longer than the server's by this factor: requests take their time to get there."""


def open_files_share(most: int) -> int:
    """`most`, or a quarter of the files that the process may have open: workers and the caller need some, too."""
    try:
        import resource  # noqa: PLC0415 - not on every platform
    except ImportError:
        return most
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(32, min(most, soft // 4))


class Charge:
    """What one request was counted as in one window."""

    __slots__ = ("amount", "time")

    def __init__(self, time: float, amount: int) -> None:
        self.time = time
        self.amount = amount


class Window:
    """At most `limit` in any minute, exactly: each charge is remembered until it is a minute old."""

    __slots__ = ("_charges", "_used", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._charges: deque[Charge] = deque()
        self._used = 0

    def delay(self, amount: int, now: float) -> float:
        """Seconds until there is room for `amount`; one that is larger than the limit waits for an empty window."""
        charges = self._charges
        old = now - MINUTE * _LATE
        while charges and charges[0].time <= old:
            self._used -= charges.popleft().amount
        over = self._used + min(amount, self.limit) - self.limit
        if over <= 0:
            return 0.0
        for charge in charges:
            over -= charge.amount
            if over <= 0:
                return charge.time - old
        return 0.0

    def take(self, amount: int, now: float) -> Charge:
        charge = Charge(now, amount)
        self._charges.append(charge)
        self._used += amount
        return charge

    def correct(self, charge: Charge, amount: int) -> None:
        """The request of this charge has taken another amount than thought: 0 if it was never sent."""
        if self._charges and self._charges[0].time <= charge.time:
            self._used += amount - charge.amount
            charge.amount = amount


class Meter:
    """What a server last said to be left of one of its limits.

    Some servers refill little by little, others all at once, and their headers look alike. So a meter believes in a
    steady refill until a request sent in that belief is refused.
    """

    __slots__ = ("_at", "_left", "_limit", "_refill", "_resets", "_steady", "_turned")

    def __init__(self) -> None:
        self._left: float = math.inf
        self._limit: float = math.inf
        self._refill = 0.0  # a second
        self._at = 0.0
        self._resets = math.inf
        self._steady = True
        self._turned = -math.inf
        """When all was there again last."""

    @property
    def exhausted(self) -> bool:
        """All is used up that was there at the last reset, and no reply has told of the next one yet."""
        return self._left <= 0 and self._resets == math.inf

    def told(
        self, left: int, limit: int | None, reset: float | None, *, in_flight: int, sent: float, now: float
    ) -> None:
        """The server says that `left` is left of `limit`, and that all of it is there again in `reset` seconds.

        It says so in reply to what was sent at `sent`; of a time before the last reset there is nothing to learn. What
        else is `in_flight` may not be counted in it yet.
        """
        if sent < self._turned:
            return
        self._left, self._at = left - in_flight, now
        self._limit = limit or math.inf
        self._resets = now + (1.0 if reset is None else reset)
        self._refill = (limit - left) / reset if self._steady and limit and reset else 0.0

    def refused(self) -> None:
        """A request was refused for this limit, though by the refill there was room."""
        self._steady = False
        self._refill = 0.0

    def delay(self, amount: int, now: float) -> float:
        """Seconds until there should be room for `amount`."""
        if now >= self._resets:
            self._left, self._resets, self._refill, self._turned = self._limit, math.inf, 0.0, now
        elif self._refill:
            self._left = min(self._limit, self._left + (now - self._at) * self._refill)
        self._at = now
        missing = min(amount, self._limit) - self._left
        if missing <= 0:
            return 0.0
        wait = self._resets - now
        if wait == math.inf:
            return 0.0  # `exhausted`
        return min(wait, missing / self._refill) if self._refill else wait

    def take(self, amount: int) -> None:
        self._left -= amount


class Quota:
    """The quota of a server that says nothing of it, only that it is used up; some say for how long.

    It is taken to be what the server took between two refusals. Near its end requests go one by one, then in growing
    numbers while they are taken: a wrong guess costs one refused request.
    """

    __slots__ = ("_believed", "_count", "_left", "_probe", "_resets", "_sent", "_since", "_taken", "_usual")

    def __init__(self) -> None:
        self._count = 0
        """Of all that was ever sent."""
        self._since = 0
        """What it was when more was granted last: what was sent before tells nothing of that."""
        self._sent = 0
        """Since it began anew, and not refused."""
        self._usual: float = math.inf
        """How many those were when it was used up last."""
        self._taken = 0
        self._left: float = math.inf
        self._resets = math.inf
        self._probe = 1
        self._believed = True
        """Whether all was there again, so far, when the server had said so."""

    @property
    def exhausted(self) -> bool:
        """As much was sent as the server took before."""
        return self._left <= 0

    def take(self) -> int:
        """One is sent; what is returned tells when."""
        self._left -= 1
        self._sent += 1
        self._count += 1
        return self._count

    def unsent(self) -> None:
        """One was not sent after all."""
        self._left += 1
        self._sent -= 1

    def accepted(self, number: int) -> None:
        """The server took the one sent then."""
        self._taken += 1
        if self._left <= 0 and self._resets == math.inf and number > self._since:
            self._since = self._count
            self._left = self._probe
            self._probe *= 2
            if 0 < (room := self._usual - self._sent) <= self._left:
                self._left, self._probe = room, 1

    def refused(self) -> None:
        """The server did not take a request."""
        self._sent -= 1

    def used_up(self, wait: float, now: float, pause: float = 0.0, *, first: bool = False) -> None:
        """The server takes no more, for `wait` seconds as it says; for `pause` as is thought, where that is not true.

        `first` if it was taking requests before.
        """
        if pause:
            if first:
                self._usual = self._sent
            self._believed = False
            self._resets = now + max(wait, pause)
        elif self._resets == math.inf:
            self._resets = now + wait
        self._probe = 1

    def turn(self, now: float) -> None:
        """Begin anew if it is time."""
        if now >= self._resets:
            self._left = max(1, self._taken) if self._believed else 1
            self._taken, self._sent, self._since, self._resets = 0, 0, self._count, math.inf


class _Names(Struct, frozen=True):
    left: str
    limit: str
    reset: str


_REQUESTS = (
    _Names("x-ratelimit-remaining-requests", "x-ratelimit-limit-requests", "x-ratelimit-reset-requests"),
    _Names(
        "anthropic-ratelimit-requests-remaining",
        "anthropic-ratelimit-requests-limit",
        "anthropic-ratelimit-requests-reset",
    ),
    _Names("x-ratelimit-remaining", "x-ratelimit-limit", "x-ratelimit-reset"),
    _Names("ratelimit-remaining", "ratelimit-limit", "ratelimit-reset"),
)
_TOKENS = (
    _Names("x-ratelimit-remaining-tokens", "x-ratelimit-limit-tokens", "x-ratelimit-reset-tokens"),
    _Names(
        "anthropic-ratelimit-tokens-remaining", "anthropic-ratelimit-tokens-limit", "anthropic-ratelimit-tokens-reset"
    ),
)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|d|h|m|s)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def rate_hints(headers: Mapping[str, str], now: datetime | None = None) -> RateHints | None:
    """What a response's headers say of the server's limits. Their names are in lower case, or their case is nothing."""
    requests = _read(headers, _REQUESTS, now)
    tokens = _read(headers, _TOKENS, now)
    if requests is None and tokens is None:
        return None
    left, limit, reset = requests or (None, None, None)
    tokens_left, token_limit, tokens_reset = tokens or (None, None, None)
    return RateHints(
        requests_left=left,
        request_limit=limit,
        requests_reset=reset,
        tokens_left=tokens_left,
        token_limit=token_limit,
        tokens_reset=tokens_reset,
    )


def _read(
    headers: Mapping[str, str], families: tuple[_Names, ...], now: datetime | None
) -> tuple[int, int | None, float | None] | None:
    for names in families:
        said = headers.get(names.left)
        if said is not None and (left := _count(said)) is not None:
            reset = seconds_until(headers.get(names.reset), now)
            return left, _count(headers.get(names.limit)), None if reset is None else min(reset, LONGEST_PAUSE)
    return None


def _count(said: str | None) -> int | None:
    try:
        count = float(said or "")
    except ValueError:
        return None
    return int(count) if 0 <= count < math.inf else None


def seconds_until(said: str | None, now: datetime | None = None) -> float | None:
    """Seconds until a reset that is given as seconds, as "1m2.5s", as a time of day, or as seconds since the epoch."""
    if not said:
        return None
    said = said.strip()
    try:
        number = float(said)
    except ValueError:
        parts = _DURATION.findall(said)
        if parts and "".join(amount + unit for amount, unit in parts) == said:
            return sum(float(amount) * _UNITS[unit] for amount, unit in parts)
        try:
            moment = datetime.fromisoformat(said)
        except ValueError:
            return None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return max(0.0, (moment - (now or datetime.now(UTC))).total_seconds())
    if not 0 <= number < math.inf:
        return None
    if number < 1e9:
        return number
    epoch = number / 1_000 if number > 1e12 else number
    return max(0.0, epoch - (now or datetime.now(UTC)).timestamp())
