"""`answer` and variables that the host loads."""

# ruff: noqa: E501 -- cells are read more easily on one line

from __future__ import annotations

import json
import os
import pickle
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from worker_host import Frame, Host

from asyncrlm.repl.worker import codec
from asyncrlm.repl.worker.loading import PIECE

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def shared() -> Iterator[Host]:
    with Host() as host:
        yield host


@pytest.fixture
def host(shared: Host) -> Host:
    """A worker with a new answer."""
    assert shared.load("answer", value={"content": "", "ready": False}) is None
    return shared


def ready(content: str, *, empty: bool = False) -> Frame:
    return {"t": "answer", "ready": True, "content": content, **({"empty": True} if empty else {})}


UNREADY = {"t": "answer", "ready": False}


def draft(content: str) -> Frame:
    return UNREADY | {"content": content}


@pytest.mark.parametrize(
    ("code", "answers"),
    [
        ("answer['content'] = 'x'\nanswer['ready'] = True", [ready("x")]),
        ("answer['ready'] = True\nanswer['content'] = 'late'", [ready("", empty=True), ready("late")]),
        ("answer.update(content='u', ready=True)", [ready("u")]),
        ("answer |= {'content': 'u', 'ready': 1}", [ready("u")]),
        ("answer.setdefault('x', 1)\nanswer.update([('content', 'p'), ('ready', True)])", [ready("p")]),
        ("answer.clear()\nanswer['content'] = 'c'\nanswer.setdefault('ready', True)", [ready("c")]),
        ("answer = {'content': 'rebound', 'ready': True}", [ready("rebound")]),
        ("answer = dict(content='rebound', ready=True)\n1/0", [ready("rebound")]),
        ("answer['content'] = 'x'\nanswer['ready'] = True\nanswer['ready'] = False", [ready("x"), UNREADY, draft("x")]),
        ("answer['content'] = 'x'\nanswer['ready'] = True\ndel answer['ready']", [ready("x"), UNREADY, draft("x")]),
        ("answer['content'] = 'x'\nanswer['ready'] = True\nanswer.pop('ready')", [ready("x"), UNREADY, draft("x")]),
        ("answer.update(content='x', ready=True)\nanswer.popitem()", None),
        (
            "answer['content'] = [1]\nanswer['ready'] = True\nanswer['content'].append(2)",
            [ready("[1]"), ready("[1, 2]")],
        ),
        ("answer['content'] = 'draft'", [draft("draft")]),
        ("answer = 'the text'", []),
        ("answer = {'ready': False, 'content': 'x'}", [draft("x")]),
        ("del answer", []),
        (
            "try:\n    answer['content'] = 'one'\n    answer['ready'] = True\nexcept Exception:\n    answer['content'] = 'two'",
            [ready("one")],
        ),
        (
            "import threading\nt = threading.Thread(target=lambda: answer.update(content='t', ready=True)); t.start(); t.join()",
            [ready("t")],
        ),
        ("async def f(): answer['content'] = 'a'; answer['ready'] = True\nawait f()", [ready("a")]),
        ("class Many:\n    def __bool__(self): raise ValueError\nanswer['ready'] = Many()", []),
    ],
)
def test_answer_is_noticed_however_it_is_set(host: Host, code: str, answers: list[Frame] | None) -> None:
    outcome = host.run(code)
    if answers is not None:
        assert outcome.answers == answers
    assert host.show("type(answer).__name__") == "'Answer'\n"


def test_an_answer_too_long_to_be_sent_is_an_error(host: Host) -> None:
    code = "answer['content'] = 'x' * (70 * 2**20)\nanswer['ready'] = True"
    for one in (code, "answer = {'content': 'x' * (70 * 2**20), 'ready': True}"):
        outcome = host.run(one)
        assert 'answer["content"] is too long' in outcome.trace
        assert outcome.answers == []
        host.load("answer", value={"content": "", "ready": False})


