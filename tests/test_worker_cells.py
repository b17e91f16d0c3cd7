"""What a cell may rely on: a real module, real errors, everything put back afterwards."""

# ruff: noqa: E501, ISC004 -- cells are read more easily on one line

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from worker_host import FOLDER, Host, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def shared() -> Iterator[Host]:
    with Host() as host:
        yield host


@pytest.fixture
def host(shared: Host) -> Host:
    """A worker whose cells before this test have left no variables."""
    shared.run("(lambda g: [g.pop(n) for n in list(g) if n[:2] != '__'])(globals()) and None")
    return shared


def test_ready_says_what_it_is() -> None:
    with Host(in_force={"network": "seccomp"}) as host:
        assert host.ready == {
            "t": "ready",
            "version": 1,
            "python": ".".join(map(str, sys.version_info[:3])),
            "in_force": {"network": "seccomp"},
        }


def test_only_the_standard_library_is_imported() -> None:
    files = list(Path(FOLDER).glob("*.py"))
    assert len(files) > 8
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(), feature_version=(3, 9))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [] if node.level else [node.module or ""]
                assert node.level <= 1, f"{file.name} reaches out of the package"
            else:
                continue
            for name in names:
                assert name.split(".")[0] in sys.stdlib_module_names, f"{file.name} imports {name}"


# ---- the namespace ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "printed"),
    [
        (["a = 41\nb = 1 / 0", "print(a + 1)"], "42"),
        (["LIMIT = 1\ndef f():\n    return LIMIT", "LIMIT = 5", "print(f())"], "5"),
        (["n = 0\ndef bump():\n    global n\n    n += 1", "bump(); bump()", "print(n)"], "2"),
        (["k = 3\nvals = [i * k for i in range(4)]\nprint(sum(v * k for v in vals))"], "54"),
        (["_x = 7", "print(_x)"], "7"),
        (["big = 1", "del big", "print('big' in globals())"], "False"),
        (["from dataclasses import dataclass\n@dataclass\nclass Row:\n    k: str", "print(Row('a'))"], "Row(k='a')"),
        (["class C:\n    pass\nimport pickle", "print(type(pickle.loads(pickle.dumps(C()))) is C)"], "True"),
        (["import sys\nx = 1", "print(sys.modules['__main__'].x, __name__)"], "1 __main__"),
        (["if __name__ == '__main__':\n    print('main')"], "main"),
        (["def f():\n    return 5", "import inspect\nprint(inspect.getsource(f).strip())"], "def f():\n    return 5"),
        (
            ["import typing\nclass T(typing.NamedTuple):\n    a: int", "print(typing.get_type_hints(T))"],
            "{'a': <class 'int'>}",
        ),
        (["import sys\ndel sys.modules['__main__']", "import sys\nprint('__main__' in sys.modules)"], "True"),
        (["globals().clear()", "print(llm_query('x'))"], "A:x"),
    ],
)
def test_namespace(host: Host, cells: list[str], printed: str) -> None:
    for code in cells[:-1]:
        host.run(code)
    assert host.show(cells[-1]).strip() == printed


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("2 + 3", "5\n"),
        ("x = 1\nx * 100", "100\n"),
        ("'text'", "'text'\n"),
        ("None", ""),
        ("x = 3", ""),
        ("for i in range(3):\n    i", ""),
        ("", ""),
        ("# only a comment", ""),
        ("import asyncio\nawait asyncio.sleep(0, 'slept')", "'slept'\n"),
        ("[1, (2,), {3}, {4: {}}, set(), (), frozenset({5})]", "[1, (2,), {3}, {4: {}}, set(), (), frozenset({5})]\n"),
        ("a = []\na.append(a)\na", "[[...]]\n"),
        ("d = {}\nd['me'] = d\nd", "{'me': {...}}\n"),
        ("import sys\nsys.displayhook = None\n1", "1\n"),
        ("llm_query_batched(['p', 'q'])", "['A:p', 'A:q']\n"),
        ("'\\ud800'", "'\\ud800'\n"),
    ],
)
def test_last_expression_is_shown(host: Host, code: str, printed: str) -> None:
    if "displayhook" in code:
        host.run("import sys\nsys.displayhook = None")
        code = "1"
    assert host.show(code) == printed


