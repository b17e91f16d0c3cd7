"""`answer`: a dict that tells the host the moment it becomes ready."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from . import report
from .bounds import MAX_FRAME
from .records import fields_of
from .wire import dump


def to_text(content: Any) -> str:
    """What the caller gets: a str as it is, other values as JSON where they have that form, else `str(content)`."""
    if report.is_a(content, str):
        return str.__str__(content)
    if content is None:
        return ""
    try:
        with report.long_ints():
            # A date alone is best as it is written; among others it must not make all of them Python's words.
            among = _among if report.is_a(content, (dict, list, tuple)) else None
            return json.dumps(content, ensure_ascii=False, allow_nan=False, default=among)
    except KeyboardInterrupt:
        raise
    except BaseException:  # of what the content itself may raise
        return hex(content) if report.is_a(content, int) else report.own_text(content)


def _among(value: Any) -> Any:
    """What JSON has for a value that it does not know."""
    if isinstance(value, (dt.date, dt.time)):
        return value.isoformat()
    if isinstance(value, (set, frozenset)):
        return list(cast("set[Any]", value))
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, decimal.Decimal) or type(value).__module__ == "uuid":
        return str(value)
    if (fields := fields_of(value)) is not None:
        return fields
    raise TypeError


class Answer(dict[str, Any]):
    """Calls `changed` after each change that it can see; `Submission.sync` at the end of a cell sees the rest."""

    changed: Callable[[], None] = staticmethod(lambda: None)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.changed()

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self.changed()

    def __ior__(self, other: Any) -> Any:
        super().update(other)
        self.changed()
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self.changed()

    def setdefault(self, key: str, default: Any = None) -> Any:
        value = super().setdefault(key, default)
        self.changed()
        return value

    def pop(self, *args: Any) -> Any:
        value = super().pop(*args)
        self.changed()
        return value

    def popitem(self) -> Any:
        item = super().popitem()
        self.changed()
        return item

    def clear(self) -> None:
        super().clear()
        self.changed()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


class Submission:
    """Keeps the host's idea of the answer equal to the cell's."""

    def __init__(self, post: Callable[[bytes], bool]) -> None:
        self._post = post
        self._told: tuple[str, bool] | None = None
        """What the host believes: content and whether it is empty; None while not ready."""
        self._draft = ""
        """The content that the host was told of last while not ready."""
        self.answer = Answer()
        self.reset({"content": "", "ready": False})

    def reset(self, value: Mapping[str, Any]) -> None:
        """A new answer; the host, who asks for this, knows already."""
        self.answer = Answer(value)
        self.answer.changed = self.sync
        self._told = None
        self._draft = ""

    def adopt(self, value: Any) -> None:
        """What the name `answer` is bound to at the end of a cell: a plain dict counts, anything else does not."""
        if value is not self.answer and isinstance(value, Mapping):
            plain = dict(cast("Mapping[str, Any]", value))
            super(Answer, self.answer).clear()
            super(Answer, self.answer).update(plain)
        self.sync()
        if self._told is None:
            self._tell_draft()

    def sync(self) -> None:
        """Tell the host where it does not know.

        Raises:
            ValueError: if the content is too long for any frame.
        """
        now: tuple[str, bool] | None = None
        if self._ready():
            content = self.answer.get("content")
            text = to_text(content)
            now = text, not text or text.isspace()
        if now == self._told:
            return
        if now is None:
            frame = '{"t":"answer","ready":false}\n'
            self._draft = ""
        else:
            empty = ',"empty":true' if now[1] else ""
            frame = f'{{"t":"answer","ready":true{empty},"content":{dump(now[0])}}}\n'
            if len(frame) > MAX_FRAME:
                raise ValueError(f'answer["content"] is too long: {len(now[0]):,} characters')
        if self._post(frame.encode("ascii")):
            self._told = now

    def _tell_draft(self) -> None:
        """What there would be to show if the run ended now; one that is too long is left out."""
        draft = to_text(self.answer.get("content"))
        frame = f'{{"t":"answer","ready":false,"content":{dump(draft)}}}\n'
        if draft != self._draft and len(frame) <= MAX_FRAME and self._post(frame.encode("ascii")):
            self._draft = draft

    def _ready(self) -> bool:
        try:
            return bool(self.answer.get("ready"))
        except KeyboardInterrupt:
            raise
        except BaseException:  # an array of several truth values, or worse
            return False
