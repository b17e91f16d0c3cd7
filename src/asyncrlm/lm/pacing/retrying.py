"""Which failures are tried again, and after how long."""

from __future__ import annotations

import importlib
import math
import random
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import anyio

from ...errors import LMError

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")

DEFAULT_ATTEMPTS = 6
"""How often one request is sent at most, the first time included."""

MAX_BACKOFF = 30.0
"""Seconds of the longest wait of our own choosing. A server's Retry-After may be longer and is honoured."""

LONGEST_WAIT = 86_400.0
"""Seconds that a server may have one request wait, by its Retry-After. Who says more may be mistaken."""

OnWait = Callable[[int, float, LMError], None]
"""Hears of a request that will be sent again: the attempt that failed (from 1), seconds until the next, the error."""


def load() -> None:
    """Load what retrying needs: it is too late once there are no files left to read it from."""
    importlib.import_module("tenacity")  # not with this module: it takes as long as the whole of this package


def is_loaded() -> bool:
    """Whether nothing is left to load."""
    return "tenacity" in sys.modules


async def retried(
    attempt: Callable[[], Awaitable[T]],
    failure: LMError,
    *,
    attempts: int,
    deadline: float = math.inf,
    on_wait: OnWait | None = None,
) -> T:
    """Go on after a first attempt has failed: wait and try again while the failures may pass.

    Args:
        attempt: One attempt.
        failure: What the first one raised.
        attempts: How many there may be, the first included.
        deadline: Nothing is waited for that ends after it, on the event loop's clock.
        on_wait: Called before each wait.

    Raises:
        LMError: of the last attempt.
    """
    from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt  # noqa: PLC0415 - as in `load`

    said = [failure]

    async def first_is_known() -> T:
        if said:
            raise said.pop()
        return await attempt()

    enough = stop_after_attempt(attempts)

    def no_more(state: RetryCallState) -> bool:
        error = _error_of(state)
        if error is not None and error.enough is not None and state.attempt_number >= error.enough:
            return True
        wait = max(state.upcoming_sleep, (error and error.retry_after) or 0.0)
        return enough(state) or anyio.current_time() + wait > deadline

    def tell(state: RetryCallState) -> None:
        error = _error_of(state)
        if on_wait is not None and error is not None:
            on_wait(state.attempt_number, state.upcoming_sleep, error)

    retrying = AsyncRetrying(
        retry=retry_if_exception(may_pass),
        wait=backoff(),
        stop=no_more,
        before_sleep=tell,
        sleep=anyio.sleep,
        reraise=True,
    )
    return await retrying(first_is_known)


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    return isinstance(error, LMError) and error.retryable


def backoff() -> Callable[[RetryCallState], float]:
    """Seconds to wait after a failed attempt.

    A Retry-After is a lower bound, up to `LONGEST_WAIT`, with a little jitter on top so that those who were refused
    together don't come back together; without one, a random part of an exponentially growing span.
    """
    from tenacity import wait_random_exponential  # noqa: PLC0415 - as in `load`

    growing = wait_random_exponential(multiplier=0.5, min=0.1, max=MAX_BACKOFF)

    def wait(state: RetryCallState) -> float:
        error = _error_of(state)
        if error is None or error.retry_after is None:
            return growing(state)
        asked = min(error.retry_after, LONGEST_WAIT)
        return asked + random.uniform(0.0, min(0.25 * asked, 5.0))  # noqa: S311 - not a secret

    return wait


def _error_of(state: RetryCallState) -> LMError | None:
    error = state.outcome.exception() if state.outcome is not None else None
    return error if isinstance(error, LMError) else None