@pytest.mark.parametrize(
    "code",
    [
        "'x' * 10**8",
        "list(range(10**6))",
        "{i: str(i) for i in range(10**5)}",
        "[[['y' * 1000] * 100] * 100] * 100",
        "import collections\ncollections.Counter(range(10**6))",
        "bytes(10**7)",
        "1 << 10**7",
        "a = 'z'\nfor _ in range(60): a = [a, a]\na",
        "b = []\nfor _ in range(10**5): b = [b]\nb",
    ],
)
def test_a_bomb_of_a_repr_is_bounded(host: Host, code: str) -> None:
    printed = host.show(code)
    assert 0 < len(printed) < 25_000


def test_an_object_whose_repr_raises(host: Host) -> None:
    host.run("class Bad:\n    def __repr__(self): raise ValueError('no')\nclass Odd:\n    def __repr__(self): return 3")
    assert host.show("[Bad(), Odd()]") == (
        "[<Bad object; its repr() raised ValueError>, <Odd object; its repr() raised TypeError>]\n"
    )


@pytest.mark.parametrize("breaks", ["llm_query = context = 1", "del llm_query, context", "globals().clear()", "1/0"])
@pytest.mark.parametrize("tail", ["", "\nraise ValueError"])
def test_reserved_names_are_put_back(host: Host, breaks: str, tail: str) -> None:
    assert host.load("context", form="json", value="the text") is None
    host.run(f"rlm_query = SHOW_VARS = FailedReply = answer = None\n{breaks}{tail}")
    code = "print(llm_query('q'), context, rlm_query('r'), answer, issubclass(FailedReply, str), context_0)"
    assert host.show(code) == "A:q the text A:r {'content': '', 'ready': False} True the text\n"


def test_builtins_are_put_back(host: Host) -> None:
    host.run("import builtins\ndel builtins.FailedReply, builtins.SubcallError\nbuiltins.input = None")
    assert host.show("print(FailedReply.__name__, SubcallError.__name__, callable(input))") == (
        "FailedReply SubcallError True\n"
    )


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_traceback_begins_in_the_cell_and_shows_the_line(host: Host) -> None:
    host.run("def f(rows):\n    return rows[7]")
    number = host.cell
    outcome = host.run("a = 1\nb = f([1])")
    error = outcome.error
    assert error is not None
    assert (error["type"], error["message"]) == ("IndexError", "list index out of range")
    trace = error["traceback"]
    assert trace.startswith(f'Traceback (most recent call last):\n  File "<cell {number + 1}>", line 2, in <module>\n')
    assert f'File "<cell {number}>", line 2, in f\n    return rows[7]' in trace
    assert trace.endswith("IndexError: list index out of range\n")
    assert FOLDER not in trace


@pytest.mark.parametrize(
    ("code", "has"),
    [
        ("x = (1,\n\nprint(x", ["SyntaxError", "^"]),
        ("def f(:\n    pass", ["SyntaxError: invalid syntax", "def f(:\n          ^"]),
        ("if True:\nx = 1", ["IndentationError", "line 2"]),
        ("x = 1\nreturn x", ["SyntaxError: 'return' outside function", "line 2", "return x"]),
        ("a = 'x\n", ["SyntaxError: unterminated string literal"]),
        ("x = 'a\0b'", ["null"]),
        (
            "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e",
            ["ZeroDivisionError", "direct cause", "KeyError: 'k'"],
        ),
        ("def f(): f()\nf()", ["RecursionError", "line 1, in f"]),
        ("llm_query(3)", ["TypeError: prompt must be a str", "llm_query(3)"]),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", ["E: <exception str() failed>"]),
        ("import asyncio\nasync def f(): raise KeyError('deep')\nawait f()", ["in f", "KeyError: 'deep'"]),
        ("raise ValueError('\\ud800')", ["ValueError: \\ud800"]),
        ("raise ValueError('x' * 10**6)", ["characters left out", "ValueError: xxx"]),
        ("assert 0", ["AssertionError"]),
        ("raise SystemError", ["SystemError"]),
        ("raise KeyboardInterrupt('own')", ["KeyboardInterrupt: own"]),
        ("async def f():\n    pass\nyield f", ["SyntaxError: 'yield' outside function"]),
    ],
)
def test_errors_are_told(host: Host, code: str, has: list[str]) -> None:
    trace = host.run(code).trace
    for text in has:
        assert text in trace
    assert len(trace) < 21_000
    assert FOLDER not in trace
    assert "interrupted" not in (host.run("1/0").error or {})


