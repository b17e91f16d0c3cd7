"""What the package is from outside: its names, what importing it costs, who imports whom inside."""

from __future__ import annotations

import ast
import graphlib
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import asyncrlm

PACKAGE = Path(asyncrlm.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

SURFACE = {
    "AsyncRLM", "RLM", "Repl", "RLMLogger", "Environment", "LocalEnvironment",
    "RemoteEnvironment", "Machine", "Confinement", "Sandbox", "Scope", "Settings", "Report", "Printed",
    "Prompts", "Chat", "Streaming", "EventStream", "BlockingChat", "BlockingStreaming", "BlockingEventStream",
    "RLMChatCompletion", "Web", "UsageSummary", "ModelUsageSummary", "REPLResult",
    "ApprovalRequest", "MCPServer", "LMClient", "LMRequest", "LMReply", "LMUsage", "Message", "Pacer",
    "RLMError", "ConfigurationError", "LimitError", "BudgetExceededError", "TimeoutExceededError",
    "TokenLimitExceededError", "SubcallLimitExceededError", "ErrorThresholdExceededError", "CancellationError",
    "SandboxLost", "ProtocolError", "LMError", "__version__",
}  # fmt: skip

MEMBERS: dict[str, set[str]] = {
    "AsyncRLM": {"aclose", "acompletion", "astream", "persistent", "session"},
    "RLM": {"close", "completion", "session", "stream"},
    "Repl": {"execute", "load", "report"},
    "Chat": {"aclose", "acompletion", "astream"},
    "BlockingChat": {"close", "completion", "stream"},
    "Streaming": set(),
    "EventStream": {"result"},
    "BlockingStreaming": set(),
    "BlockingEventStream": {"close", "result"},
    "Pacer": {"in_flight", "name", "waiting", "width"},
}
"""What a caller may use of the objects that do something; all else of them begins with an underscore."""

LAYERS = [
    {"cli", "__main__"},
    {"testing"},
    {"rlm", "sync", "chat", "blocking", "portal"},
    {"engine"},
    {"mcp"},
    {"environments"},
    {"repl"},
    {"lm"},
    {"observe"},
    {"ledger", "money", "events", "types", "errors", "clipping", "caught", "backend", "_version"},
]
"""From the door inward; each may import what stands below it."""


def test_the_public_names_are_these() -> None:
    assert set(asyncrlm.__all__) == SURFACE
    assert len(asyncrlm.__all__) == len(SURFACE)
    for name in asyncrlm.__all__:
        assert getattr(asyncrlm, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        asyncrlm.nonsense  # noqa: B018


def test_the_readme_names_what_is_public() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    versioned = readme.partition("**What is versioned.**")[2].partition("\n\n")[0]
    assert set(re.findall(r"`asyncrlm\.(\w+)`", versioned)) == set(dir(asyncrlm)) - SURFACE | {"__all__"}


@pytest.mark.parametrize("name", MEMBERS)
def test_the_public_members_are_these(name: str) -> None:
    cls = getattr(asyncrlm, name)
    found = {member for member in dir(cls) if not member.startswith("_")}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            found |= {node.attr} if not node.attr.startswith("_") else set()
    assert found == MEMBERS[name]


def _fresh(code: str) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE")}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return ran.stdout


SDKS = {"openai", "structlog", "typer", "click", "httpx", "httpx2", "aiohttp", "tenacity", "pydantic", "stamina"}


@pytest.mark.parametrize(
    "code",
    [
        "import asyncrlm",
        "import asyncrlm; asyncrlm.RLMError; asyncrlm.RLMLogger",
        "import asyncrlm; asyncrlm.AsyncRLM(backend='offline')",
    ],
)
def test_importing_loads_no_more_than_is_used(code: str) -> None:
    loaded = json.loads(_fresh(f"import json, sys; {code}; print(json.dumps(sorted(sys.modules)))"))
    assert SDKS.isdisjoint(loaded)


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def _layer(name: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if name in names)


def _imported(path: Path) -> set[str]:
    """All that a module imports, at its top, inside functions or for types only."""
    here = ("asyncrlm", *path.relative_to(PACKAGE).with_suffix("").parts)
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level]) + "." if node.level else ""
            module = f"{base}{node.module or ''}".rstrip(".")
            names = [f"{module}.{alias.name}" for alias in node.names]
        found.update(name for name in names if name.startswith("asyncrlm."))
    return found


def _imports(path: Path) -> set[str]:
    """The parts of the package that a module imports."""
    return {_home(name.split(".")[1]) for name in _imported(path)}


def _home(name: str) -> str:
    """A public name imported from the package itself counts as the module it lives in."""
    if name == "__version__":
        return "_version"
    if name in asyncrlm.__all__:
        return str(getattr(asyncrlm, name).__module__).split(".")[1]
    return name


@pytest.mark.parametrize("path", [p for p in MODULES if p.parent != PACKAGE or p.stem != "__init__"], ids=str)
def test_each_layer_imports_only_those_below(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for imported in _imports(path) - {part}:
        below = _layer(imported) > _layer(part)
        beside = imported in LAYERS[_layer(part)]
        assert below or beside, f"{part} imports {imported}, which stands above it"


def _named(path: Path) -> str:
    return ".".join(("asyncrlm", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


def test_no_modules_import_each_other() -> None:
    modules = {_named(path): path for path in MODULES if path.parent != PACKAGE or path.stem != "__init__"}

    def module(name: str) -> str | None:
        return name if name in modules else name.rpartition(".")[0] if name.rpartition(".")[0] in modules else None

    found = {name: {module(imported) for imported in _imported(path)} - {None} for name, path in modules.items()}
    graphlib.TopologicalSorter(found).prepare()


@pytest.mark.parametrize("path", sorted((PACKAGE / "repl" / "worker").glob("*.py")), ids=lambda p: p.name)
def test_the_worker_needs_the_standard_library_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] in sys.stdlib_module_names for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                assert (node.module or "").split(".")[0] in sys.stdlib_module_names
            else:
                assert node.level == 1, "the package may be loaded under any name"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_outgrows_its_concept(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= 400


@pytest.mark.parametrize(
    "module", ["testing.ScriptedLM", "errors.LMError", "events.Event", "environments.docker.prune"]
)
def test_public_modules_are_attributes(module: str) -> None:
    assert "True" in _fresh(f"import asyncrlm; print(callable(asyncrlm.{module}))")


def test_the_testing_extra_is_all_that_its_modules_need() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    extra, core = project["optional-dependencies"]["testing"], project["dependencies"]
    brought = {re.split(r"[\[>=<~ ]", requirement)[0] for requirement in (*extra, *core)}
    assert {*asyncrlm.testing.EnvironmentConformance.backends, "pytest"} - {"asyncio"} <= brought
    for path in (PACKAGE / "testing").rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        absolute = [node for node in tree.body if isinstance(node, ast.Import)]
        names = {alias.name.partition(".")[0] for node in absolute for alias in node.names}
        assert names - set(sys.stdlib_module_names) <= brought, path
