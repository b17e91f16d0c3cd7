"""The frames between host and worker: JSON Lines, ASCII, one object a line, tagged by `t`.

The worker's side of the same frames is `worker/wire.py` (standard library only, plain dicts). `Value` fields hold what
`worker/codec.py` encodes; the host decodes them with the same module, which makes inert values only.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from .worker import codec
from .worker.bounds import CREDIT, MAX_CALLS, PROTOCOL_VERSION

Value = Any
"""JSON with the tags of `worker/codec.py`."""


class _Frame(Struct, kw_only=True, tag_field="t", omit_defaults=True):
    pass


# ---- host → worker ---------------------------------------------------------------------------------------------------


class Init(_Frame, tag="init"):
    """The first frame of the host, and one that comes again between cells says what holds from then on."""

    version: int = PROTOCOL_VERSION
    credit: int = CREDIT
    calls: int = MAX_CALLS
    raise_errors: bool = False
    """`on_subcall_error="raise"`: a failed sub-call raises SubcallError in the cell."""
    show_values: bool = False
    """Send a short repr of each variable with `done`, not only its type."""
    tools: dict[str, str] = field(default_factory=dict[str, str])
    """Host callables and what `help` says of them, the signature first; "name.function" for those of an object that
    stays on the host; values arrive as `load` frames."""
    awaitable: list[str] = field(default_factory=list[str])
    """Those of `tools` whose results cells may await, as of coroutine functions."""
    drop: list[str] = field(default_factory=list[str])
    """Names that are put back no more: tools that are not there any longer."""


class Load(_Frame, tag="load"):
    """Bind a variable, which is put back after each cell. `value`, `path` or `descriptor` says where it is from.

    `form`: "text" (UTF-8 with surrogatepass), "bytes", "json" (codec values), "pickle" (host → worker only),
    "code" (executed; the variable is what it binds under `name`), "documents" (an index and files), "lazy" (a file that
    stays one: `value` is what `file` calls name it by, its name and its bytes), "folder" (files that stay files:
    `value` names them all, the rest says where their index is), "binary" (an open file), "table" (`value` is its
    library and class, the rest says where its bytes are).
    """

    id: int
    name: str
    form: str = "json"
    value: Value | UnsetType = UNSET
    path: str | None = None
    """A file in the sandbox; the worker removes it once loaded."""
    descriptor: bool = False
    """The next descriptor that was passed to the worker."""
    also: str | None = None
    """Another name for the same value."""


class Execute(_Frame, tag="execute"):
    cell: int
    code: str


class Reply(_Frame, tag="reply"):
    """The answer to one call: a value or an error."""

    id: int
    value: Value | UnsetType = UNSET
    error: str | None = None
    """What the cell reads; for llm and rlm without the leading "Error: "."""
    kind: str | None = None
    """An `LMErrorKind`, "limit", "child", or for a tool the name of the exception's class."""
    retryable: bool = False
    descriptor: bool = False
    """The value is the next descriptor that was passed to the worker."""
    args: list[Value] | None = None
    """What the exception of a tool is made with, where its class is a builtin one."""
    raises: bool = False
    """Raise in the cell whatever `raise_errors` says (a permanent failure met again and again, a tool's exception)."""


class Dropped(_Frame, tag="dropped"):
    """These calls get no reply: they were cut off with their cell."""

    ids: list[tuple[int, int]]
    """First and last of each row of them."""


# ---- worker → host ---------------------------------------------------------------------------------------------------


class Ready(_Frame, tag="ready"):
    """The first frame of the worker."""

    version: int
    python: str
    in_force: dict[str, Any] = field(default_factory=dict[str, Any])


class Loaded(_Frame, tag="loaded"):
    """The outcome of one `load`."""

    id: int
    error: str | None = None


class Call(_Frame, tag="call", gc=False):
    """A cell asks the host: one frame an item; the items of a batch share a `group`.

    `kind` "llm" and "rlm" use `prompt`, `model`, `schema`; "tool" uses `name`, `args`, `kwargs`; "file", about a file
    of the host, `name` and `args`; "limits" nothing.
    """

    id: int
    kind: str
    group: int | None = None
    prompt: Value = None
    model: str | None = None
    schema: Value = None
    name: str | None = None
    args: list[Value] | None = None
    kwargs: dict[str, Value] | None = None


class Cancel(_Frame, tag="cancel"):
    """The cell no longer waits for this call (its task was cancelled): the host may stop it. Needs no reply."""

    id: int


class OddText(Struct, tag_field="$", tag="str", forbid_unknown_fields=True):
    """A text that is no valid Unicode, as `worker/codec.py` encodes it."""

    v: str


class Answer(_Frame, tag="answer"):
    """`answer` became ready, or changed while ready, or stopped being ready (then without content).

    At the end of a cell, the content of one that is not ready comes too, where it has changed.

    `content` is the text that the caller gets: a str as it is, any other value as JSON where it has a JSON form, else
    as `str(value)`. `empty` is true for content the loop must refuse ("" , None or blank).
    """

    ready: bool = True
    content: str | OddText = ""
    empty: bool = False

    @property
    def text(self) -> str:
        """The content as a str.

        Raises:
            ValueError: if it can't be read.
        """
        if not isinstance(self.content, str):
            self.content = str(codec.decode({"$": "str", "v": self.content.v}))
        return self.content


class CellError(Struct, kw_only=True, omit_defaults=True):
    """What a cell raised."""

    type: str
    message: str = ""
    traceback: str = ""
    """From the first frame inside a cell; ends with a hint where a setting would have allowed what was denied."""
    interrupted: bool = False

    @property
    def text(self) -> str:
        """The traceback, or else what can be said in one line."""
        return self.traceback or f"{self.type}: {self.message}"


class Done(_Frame, tag="done"):
    """A cell ended; everything it printed is in the pipes before this frame is sent."""

    cell: int
    variables: dict[str, str] = field(default_factory=dict[str, str])
    """Name → type, of what cells have bound, newest last, at most 200."""
    values: dict[str, str] = field(default_factory=dict[str, str])
    """Name → short repr, if `show_values`."""
    error: CellError | None = None


class Output(_Frame, tag="output"):
    """From a keeper only: what the worker wrote. `data` is base64."""

    stream: int
    data: str
    omitted: int = 0
    """Bytes left out before these."""


class Exited(_Frame, tag="exited"):
    """From a warden or keeper: the worker is gone and swept away. The stream ends after it."""

    status: int | None = None
    reason: str = ""


FromWorker = Ready | Loaded | Call | Cancel | Answer | Done | Output | Exited
ToWorker = Init | Load | Execute | Reply | Dropped
