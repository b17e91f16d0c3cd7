"""The door to environments: names, settings and their values are checked before anything starts."""

from __future__ import annotations

import importlib.util
import re
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from asyncrlm import AsyncRLM, Repl
from asyncrlm.environments import NAMES, Environment, environment
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
    assert made.cell_timeout == 3
    assert made.memory_limit == "1GB"
    assert made.workdir == tmp_path.resolve()
    assert environment(made) is made
    assert environment().name == "local"
    assert environment("local", {"cell_timeout": None, "max_processes": None}).max_processes is None


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


def test_a_workdir_that_holds_temporary_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared" / "mine").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "shared"))
    for folder in (tmp_path, tmp_path / "shared"):
        with pytest.raises(ConfigurationError, match=r"holds the folder of temporary files, .*shared"):
            environment("local", {"workdir": folder})
        environment("local", {"workdir": folder, "isolation": "none"})
    environment("local", {"workdir": tmp_path / "shared" / "mine"})


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


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("local", {"workdir": 5}, "^workdir=5: use a str, a Path or None, not int"),
        ("local", {"workdir": ""}, "^workdir='' is not a folder"),
        ("local", {"workdir": "/"}, "^workdir='/': cells write there"),
        ("local", {"read_paths": 5}, "^read_paths=5: use a list, of a str or a Path each, not int"),
        ("local", {"read_paths": [5]}, "^read_paths: use a list, of a str or a Path each"),
        ("local", {"read_paths": [""]}, "^read_paths: '' does not exist"),
        ("local", {"python": 5}, "^python=5: use a str, a Path or None"),
        ("local", {"python": "/nope"}, "^python='/nope' can't be run"),
        ("local", {"python": "/etc/passwd"}, "^python='/etc/passwd' can't be run"),
        ("local", {"memory_limit": 10**30}, '^memory_limit=1000+: use "1024TB" at most'),
        ("local", {"memory_limit": "9" * 400 + "TB"}, "^memory_limit='9+TB': use"),
        ("local", {"max_processes": 10**9}, "^max_processes=1000000000: use 1 to 4,000,000"),
        ("local", {"max_output": 10**30}, "^max_output=1000+: use 1 to"),
        ("local", {"setup_code": b"x"}, "^setup_code: use a str or None, not bytes"),
        ("docker", {"image": None}, "^image=None: use a str, not NoneType"),
        ("docker", {"pull": "sometimes"}, '^pull=\'sometimes\': use "missing", "always" or "never"'),
        ("docker", {"volumes": {"a": 5}}, "^volumes: use a dict with str keys, not dict"),
        ("docker", {"cpus": True}, "^cpus=True: use a number or None, not bool"),
        ("modal", {"cpu": (1, 2, 3)}, r"^cpu: use a number, \(a number, a number\) or None"),
        ("e2b", {"api_key": ["sk-1"]}, "^api_key: use a str or None, not list$"),
        ("daytona", {"name": 5}, "^sandbox_name=5: use a str"),
        ("ipython", {"kernel": 5}, "^kernel=5: use a str or None"),
    ],
)
def test_values_of_a_wrong_type_are_named(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        environment(name, kwargs)


def test_drivers_take_the_common_settings_as_they_are_listed() -> None:
    made = LocalEnvironment(cell_timeout=2, max_output=1000)
    assert (made.cell_timeout, made.max_output, made.memory_limit) == (2, 1000, "2GB")
    assert made == environment("local", {"cell_timeout": 2, "max_output": 1000})
    for name in NAMES:
        assert environment(name, {"cell_timeout": 2}).cell_timeout == 2
    with pytest.raises(ConfigurationError, match="cell_timeout='2': use a number or None"):
        LocalEnvironment(cell_timeout="2")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "local"])
def test_what_is_not_installed_is_told_by_the_constructor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    install = rf"environment '{name}' needs \w+, which is not installed: pip install 'asyncrlm\[{name}\]'"
    for make in (lambda: AsyncRLM("offline", environment=name), lambda: Repl(name)):
        with pytest.raises(ConfigurationError, match=install):
            make()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cell_timeout", r'a setting of the environment: environment_kwargs={"cell_timeout": …}'),
        ("isolation", 'environment_kwargs={"isolation": …}'),
        ("memory_limit", 'environment_kwargs={"memory_limit": …}'),
        ("pool_size", 'environment_kwargs={"pool_size": …}'),
        ("image", "of environment 'docker' or 'modal' or 'daytona'"),
        ("timeout", "did you mean 'max_timeout'?"),
        ("log_dir", "logger=RLMLogger(log_dir=…)"),
    ],
)
def test_a_setting_given_to_the_engine_is_told_its_place(name: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"unknown argument '{name}'.*{re.escape(hint)}"):
        AsyncRLM("offline", **{name: 1})
