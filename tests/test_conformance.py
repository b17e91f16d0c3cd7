"""Every environment does what every environment must do; see `conformance_environments` for which there are."""

from __future__ import annotations

import pytest

from .conformance_environments import PLACES

pytestmark = pytest.mark.soak

for _name, _suite in PLACES.items():
    globals()[f"Test{_name}"] = type(f"Test{_name}", (_suite,), {"__module__": __name__})
