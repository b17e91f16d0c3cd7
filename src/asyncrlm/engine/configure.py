"""From a constructor's arguments to a `Configuration`: every argument checked, every mistake named."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..environments import environment as make_environment
from ..errors import ConfigurationError
from ..lm.asked import CacheMode, CacheSettings
from ..lm.pacing import Pacer
from ..lm.routing import Router
from ..repl.tools import HostTools
from .prompts import DEFAULT_PROMPTS
from .settings import Callbacks, Configuration, Limits, checked_limits

_LATER = {
    "persistent": "conversations come with a later release; until then pass what the next call needs in its prompt",
    "compaction": "compaction comes with a later release; until then give the root model a larger window or print less",
}


def configure(*, unknown: Mapping[str, Any], **given: Any) -> Configuration:
    """The checked configuration of `AsyncRLM(**given, **unknown)`.

    Raises:
        ConfigurationError: naming the wrong argument and the right ones.
    """
    _refuse_unknown(unknown, given)
    for name, why in _LATER.items():
        if given[name]:
            raise ConfigurationError(f"{name}=True: {why}")
    limits = checked_limits(Limits(), {name: given[name] for name in Limits.__struct_fields__})
    replies = _replies(given)
    router = Router.of(
        given["backend"],
        given["backend_kwargs"],
        given["other_backends"],
        given["other_backend_kwargs"],
        given["sampling_args"],
        given["sub_sampling_args"],
        needs_keys=replies is None or replies.mode != "replay",
    )
    tools = HostTools(_mapping("custom_tools", given["custom_tools"]))
    sub_tools = given["custom_sub_tools"]
    configuration = Configuration(
        router=router,
        environment=make_environment(given["environment"], _mapping("environment_kwargs", given["environment_kwargs"])),
        limits=limits,
        prompts=DEFAULT_PROMPTS,
        custom_system_prompt=_text("custom_system_prompt", given["custom_system_prompt"]),
        orchestrator=bool(given["orchestrator"]),
        user_prologue=_text("user_prologue", given["user_prologue"]),
        tools=tools,
        sub_tools=tools if sub_tools is None else HostTools(_mapping("custom_sub_tools", sub_tools)),
        callbacks=_callbacks(given),
        logger=_logger(given["logger"]),
        verbose=bool(given["verbose"]),
        pacer=_pacer(given["pacer"], router),
        tenant=checked_tenant(given["tenant"]),
        replies=replies,
    )
    refuse_unknown_prices(configuration, limits)
    return configuration


def refuse_unknown_prices(configuration: Configuration, limits: Limits) -> None:
    """A budget can't be kept with a model whose price nobody knows.

    Raises:
        ConfigurationError: naming the models and how to give their price.
    """
    if limits.max_budget is None:
        return
    unknown = [spec.model for spec in configuration.router.specs if spec.needs_price and spec.price is None]
    if unknown:
        raise ConfigurationError(
            f"max_budget needs a price for {', '.join(map(repr, unknown))}: give it with "
            'backend_kwargs={"price": {"input": …, "output": …}} in USD per million tokens '
            "(other_backend_kwargs likewise), or leave max_budget out"
        )


def _refuse_unknown(unknown: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name in unknown:
        if name == "depth":
            raise ConfigurationError("depth is internal: the engine counts it; max_depth limits it")
        near = difflib.get_close_matches(name, given, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigurationError(f"unknown argument {name!r}; {hint}known are: {', '.join(given)}")


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} must be a dict, got {type(value).__name__}")
    return value  # pyright: ignore[reportUnknownVariableType]


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ConfigurationError(f"{name} must be a str, got {type(value).__name__}")
    return value or None


def _callbacks(given: Mapping[str, Any]) -> Callbacks:
    names = Callbacks.__struct_fields__
    for name in names:
        if given[name] is not None and not callable(given[name]):
            raise ConfigurationError(f"{name} must be a function or a coroutine function, got {given[name]!r}")
    return Callbacks(**{name: given[name] for name in names})


def _pacer(pacer: Any, router: Router) -> Pacer | Mapping[str, Pacer] | None:
    if pacer is None or isinstance(pacer, Pacer):
        return pacer
    given = _mapping("pacer", pacer) if isinstance(pacer, Mapping) else {"": None}
    if not all(isinstance(each, Pacer) for each in given.values()):
        raise ConfigurationError("pacer must be a Pacer, or a dict of model name → Pacer")
    for name in given:
        if name not in router.names:
            raise ConfigurationError(f"pacer names the model {name!r}; known: {', '.join(router.names)}")
    return given


def _replies(given: Mapping[str, Any]) -> CacheSettings | None:
    modes: tuple[CacheMode, ...] = ("cache", "record", "replay")
    found: list[CacheSettings] = []
    for mode in modes:
        folder = given[mode]
        if folder is None:
            continue
        if not isinstance(folder, str | Path) or not str(folder):
            raise ConfigurationError(f"{mode} must be a folder, as a str or a Path, got {folder!r}")
        found.append(CacheSettings(Path(folder), mode))
    if len(found) > 1:
        raise ConfigurationError(f"{' and '.join(each.mode for each in found)} exclude one another: give one of them")
    return found[0] if found else None


def checked_tenant(tenant: Any) -> str | None:
    if tenant is not None and not isinstance(tenant, str):
        raise ConfigurationError(f"tenant must be a str, got {type(tenant).__name__}")
    return tenant


def _logger(logger: Any) -> Any:
    if logger is not None and not hasattr(logger, "for_tree"):
        raise ConfigurationError(
            f"logger must be an RLMLogger, e.g. RLMLogger(log_dir='logs'), got {type(logger).__name__}"
        )
    return logger
