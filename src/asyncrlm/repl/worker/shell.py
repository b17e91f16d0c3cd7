"""IPython's shell as what runs cells: magics, `!`, `?`, `Out[]` and display, all of it as plain text.

A shell is made once, before workers are forked, or is a kernel's own. What it does beyond running a cell is cut off: no
profile folder, no history file, no thread that outlives a cell, no terminal to draw on, no colours.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from . import report, spelling

if TYPE_CHECKING:
    import ast
    from collections.abc import Coroutine

    from .cells import Namespace
    from .loops import Loops
    from .main import Worker

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_OWN_NAMES = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|_[ido]h|_exit_code")
"""Names that the shell binds as cells run."""
_SHOWN = ("In", "Out", "get_ipython")
"""Names of the shell that are put back after each cell."""


def available() -> str:
    """The version of IPython that there is; "" if there is none."""
    try:
        return importlib.import_module("IPython").__version__
    except ImportError:
        return ""


def install(worker: Worker, shell: Any = None) -> None:
    """Make cells of `worker` run in `shell`, or in a new one."""
    worker.cells.executor = Shell(_new_shell() if shell is None else shell, worker.namespace, worker.loops)


def _new_shell() -> Any:
    module = importlib.import_module("IPython.core.interactiveshell")
    module.PickleShareDB = lambda _folder: {}  # type: ignore[attr-defined]  # until 9.18, made with the shell
    config = _class("traitlets.config", "Config")()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    config.InteractiveShell.colors = "nocolor" if _major() >= 9 else "NoColor"
    own = dict.fromkeys(("init_profile_dir", "init_virtualenv", "init_completer"), _nothing)
    own |= {"profile_dir": SimpleNamespace(location=""), "_db": {}}
    return type("Shell", (module.InteractiveShell,), own).instance(config=config, ipython_dir=tempfile.gettempdir())


def _major() -> int:
    return int(available().split(".")[0])


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


class Shell:
    """Runs cells in an `InteractiveShell`; an `Executor`."""

    def __init__(self, shell: Any, namespace: Namespace, loops: Loops) -> None:
        self._shell = shell
        self._loops = loops
        self._reserved = namespace.reserved
        self._name: str | None = None
        """What the next code to be compiled is called."""
        self._running = 0
        """How deep in the code of cells we are: a cell may run another."""
        self._last = ""
        """The traceback of the last cell that raised, for `%tb`."""
        self._system_name_of = shell.compile.get_code_name
        self._parse = shell.compile.ast_parse
        namespace.move(shell.user_module)
        namespace.hides = self._hides
        for name in _SHOWN:
            namespace.reserve(name, shell.user_ns[name])
        for name in ("exit", "quit", "open"):  # Python's own serve a cell better
            shell.user_ns.pop(name, None)
        report.hidden.append(os.path.dirname(importlib.import_module("IPython").__file__ or "") + os.sep)
        self._take_over()
        self._make_plain()
        # The first of anything imports and caches: done here, it is done for every worker that is forked.
        importlib.import_module("IPython.core.magics.execution")
        shell.display_formatter.format(0)
        self.execute("None", "<cell 0>", 0)

    def displayhook(self, value: Any) -> None:
        self._shell.displayhook(value)

    def execute(self, source: str, name: str, cell: int) -> None:
        shell = self._shell
        self._name, self._running = name, 0
        if cell:
            shell.execution_count = cell
        try:
            result = shell.run_cell(source, store_history=bool(cell))
        finally:
            self._name = None
            self._end_scripts()
        error = result.error_before_exec or result.error_in_exec
        shell.last_execution_result = result.error_in_exec = result.error_before_exec = None
        if error is not None:
            self._last = report.format_error(error)
            try:
                raise error
            finally:
                del error  # its traceback holds this frame

    # ---- in place of the shell's own ----

    def _take_over(self) -> None:
        shell = self._shell
        shell.compile.get_code_name = self._code_name
        shell.compile.ast_parse = self._ast_parse
        shell.run_code = self._run_code
        shell.loop_runner, shell.autoawait = self._run_async, True
        for name in ("showtraceback", "showsyntaxerror", "showindentationerror"):
            setattr(shell, name, self._show_error)
        shell._format_exception_for_storage = _nothing
        shell.system = shell.system_raw = shell.system_piped = self._system
        shell.getoutput = self._getoutput
        shell.builtin_trap.auto_builtins = {"get_ipython": shell.get_ipython}  # and `exit` and `quit` stay

    def _code_name(self, *given: Any) -> str:
        name, self._name = self._name, None
        return name or f"<cell {self._system_name_of(*given).strip('<>')}>"

    def _ast_parse(self, source: str, *args: Any, **kwargs: Any) -> ast.Module:
        tree = self._parse(source, *args, **kwargs)
        spelling.apply(tree, source, self._reserved)
        return tree

    async def _run_code(self, code: Any, result: Any = None, *, async_: bool = False) -> bool:
        """Run compiled code; true if it raised. Nothing is shown: `execute` raises it once more."""
        shell = self._shell
        self._running += 1
        try:
            if async_:
                await eval(code, shell.user_global_ns, shell.user_ns)
            else:
                exec(code, shell.user_global_ns, shell.user_ns)
        except BaseException as error:
            if result is not None:
                result.error_in_exec = error
            if self._running > 1:
                self._show_error()
            return True
        finally:
            self._running -= 1
        return False

    def _run_async(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._running:  # a cell in a cell: its loop is running
            return self._loops.run(coroutine)
        result = self._loops.top_level(coroutine)
        if isinstance(result.error_in_exec, (KeyboardInterrupt, SystemExit)):
            self._loops.cancel()
        return result

    def _show_error(self, *_: Any, **__: Any) -> None:
        """Print what is being handled, if it is the business of a cell's own code: what ends a cell is told by the
        worker."""
        if self._running:
            error = sys.exc_info()[1]
            print(self._last if error is None else report.format_error(error), end="", file=sys.stderr)

    def _system(self, command: str) -> None:
        command = self._shell.var_expand(command, depth=1)
        sys.stdout.flush()
        status = subprocess.call(command, shell=True)
        self._shell.user_ns["_exit_code"] = status
        if status and getattr(self._shell, "system_raise_on_error", False):  # since 9
            raise subprocess.CalledProcessError(status, command)

    def _getoutput(self, command: str, split: bool = True, depth: int = 0) -> Any:
        command = self._shell.var_expand(command, depth=depth + 1)
        done = subprocess.run(
            command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
        )
        self._shell.user_ns["_exit_code"] = done.returncode
        texts = importlib.import_module("IPython.utils.text")
        return texts.SList(done.stdout.splitlines()) if split else texts.LSString(done.stdout)

    def _end_scripts(self) -> None:
        """Stop the thread that `%%bash` and its like leave, unless a script in the background needs it."""
        magics = self._shell.magics_manager.registry.get("ScriptMagics")
        loop = getattr(magics, "event_loop", None)
        if loop is None:
            return
        magics._gc_bg_processes()
        if magics.bg_processes:
            return
        if hasattr(magics, "stop_event_loop"):
            magics.stop_event_loop()
        else:
            magics.event_loop = None
            loop.call_soon_threadsafe(loop.stop)

    # ---- text ----

    def _make_plain(self) -> None:
        shell = self._shell
        hook = _class("IPython.core.displayhook", "DisplayHook")(parent=shell, shell=shell, cache_size=shell.cache_size)
        hook.write_format_data = self._write
        shell.displayhook = shell.display_trap.hook = hook
        shell.display_pub.publish = self._publish
        shell.display_pub.clear_output = _nothing
        formatter = shell.display_formatter
        formatter.active_types = ["text/plain"]
        plain = formatter.formatters["text/plain"]
        plain.for_type(str, _pretty_text)
        plain.for_type(bytes, _pretty_text)
        rich = importlib.import_module("IPython.core.display")
        for name in ("TextDisplayObject", "JSON"):
            plain.for_type(getattr(rich, name), _pretty_rich)
        shell.set_hook("show_in_pager", self._page, 0)
        shell.set_hook("editor", _no_editor, 0)

    def _publish(self, data: dict[str, Any], *_: Any, **__: Any) -> None:
        self._write(data, prompt=False)

    def _write(self, data: dict[str, Any], _metadata: Any = None, *, prompt: bool = True) -> None:
        text = data.get("text/plain")
        if isinstance(text, str):
            text = report.valid(report.shorten(text, report.MAX_SHOWN))
            print("\n" * (prompt and "\n" in text) + text)

    def _page(self, _shell: Any, data: Any, **_: Any) -> None:
        text = data.get("text/plain", "") if isinstance(data, dict) else str(data)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        print(_ESCAPES.sub("", text).rstrip())  # pyright: ignore[reportUnknownArgumentType]

    def _hides(self, name: str, value: Any) -> bool:
        """Whether a name is the shell's, not one that a cell has bound."""
        hidden = self._shell.user_ns_hidden
        return (name in hidden and hidden[name] is value) or _OWN_NAMES.fullmatch(name) is not None


def _nothing(*_: Any, **__: Any) -> None:
    """In place of what a shell does besides."""


def _pretty_text(value: Any, printer: Any, _cycle: bool) -> None:
    printer.text(report.short_repr(value, report.MAX_SHOWN))


def _pretty_rich(value: Any, printer: Any, _cycle: bool) -> None:
    """HTML, Markdown and the like: their source, since nobody renders it."""
    data = value.data
    printer.text(data if isinstance(data, str) else report.short_repr(data, report.MAX_SHOWN))


def _no_editor(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("there is no editor here: nobody is there to type")
