"""The commands about the places where cells run."""

from __future__ import annotations

from typing import Annotated, Any

import anyio
import msgspec
import typer

from .exits import FAILED, exits, fail, write, write_json
from .given import Settings, number
from .given import settings as settings_of

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look after the places where cells run.")

_CHECKED = """
Exit status: 0 it can be used; 1 it can't (without NAME: one that is set up fails, or none can be used); 2 wrong usage.
"""
_PRUNED = """
Exit status: 0 nothing of crashed hosts is left; 1 it could not be looked for or removed; 2 wrong usage.
"""
Json = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]


@app.command(epilog=_CHECKED)
def check(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="An environment, such as docker; all if not given.")
    ] = None,
    settings: Settings = None,
    timeout: Annotated[float, number("SECONDS", "Seconds that each may take.")] = 120.0,
    as_json: Json = False,
) -> None:
    """Tell whether an environment can be used here, and what is missing.

    One sandbox is started, runs a cell and then a cell with a sub-call (which a function here answers: no model is
    asked), and is closed; each step is timed. At a vendor's that is a sandbox to be paid for.
    """
    with exits(as_json=as_json):
        if settings and name is None:
            raise typer.BadParameter("--set needs the NAME of the environment whose setting it is")
        from .checking import MISSING, USABLE, checks, told  # noqa: PLC0415 - `--help` needs no engine

        found: list[dict[str, Any]] = []

        async def run() -> None:
            async for result in checks(name, settings_of(settings), timeout):
                found.append(msgspec.to_builtins(result))
                if not as_json:
                    write(told(result))

        anyio.run(run)
        if as_json:
            write_json(found)
        states = {result["state"] for result in found}
        fine = USABLE in states and states <= {USABLE, MISSING}
        raise SystemExit(0 if fine else FAILED)


@app.command(epilog=_PRUNED)
def prune(
    docker_host: Annotated[
        str | None, typer.Option(metavar="URL", help="The Docker Engine; as `docker` finds it if not given.")
    ] = None,
    docker_context: Annotated[
        str | None, typer.Option(metavar="NAME", help="A context of the `docker` command.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove what crashed processes of this machine left: containers, and the folders of local workers.

    What belongs to a process that lives, or to another machine, stays. Sandboxes at a vendor's end by themselves.
    """
    with exits(as_json=as_json):
        if docker_host and docker_context:
            raise typer.BadParameter("--docker-host and --docker-context both name an engine: use one of them")
        from .pruning import pruned  # noqa: PLC0415 - as above

        removed, problem = anyio.run(pruned, docker_host, docker_context)
        if as_json:
            write_json({"removed": removed, "problem": problem})
        elif removed:
            write("\n".join(f"removed {what}" for what in removed))
        elif problem is None:
            write("nothing to remove")
        if problem is not None:
            fail(problem, FAILED)
