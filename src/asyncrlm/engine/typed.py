"""The answers of one run, taken as they are or held against the shape that its caller asked for."""

from __future__ import annotations

from ..errors import LMError
from . import prompts as words
from .checks import Checks
from .fitting import TooManySteps
from .prompts import Prompts
from .shapes import Fit, Misfit, Shape


class Answers:
    """Reads what one run's model submits."""

    def __init__(self, shape: Shape | None, prompts: Prompts, checks: Checks) -> None:
        self.shape = shape
        self.problem: str | None = None
        """Why the newest answer was refused; None if it was not."""
        self.newly_refused = False
        """Whether the newest answer is another one than that which was refused before it."""
        self._refused: str | None = None
        self._prompts = prompts
        self._checks = checks

    async def read(self, text: str) -> Fit | None:
        """The answer in `text`; None if it does not fit, for the reason that `problem` then gives."""
        if self.shape is None:
            return Fit(text, None)
        self.problem = None
        self.newly_refused = False
        try:
            return await self._checks.read(self.shape, words.clean(text))
        except (Misfit, TooManySteps) as misfit:
            self.problem = str(misfit)
            self.newly_refused, self._refused = text != self._refused, text
            return None

    @property
    def asked(self) -> str:
        """What the model is told of the shape before it answers; "" if there is none."""
        return "" if self.shape is None else words.shape_message(self._prompts, self.shape.stated)

    @property
    def asked_in_text(self) -> str:
        """The same for an answer that is the whole reply."""
        return "" if self.shape is None else words.shape_message(self._prompts, self.shape.stated, in_cell=False)

    @property
    def refusal(self) -> str:
        """What the model is told of the newest answer; "" if it was not refused."""
        return "" if self.problem is None else words.misfit_message(self._prompts, self.problem)

    @property
    def refusal_in_text(self) -> str:
        """The same for an answer that was the whole reply."""
        return "" if self.problem is None else words.misfit_message(self._prompts, self.problem, in_cell=False)

    def failure(self, why: str) -> LMError:
        """The error of a run that ends without an answer that fits."""
        told = f": {self.problem}" if self.problem else ""
        return LMError(f"{why}, and no answer fits response_format{told}", kind="schema")
