"""Whether an account refuses everything: how long it is left alone then, and when it is given up."""

from __future__ import annotations

import math

UNEXPLAINED = 2
"""Refusals one after the other that may be chance, or a few too many at once: they only narrow."""

FIRST_PAUSE = 1.0
"""Seconds that the whole account waits after the first refusal beyond those; doubled with each that follows."""

LAST_PAUSE = 60.0
"""Seconds of the longest of these pauses: limits are mostly by the minute."""

PATIENCE = 150.0
"""Seconds for which an account that has answered before may refuse everything."""

HOPELESS = 6
"""Refusals one after the other, none of them sent before the one before was known, that end patience."""


class Refusals:
    """Refusals in a row. One only counts if it was sent after the last one that counted was known, and if nothing sent
    since then was taken: however many are refused together, they tell one thing."""

    __slots__ = ("_began", "_mark", "_since", "_taken", "row")

    def __init__(self) -> None:
        self.row = 0
        """How many in a row; 0 after any that was taken."""
        self._mark: int = 0
        self._since: int = 0
        """In flight, of those sent since the last that counted."""
        self._began = math.inf
        self._taken = False

    def sent(self) -> int:
        """One is sent; what is returned tells when."""
        self._since += 1
        return self._mark

    def closed(self, mark: int) -> None:
        """The one sent then is no longer in flight."""
        if mark == self._mark:
            self._since -= 1

    def taken(self, mark: int) -> None:
        """The one sent then was taken."""
        self._taken = True
        if mark == self._mark:
            self.row = 0

    def refused(self, mark: int, now: float, *, most: bool) -> float:
        """The one sent then was refused; before `closed`. Returns for how many seconds to send nothing.

        Args:
            mark: What `sent` returned.
            now: The event loop's time.
            most: Whether most requests are being refused; else the others in flight are waited for.
        """
        if mark != self._mark or not (most or self._since == 1):
            return 0.0
        if not self.row:
            self._began = now
        self.row += 1
        self._mark += 1
        self._since = 0
        return min(LAST_PAUSE, FIRST_PAUSE * 2 ** (self.row - UNEXPLAINED - 1)) if self.row > UNEXPLAINED else 0.0

    def patient(self, now: float) -> bool:
        """Whether it has answered, and may be hoped to do so again."""
        return self._taken and (not self.row or now - self._began < PATIENCE)

    def hopeless(self, now: float) -> bool:
        """Whether it is no use to wait for it."""
        return self.row >= HOPELESS and not self.patient(now)
