"""From a constructor's arguments to a `Configuration`: every argument checked, every mistake named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ..caught import is_async
from ..environments import Environment
from ..environments import environment as make_environment
from ..environments.units import parse_bytes
from ..errors import ConfigurationError
from ..lm.cache.asked import CacheMode, CacheSettings
from ..lm.pacing import Pacer
from ..lm.routing import Router
from ..lm.spec import checked_sampling
from ..mcp.server import checked_servers
from ..repl.tools import HostTools
from ..repl.web import Web
from .compaction import by_summary
from .hints import got, of_call, unknown_argument
from .prompts import DEFAULT_PROMPTS, Prompts
from .settings import Callbacks, Compactor, Configuration, Limits, checked_limits


def configure(*, nameless: tuple[Any, ...], unknown: Mapping[str, Any], **given: Any) -> Configuration:
    """The checked configuration of `AsyncRLM(**given, **unknown)` with `nameless` beyond the arguments it takes so.

    Raises:
        ConfigurationError: naming the wrong argument and the right ones.
    """
    if nameless:
        raise ConfigurationError(
            "only backend, backend_kwargs, environment and environment_kwargs, in this order, may be given without "
            "their names; give the others as name=value"
        )
    _refuse_unknown(unknown, given)
    flags = {name: _flag(name, given[name]) for name in ("orchestrator", "verbose", "persistent")}
    limits = checked_limits(Limits(), {name: given[name] for name in Limits.__struct_fields__})
    replies = checked_replies(given)
    router = Router.of(
        given["backend"],
        given["backend_kwargs"],
        _list("other_backends", given["other_backends"], '["openai/gpt-5.4-mini"]'),
        _list("other_backend_kwargs", given["other_backend_kwargs"], '[{"model_name": …}]'),
        _sampling("sampling_args", given["sampling_args"]),
        _sampling("sub_sampling_args", given["sub_sampling_args"]),
        needs_keys=replies is None or replies.mode != "replay",
    )
    prompts = checked_prompts(given["prompts"])
    tools = HostTools(given["custom_tools"])
    sub_tools = given["custom_sub_tools"]
    configuration = Configuration(
        router=router,
        environment=checked_environment(given["environment"], given["environment_kwargs"]),
        limits=limits,
        prompts=prompts,
        custom_system_prompt=_text("custom_system_prompt", given["custom_system_prompt"]),
        orchestrator=flags["orchestrator"],
        user_prologue=_text("user_prologue", given["user_prologue"]),
        tools=tools,
        sub_tools=tools if sub_tools is None else HostTools(sub_tools, "custom_sub_tools"),
        servers=checked_servers(given["mcp_servers"]),
        approve=checked_function("approve", given["approve"]),
        callbacks=Callbacks(**{name: checked_function(name, given[name]) for name in Callbacks.__struct_fields__}),
        logger=_logger(given["logger"]),
        verbose=flags["verbose"],
        persistent=flags["persistent"],
        compactor=_compactor(given["compaction"], router, prompts),
        compaction_threshold=_share("compaction_threshold_pct", given["compaction_threshold_pct"]),
        pacer=checked_pacer(given["pacer"], router),
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
    models = [model for spec in configuration.router.specs for model in spec.each]
    unknown = dict.fromkeys(model.model for model in models if model.needs_price and model.price is None)
    if unknown:
        needs = f"max_budget needs a price for {', '.join(map(repr, unknown))}"
        raise ConfigurationError(
            f'{needs}: give it with backend_kwargs={{"price": {{"input": …, "output": …}}}} in USD per million tokens '
            "(other_backend_kwargs likewise), or leave max_budget out",
            argument="price",
            problem=needs,
        )


def _refuse_unknown(unknown: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name in unknown:
        if name == "depth":
            raise ConfigurationError("depth is internal: the engine counts it; max_depth limits it", argument=name)
        raise unknown_argument(name, given, elsewhere=of_call(()), of="constructor")


def check_call(root_prompt: Any, tags: Any) -> None:
    """What a call is given beside its prompt and its overrides.

    Raises:
        ConfigurationError: naming the right form.
    """
    _text("root_prompt", root_prompt)
    if tags is not None:
        checked_dict("tags", tags, '{"user": 7}')


def check_overrides(overrides: Mapping[str, Any], given: Iterable[str]) -> Mapping[str, Any]:
    """The overrides of one call, those checked that are no limits.

    Args:
        overrides: As the caller wrote them.
        given: The names that the constructor takes.

    Raises:
        ConfigurationError: naming the right form.
    """
    known = (*Limits.__struct_fields__, "sampling_args", "custom_tools", "tenant", "response_format", "lazy", "web")
    for name in overrides:
        if name not in known:
            raise unknown_argument(name, of_call(known), elsewhere=given, of="call")
    if not isinstance(overrides.get("lazy", False), bool):
        raise ConfigurationError("lazy is True or False: whether a text file stays a file in cells, whatever its size")
    checked_web(overrides.get("web"))
    return {**overrides, "sampling_args": _sampling("sampling_args", overrides.get("sampling_args"))}


def checked_dict(name: str, value: Any, example: str = '{"cell_timeout": 60}') -> Mapping[str, Any]:
    """`value`, or an empty dict for None.

    Raises:
        ConfigurationError: if it is none.
    """
    if value is None:
        return {}
    kind = type(value).__name__
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in cast("Mapping[Any, Any]", value)):
        raise ConfigurationError(f"{name} must be a dict with str keys, such as {example}, not {kind}")
    return cast("Mapping[str, Any]", value)


def checked_prompts(value: Any) -> Prompts:
    """What `prompts=` names; the default for None.

    Raises:
        ConfigurationError: naming what would be right.
    """
    prompts = DEFAULT_PROMPTS if value is None else value
    if not isinstance(prompts, Prompts):
        raise ConfigurationError(
            f"prompts must be a Prompts, such as msgspec.structs.replace(Prompts(), turn=…), {got(prompts)}"
        )
    return prompts


def checked_environment(value: Any, settings: Any) -> Environment:
    """The place that `environment=` and `environment_kwargs=` name.

    Raises:
        ConfigurationError: naming what would be right.
    """
    if not isinstance(value, (str, Environment)):
        raise ConfigurationError(f'environment must be a name such as "local", or an Environment, {got(value)}')
    place = make_environment(value, checked_dict("environment_kwargs", settings))
    place.check()
    return place


def _sampling(name: str, value: Any) -> Mapping[str, Any]:
    return checked_sampling(checked_dict(name, value, '{"temperature": 0}'))


def _list(name: str, value: Any, example: str) -> Sequence[Any] | None:
    if value is not None and not isinstance(value, (list, tuple)):
        raise ConfigurationError(f"{name} must be a list, such as {example}, not {type(value).__name__}")
    return cast("Sequence[Any] | None", value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False, not {type(value).__name__}")
    return value


def _compactor(value: Any, router: Router, prompts: Prompts) -> Compactor | None:
    if value is False:
        return None
    if value is not True and not is_async(value):
        raise ConfigurationError(
            "compaction must be True or False, or an `async def f(messages, ask) -> str` that makes one text of a "
            f"history, not {type(value).__name__}"
        )
    root = router.root()
    if root.window is None:
        raise ConfigurationError(
            f"compaction needs the window of {root.model!r}, which is not known: give it in tokens with "
            'backend_kwargs={"context_window": …}'
        )
    return by_summary(prompts.compaction) if value is True else value


def _share(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigurationError(f"{name} must be a number above 0 and at most 1, such as 0.85")
    return float(value)


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ConfigurationError(f"{name} must be a str, not {type(value).__name__}")
    return value or None


def checked_function(name: str, value: Any) -> Callable[..., Any] | None:
    """`value`, a callable or None.

    Raises:
        ConfigurationError: if it is neither.
    """
    if value is not None and not callable(value):
        raise ConfigurationError(f"{name} must be a function or a coroutine function, not {type(value).__name__}")
    return value


def checked_pacer(pacer: object, router: Router) -> Pacer | Mapping[str, Pacer] | None:
    """What `pacer=` names, for the models of `router`.

    Raises:
        ConfigurationError: naming what would be right.
    """
    if pacer is None or isinstance(pacer, Pacer):
        return pacer
    given = cast("Mapping[Any, Any]", pacer) if isinstance(pacer, Mapping) else {"": None}
    pacers = {str(name): each for name, each in given.items() if isinstance(each, Pacer)}
    if len(pacers) < len(given):
        raise ConfigurationError(f"pacer must be a Pacer, or a dict of model name → Pacer, {got(pacer)}")
    known = dict.fromkeys(each.model for spec in router.specs for each in spec.each)
    for name in pacers:
        if name not in known:
            raise ConfigurationError(f"pacer names the model {name!r}; known: {', '.join(known)}")
    return pacers


def checked_replies(given: Mapping[str, Any]) -> CacheSettings | None:
    """What `cache=`, `record=` and `replay=` name, at most one of them, and `cache_size=`.

    Raises:
        ConfigurationError: naming what would be right.
    """
    size = parse_bytes("cache_size", given["cache_size"])
    modes: tuple[CacheMode, ...] = ("cache", "record", "replay")
    found: list[CacheSettings] = []
    for mode in modes:
        folder = given[mode]
        if folder is None:
            continue
        if not isinstance(folder, str | Path) or not str(folder):
            got = "an empty str" if folder == "" else type(folder).__name__
            raise ConfigurationError(f"{mode} must be a folder, as a str or a Path, got {got}")
        if mode == "replay" and not Path(folder).is_dir():
            raise ConfigurationError(f"replay must be a folder that record= made; {str(folder)!r} is none")
        if Path(folder).exists() and not Path(folder).is_dir():
            raise ConfigurationError(f"{mode} must be a folder; {str(folder)!r} is a file")
        found.append(CacheSettings(Path(folder), mode, size if mode == "cache" else None))
    if len(found) > 1:
        raise ConfigurationError(f"{' and '.join(each.mode for each in found)} exclude one another: give one of them")
    return found[0] if found else None


def checked_web(web: Any) -> Web | None:
    """How documents of the web are fetched, as it was given.

    Raises:
        ConfigurationError: if that is no `Web`.
    """
    if web is None or isinstance(web, Web):
        return web
    raise ConfigurationError("web is a Web, such as Web(max_bytes=10_000_000): how an httpx.URL is fetched")


def checked_tenant(tenant: Any) -> str | None:
    if tenant is not None and not isinstance(tenant, str):
        raise ConfigurationError(f"tenant must be a str, got {type(tenant).__name__}")
    return tenant


def _logger(logger: Any) -> Any:
    if logger is not None and (isinstance(logger, type) or not callable(getattr(logger, "for_tree", None))):
        raise ConfigurationError(
            f"logger must be an RLMLogger, such as RLMLogger(log_dir='logs'), {got(cast('object', logger))}"
        )
    return logger
