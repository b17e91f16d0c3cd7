"""Which model answers what: the root model, the sub models by depth, and those asked for by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..errors import ConfigurationError, LMError
from .clients import Backend, ClientSpec, client_spec


class Router:
    """Chooses among the models of one `AsyncRLM`.

    `root` runs the loop, of children too. `others` are the sub models: the first answers what the root run asks
    (depth 1), the second what its children ask (depth 2), the last all that is deeper. Without any, the root model
    answers all.
    """

    def __init__(self, root: ClientSpec, others: Sequence[ClientSpec] = ()) -> None:
        self._root = root
        self._others = tuple(others)

    @classmethod
    def of(
        cls,
        backend: Backend,
        backend_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        other_backends: Sequence[Backend] | None = None,
        other_backend_kwargs: Sequence[Mapping[str, Any]] | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        sub_sampling_args: Mapping[str, Any] | None = None,
        *,
        needs_keys: bool = True,
    ) -> Router:
        """The router for the arguments that `AsyncRLM` takes under these names.

        Without `needs_keys` nothing will be asked: a key that is not there is not missed.

        Raises:
            ConfigurationError: naming what would be right.
        """
        spec = client_spec if needs_keys else _spec_without_key
        root = spec(backend, backend_kwargs, sampling_args)
        if not other_backends:
            if other_backend_kwargs:
                raise ConfigurationError("other_backend_kwargs are given, but no other_backends")
            if not sub_sampling_args:
                return cls(root)
            return cls(root, [spec(backend, backend_kwargs, {**(sampling_args or {}), **sub_sampling_args})])
        if isinstance(other_backends, str):
            raise ConfigurationError(f"other_backends must be a list: [{other_backends!r}]")
        kwargs: Sequence[Mapping[str, Any] | None] = other_backend_kwargs or [None] * len(other_backends)
        if isinstance(kwargs, Mapping) or len(kwargs) != len(other_backends):
            raise ConfigurationError(f"other_backend_kwargs must be a list of {len(other_backends)} dicts, one each")
        pairs = zip(other_backends, kwargs, strict=True)
        return cls(root, [spec(other, given, sub_sampling_args) for other, given in pairs])

    @property
    def specs(self) -> tuple[ClientSpec, ...]:
        """All models, the root's first."""
        return (self._root, *self._others)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that `model=` may be, without repeats, the root's first."""
        return tuple(dict.fromkeys(spec.model for spec in self.specs))

    def root(self, model: str | None = None) -> ClientSpec:
        """The model that runs a loop: the root model, for a child too unless its `model` says another.

        Raises:
            LMError: of kind "unknown_model", if `model` is not among `names`.
        """
        return self._root if model is None else self._named(model, self._root)

    def sub(self, depth: int, model: str | None = None) -> ClientSpec:
        """The model for a sub-call of `depth`: 1 for one that the root run makes, one more for each level below.

        Raises:
            LMError: of kind "unknown_model", listing the known ones, if `model` is not among `names`.
        """
        by_depth = self._others[min(max(depth, 1), len(self._others)) - 1] if self._others else self._root
        return by_depth if model is None else self._named(model, by_depth)

    def _named(self, model: str, first: ClientSpec) -> ClientSpec:
        for spec in (first, *self._others, self._root):
            if model in (spec.model, f"{spec.backend}/{spec.model}"):
                return spec
        raise LMError(f"unknown model {model!r}; known: {', '.join(self.names)}", kind="unknown_model")

    def __repr__(self) -> str:
        return f"<Router {', '.join(self.names)}>"


def _spec_without_key(
    backend: Backend,
    backend_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    sampling_args: Mapping[str, Any] | None,
) -> ClientSpec:
    try:
        return client_spec(backend, backend_kwargs, sampling_args)
    except ConfigurationError as error:
        kwargs: Any = backend_kwargs
        named: Any = backend
        if isinstance(named, list | tuple):
            kwargs = [_with_key(each) for each in kwargs or [None] * len(cast("Sequence[Any]", named))]
        else:
            kwargs = _with_key(kwargs)
        try:
            return client_spec(cast("Backend", named), kwargs, sampling_args)
        except ConfigurationError:
            raise error from None


def _with_key(kwargs: Any) -> dict[str, Any]:
    return {"api_key": "none", **(kwargs or {})}