@pytest.mark.parametrize(
    "fails",
    [
        "f()",
        "import asyncio\nawait asyncio.sleep(0)\nf()",
        "import asyncio\nasync def g():\n    await asyncio.sleep(0)\n    f()\nawait g()",
        "g = (f() for _ in [1])\nlist(g)",
        "import sys\ndef f():\n    big = Big()\n    here.append(weakref.ref(big))\n    sys.exit(1)\nf()",
        "from collections import UserDict\nclass M(UserDict):\n    def __iter__(self): f()\nanswer = M(a=1)",
    ],
)
def test_what_a_failed_cell_held_is_freed_at_once(host: Host, fails: str) -> None:
    host.run("import gc, weakref\nclass Big: pass\nhere = []\ngc.disable()")
    host.run("def f():\n    big = Big()\n    here.append(weakref.ref(big))\n    raise ValueError")
    error = host.run(fails).error
    assert error is not None
    assert error["type"] in ("ValueError", "SystemExit")
    assert host.show("print([ref() for ref in here])") == "[None]\n"
    host.run("gc.enable()")


def test_an_exception_group_is_told_whole(host: Host) -> None:
    trace = host.run("raise ExceptionGroup('two', [ValueError('one'), KeyError('k')])").trace
    assert "ValueError: one" in trace
    assert "KeyError: 'k'" in trace


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("sys.exit()", "SystemExit"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("exit()", "SystemExit"),
        ("quit('bye')", "SystemExit: bye"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_exit_ends_the_cell_only(host: Host, call: str, text: str) -> None:
    outcome = host.run(f"import sys\nrows = 3\nprint('before')\n{call}\nprint('after')")
    assert outcome.stdout == "before\n"
    assert text in outcome.trace
    assert "variables are kept" in outcome.trace
    assert host.show("print(rows, sys.stdin.read())") == "3 \n"


def test_input_says_why_not(host: Host) -> None:
    assert "input() is not available in a cell" in host.run("name = input('who? ')").trace


@pytest.mark.parametrize(
    ("code", "setting"),
    [
        ("raise PermissionError(13, 'Permission denied', '/etc/shadow')", "read_paths"),
        ("raise PermissionError(1, 'Operation not permitted')", 'isolation="none"'),
        ("import socket\nsocket.socket.__init__.__globals__['_socket'].socket", None),
        ("import socket\nraise socket.gaierror(-3, 'Temporary failure in name resolution')", "no network"),
        ("def connect(): raise PermissionError(1, 'no')\nconnect()", "custom_tools"),
        ("raise MemoryError", "memory_limit"),
        ("raise OSError(12, 'Cannot allocate memory')", "memory_limit"),
        ("raise OSError(27, 'File too large')", "max_file_size"),
        ("raise OSError(28, 'No space left on device')", "max_file_size"),
        ('raise RuntimeError("can\'t start new thread")', "max_processes"),
        ("def fork(): raise BlockingIOError(11, 'Resource temporarily unavailable')\nfork()", "max_processes"),
        (
            "try:\n    raise PermissionError(1, 'no')\nexcept OSError as e:\n    raise RuntimeError('wrapped') from e",
            "isolation",
        ),
        ("class U(OSError):\n    reason = PermissionError(13, 'no', 'x')\nraise U", "read_paths"),
        ("raise ValueError('plain')", None),
        ("open('/nowhere/at/all')", None),
    ],
)
def test_hints_name_the_setting_where_something_is_confined(
    code: str, setting: str | None, confined: Host, host: Host
) -> None:
    trace = confined.run(code)
    if setting is None:
        assert trace.error is None or "[sandbox]" not in trace.trace
    else:
        last = trace.trace.rstrip().splitlines()[-1]
        assert last.startswith("[sandbox]")
        assert setting in last
        assert "[sandbox]" not in host.run(code).trace


@pytest.mark.parametrize("code", ["eval('-' * 100_000 + '1')", "-" * 100_000 + "1"])
def test_code_that_is_too_much_for_the_parser_is_not_blamed_on_memory(code: str, confined: Host) -> None:
    if confined.run(code).error["type"] != "MemoryError":
        pytest.skip("this Python's parser says so itself")
    assert "nested too deeply" in confined.run(code).trace
    assert "memory_limit" not in confined.run(code).trace


@pytest.mark.parametrize("name", ["__import__", "__build_class__", "len", "print", "getattr", "BaseException"])
def test_builtins_that_a_cell_deletes_are_back_in_the_next(name: str, host: Host) -> None:
    host.run(f"import builtins\ndel builtins.{name}")
    assert host.show(f"import json\nclass C: pass\nprint(len([C]), {name} is not None)") == "1 True\n"
    assert host.run("import builtins\nbuiltins.__import__ = None").error is None
    assert host.show("import string\nprint(string.digits)") == "0123456789\n"


@pytest.fixture(scope="module")
def confined() -> Iterator[Host]:
    with Host(in_force={"read_outside": "Landlock", "outliving": None}) as host:
        yield host


def test_a_worker_that_only_outlives_nothing_is_not_confined() -> None:
    with Host(in_force={"read_outside": None, "outliving": "pid namespace"}) as host:
        assert "[sandbox]" not in host.run("raise MemoryError").trace


# ---- standard streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.stdout.close()",
        "import sys, io\nsys.stdout = io.StringIO()\nsys.stderr = None\nsys.stdin = 3",
        "import sys\ndel sys.stdout, sys.stderr",
        "import os\nos.close(1); os.close(2); os.close(0)",
        "import os\nf = os.open('file', os.O_RDWR | os.O_CREAT)\nos.dup2(f, 1); os.dup2(f, 2)",
        "import sys\nsys.stdin.close(); sys.__stdout__.close()",
        "import os\nos.close(1)\nprint('lost')",
        "import contextlib, io\ncontextlib.redirect_stdout(io.StringIO()).__enter__()",
    ],
)
def test_streams_are_whole_again(host: Host, code: str) -> None:
    host.run(code)
    host.output(0), host.output(1)
    outcome = host.run(
        "import sys, os\nprint('out')\nprint('err', file=sys.stderr)\nos.write(1, b'raw')\nsys.stdin.read()\nNone"
    )
    assert outcome.error is None
    assert (outcome.stdout.replace("lost\n", ""), outcome.stderr) == ("out\nraw", "err\n")


