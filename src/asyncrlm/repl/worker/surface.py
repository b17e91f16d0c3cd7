"""The functions that a cell finds: sub-calls, tools, and what is there and left."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from . import codec
from .bounds import MAX_FRAME
from .lazytext import Text
from .replies import FailedReply, SubcallError, Texts, ready
from .replies import Text as ReplyText
from .wire import dump

if TYPE_CHECKING:
    from .calls import Calls
    from .folder import Open
    from .lazytext import Ask

TWIN = "__awaited__"
"""The attribute of a plain function that is its twin, the coroutine function that does the same."""
_Frame = dict[str, Any]


def check_prompt(prompt: Any, where: str = "prompt") -> None:
    """Raise TypeError or ValueError unless `prompt` is a prompt: text, or a list of messages."""
    if isinstance(prompt, str):
        if not prompt or prompt.isspace():
            raise ValueError(f"{where} is empty")
        return
    if not isinstance(prompt, (list, tuple)):
        hint = "; use str(...), json.dumps(...) or an f-string"
        if isinstance(prompt, (bytes, bytearray)):
            hint = "; decode it first"
        elif isinstance(prompt, Text):
            hint = "; pass a part of it, text[a:b], or pieces of text.chunks(size)"
        raise TypeError(
            f"{where} must be a str or a list of messages {{'role': ..., 'content': ...}}, not {type(prompt).__name__}"
            + hint
        )
    if not prompt:
        raise ValueError(f"{where} is empty")
    for index, message in enumerate(cast("Sequence[Any]", prompt)):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:  # pyright: ignore[reportUnknownMemberType]
            raise TypeError(
                f"{where}[{index}] must be a message {{'role': ..., 'content': ...}}, not {_describe(message)}"
            )
    if all(_is_blank(message["content"]) for message in cast("Sequence[Any]", prompt)):
        raise ValueError(f"{where} is empty")


def _is_blank(content: Any) -> bool:
    return content is None or (isinstance(content, str) and not content.strip())


def _describe(message: Any) -> str:
    if isinstance(message, str):
        return "a str (a batch of prompts goes to the _batched function)"
    return (
        f"{type(message).__name__}{f' with keys {sorted(map(str, message))[:5]}' if isinstance(message, dict) else ''}"  # pyright: ignore[reportUnknownArgumentType]
    )


def check_batch(prompts: Any, name: str) -> list[Any]:
    """The prompts of a batch as a list, each checked."""
    if isinstance(prompts, (str, bytes, dict)) or not isinstance(prompts, Iterable):
        raise TypeError(f"{name} takes a list of prompts, not {type(prompts).__name__}")  # pyright: ignore[reportUnknownArgumentType]
    batch = list(cast("Iterable[Any]", prompts))
    for index, prompt in enumerate(batch):
        check_prompt(prompt, f"prompts[{index}]")
        # Where a prompt may be too long, it is encoded once more rather than half the batch be sent and paid for.
        if isinstance(prompt, str) and len(prompt) * 12 > MAX_FRAME and len(dump(prompt)) > MAX_FRAME - 4096:
            raise ValueError(f"prompts[{index}] is too long to be sent: {len(prompt):,} characters")
    return batch


class Surface:
    """Makes the functions, bound to the calls of one worker."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.raise_errors = False
        """A failed sub-call raises."""

    def queries(self) -> dict[str, Callable[..., Any]]:
        """The eight functions that ask a model or a child."""
        out: dict[str, Callable[..., Any]] = {}
        for kind, what in (("llm", "a language model"), ("rlm", "a child that has its own REPL")):
            one, batch = self._async_one(kind), self._async_batch(kind)
            for function, twin, doc in (
                (self._one(kind), one, f"Ask {what} and wait for its reply."),
                (self._batch(kind), batch, f"Ask {what} each of the prompts, all at once; the replies in order."),
                (one, None, f"Ask {what}; to be awaited."),
                (batch, None, f"Ask {what} each of the prompts; to be awaited; the replies in order."),
            ):
                name = function.__name__.replace("query", f"{kind}_query")
                out[name] = _named(function, name, doc, twin)
        return out

    def _one(self, kind: str) -> Callable[..., Any]:
        def query(prompt: Any, model: str | None = None, *, schema: Any = None) -> Any:
            check_prompt(prompt)
            return self._text(self._calls.call((prompt,), _encoder(kind, model, schema))[0])

        return query

    def _async_one(self, kind: str) -> Callable[..., Any]:
        async def aquery(prompt: Any, model: str | None = None, *, schema: Any = None) -> Any:
            check_prompt(prompt)
            return self._text((await self._calls.acall((prompt,), _encoder(kind, model, schema)))[0])

        return aquery

    def _batch(self, kind: str) -> Callable[..., Any]:
        def query_batched(prompts: Any, model: str | None = None, *, schema: Any = None) -> Any:
            batch = check_batch(prompts, f"{kind}_query_batched")
            return self._texts(self._calls.call(batch, _encoder(kind, model, schema)))

        return query_batched

    def _async_batch(self, kind: str) -> Callable[..., Any]:
        async def aquery_batched(prompts: Any, model: str | None = None, *, schema: Any = None) -> Any:
            batch = check_batch(prompts, f"a{kind}_query_batched")
            return self._texts(await self._calls.acall(batch, _encoder(kind, model, schema)))

        return aquery_batched

    def _text(self, reply: _Frame) -> Any:
        if reply.get("error") is None:
            return _value(reply)
        if self.raise_errors or reply.get("raises"):
            raise _subcall_error(reply)
        return _failed(reply)

    def _texts(self, replies: list[_Frame]) -> Texts:
        texts = Texts([_value(reply) if reply.get("error") is None else _failed(reply) for reply in replies])
        for reply in replies:
            if reply.get("error") is not None and (self.raise_errors or reply.get("raises")):
                raise _subcall_error(reply, texts)
        return texts

    def limits(self) -> Any:
        """What is left of the limits: money, tokens, calls, seconds; None where there is no limit."""
        return codec.decode(self._calls.call((None,), lambda _: '"kind":"limits"')[0].get("value"))

    def counter(self, key: str) -> Ask:
        """What asks the host where the characters of a file are."""

        def ask(have: int, nbytes: int | None, character: int | None) -> tuple[bytes, str]:
            counts, order = codec.decode(self._file(key, ["index", have, nbytes, character]).get("value"))
            return counts, order

        return ask

    def opener(self, key: str) -> Open:
        """What asks the host for a file of a folder: gives a descriptor, or else a path of this sandbox."""

        def ask(number: int) -> tuple[int, str]:
            reply = self._file(key, ["open", number])
            return (reply["fd"], "") if "fd" in reply else (-1, codec.decode(reply.get("value")))

        return ask

    def _file(self, key: str, question: list[Any]) -> _Frame:
        fields = f'"kind":"file","name":{dump(key)},"args":{dump(question)}'
        reply = self._calls.call((fields,), str)[0]
        if reply.get("error") is not None:
            raise OSError(str(reply["error"]))
        return reply

    def tool(self, name: str, doc: str, *, awaitable: bool = False) -> Callable[..., Any]:
        """A function of the host, whose signature is the first line of `doc`; `awaitable`: so are its results."""

        def fields(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
            fields = f'"kind":"tool","name":{dump(name)}'
            if args:
                fields += f',"args":{dump(list(args), f"{name}() args")}'
            if kwargs:
                values = ",".join([f"{dump(key)}:{dump(value, f'{name}() {key}')}" for key, value in kwargs.items()])
                fields += f',"kwargs":{{{values}}}'
            return fields

        def result(reply: _Frame) -> Any:
            if reply.get("error") is not None:
                raise _tool_error(name, reply)
            value = codec.decode(reply.get("value"))
            return ready(value) if awaitable else value

        def tool(*args: Any, **kwargs: Any) -> Any:
            return result(self._calls.call((fields(args, kwargs),), str)[0])

        async def later(*args: Any, **kwargs: Any) -> Any:
            return result((await self._calls.acall((fields(args, kwargs),), str))[0])

        signature, _, text = doc.partition("\n\n")
        stub = _stub(signature)
        if stub is None:
            text = doc
        else:  # where `help` and `inspect` look for what a function takes
            tool.__dict__["__wrapped__"] = later.__dict__["__wrapped__"] = stub
        return _named(tool, name, text, _named(later, name, text))


def _named(
    function: Callable[..., Any], name: str, doc: str, twin: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """`function` as if a cell had defined it under `name`; `twin` is the coroutine function that does the same."""
    function.__qualname__ = function.__name__ = name
    function.__doc__ = doc or None
    function.__module__ = "__main__"
    if twin is not None:
        setattr(function, TWIN, twin)
    return function


class _Written:
    """An annotation, shown as it was written."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _stub(signature: str) -> Any:
    """A function that takes what `signature` says; None where that is not how Python would have it written."""
    name, _, rest = signature.partition("(")
    try:
        tree = ast.parse(f"from __future__ import annotations\ndef {name.rpartition('.')[2]}({rest}: ...")
        _, stub = tree.body
        if not isinstance(stub, ast.FunctionDef):
            return None
        for default in (*stub.args.defaults, *stub.args.kw_defaults):
            if default is not None:
                ast.literal_eval(default)
        names: dict[str, Any] = {}
        exec(compile(tree, "<tool>", "exec"), names)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    made = names[stub.name]
    made.__annotations__ = {name: _Written(text) for name, text in made.__annotations__.items()}
    return made


class HostObject:
    """Stands for an object of the host, whose functions are called there."""

    def __init__(self, name: str, functions: dict[str, Callable[..., Any]]) -> None:
        self.__dict__.update(functions)
        self.__dict__["__name__"] = name

    def __setattr__(self, attribute: str, value: Any) -> None:
        raise AttributeError(f"{self!r}; nothing of it can be set here")

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise AttributeError(f"{self!r}; it has no function {attribute!r}, and its data can't be read here")

    def __repr__(self) -> str:
        functions = [name for name in self.__dict__ if not name.startswith("__")]
        return f"<{self.__dict__['__name__']} is an object of the host; functions: {', '.join(functions)}>"


def _encoder(kind: str, model: Any, schema: Any) -> Callable[[Any], str]:
    if model is not None and not isinstance(model, str):
        raise TypeError(f"model must be the name of a model, not {type(model).__name__}")
    if hasattr(schema, "model_json_schema"):  # a class of pydantic's
        schema = schema.model_json_schema()
    elif isinstance(schema, type):
        raise TypeError(
            f"schema= is a JSON schema, such as {{'type': 'object', 'properties': {{...}}}}, or a pydantic model; "
            f"the class {schema.__name__} is neither"
        )
    rest = (f',"model":{dump(model)}' if model is not None else "") + (
        f',"schema":{dump(schema, "schema")}' if schema is not None else ""
    )
    head = f'"kind":"{kind}"{rest},"prompt":'

    def encode(prompt: Any) -> str:
        return head + dump(prompt, "prompt")

    return encode


def _value(reply: _Frame) -> Any:
    value = reply.get("value")
    if type(value) is not str:
        value = codec.decode(value)
    return ReplyText(value) if type(value) is str else value


def _failed(reply: _Frame) -> FailedReply:
    return FailedReply(str(reply["error"]), reply.get("kind"), bool(reply.get("retryable")))


def _subcall_error(reply: _Frame, replies: list[Any] | None = None) -> SubcallError:
    return SubcallError(str(reply["error"]), reply.get("kind"), bool(reply.get("retryable")), replies)


def _tool_error(name: str, reply: _Frame) -> Exception:
    """The exception a tool raised, of its own class where that is a builtin one: cells catch `ValueError`."""
    error, kind = str(reply["error"]), reply.get("kind")
    known = getattr(builtins, kind, None) if isinstance(kind, str) else None
    if isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, SubcallError):
        try:
            return known(error) if (args := reply.get("args")) is None else known(*map(codec.decode, args))
        except Exception:  # one that takes more than a text, such as ExceptionGroup
            pass
    return RuntimeError(f"{name}: {kind}: {error}" if kind else f"{name}: {error}")
