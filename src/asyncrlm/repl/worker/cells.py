"""The namespace and the cells that run in it."""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from . import report, spelling
from .bounds import MAX_VARIABLES
from .guard import leave
from .loops import interrupted
from .replies import BUILTINS

if TYPE_CHECKING:
    from collections.abc import Callable

    from .answer import Submission
    from .loops import Loops
    from .stdio import Stdio
    from .wire import Wire

MAX_VALUE = 200
"""Characters of a value that `done` shows."""
_NO_ANSWER = (
    '[answer] `answer` is a dict, and what you bound to its name is no answer: set answer["content"] to the answer, '
    'then answer["ready"] = True.'
)
_COROUTINE = 0x80
"""`inspect.CO_COROUTINE`; the module takes as long to import as half of the others."""


def no_input(prompt: object = "") -> NoReturn:
    """In place of `input`: nobody is there to type."""
    raise EOFError("input() is not available in a cell: nobody is there to type; the data is in `context`")


class Namespace:
    """The module `__main__` of the cells, and the names in it that are put back after each cell."""

    def __init__(self, submission: Submission) -> None:
        self.module = types.ModuleType("__main__")
        self.names: dict[str, Any] = self.module.__dict__
        self.submission = submission
        self.reserved: dict[str, Any] = {}
        self.hides: Callable[[str, Any], bool] = lambda _name, _value: False
        """Whether a name is there for another reason than that a cell has bound it."""
        self._builtins: dict[str, Any] = {**BUILTINS, "input": no_input}
        self._all_builtins = builtins.__dict__.copy()
        for name in ("exit", "quit"):
            if not hasattr(builtins, name):
                self._builtins[name] = sys.exit

    def move(self, module: types.ModuleType) -> None:
        """Have cells run in `module`."""
        module.__dict__.update({name: value for name, value in self.names.items() if not name.startswith("__")})
        self.module, self.names = module, module.__dict__

    def reserve(self, name: str, value: Any) -> None:
        """Bind `name` now and again after each cell."""
        self.reserved[name] = value
        self.names[name] = value

    def release(self, name: str) -> None:
        """Forget a name that was reserved."""
        self.reserved.pop(name, None)
        self.names.pop(name, None)

    def restore(self) -> None:
        """Put everything back that a cell must find. A context changed in place stays changed: a copy of it for each
        cell would cost as much as the context."""
        sys.modules["__main__"] = self.module
        self.names.update(self.reserved)
        self.names["answer"] = self.submission.answer
        builtins.__dict__.update(self._builtins)
        for name in BUILTINS:
            self.names.pop(name, None)

    def mend_builtins(self) -> None:
        """Put back what a cell has deleted there, or put in the way of every import. Needs none of them itself."""
        now, before = builtins.__dict__, self._all_builtins
        for name in before.keys() - now.keys():
            now[name] = before[name]
        now["__import__"] = before["__import__"]
        now["__build_class__"] = before["__build_class__"]

    def bound(self) -> dict[str, Any]:
        """What cells have bound, oldest first."""
        reserved, hides = self.reserved, self.hides
        return {
            name: value
            for name, value in self.names.copy().items()
            if type(name) is str
            and name not in reserved
            and name != "answer"
            and not (name.startswith("__") and name.endswith("__"))
            and not hides(name, value)
        }

    def show_vars(self) -> str:
        """The variables that cells have bound, each with its type."""
        bound = {name: value for name, value in self.bound().items() if not report.is_a(value, types.ModuleType)}
        if not bound:
            return "No variables yet."
        return "\n".join([f"{name}: {report.type_name(value)}" for name, value in bound.items()])


class Executor(Protocol):
    """What runs the code of a cell."""

    def execute(self, source: str, name: str, cell: int) -> None:
        """Run `source`, called `name` in tracebacks; what it raises is raised. `cell` is 0 for code that is no cell."""
        ...

    def displayhook(self, value: Any) -> None:
        """`sys.displayhook` of cells."""
        ...


class Python:
    """Runs code as the interpreter does."""

    def __init__(self, namespace: Namespace, loops: Loops) -> None:
        self._namespace = namespace
        self._loops = loops

    def execute(self, source: str, name: str, cell: int) -> None:
        names = self._namespace.names
        for code in _compile(source, name, self._namespace.reserved):
            if code.co_flags & _COROUTINE:
                self._loops.top_level(eval(code, names))
            else:
                exec(code, names)

    def displayhook(self, value: Any) -> None:
        if value is not None:
            print(report.short_repr(value, report.MAX_SHOWN))


