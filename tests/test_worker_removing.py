"""What cells leave is removed, whatever it is, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from asyncrlm.repl.worker.removing import remove_tree

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX only")


def nest(folder: Path, depth: int) -> None:
    """Nest folders deeper than any path may be long."""
    here = os.open(folder, os.O_RDONLY)
    try:
        for _ in range(depth):
            os.mkdir("d", dir_fd=here)
            os.close(os.open("f", os.O_CREAT, dir_fd=here))
            below = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
    finally:
        os.close(here)


def test_folders_nested_deeper_than_python_calls(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    nest(home, 1200 + sys.getrecursionlimit() // 5)
    before = len(os.listdir("/dev/fd"))
    assert remove_tree(home)
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/dev/fd")) == before
    assert remove_tree(home)


def test_wide_odd_and_locked_folders(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for name in ("a/b/c", "e/" + "x" * 255, "\n/ ", "locked/inside"):
        (home / name).mkdir(parents=True)
        (home / name / "file").touch()
    os.mkfifo(home / "fifo")
    (home / "locked").chmod(0)
    assert remove_tree(home)
    assert os.listdir(tmp_path) == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    home = tmp_path / "home"
    (home / "deep").mkdir(parents=True)
    (home / "link").symlink_to(outside)
    (home / "deep" / "link").symlink_to(outside / "kept")
    (home / "deep" / "up").symlink_to("..")
    assert remove_tree(home)
    assert (outside / "kept").is_dir()
    link = tmp_path / "home"
    link.symlink_to(outside)
    assert not remove_tree(link)
    assert (outside / "kept").is_dir()


def test_what_can_not_be_removed_keeps_the_name_that_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / "a" / "b").mkdir(parents=True)
    (home / "a" / "b" / "busy").touch()
    (home / "lock").touch()
    real = os.unlink

    def unlink(name: str, *, dir_fd: int) -> None:
        if name == "busy":
            raise OSError("it is in use")
        real(name, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        assert not remove_tree(home, last="lock")
    assert (home / "lock").exists()
    assert remove_tree(home, last="lock")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="mounts take root on Linux")
def test_what_is_mounted_inside_stays(tmp_path: Path) -> None:
    """In a namespace of its own, so that nothing is mounted for others."""
    script = """
import ctypes, os, sys
from asyncrlm.repl.worker import namespaces, removing
home, outside = sys.argv[1:]
try:
    namespaces.unshare(namespaces.NEWNS)
    namespaces._mount(None, "/", None, 0x44000)
    namespaces._mount(os.fsencode(outside), home + "/a/mounted", None, 0x1000)
except OSError:
    sys.exit(77)
sys.exit(removing.remove_tree(home) or not os.path.exists(outside + "/kept"))
"""
    (tmp_path / "home" / "a" / "mounted").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").touch()
    arguments = [sys.executable, "-c", script, str(tmp_path / "home"), str(tmp_path / "outside")]
    status = subprocess.run(arguments, check=False).returncode
    if status == 77:
        pytest.skip("no mounts are to be had here")
    assert status == 0
    assert remove_tree(tmp_path / "home")
