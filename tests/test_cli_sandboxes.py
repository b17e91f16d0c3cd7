"""`asyncrlm sandboxes`: whether environments can be used here, and what crashed hosts left."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import httpx
import pytest

from asyncrlm.cli import checking
from asyncrlm.environments.owners import LABEL, owner_labels

from . import test_cli
from .docker_engine import IMAGE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .test_cli import Ran

    Command = Callable[..., Ran]

cli = test_cli.cli
STEPS = {"create", "start", "first_cell", "subcall", "close"}


# ---- check ----


def test_an_environment_that_can_be_used(no_leaks: None, cli: Command) -> None:
    ran = cli("sandboxes", "check", "local")
    assert (ran.status, ran.err) == (0, "")
    first, steps, *_ = ran.out.splitlines()
    assert first.startswith("local: can be used (Python 3.")
    for step in ("create ", "start ", "first cell ", "sub-call ", "close "):
        assert step in steps


def test_json_has_the_seconds_of_each_step_and_what_is_in_force(cli: Command) -> None:
    ran = cli("sandboxes", "check", "local", "--json", "--set", "isolation=none", "--set", "max_processes=null")
    (found,) = json.loads(ran.out)
    assert (ran.status, found["state"], found["problem"], found["failed_step"]) == (0, "usable", None, None)
    assert set(found["seconds"]) == STEPS
    assert all(seconds > 0 for seconds in found["seconds"].values())
    assert found["isolation"]["network"] is None
    shown = cli("sandboxes", "check", "local", "--set", "isolation=none").out
    assert "not held: read_outside, write_outside, network" in shown


@pytest.mark.parametrize(("name", "sdk"), [("docker", "aiodocker"), ("modal", "modal"), ("e2b", "e2b")])
def test_a_missing_sdk_is_told_with_what_to_install(
    cli: Command, monkeypatch: pytest.MonkeyPatch, name: str, sdk: str
) -> None:
    monkeypatch.setitem(sys.modules, sdk, None)  # type: ignore[arg-type]
    ran = cli("sandboxes", "check", name)
    assert (ran.status, ran.err) == (1, "")
    assert f"{name}: can't be used yet" in ran.out
    assert f"pip install 'asyncrlm[{name}]'" in ran.out


def test_a_missing_engine_is_told_with_what_to_do(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiodocker")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    ran = cli("sandboxes", "check", "docker", "--json")
    (found,) = json.loads(ran.out)
    assert (ran.status, found["state"], found["failed_step"]) == (1, "missing", "create")
    assert "no Docker Engine answers at unix:///nowhere.sock (DOCKER_HOST)" in found["problem"]
    assert found["seconds"] == {}


def test_all_are_tried_and_what_is_not_set_up_is_no_failure(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "NAMES", ("docker", "local"))
    monkeypatch.setitem(sys.modules, "aiodocker", None)  # type: ignore[arg-type]
    ran = cli("sandboxes", "check")
    assert ran.status == 0
    assert "docker: can't be used yet" in ran.out
    assert "local: can be used" in ran.out
    monkeypatch.setattr(checking, "NAMES", ("docker",))
    assert cli("sandboxes", "check").status == 1


@pytest.mark.parametrize(
    ("setting", "step"),
    [
        ("setup_code=while True: pass", "first cell"),
        ("setup_code=def llm_query(prompt): return 'other'", None),  # restored before the cell
        ("setup_code=print = len", "first cell"),
    ],
)
def test_what_does_not_work_is_told_with_the_step(cli: Command, setting: str, step: str | None) -> None:
    ran = cli("sandboxes", "check", "local", "--timeout", "3", "--set", setting)
    assert "Traceback" not in ran.err
    if step is None:
        assert ran.status == 0
    else:
        assert ran.status == 1
        assert ran.out.startswith("local: does not work (Python 3.")
        assert f"  {step}: " in ran.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "unknown environment 'nowhere'"),
        (("local", "--set", "colour=1"), "no setting 'colour'"),
        (("local", "--set", "colour"), "--set SETTING=VALUE"),
        (("--set", "image=x"), "NAME"),
    ],
)
def test_wrong_usage(cli: Command, arguments: tuple[str, ...], said: str) -> None:
    ran = cli("sandboxes", "check", *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert said in ran.err


@pytest.mark.soak
def test_a_container_can_be_used(cli: Command, docker_host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiodocker")
    monkeypatch.setenv("DOCKER_HOST", docker_host)
    ran = cli("sandboxes", "check", "docker", "--json", "--set", 'tmp_size="64MB"')
    (found,) = json.loads(ran.out)
    assert (ran.status, found["problem"], set(found["seconds"])) == (0, None, STEPS)
    assert found["isolation"]["disk"] == "a read-only root, a sized /tmp"


# ---- prune ----


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _homes(folder: Path) -> tuple[Path, Path, int]:
    """One of a host that was killed, one of a host that lives, and the lock that the second has."""
    for name in ("asyncrlm-dead", "asyncrlm-alive"):
        (folder / name).mkdir()
        (folder / name / "lock").touch()
    lock = os.open(folder / "asyncrlm-alive" / "lock", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder / "asyncrlm-dead", folder / "asyncrlm-alive", lock


def test_folders_of_crashed_hosts_are_removed_and_no_others(
    cli: Command, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    dead, alive, lock = _homes(temporary)
    try:
        ran = cli("sandboxes", "prune")
    finally:
        os.close(lock)
    assert ran.out == f"removed folder {dead}\n"
    assert (dead.exists(), alive.exists()) == (False, True)
    if ran.status:  # an engine that does not answer may still have containers
        assert "no Docker Engine answers" in ran.err


def test_without_the_sdk_there_is_nothing_to_ask_an_engine(
    cli: Command, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiodocker", None)  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert cli("sandboxes", "prune") == (0, "nothing to remove\n", "")
    ran = cli("sandboxes", "prune", "--docker-host", "unix:///nowhere.sock", "--json")
    assert (ran.status, json.loads(ran.out)["removed"]) == (1, [])
    assert "pip install 'asyncrlm[docker]'" in ran.err


def test_containers_of_crashed_hosts_are_removed(cli: Command, docker_host: str, temporary: Path) -> None:
    pytest.importorskip("aiodocker")
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine = owner_labels()
    transport = httpx.HTTPTransport(uds=docker_host.removeprefix("unix://"))
    with httpx.Client(transport=transport, base_url="http://docker", timeout=60) as http:
        for name, labels in (("stray", mine | {f"{LABEL}.process": f"{gone.pid}:1"}), ("kept", mine)):
            body = {"Image": IMAGE, "Cmd": ["sleep", "100"], "Labels": labels}
            http.post("/containers/create", params={"name": name}, json=body).raise_for_status()
        try:
            ran = cli("sandboxes", "prune", "--docker-host", docker_host, "--json")
        finally:
            http.delete("/containers/kept").raise_for_status()
        assert http.get("/containers/stray/json").status_code == 404
    assert (ran.status, json.loads(ran.out)) == (0, {"removed": ["container stray"], "problem": None})


def test_one_engine_at_a_time(cli: Command) -> None:
    ran = cli("sandboxes", "prune", "--docker-host", "unix:///x", "--docker-context", "y")
    assert ran.status == 2
    assert "use one of them" in ran.err
