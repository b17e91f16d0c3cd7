"""Waiting between attempts, on a clock that jumps."""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest
import trio.testing

from asyncrlm.errors import LMError
from asyncrlm.lm.pacing.retrying import MAX_BACKOFF, may_pass, retried


def fault(**changes: Any) -> LMError:
    return LMError("fault", **({"kind": "server", "retryable": True} | changes))


def waits(failures: list[LMError], *, deadline: float = math.inf, attempts: int = 99) -> tuple[list[float], Any]:
    """The waits heard of while `failures` came one after another, and the result or the error of the end."""
    heard: list[float] = []
    rest = failures[1:]

    async def attempt() -> str:
        if rest:
            raise rest.pop(0)
        return "done"

    async def main() -> Any:
        due = anyio.current_time() + deadline
        try:
            return await retried(
                attempt,
                failures[0],
                attempts=attempts,
                deadline=due,
                on_wait=lambda number, delay, error: heard.append(delay),
            )
        except LMError as error:
            return error

    clock = trio.testing.MockClock(autojump_threshold=0)
    return heard, anyio.run(main, backend="trio", backend_options={"clock": clock})


@pytest.mark.parametrize("asked", [0.0, 0.1, 1.0, 60.0, 3_600.0])
def test_a_retry_after_is_honoured_in_full_with_a_little_on_top(asked: float) -> None:
    heard, outcome = waits([fault(retry_after=asked) for _ in range(50)])
    assert outcome == "done"
    assert all(asked <= wait <= asked + min(0.25 * asked, 5.0) for wait in heard)
    assert asked == 0.0 or len(set(heard)) > 1


def test_back_off_grows_is_jittered_and_bounded() -> None:
    runs = [waits([fault() for _ in range(12)])[0] for _ in range(40)]
    for number, column in enumerate(zip(*runs, strict=True)):
        bound = max(0.1, min(0.5 * 2**number, MAX_BACKOFF))
        assert all(0.1 <= wait <= bound for wait in column)
        assert max(column) > bound / 2
        assert len(set(column)) > 20


def test_attempts_run_out_with_the_last_error() -> None:
    failures = [fault() for _ in range(4)]
    heard, outcome = waits(failures, attempts=3)
    assert (len(heard), outcome) == (2, failures[2])


def test_nothing_is_waited_for_that_ends_after_the_deadline() -> None:
    failures = [fault(retry_after=5.0), fault(retry_after=50.0), fault()]
    heard, outcome = waits(failures, deadline=30.0)
    assert (len(heard), outcome) == (1, failures[1])


def test_what_will_not_pass_is_not_tried_again() -> None:
    permanent = fault(retryable=False)
    heard, outcome = waits([fault(), permanent])
    assert (len(heard), outcome) == (1, permanent)
    assert not may_pass(ValueError())


@pytest.mark.anyio
async def test_it_can_be_cancelled() -> None:
    with anyio.move_on_after(0.01) as scope:
        await retried(anyio.sleep_forever, fault(retry_after=0.0), attempts=2)
    assert scope.cancelled_caught
