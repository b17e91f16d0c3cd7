"""Hand an event to everyone who listens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrlm.events import Event, Listener, ListenerFailed

from .log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable


def listener_name(listener: object) -> str:
    """How a listener or callback is called in `ListenerFailed`."""
    return str(getattr(listener, "__qualname__", None) or type(listener).__qualname__)


def dispatch(listeners: Iterable[Listener], event: Event) -> None:
    """Call each listener with `event`, in order.

    A listener that raises does not end the run and does not keep the others from hearing: it becomes a
    `ListenerFailed` event for the others. One that raises on `ListenerFailed` is only logged, so that two broken
    listeners can't call each other for ever.
    """
    listeners = list(listeners)
    for listener in listeners:
        try:
            listener(event)
        except Exception as error:  # noqa: BLE001 - whatever a user's listener raises is reported below
            _report(listener, error, event, [other for other in listeners if other is not listener])


def _report(listener: Listener, error: Exception, event: Event, others: list[Listener]) -> None:
    name = listener_name(listener)
    text = f"{type(error).__name__}: {error}"
    get_logger().warning("listener failed", listener=name, on=type(event).__name__, error=text)
    if isinstance(event, ListenerFailed):
        return
    failed = ListenerFailed(
        run_id=event.run_id, parent_id=event.parent_id, depth=event.depth, time=event.time, listener=name, error=text
    )
    dispatch(others, failed)