def test_print_subprocess_and_c_keep_their_order(host: Host) -> None:
    code = "import os, subprocess\nprint('a')\nsubprocess.run(['/bin/echo', 'b'])\nos.write(1, b'c\\n')\nprint('d', end='')"
    assert host.show(code + "\nNone") == "a\nb\nc\nd"
    assert host.show("print('\\ud83d', 'za\u017c\u00f3\u0142\u0107')") == "\\ud83d za\u017c\u00f3\u0142\u0107\n"


# ---- what `done` tells -----------------------------------------------------------------------------------------------


def test_variables_are_what_cells_bound(host: Host) -> None:
    host.load("context", value="c")
    outcome = host.run(
        "import os\n_a = 1\nb = [2]\nr = llm_query('x')\nrs = llm_query_batched(['x'])\n__d__ = 1\ndef f(): pass"
    )
    assert outcome.variables == {"os": "module", "_a": "int", "b": "list", "r": "str", "rs": "list", "f": "function"}
    assert outcome.values == {}
    outcome = host.run("for i in range(300): globals()[f'v{i}'] = i")
    assert len(outcome.variables) == 200
    assert list(outcome.variables)[-1] == "v299"


def test_show_vars(host: Host) -> None:
    assert host.show("print(SHOW_VARS())") == "No variables yet.\n"
    host.run("import os\na = 1\nb = 'x'")
    assert host.show("print(SHOW_VARS())") == "a: int\nb: str\n"


