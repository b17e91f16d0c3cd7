"""The commands and their options."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._version import __version__
from ..environments import NAMES
from .exits import exits
from .given import Settings, choice, number, place, price, question
from .sandboxes import app as sandboxes

if TYPE_CHECKING:
    from .ask import Detail

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(sandboxes, name="sandboxes")

_STATUS = """
Exit status: 0 an answer, 1 the run failed, 2 wrong usage or input, 124 --max-timeout was met, 130 interrupted.
"""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"asyncrlm {__version__}")
        raise typer.Exit


@app.callback()
def about(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Ask questions about texts far longer than a model's window."""


def _known(name: str) -> str:
    if name not in NAMES:
        raise typer.BadParameter(f"{name}: use one of {', '.join(NAMES)}")
    return name


Json = Annotated[bool, typer.Option("--json", help="Print the completion as JSON, without its trajectory.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress lines.")]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="All that happens: replies, code, what it prints; also where no terminal is."),
]


class LimitsMode(StrEnum):
    SOFT = "soft"
    HARD = "hard"


class OnLimit(StrEnum):
    RAISE = "raise"
    ANSWER = "answer"


class OnSubcallError(StrEnum):
    RETURN = "return"
    RAISE = "raise"


@app.command(epilog=_STATUS)
def run(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A text file, a folder, 'docs/*.md', an https:// address, - for standard input."
        ),
    ],
    asked: Annotated[
        str, typer.Option("--question", "-q", metavar="TEXT", help="What to find out about it.", callback=question)
    ],
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="openai, azure_openai, anthropic, gemini, portkey, openrouter, vercel, prime, vllm, ollama, lmstudio, "
            "llamacpp, llamacpp_local, or offline (no model, no network).",
        ),
    ] = "openai",
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The root model's name.")] = None,
    sub_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model that sub-calls go to; the root model if not given.")
    ] = None,
    base_url: Annotated[str | None, typer.Option(metavar="URL", help="Address of an OpenAI-compatible server.")] = None,
    root_price: Annotated[
        str | None,
        typer.Option(
            "--price", metavar="IN,OUT", help="US dollars per million tokens of the root model; for --max-budget."
        ),
    ] = None,
    sub_price: Annotated[str | None, typer.Option(metavar="IN,OUT", help="The same of --sub-model.")] = None,
    environment: Annotated[
        str, typer.Option(metavar="NAME", help=f"Where cells run: {', '.join(NAMES)}.", callback=_known)
    ] = "local",
    settings: Settings = None,
    max_iterations: Annotated[int | None, number("N", "Turns of the run.", least=1)] = None,
    max_depth: Annotated[int | None, number("N", "How deep runs nest; 0 asks the model directly.")] = None,
    max_budget: Annotated[float | None, number("USD", "US dollars for everything.")] = None,
    max_timeout: Annotated[float | None, number("SECONDS", "Seconds for everything.")] = None,
    max_tokens: Annotated[int | None, number("N", "Tokens for everything, input and output.")] = None,
    max_subcalls: Annotated[int | None, number("N", "Calls of models by cells.")] = None,
    max_errors: Annotated[int | None, number("N", "Turns in a row whose cells raise.", least=1)] = None,
    max_concurrent_requests: Annotated[int | None, number("N", "Requests in flight at once.", least=1)] = None,
    max_concurrent_subcalls: Annotated[int | None, number("N", "Live child runs per depth.", least=1)] = None,
    subcall_timeout: Annotated[
        float | None, number("SECONDS", "Seconds that one llm_query may take, retries included; inf for no limit.")
    ] = None,
    tool_timeout: Annotated[
        float | None, number("SECONDS", "Seconds that one call of a tool may take; inf for no limit.")
    ] = None,
    limits: Annotated[
        LimitsMode | None, choice(LimitsMode, "soft: at most the calls in flight over a limit; hard: never over.")
    ] = None,
    on_limit: Annotated[OnLimit | None, choice(OnLimit, "At a limit fail, or answer from what there is.")] = None,
    on_subcall_error: Annotated[
        OnSubcallError | None,
        choice(OnSubcallError, "A failed call is a text that says so, or an exception in the cell."),
    ] = None,
    lazy: Annotated[bool, typer.Option(help="Keep files out of memory, as those over 256 MB always are.")] = False,
    max_download: Annotated[
        str | None, typer.Option(metavar="SIZE", help="How large a document of the web may be; 1GB if not given.")
    ] = None,
    allow_private: Annotated[
        bool, typer.Option("--allow-private", help="Fetch from addresses that are not of the public internet too.")
    ] = False,
    log_dir: Annotated[str | None, typer.Option(metavar="FOLDER", help="Write a log of the run there.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Answer a question about a text.

    The answer goes to standard output, progress and errors to standard error.
    """
    with exits(as_json=as_json):
        from .ask import ask, backend_arguments, context_arguments, read_prompt  # noqa: PLC0415 - `--help` needs no engine

        arguments = {
            "environment": place(environment, settings),
            "max_iterations": max_iterations,
            "max_depth": max_depth,
            "max_budget": max_budget,
            "max_timeout": max_timeout,
            "max_tokens": max_tokens,
            "max_subcalls": max_subcalls,
            "max_errors": max_errors,
            "max_concurrent_requests": max_concurrent_requests,
            "max_concurrent_subcalls": max_concurrent_subcalls,
            "subcall_timeout": subcall_timeout,
            "tool_timeout": tool_timeout,
            "limits": limits,
            "on_limit": on_limit,
            "on_subcall_error": on_subcall_error,
        }
        given: dict[str, Any] = {
            name: value.value if isinstance(value, StrEnum) else value
            for name, value in arguments.items()
            if value is not None
        }
        given |= backend_arguments(
            backend,
            model=model,
            sub_model=sub_model,
            base_url=base_url,
            price=price("--price", root_price),
            sub_price=price("--sub-price", sub_price),
        )
        shown = _detail(quiet=quiet, verbose=verbose, by_itself=sys.stderr is not None and sys.stderr.isatty())
        ask(
            read_prompt(file),
            asked,
            given,
            name=file,
            log_dir=log_dir,
            progress=shown,
            as_json=as_json,
            overrides=context_arguments(lazy=lazy, max_download=max_download, allow_private=allow_private),
        )


@app.command(epilog=_STATUS)
def demo(
    asked: Annotated[
        str | None, typer.Option("--question", "-q", metavar="TEXT", help="Ask something else.", callback=question)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Watch a run without a key and without a network.

    A question is answered over the language reference that comes with Python. Loop, cells, parallel sub-calls and
    isolation are real; the model is the offline one, which is no language model: a fixed strategy that ranks sentences
    by the words they share with the question.
    """
    with exits(as_json=as_json):
        from .demo import run_demo  # noqa: PLC0415 - as above

        run_demo(asked, progress=_detail(quiet=quiet, verbose=verbose, by_itself=True), as_json=as_json)


def _detail(*, quiet: bool, verbose: bool, by_itself: bool) -> Detail | None:
    if quiet and verbose:
        raise typer.BadParameter("--quiet and --verbose exclude each other")
    return "full" if verbose else "brief" if by_itself and not quiet else None
