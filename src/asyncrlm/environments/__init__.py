"""Where cells run: one driver per kind of place, found by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from ..repl.sandbox import Environment, Exit, Printed, Report, Sandbox, Scope, Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NAMES", "Environment", "Exit", "Printed", "Report", "Sandbox", "Scope", "Settings", "environment"]

_DRIVERS = {
    "local": "asyncrlm.environments.local:LocalEnvironment",
    "ipython": "asyncrlm.environments.ipython:IPythonEnvironment",
    "docker": "asyncrlm.environments.docker:DockerEnvironment",
    "modal": "asyncrlm.environments.modal:ModalEnvironment",
    "daytona": "asyncrlm.environments.daytona:DaytonaEnvironment",
    "e2b": "asyncrlm.environments.e2b:E2BEnvironment",
    "prime": "asyncrlm.environments.prime:PrimeEnvironment",
}
NAMES = tuple(_DRIVERS)
"""Of all that can be asked for by name."""


def environment(environment: str | Environment = "local", kwargs: Mapping[str, Any] | None = None) -> Environment:
    """The environment of this name with the settings `kwargs`, or `environment` itself if it is one already.

    Raises:
        ConfigurationError: for an unknown name or setting, or a value that can't be; it says which there are.
    """
    if isinstance(environment, Environment):
        if kwargs:
            raise ConfigurationError(
                "environment_kwargs go with a name; an Environment object has its settings already"
            )
        return environment
    driver = _driver(environment)
    known = sorted(name for name in driver.__struct_fields__ if not name.startswith("_"))
    given = {driver.renamed.get(key, key): value for key, value in (kwargs or {}).items()}
    for name in given.keys() & driver.elsewhere.keys():
        raise ConfigurationError(f"environment_kwargs: {name}: {driver.elsewhere[name]}")
    if unknown := sorted(set(given) - set(known)):
        raise ConfigurationError(
            f"environment {environment!r} has no setting {', '.join(map(repr, unknown))}; it has {', '.join(known)}"
        )
    return driver(**given)


def takers(setting: str) -> list[str]:
    """The names of the environments that have this setting."""
    return [name for name in NAMES if setting in (*(driver := _driver(name)).__struct_fields__, *driver.renamed)]


def _driver(name: str) -> type[Environment]:
    place = _DRIVERS.get(name)
    if place is None:
        there = f"there is {', '.join(map(repr, _DRIVERS))}"
        raise ConfigurationError(f"unknown environment {name!r}; {there}, or pass an Environment object")
    module, _, driver = place.partition(":")
    return getattr(importlib.import_module(module), driver)


def __getattr__(name: str) -> Any:
    """A driver's module, loaded when it is first used."""
    if name in _DRIVERS or name == "remote":
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