def test_values_are_short_and_safe() -> None:
    with Host(show_values=True) as host:
        outcome = host.run(
            "class Bad:\n    def __repr__(self): raise ValueError\nimport os\nx = 1\nbad = Bad()\nbig = 'x' * 10**7\n"
            "me = []\nme.append(me)\ns = '\\ud800'"
        )
        values = outcome.values
        assert values["x"] == "1"
        assert values["bad"] == "<Bad object; its repr() raised ValueError>"
        assert values["me"] == "[[...]]"
        assert values["big"].endswith("... (length 10,000,000)")
        assert set(values) == {"x", "bad", "big", "me", "s"}
        assert all(len(value) < 300 for value in values.values())


# ---- forks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (
            "import os\npid = os.fork()\nif pid == 0:\n    try:\n        llm_query('x')\n    except RuntimeError as e:\n"
            "        os._exit(7 if 'threads' in str(e) and 'llm_query_batched' in str(e) else 1)\n"
            "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), llm_query('q'))",
            "7 A:q",
        ),
        ("import os\npid = os.fork()\nif pid:\n    print(os.waitpid(pid, 0)[1], llm_query('q'))", "0 A:q"),
        ("import os\npid = os.fork()\nif not pid: 1/0\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))", "1"),
        (
            "import os\npid = os.fork()\nif not pid: exit(5)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
            "5",
        ),
        (
            "import os\npid = os.fork()\nif not pid: exit('no')\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
            "1",
        ),
        (
            "import multiprocessing as m\ndef f(i): return i * i\nwith m.Pool(2) as p: print(p.map(f, range(4)))",
            "[0, 1, 4, 9]",
        ),
        (
            "from concurrent.futures import ProcessPoolExecutor as P\ndef ask(p):\n    try: return llm_query(p)\n"
            "    except RuntimeError: return 'refused'\nwith P(1) as p: print(list(p.map(ask, ['a'])), llm_query('b'))",
            "['refused'] A:b",
        ),
        (
            "import os\nasync def f():\n    t = asyncio.create_task(allm_query('t'))\n    await asyncio.sleep(0)\n"
            "    if (pid := os.fork()) == 0:\n        t.cancel()\n        os._exit(3)\n"
            "    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), await t\nimport asyncio\nprint(await f())",
            "(3, 'A:t')",
        ),
        (
            "import os, threading\nout = []\ndef f():\n    pid = os.fork()\n    if not pid: return\n    out.append(os.waitpid(pid, 0)[1])\n"
            "t = threading.Thread(target=f); t.start(); t.join()\nprint(out, llm_query('x'))",
            "[0] A:x",
        ),
        (
            "import os\ndef sockets():\n    links = []\n    for n in os.listdir('/proc/self/fd'):\n"
            "        try: links.append(os.readlink(f'/proc/self/fd/{n}'))\n        except OSError: pass\n"
            "    return sum(link.startswith('socket:') for link in links)\nmine = sockets()\npid = os.fork()\n"
            "if not pid: os._exit(sockets())\nprint(mine - os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
            "1",  # the channel
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_forks(host: Host, code: str, printed: str) -> None:
    outcome = host.run(code)
    assert outcome.error is None, outcome.error
    assert outcome.stdout.strip() == printed
    assert host.show("print(llm_query('after'))") == "A:after\n"


def test_a_fork_does_not_print_twice(host: Host) -> None:
    code = "import os\nprint('once', end='')\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nNone"
    assert host.show(code) == "once"


# ---- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", [None, "llm_query('x')", "while True: llm_query('y')", "import asyncio\nawait allm_query('z')"]
)
def test_the_worker_goes_with_its_host(code: str | None) -> None:
    with Host() as host:
        if code is not None:
            host.start(code)
            assert host.frame()["t"] == "call"
        host.socket.close()
        host.wait_exit()