class Cells:
    """Runs cells, one after another, in one namespace."""

    def __init__(self, wire: Wire, namespace: Namespace, stdio: Stdio, loops: Loops) -> None:
        self.wire = wire
        self.namespace = namespace
        self.stdio = stdio
        self.loops = loops
        self.executor: Executor = Python(namespace, loops)
        self.confined = False
        """Something is denied to cells."""
        self.show_values = False
        self.arm: Callable[[], None] = lambda: None
        """Put the handler of SIGINT back, which a cell may have replaced."""

    def run(self, cell: int, source: str) -> dict[str, Any]:
        """Run one cell and return its `done` frame. Called, and left, with the guard up."""
        guard = self.wire.guard
        name = f"<cell {cell}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        sys.displayhook = self.executor.displayhook
        error: BaseException | None = None
        guard.stopped = guard.pending = False
        self.wire.send({}, opens=True)
        guard.armed = True
        try:
            guard.depth = 0
            self._execute(source, name, cell)
        except BaseException as raised:
            guard.depth = 1
            error = raised
        guard.depth = 1
        guard.armed = guard.pending = False
        if guard.child:
            self._end_child(error)
        if guard.stopped:
            self.wire.stop()
            self.loops.broken_off = True
            error = interrupted(error)
        try:
            return self._finish(cell, error)
        finally:
            # Its traceback holds this frame: as a circle all that the cell's functions held would stay.
            del error

    def execute(self, source: str, name: str) -> None:
        """Run code that is no cell; what it raises is raised."""
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        self._execute(source, name, 0)

    def _execute(self, source: str, name: str, cell: int) -> None:
        if "asyncio" in source or "await" in source:
            self.loops.loop()  # so that get_event_loop() finds one
        self.executor.execute(source, name, cell)

    def _finish(self, cell: int, error: BaseException | None) -> dict[str, Any]:
        namespace, guard = self.namespace, self.wire.guard
        namespace.mend_builtins()
        self.stdio.flush()
        self.stdio.restore()
        self.arm()
        bound_answer = namespace.names.get("answer")
        if bound_answer is not None and not report.is_a(bound_answer, Mapping):
            print(_NO_ANSWER, file=sys.stderr)
            self.stdio.flush()
        try:
            namespace.submission.adopt(bound_answer)
        except BaseException as raised:  # an answer too long to be sent, or a mapping that can't be read
            error = error or raised
        namespace.restore()
        done: dict[str, Any] = {"t": "done", "cell": cell}
        bound = list(namespace.bound().items())[-MAX_VARIABLES:]
        done["variables"] = {_short(name): report.valid(report.type_name(value)) for name, value in bound}
        if self.show_values:
            done["values"] = {
                _short(name): _shown(value)
                for name, value in bound
                if not report.is_a(value, (types.ModuleType, types.FunctionType, type))
            }
        if error is not None:
            done["error"] = report.describe_error(error, interrupted=guard.stopped, confined=self.confined)
            self.stdio.flush()
        del error  # whose traceback may hold this frame
        return done

    def _end_child(self, error: BaseException | None) -> NoReturn:
        """A process that the cell forked came to the end of the cell: its copy of everything ends here."""
        status = 0
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            status = 1
            print(report.describe_error(error, interrupted=False, confined=False)["traceback"], file=sys.stderr)
        self.stdio.flush()
        leave(status & 0xFF)


def _short(name: str) -> str:
    return report.valid(name[: report.MAX_NAME])


def _shown(value: Any) -> str:
    try:
        return report.short_repr(value, MAX_VALUE)
    except KeyboardInterrupt:  # no interrupt comes between cells: the value's own
        return f"<{report.type_name(value)} object>"


def _compile(source: str, name: str, reserved: dict[str, Any]) -> list[types.CodeType]:
    """The code of a cell; its last statement on its own if that is an expression, to be shown as a REPL does."""
    tree = ast.parse(source, name)
    spelling.apply(tree, source, reserved)
    body = tree.body
    codes: list[types.CodeType] = []
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    if body or last is None:
        codes.append(compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True))
    if last is not None:
        codes.append(
            compile(ast.Interactive([last]), name, "single", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        )
    return codes
