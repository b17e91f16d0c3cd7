"""Every example runs as it stands, offline."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

if TYPE_CHECKING:
    from types import ModuleType

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    keyless = {key: value for key, value in os.environ.items() if not key.endswith("_API_KEY")}
    return subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=keyless,
    )


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_quickstart() -> None:
    ran = run_example("quickstart.py")
    assert ran.returncode == 0, ran.stderr
    assert "behind the kitchen clock" in ran.stdout
    assert "turn 1/" in ran.stderr


def test_batch_of_questions_over_one_document(tmp_path: Path) -> None:
    ran = run_example("batch_questions.py")
    assert ran.returncode == 0, ran.stderr
    captain, cargo, harbour = ran.stdout.split("?\n")[1:]
    assert "Ada Brandt" in captain
    assert "lamp oil" in cargo
    assert "Bergen" in harbour
    document = tmp_path / "log.txt"
    document.write_text("The captain of the ship was Bo Ek.\n" * 2)
    ran = run_example("batch_questions.py", str(document))
    assert ran.returncode == 0, ran.stderr
    assert "Bo Ek" in ran.stdout


def test_custom_tools() -> None:
    ran = run_example("custom_tools.py")
    assert (ran.returncode, ran.stdout) == (0, "to order: lamp, rope\n"), ran.stderr


def test_recursion() -> None:
    ran = run_example("recursion.py")
    assert ran.returncode == 0, ran.stderr
    answer, *children = ran.stdout.splitlines()
    for drink in ("tea", "coffee", "milk", "rum"):
        assert drink in answer
    assert len(children) == 4
    assert all("child on offline" in line for line in children)


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