@pytest.mark.parametrize(
    ("content", "text", "empty"),
    [
        ("'text'", "text", False),
        ("llm_query('q')", "A:q", False),
        ("0", "0", False),
        ("False", "false", False),
        ("True", "true", False),
        ("2.5", "2.5", False),
        (
            "{'total': 3, 'items': ['a'], 'ok': True, 'none': None}",
            '{"total": 3, "items": ["a"], "ok": true, "none": null}',
            False,
        ),
        ("('za\u017c', 1)", '["za\u017c", 1]', False),
        ("float('nan')", "nan", False),
        ("{1, }", "{1}", False),
        ("[]", "[]", False),
        ("''", "", True),
        ("' \\n'", " \n", True),
        ("None", "", True),
        ("b'x'", "b'x'", False),
        ("Bad()", "<Bad object; its str() raised ValueError>", False),
        ("'a\\ud800'", "a\ud800", False),
        ("loop", "[[...]]", False),
    ],
)
def test_content_becomes_text(host: Host, content: str, text: str, empty: bool) -> None:
    host.run("class Bad:\n    def __str__(self): raise ValueError\nloop = []\nloop.append(loop)")
    outcome = host.run(f"answer['content'] = {content}\nanswer['ready'] = True")
    (frame,) = outcome.answers
    assert codec.decode(frame["content"]) == text
    assert frame.get("empty", False) is empty


def test_answer_is_sent_at_once(host: Host) -> None:
    """So that a kill can't lose it."""
    host.start("import os\nanswer['content'] = 'x'\nanswer['ready'] = True\nllm_query('wait')")
    assert host.frame() == ready("x")
    call = host.frame()
    assert call["t"] == "call"
    host.reply(call, value="")
    assert host.finish().answers == []


def test_a_rebound_answer_is_watched_again(host: Host) -> None:
    host.run("answer = {'content': 'x', 'ready': False}")
    outcome = host.run(
        "import pickle\nprint(answer['content'], pickle.loads(pickle.dumps(answer)))\nanswer['ready'] = True"
    )
    assert outcome.stdout == "x {'content': 'x', 'ready': False}\n"
    assert outcome.answers == [ready("x")]


def test_the_host_resets_the_answer(host: Host) -> None:
    host.run("answer['content'] = 'first'\nanswer['ready'] = True")
    host.load("answer", value={"content": "", "ready": False})
    outcome = host.run("print(answer)")
    assert (outcome.stdout, outcome.answers) == ("{'content': '', 'ready': False}\n", [])
    assert host.run("answer.update(content='first', ready=True)").answers == [ready("first")]


# ---- loading ---------------------------------------------------------------------------------------------------------


def write(host: Host, data: bytes) -> str:
    path = Path(host.folder.name) / "variable"
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize(
    ("form", "data", "shown"),
    [
        ("text", "za\u017c\r\n\0\"'''\\".encode(), ascii("za\u017c\r\n\0\"'''\\")),
        ("text", "a\ud800".encode("utf-8", "surrogatepass"), ascii("a\ud800")),
        ("text", b"", "''"),
        ("bytes", b"\xff\0", r"b'\xff\x00'"),
        ("bytes", b"", "b''"),
        ("json", json.dumps(codec.encode({1: (2,)})).encode(), "{1: (2,)}"),
        ("pickle", pickle.dumps({3}), "{3}"),
    ],
)
def test_load_from_a_file_which_is_removed(host: Host, form: str, data: bytes, shown: str) -> None:
    path = write(host, data)
    assert host.load("filed", form=form, path=path) is None
    assert host.show("print(ascii(filed))") == shown + "\n"
    assert not Path(path).exists()
    host.run("del filed")
    assert host.show("print(ascii(filed))") == shown + "\n"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"form": "json", "value": {"$": "tuple", "v": [1]}}, "(1,)"),
        ({"value": "x"}, "'x'"),
        ({"form": "text", "value": "x"}, "'x'"),
        ({"form": "bytes", "value": codec.encode(b"x")}, "b'x'"),
        ({"form": "pickle", "value": codec.encode(pickle.dumps(range(3)))}, "range(0, 3)"),
        ({"form": "code", "value": "def v(): return 1\nv = v()"}, "1"),
    ],
)
def test_load_a_value(host: Host, fields: Frame, shown: str) -> None:
    name = "v" if fields.get("form") == "code" else "w"  # code finds the name free, as it is in a new worker
    assert host.load(name, **fields) is None
    host.run(f"{name} = 'changed'")
    assert host.show(name) == shown + "\n"


