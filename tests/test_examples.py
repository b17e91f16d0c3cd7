"""Every example runs as it stands, offline."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from asyncrlm import AsyncRLM
from asyncrlm.testing import ScriptedLM

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_leaks: None
) -> Callable[..., tuple[str, str]]:
    """Runs an example as `python examples/NAME` does; what it wrote to standard output and error."""
    for name in list(os.environ):
        if name.endswith("_API_KEY"):
            monkeypatch.delenv(name)

    def run(name: str, *arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        out, err = capsys.readouterr()
        return out, err

    return run


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_test() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {
        "quickstart.py",
        "batch_questions.py",
        "custom_tools.py",
        "recursion.py",
        "fastapi_app.py",
        "ssh_environment.py",
    }


def test_quickstart(run_example: Callable[..., tuple[str, str]]) -> None:
    out, err = run_example("quickstart.py")
    assert "behind the kitchen clock" in out
    assert "turn 1/" in err


def test_batch_of_questions_over_one_document(run_example: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    out, _ = run_example("batch_questions.py")
    captain, cargo, harbour = out.split("?\n")[1:]
    assert "Ada Brandt" in captain
    assert "lamp oil" in cargo
    assert "Bergen" in harbour
    document = tmp_path / "log.txt"
    document.write_text("The captain of the ship was Bo Ek.\nThe sky was blue.\n")
    out, _ = run_example("batch_questions.py", str(document))
    assert "Bo Ek" in out


def no_answer() -> ScriptedLM:
    return ScriptedLM(lambda request: "```repl\n1 / 0\n```")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_run_without_an_answer_is_none(monkeypatch: pytest.MonkeyPatch, anyio_backend: str) -> None:
    batch = load("batch_questions")
    monkeypatch.setattr(batch, "AsyncRLM", lambda **settings: AsyncRLM(no_answer(), max_iterations=1))
    (answer,) = await batch.ask_all("text", ["Why?"])
    assert answer.startswith("no answer: no answer after 1 turn and a last one; last error: ZeroDivisionError")
    module = load("fastapi_app")
    module.app.dependency_overrides[module.engine] = lambda: AsyncRLM(no_answer(), max_iterations=1)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(module.app), base_url="http://test") as client:
        reply = await client.post("/ask", json={"text": "x", "question": "y"})
    assert reply.status_code == 502
    assert "ZeroDivisionError" in reply.json()["detail"]


def test_custom_tools(run_example: Callable[..., tuple[str, str]]) -> None:
    assert run_example("custom_tools.py") == ("to order: lamp, rope\n", "")


def test_recursion(run_example: Callable[..., tuple[str, str]]) -> None:
    out, _ = run_example("recursion.py")
    answer, *children = out.splitlines()
    for drink in ("tea", "coffee", "milk", "rum"):
        assert drink in answer
    assert len(children) == 4
    assert all("child on offline" in line for line in children)


def test_another_machine(
    run_example: Callable[..., tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ "$1" != nowhere ]; do shift; done\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "Room 77777" in run_example("ssh_environment.py", "nowhere")[0]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_fastapi_handler(no_leaks: None, anyio_backend: str) -> None:
    module = load("fastapi_app")
    app = module.app
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=30) as client,
    ):
        replies: list[httpx.Response] = []

        async def ask(number: int) -> None:
            body = {"text": f"Room {number} is painted green. The sky is wide.", "question": "Which room is painted?"}
            replies.append(await client.post("/ask", json=body))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(ask, number)
            assert [reply.status_code for reply in replies] == [200] * 8
            for number in range(8):
                assert any(f"Room {number} is" in reply.json()["answer"] for reply in replies)
            late = await client.post("/ask", json={"text": "x", "question": "y", "max_timeout": 1e-6})
            assert late.status_code == 504
            assert "timeout" in late.json()["detail"]
            wrong = await client.post("/ask", json={"text": "x"})
            assert wrong.status_code == 422