def test_close_ends_it() -> None:
    with Host() as host:
        host.send({"t": "close"})
        assert host.wait_exit() == 0


def test_another_version_of_the_protocol_ends_it() -> None:
    with Host(version=999) as host:
        assert host.wait_exit() == 64
        assert "version 999" in host.output(0)


def test_the_handler_of_sigint_is_put_back(host: Host) -> None:
    host.run("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nllm_query('x')")
    host.start("print('on', flush=True)\nwhile True: pass")
    seen = ""

    def started() -> bool:
        nonlocal seen
        seen += host.output(0)
        return seen == "on\n"

    wait_for(started)
    host.interrupt()
    error = host.finish().error
    assert error is not None
    assert error["interrupted"] is True


# ---- objects that raise wherever they are asked ----------------------------------------------------------------------

NASTY = """
class Meta(type):
    @property
    def __name__(cls): raise SystemExit('name')
    def __repr__(cls): raise SystemExit('repr')
    def __instancecheck__(cls, other): raise SystemExit('check')
class Nasty(metaclass=Meta):
    def __repr__(self): raise KIND('repr')
    def __str__(self): raise KIND('str')
    @property
    def __class__(self): raise KIND('class')
    def __len__(self): raise KIND('len')
    def __bool__(self): raise KIND('bool')
    def __hash__(self): raise KIND('hash')
class Bad(Exception):
    def __str__(self): raise KIND('str')
    def __repr__(self): raise KIND('repr')
    @property
    def errno(self): raise KIND('errno')
    @property
    def __notes__(self): raise KIND('notes')
"""


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "ValueError"])
def test_whatever_a_value_raises_the_worker_goes_on(kind: str) -> None:
    with Host(show_values=True) as host:
        assert host.run(f"kept = 5\nKIND = {kind}\n{NASTY}\nx = Nasty()\nnested = [[x], {{1: x}}]").error is None
        for code in ("raise Bad()", "x", "[x]", "print(SHOW_VARS())", "answer['ready'] = x", "answer['content'] = [x]"):
            host.run(code)
        host.run("answer['ready'], answer['content'] = True, x")
        host.run("answer['ready'], answer['content'] = False, ''\nanswer = x")
        outcome = host.run("try:\n    raise Bad()\nexcept Bad as e:\n    y = e\n    raise RuntimeError(1) from e")
        assert "RuntimeError" in outcome.trace
        assert host.show("print(kept)") == "5\n"
        assert host.run("1").variables["x"] == "Nasty"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("10 ** 5000", "1" + "0" * 5000),
        ("[10 ** 5000]", "[1" + "0" * 5000 + "]"),
        ("{1: {10 ** 5000}}", '{"1": [1' + "0" * 5000 + "]}"),
        ("16 ** 200_000", "0x1" + "0" * 200_000),
    ],
)
def test_long_ints_are_answers(host: Host, content: str, told: str) -> None:
    outcome = host.run(f"answer['content'] = {content}\nanswer['ready'] = True")
    assert outcome.answers[-1]["content"] == told
    assert "Exceeds the limit" in host.run("str(10 ** 5000)").trace  # in the cell itself it is as ever


def test_long_ints_are_shown(host: Host) -> None:
    assert host.show("10 ** 5000") == "1" + "0" * 5000 + "\n"
