"""What every environment must do, as checks that ours pass and yours can run.

    import pytest

    from asyncrlm.testing import EnvironmentConformance


    class TestMine(EnvironmentConformance):
        @pytest.fixture
        def environment(self):
            return MyEnvironment()

pytest, which comes with `asyncrlm[testing]`, collects the checks of the subclass and runs each on asyncio and trio (see
`backends`). They use public doors only: `Repl` and `AsyncRLM`. What may differ from place to place is an attribute of
the class, see `Conformance`.
"""

from __future__ import annotations

from .base import Conformance
from .calls import Calls
from .cells import Cells
from .contexts import Contexts
from .deaths import Deaths
from .endings import Endings
from .output import Outputs
from .runs import Runs
from .tools import Tools

__all__ = ["Conformance", "EnvironmentConformance"]


class EnvironmentConformance(Cells, Outputs, Contexts, Calls, Tools, Runs, Deaths, Endings):
    """All checks of an environment. Subclass it under a name that begins with `Test` and give it an `environment`."""
