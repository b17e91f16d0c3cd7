"""Where texts are held against shapes: beside the event loop, one at a time for each tree of runs."""

from __future__ import annotations

import functools
import json
from typing import Any

import anyio
import anyio.to_thread

from ..errors import LMError
from .cell_schemas import measured, shape_of_cell
from .fitting import Steps
from .shapes import Fit, Shape

_READ_HERE = 300
"""Values of a schema that is read on the event loop."""


class Checks:
    """Reads the schemas of one tree's cells, and texts by them.

    What it does takes the interpreter: one at a time, so that a tree of runs never takes more of it from its
    neighbours than one thread does; and what nobody waits for any more ends.
    """

    def __init__(self, threads: anyio.CapacityLimiter) -> None:
        self._threads = threads
        self._one = anyio.Lock()
        self._newest: tuple[str, Shape | LMError] | None = None

    async def shape(self, given: Any) -> Shape:
        """What `schema=` in a cell asks for.

        Raises:
            LMError: of kind "bad_request", if it is no schema, or one that a cell may not give.
        """
        schema, parts = measured(given)
        key = json.dumps(schema)
        async with self._one:
            if self._newest is None or self._newest[0] != key:
                read = functools.partial(_shape_or_error, schema)
                if parts > _READ_HERE:
                    shape = await anyio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=self._threads)
                else:
                    shape = read()
                self._newest = key, shape
            found = self._newest[1]
        if isinstance(found, LMError):
            raise LMError(str(found), kind=found.kind) from found
        return found

    async def read(self, shape: Shape, text: str) -> Fit:
        """The value that `text` says.

        Raises:
            Misfit: if it says none that fits.
            TooManySteps: if that can't be said in the steps allowed.
        """
        steps = Steps(len(text))
        async with self._one:
            try:
                return await anyio.to_thread.run_sync(
                    shape.read, text, steps, abandon_on_cancel=True, limiter=self._threads
                )
            finally:
                steps.stop()


def _shape_or_error(schema: dict[str, Any]) -> Shape | LMError:
    try:
        return shape_of_cell(schema)
    except LMError as error:
        return error
