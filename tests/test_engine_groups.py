"""One error in the place of a group that holds nothing else."""

from __future__ import annotations

import gc
import weakref

import pytest

from asyncrlm import LMError
from asyncrlm.engine.groups import one_error


def failed() -> LMError:
    try:
        try:
            raise KeyError("context")
        except KeyError:
            raise LMError("down") from ValueError("cause")
    except LMError as error:
        return error


def test_it_keeps_its_own_cause_and_context() -> None:
    with pytest.raises(LMError) as caught, one_error():
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [failed()])])
    assert isinstance(caught.value.__cause__, ValueError)
    assert isinstance(caught.value.__context__, KeyError)


def test_it_is_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        try:
            with one_error():
                raise ExceptionGroup("group", [LMError("down")])
        except LMError as error:
            seen = weakref.ref(error)
        assert seen() is None
    finally:
        gc.enable()


def test_a_group_of_two_stays_one() -> None:
    with pytest.raises(ExceptionGroup), one_error():
        raise ExceptionGroup("two", [LMError("a"), LMError("b")])
