"""A model that is any async function of the caller's."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

from ..caught import described, is_async, is_own
from ..errors import ConfigurationError, LMError
from .base import LMClient, LMReply, LMRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class CallableClient(LMClient):
    """Asks `async def function(messages) -> str`, where `messages` are dicts with "role" and "content".

    The function may return an `LMReply` instead, to say what it used. What it raises becomes an `LMError` that is not
    retried, with the exception as its cause; an `LMError` of its own passes as it is.
    """

    burst: ClassVar[int | None] = 256

    def __init__(self, function: Callable[..., Awaitable[str | LMReply]], *, model: str | None = None) -> None:
        if not is_async(function):
            raise ConfigurationError(
                f"the model function {_name(function)} is not async: write `async def {_spelt(function)}(messages)`, "
                "and inside it `await anyio.to_thread.run_sync(...)` for what blocks"
            )
        if not _takes_messages(function):
            raise ConfigurationError(
                f"the model function {_name(function)} must take one argument: "
                f"write `async def {_spelt(function)}(messages)`"
            )
        self.model = model or _name(function)
        self._function = function

    @property
    def account(self) -> str:
        return f"callable:{self.model}:{id(self._function):x}"

    async def acomplete(self, request: LMRequest) -> LMReply:
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        try:
            reply: Any = await self._function(messages)
        except LMError:
            raise
        except BaseException as error:
            if not is_own(error):
                raise
            raise LMError(f"{self.model} raised {described(error)}", kind="other") from error
        if isinstance(reply, str):
            return LMReply(text=reply)
        if isinstance(reply, LMReply):
            return reply
        raise LMError(f"{self.model} returned {type(reply).__name__}, not a str or an LMReply", kind="bad_reply")

    def __repr__(self) -> str:
        return f"<CallableClient {self.model}>"


def _takes_messages(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind([])
    except TypeError:
        return False
    except ValueError:  # it does not say what it takes
        return True
    return True


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)


def _spelt(function: Callable[..., Any]) -> str:
    name = _name(function)
    return name if name.isidentifier() else "model"  # a lambda has none
