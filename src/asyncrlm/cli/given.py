"""What options are given, read: numbers with their bounds, prices, settings of environments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
import typer

from ..environments import Environment, environment
from ..errors import ConfigurationError
from .exits import USAGE, fail

if TYPE_CHECKING:
    from collections.abc import Callable
    from enum import StrEnum

Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SETTING=VALUE",
        help="One of the environment's settings, such as image=python:3.12-slim; JSON, or else text. Again for more.",
    ),
]


def number(metavar: str, about: str, least: Literal[0, 1] = 0) -> Any:
    """An option that takes a number: whole if counted in N, seconds or US dollars else."""
    return typer.Option(metavar=metavar, help=about, parser=_at_least(least, int if metavar == "N" else float))


def _at_least(least: int, kind: type[int | float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = least - 1
        if not value >= least:
            raise typer.BadParameter(f"{text}: use {'a whole' if kind is int else 'a'} number, {least} or more")
        return value

    return number


def choice(kind: type[StrEnum], about: str) -> Any:
    """An option that takes one of a few names."""
    names = [each.value for each in kind]

    def chosen(text: str) -> StrEnum:
        if text not in names:
            raise typer.BadParameter(f"{text}: use {' or '.join(names)}")
        return kind(text)

    return typer.Option(metavar=f"[{'|'.join(names)}]", help=about, parser=chosen)


def price(option: str, text: str | None) -> tuple[float, float] | None:
    """US dollars per million tokens, in and out."""
    if text is None:
        return None
    try:
        entered, left = map(float, text.split(","))
    except ValueError:
        entered = left = -1.0
    if not (0 <= entered < float("inf") and 0 <= left < float("inf")):
        raise typer.BadParameter(f"{option} is two numbers, such as 0.25,2: US dollars per million tokens")
    return entered, left


def question(text: str | None) -> str | None:
    """A question, if there is one: an empty one is a mistake of a script."""
    if text is not None and not text.strip():
        raise typer.BadParameter("it is empty")
    return text


def settings(given: list[str] | None) -> dict[str, Any]:
    """What every `--set` gives."""
    settings: dict[str, Any] = {}
    for one in given or []:
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"--set {one}: use --set SETTING=VALUE")
        try:
            settings[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            settings[name] = value
    return settings


def place(name: str, given: list[str] | None) -> Environment:
    """The environment that `--environment` and every `--set` name."""
    try:
        return environment(name, settings(given))
    except ConfigurationError as error:
        fail(str(error).replace("environment_kwargs: ", "--set: "), USAGE)
