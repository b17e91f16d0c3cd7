"""Text that models and cells wrote, made fit for a terminal or a log."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from ..caught import is_ctrl_c
from ..clipping import clip

if TYPE_CHECKING:
    from ..types import UsageSummary

# CSI sequences; strings that a terminal takes as commands (OSC, DCS, SOS, PM, APC) up to their end; other escapes.
_ESCAPES: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
# C0 and C1 controls but tab and newline; marks that reorder the text around them.
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

_SECRET_NAME: Final = re.compile(
    r"api[_-]?key|access[_-]?key|private[_-]?key|authorization|secret|passw|cookie|credential"
    r"|(^|[_-])(auth|token|bearer)$|(access|refresh|session|id|api|bearer|auth)[_-]?tokens?$",
    re.IGNORECASE,
)
# The looks ahead are bounded: a text of nothing but beginnings of keys must not take long.
_SECRET_TEXT: Final = re.compile(
    r"\b(Bearer|Basic)\s+(?=[A-Za-z._~+/=-]{0,400}[0-9])[A-Za-z0-9._~+/=-]{8,}"
    r"|\b(?:(?:sk|rk|pk|xai|glpat|xox[abprs])-(?=[A-Za-z_-]{0,200}[0-9])[A-Za-z0-9_-]{16,}"
    r"|(?:gsk|hf|gh[opsur]|[srp]k_live|[srp]k_test)_[A-Za-z0-9]{20,}"
    r"|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,})"
)
REDACTED: Final = "[redacted]"
_MAX_DEPTH: Final = 32
_MAX_ITEMS: Final = 1_000


def printable(text: str) -> str:
    """`text` without terminal escapes, control characters and marks that reorder text; CRLF becomes LF."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n")))


def one_line(text: str, limit: int) -> str:
    """`text` as one printable line of at most `limit` characters."""
    # What lies beyond a few times the limit can't show up, and cleaning it would cost.
    line = " ".join(printable(text[: 4 * limit]).split())
    return line if len(line) <= limit and len(text) <= 4 * limit else line[: max(limit - 3, 0)].rstrip() + "..."


def counted(number: int, noun: str) -> str:
    """Such as "1 line" and "2,000 lines"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def isolation(in_force: Mapping[str, Any], *, brief: bool) -> str:
    """What isolation is in force where cells run, and what not."""
    held = [name for name, holder in in_force.items() if holder]
    open_ = [name for name, holder in in_force.items() if not holder]
    if not held:
        return "no isolation"
    if brief and not open_:
        return f"isolation: all {len(held)} rows hold"
    return f"isolation: {', '.join(held)}" + (f"; not in force: {', '.join(open_)}" if open_ else "")


def last_line(text: str) -> str:
    """Of a traceback the error."""
    return printable(text).rstrip().rpartition("\n")[2]


def used(usage: UsageSummary) -> str:
    """What a tree of runs has used, to go on with behind other figures."""
    text = f", {counted(usage.total_calls, 'request')}"
    text += f", {usage.total_input_tokens:,} + {usage.total_output_tokens:,} tokens"
    if usage.total_cost is not None:
        text += f", ${usage.total_cost:.4f}" if usage.total_cost else ", $0"
    return text + ("" if usage.complete else " (partly estimated)")


def redact(text: str) -> str:
    """`text` without what looks like a key or an Authorization header."""
    return _SECRET_TEXT.sub(lambda match: f"{match[1]} {REDACTED}" if match[1] else REDACTED, text)


def names_secret(name: str) -> bool:
    """Whether what stands under this name is likely a secret."""
    return _SECRET_NAME.search(name) is not None


def plain(value: Any, *, limit: int | None = None, redacting: bool = False) -> Any:
    """`value` as strict JSON can hold it.

    NaN and the infinities become strings, keys become strings, lone surrogates are written out as escapes, what has no
    JSON form becomes its text. Strings longer than `limit` characters keep head and tail. Where `redacting`, what
    stands under the name of a secret or looks like one is replaced.
    """
    return _Plain(limit, redacting).value(value, 0)


class _Plain:
    def __init__(self, limit: int | None, redacting: bool) -> None:
        self._limit = limit
        self._redacting = redacting

    def value(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, int):
            # Readers of JSON keep 64 bits; Python refuses to print numbers of thousands of digits.
            return int(value) if abs(value) < 2**63 else self.text(hex(value))
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else str(float(value))
        if depth >= _MAX_DEPTH:
            return f"<{type(value).__name__}>"
        if isinstance(value, msgspec.Struct):
            value = {name: getattr(value, name) for name in value.__struct_fields__}
        if isinstance(value, Mapping):
            return self.mapping(cast("Mapping[Any, Any]", value), depth)
        if isinstance(value, (list, tuple, set, frozenset)):
            items = list(cast("list[Any]", value))
            kept = [self.value(item, depth + 1) for item in items[:_MAX_ITEMS]]
            return (
                kept if len(items) <= _MAX_ITEMS else [*kept, f"[... {len(items) - _MAX_ITEMS:,} items left out ...]"]
            )
        return self.text(_str(value))

    def text(self, text: str) -> str:
        if self._limit is not None:
            text = clip(text, self._limit)
        if not text.isascii():
            # Lone surrogates have no UTF-8 form, and strict readers refuse their \u escapes.
            text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        return redact(text) if self._redacting else text

    def mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, item in value.items():
            if len(kept) >= _MAX_ITEMS:
                kept["..."] = f"{len(value) - _MAX_ITEMS:,} items left out"
                break
            name = self.text(key if isinstance(key, str) else _str(key))
            holds_text = isinstance(item, (str, bytes, Mapping, list, tuple))
            secret = self._redacting and holds_text and names_secret(name)
            kept[name] = REDACTED if secret else self.value(item, depth + 1)
        return kept


def _str(value: Any) -> str:
    try:
        return str(value)
    except BaseException as error:  # an object that can't say what it is must not cost the log
        if is_ctrl_c(error):
            raise
        return f"<{type(value).__name__}, whose str raised {type(error).__name__}>"
