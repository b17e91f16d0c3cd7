"""The door to environments: names, settings and their values are checked before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncrlm.environments import Environment, environment
from asyncrlm.environments.local import LocalEnvironment
from asyncrlm.environments.units import parse_bytes
from asyncrlm.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_name_and_settings_make_an_environment(tmp_path: Path) -> None:
    made = environment(
        "local", {"cell_timeout": 3, "memory_limit": "1GB", "workdir": str(tmp_path), "read_paths": [tmp_path]}
    )
    assert isinstance(made, LocalEnvironment)
    assert made.settings.cell_timeout == 3
    assert made.settings.memory_limit == "1GB"
    assert made.workdir == tmp_path.resolve()
    assert environment(made) is made
    assert environment().name == "local"
    assert environment("local", {"cell_timeout": None, "max_processes": None}).settings.max_processes is None


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"memory": 1}, "no setting 'memory'; it has .*memory_limit"),
        ({"_mode": "walk"}, "no setting '_mode'"),
        ({"settings": 1}, "no setting 'settings'"),
        ({"memory_limit": "2 apples"}, "memory_limit='2 apples'.*2GB"),
        ({"memory_limit": -1}, "memory_limit=-1"),
        ({"memory_limit": True}, "memory_limit"),
        ({"max_file_size": "0"}, "max_file_size='0'"),
        ({"cell_timeout": 0}, "cell_timeout=0"),
        ({"cell_timeout": float("nan")}, "cell_timeout=nan"),
        ({"cell_timeout": "soon"}, "cell_timeout"),
        ({"max_processes": 0}, "max_processes=0"),
        ({"max_output": 0}, "max_output=0"),
        ({"isolation": "some"}, "isolation='some': use \"auto\""),
        ({"read_paths": "/tmp"}, "use a list"),
        ({"read_paths": ["/nowhere/at/all"]}, "read_paths: '/nowhere/at/all' does not exist"),
        ({"workdir": "/nowhere/at/all"}, "workdir='/nowhere/at/all' is not a folder"),
        ({"workdir": __file__}, "is not a folder"),
        ({"pool_size": -1}, "pool_size=-1: use a whole number"),
        ({"pool_size": True}, "pool_size=True"),
        ({"pool_size": "many"}, "pool_size=.many."),
    ],
)
def test_what_can_not_be_is_refused_and_says_why(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        environment("local", kwargs)


def test_unknown_names_and_misplaced_settings() -> None:
    with pytest.raises(ConfigurationError, match="unknown environment 'moon'; there is 'local', 'ipython', 'docker'"):
        environment("moon")
    with pytest.raises(ConfigurationError, match="has its settings already"):
        environment(LocalEnvironment(), {"cell_timeout": 1})
    assert issubclass(LocalEnvironment, Environment)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1.5MB", 3 << 19),
        ("10k", 10240),
        ("7", 7),
        (9, 9),
        ("1TB", 1 << 40),
        (None, None),
    ],
)
def test_sizes(text: Any, size: int | None) -> None:
    assert parse_bytes("x", text) == size