def pass_file(host: Host, path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    socket.send_fds(host.socket, [b"\n"], [fd])
    os.close(fd)


def test_load_from_descriptors_in_their_order(host: Host) -> None:
    first, second = write(host, b"one"), str(Path(host.folder.name) / "second")
    Path(second).write_bytes(b"")
    pass_file(host, first)
    pass_file(host, second)
    assert host.load("a", form="text", descriptor=True) is None
    assert host.load("b", form="text", descriptor=True) is None
    assert host.show("a, b") == "('one', '')\n"
    assert Path(first).exists()
    before = host.show("import os\nprint(len(os.listdir('/proc/self/fd')))")
    pass_file(host, first)
    assert host.load("a", form="text", descriptor=True) is None
    assert host.show("print(len(os.listdir('/proc/self/fd')))") == before


def test_a_file_is_read_in_pieces(host: Host) -> None:
    pass_file(host, write(host, b"a" * (PIECE - 1) + b"\xc3\xa9" + b"b" * PIECE))
    assert host.load("long", form="text", descriptor=True) is None
    assert host.show(f"print(long == 'a' * {PIECE - 1} + 'é' + 'b' * {PIECE})") == "True\n"


@pytest.mark.parametrize(
    ("form", "data", "error"),
    [
        ("text", b"good \xff bad", "not UTF-8 text: byte 0xff at position 5"),
        ("text", b"\xed\xa0\x80", "not UTF-8 text"),
        ("text", b"a" * (PIECE - 1) + b"\xc3\xa9\xff", f"byte 0xff at position {PIECE + 1:,}"),
        ("text", b"a" * (PIECE - 1) + b"\xc3", f"byte 0xc3 at position {PIECE - 1:,}"),
        ("json", b"{", "JSONDecodeError"),
        ("json", b'{"$": "nothing", "v": 1}', "unknown tag"),
        ("odd", b"x", "unknown form"),
    ],
)
def test_load_refusals(host: Host, form: str, data: bytes, error: str) -> None:
    pass_file(host, write(host, data))
    answer = host.load("v", form=form, descriptor=True)
    assert answer is not None
    assert error in answer


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"form": "text", "path": "/nowhere"}, "FileNotFoundError"),
        ({"form": "text"}, "nothing to load"),
        ({"form": "text", "descriptor": True}, "nothing to load"),
        ({"form": "json", "value": {"$": "set", "v": [[]]}}, "ValueError"),
        ({"form": "pickle", "value": codec.encode(b"junk")}, "UnpicklingError"),
        ({"form": "code", "value": "x = 1"}, "does not bind 'unbound'"),
        ({"form": "code", "value": "1/0"}, 'File "<cell unbound>", line 1'),
        ({"form": "code", "value": "llm_query('x')"}, "RuntimeError"),
        ({"form": "code", "value": "raise SystemExit(1)"}, "SystemExit"),
    ],
)
def test_load_errors(host: Host, fields: Frame, error: str) -> None:
    answer = host.load("unbound", **fields)
    assert answer is not None
    assert error in answer


def test_memory_error_names_the_limit() -> None:
    with Host() as host:
        host.run("import resource\nresource.setrlimit(resource.RLIMIT_DATA, (200 << 20, 200 << 20))")
        path = Path(host.folder.name) / "big"
        with path.open("wb") as file:
            file.truncate(400 << 20)
        answer = host.load("context", form="text", path=str(path))
        assert answer is not None
        assert "memory_limit" in answer
        assert not path.exists()
        assert host.show("print(llm_query('x'))") == "A:x\n"


def test_a_large_text_is_there_once(host: Host) -> None:
    size = 64 << 20
    with Host() as fresh:
        path = Path(fresh.folder.name) / "big"
        path.write_bytes(b"x" * size)
        fresh.run(
            "import resource\npeak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10\nbefore = peak()"
        )
        data = "open('/proc/self/status').read().split('VmData:')[1].split()[0]"
        before = int(fresh.show(f"print({data})")) << 10
        assert fresh.load("context", form="text", path=str(path)) is None
        grown = (int(fresh.show(f"print({data})")) << 10) - before
        assert size <= grown < 1.2 * size
        peak = int(fresh.show("print(peak() - before)"))
        assert peak < 2.2 * size, "the text and the mapped file, and no second text"
        assert fresh.show("print(len(context), context is context_0)") == f"{size} True\n"


@pytest.mark.parametrize("value", [{"rows": [1]}, [1, 2], "text"])
def test_context_in_place_changes_stay_and_the_name_comes_back(host: Host, value: Any) -> None:
    host.load("context", value=value)
    host.run("kept = context\ncontext = None")
    assert host.show("context is kept") == "True\n"
