"""Which parts of a reply run, and what the model is told when something does not."""

from __future__ import annotations

import signal
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrlm.engine.parsing import looks_like_code, parse_reply
from asyncrlm.engine.prompts import DEFAULT_PROMPTS, problem_message
from asyncrlm.observe.text import redact

SUBMIT = 'answer["content"]'
NESTED = 'p = """# G\n```python\nn = 1\n```\nend"""'
TAGS = 's = "<think>"\nt = """\n</think>\n"""'


@pytest.mark.parametrize(
    ("reply", "cells"),
    [
        pytest.param("```repl\nx = 1\n```", ["x = 1"], id="plain"),
        pytest.param("```python\nx\n```\n```py\ny\n```\n```Python3\nz\n```", ["x", "y", "z"], id="labels"),
        pytest.param("```REPL\nx\n```", ["x"], id="upper case"),
        pytest.param("``` repl\nx\n```", ["x"], id="space before the label"),
        pytest.param('```python title="a.py" {1}\nx\n```', ["x"], id="attributes"),
        pytest.param("```{python}\nx\n```", ["x"], id="braces"),
        pytest.param("````repl\nx\n````", ["x"], id="four backticks"),
        pytest.param("~~~repl\nx\n~~~", ["x"], id="tildes"),
        pytest.param("Ok.\r\n```repl\r\nx = 1\r\ny = 2\r\n```\r\n", ["x = 1\ny = 2"], id="CRLF"),
        pytest.param("a\n```repl\nx\n```\nprose ) ] }\n```repl\ny\n```\nend", ["x", "y"], id="several"),
        pytest.param("```repl\nx\n``` \t\nend", ["x"], id="blanks after the fence"),
        pytest.param("```repl x = 1```", ["x = 1"], id="on one line"),
        pytest.param("```repl\nx = 5```\nNow.\n```repl\ny\n```", ["x = 5", "y"], id="closing fence glued to code"),
        pytest.param("```repl\nx = 1  # see ```\ny = 2\n```", ["x = 1  # see ```\ny = 2"], id="fence in a comment"),
        pytest.param('```repl\ns = "```"\n```', ['s = "```"'], id="fence in a string"),
        pytest.param(f"```repl\n{NESTED}\n```", [NESTED], id="nested"),
        pytest.param("```repl\ns = '''a\n``` no end\nb'''\n```", ["s = '''a\n``` no end\nb'''"], id="fence with words"),
        pytest.param('```repl\ns = r"""\\\n```\n"""\n```', ['s = r"""\\\n```\n"""'], id="raw string"),
        pytest.param("```repl\n# don't\nx\n```", ["# don't\nx"], id="apostrophe in a comment"),
        pytest.param("```repl\nx = 'abc\ny\n```", ["x = 'abc\ny"], id="string that ends with its line"),
        pytest.param("```repl\na\n```repl\nb\n```", ["a", "b"], id="closing fence forgotten"),
        pytest.param("```repl\na\n~~~\n```", ["a\n~~~"], id="other fence inside"),
        pytest.param("````repl\na\n```\n````", ["a\n```"], id="shorter fence inside"),
        pytest.param('```repl\nx = """a\n```\nprose\n```repl\ny\n```', ['x = """a', "y"], id="string never ended"),
        pytest.param("   ```repl\n   if a:\n       b\n   ```", ["if a:\n    b"], id="indented fence"),
        pytest.param("\t```repl\n\tx\n\t```", ["x"], id="tab"),
        pytest.param("1. ```repl\n   if a:\n     b\n   ```", ["if a:\n  b"], id="in a list"),
        pytest.param("  ```repl\nif a:\n  b\n  ```", ["if a:\n  b"], id="only the fence indented"),
        pytest.param("```repl\n    x\n    if y:\n        z\n```", ["x\nif y:\n    z"], id="only the code indented"),
        pytest.param("```repl\n\n  \n```\n```repl\nx\n```", ["x"], id="blank block"),
        pytest.param("```json\n{}\n```\n```\nraise\n```\n```text\nx\n```\n```repl\ny\n```", ["y"], id="other labels"),
        pytest.param("````markdown\n```repl\nno\n```\n````\n```repl\nyes\n```", ["yes"], id="quoted block"),
        pytest.param("```json\n{}\n\n```repl\nx\n````", [], id="block of text closed by longer fence"),
        pytest.param("````json\n{}\n\n```repl\nx\n```", ["x"], id="block of text never closed"),
        pytest.param("text ```repl inside``` a line", [], id="inline code"),
        pytest.param("```repl`x`\ny\n```", [], id="backtick in the opening line"),
        pytest.param("<think>\n```repl\nno\n```\n</think>\n```repl\nyes\n```", ["yes"], id="thinking"),
        pytest.param("<THINKING>no</Thinking>```repl\nyes\n```", ["yes"], id="block right after thinking"),
        pytest.param("```repl\nno\n```\n</think>\n```repl\nyes\n```", ["yes"], id="thinking opened by the template"),
        pytest.param("```repl\nno\n</think>\n```repl\nyes\n```", ["yes"], id="thinking ends inside a draft"),
        pytest.param(f"```repl\n{TAGS}\n```", [TAGS], id="tags in code"),
        pytest.param("use `<think>` here\n```repl\nx\n```", ["x"], id="tag named in prose"),
    ],
)  # fmt: skip
def test_cells(reply: str, cells: list[str]) -> None:
    parsed = parse_reply(reply)
    assert parsed.cells == cells
    assert (parsed.problem is None) is bool(cells)
    assert not parsed.unclosed


@pytest.mark.parametrize(
    "code",
    [
        "x = 1",
        "def f(): ...",
        'x = "a = # b"',
        "x = 1 # if",
        'answer["ready"] = True',
        "f(x)",
        "s = '''a'''",
        "x = [1,\n2]",
        "a])",
    ],
)
def test_an_unclosed_last_block_runs_if_it_looks_whole(code: str) -> None:
    parsed = parse_reply(f"Go.\n```repl\n{code}")
    assert (parsed.cells, parsed.problem, parsed.unclosed) == ([code], None, True)


@pytest.mark.parametrize(
    "code",
    [
        "rows = [1, 2,", "x = 1 +", "if x:", "x =", "f(", 'print("hello wor', 'print("a\\"', "s = '''abc", "import",
        "x = a and", "a.", "x = 1 \\",
    ],
)  # fmt: skip
def test_a_block_cut_off_does_not_run(code: str) -> None:
    parsed = parse_reply(f"```repl\nfirst\n```\n```repl\nprint('half')\n{code}")
    assert parsed.cells == ["first"]
    assert parsed.problem == "cut_block"


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("", "no ```repl block"),
        ("I think it is 7.", "no ```repl block"),
        ("FINAL(42)", "FINAL(...) and FINAL_VAR(...) do nothing"),
        ("I call FINAL_VAR(result).", "FINAL(...) and FINAL_VAR(...) do nothing"),
        ("```json\n{}\n```", "labelled json"),
        ("```\nx\n```", "without a label"),
        ("```replx\nx\n```", "labelled replx"),
        ("<think>\n```repl\nx\n```", "outside your thinking"),
        ("```repl\n```", "no ```repl block"),
    ],
)
def test_the_model_is_told_what_to_do(reply: str, says: str) -> None:
    parsed = parse_reply(reply)
    assert parsed.cells == []
    told = problem_message(DEFAULT_PROMPTS, parsed, "whole")
    assert told is not None
    assert says in told
    assert told.startswith("No code ran: ")
    assert SUBMIT in told


def test_a_mention_of_final_beside_a_cell_is_no_problem() -> None:
    assert parse_reply("Then I call FINAL(x).\n```repl\nx\n```").problem is None


N = 100_000
HOSTILE = {
    "backticks": "`" * N,
    "strings that never end": '```py\n\\"""\n```\n' * (N // 12),
    "openers": "```x\n````y\n" * (N // 12),
    "blanks": " " * N,
    "thoughts": "<think>" * (N // 7),
    "empty thoughts": "<think></think>" * (N // 15),
    "quotes": "```py\n" + '"' * N,
    "lines": "```py\n" + "x = 1\n" * (N // 6),
    "backslashes": '```py\n"' + "\\" * N,
    "fences with words": "```py\n" + "``` x\n" * (N // 6),
    "blocks": "```py\n" * (N // 6),
    "comments": "```py\n" + "#```\n" * (N // 5),
    "glued": "```py\nx```\n" * (N // 11),
    "one line": "```py " + "a`" * (N // 2),
    "list": "1. " * (N // 3),
    "brackets": "```py\n" + "(" * N,
    "ever shorter fences": "".join("`" * (440 - i) + "x\n```\n" for i in range(430)),
    "code without fence": "x = [" + "(a, " * (N // 4),
    "assignments": "a = " * (N // 4),
    "words": "a b " * (N // 4),
}


@pytest.mark.parametrize("reply", HOSTILE.values(), ids=HOSTILE)
def test_reading_is_linear(reply: str) -> None:
    """Eight times the text may take about eight times as long, never 64: the CPU time of this process is measured."""

    def seconds(text: str) -> float:
        before = time.process_time()
        parse_reply(text)
        looks_like_code(text)
        return time.process_time() - before

    small = min(seconds(reply[: len(reply) // 8]) for _ in range(3))
    assert min(seconds(reply) for _ in range(3)) < 30 * small + 0.05


FENCES = ["```", "````", "~~~", "```repl\n", "```py", "<think>", "</think>"]
PIECES = [*FENCES, "\n", "x=1\n", '"""', "'", "\\", "#", "(", "1. ", "  "]


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet="`~ \nx\"'#\\<>/think1.-r(p)y", max_size=80)
    | st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
)
def test_any_text_is_read(reply: str) -> None:
    parsed = parse_reply(reply)
    assert all(cell.strip() and cell.replace("\n", "") for cell in parsed.cells)
    assert parsed.cells or parsed.problem


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "x = 1",
                's = """a\n```\nb"""',
                "t = '''\n```repl\n'''",
                "# it's ```",
                "u = '```'",
                "if x:\n    y = 2",
                'f"{x!r}"',
            ]
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["```", "````", "~~~"]),
    st.sampled_from(["", "  ", "\t"]),
)
def test_what_is_fenced_comes_out(statements: list[str], fence: str, indent: str) -> None:
    code = "\n".join(statements)
    inside = "\n".join(indent + line for line in code.split("\n"))
    assert parse_reply(f"Go\n{indent}{fence}repl\n{inside}\n{indent}{fence}\nend").cells == [code]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```repl\nprint('still looking')\n```", True),
        ("Sorry.\n~~~ Repl\nx\n~~~", True),
        ('I submit:\n```python\nanswer["content"] = "x"\n```', True),
        ("```python\nprint(len(context))\n```", True),
        ("import os\nx = 1\nprint(x)", True),
        ("for x in range(3):\n    print(x)\n# done", True),
        ('answer["content"] = "x"', True),
        ("llm_query_batched(prompts)", True),
        ("42", False),
        ("", False),
        ("Paris", False),
        ("total = 5", False),
        ("The answer is 42.", False),
        ("Use this:\n```python\ndef f(x): return x\n```\nIt is fine.", False),
        ("```python\ndef f(x): return x\n```", False),
        ("Name: Bob\nAge = 12 years, and so on.\nThis is prose (yes).", False),
        ('{"a": 1,\n "b": 2}', False),
        ("- a\n- b", False),
    ],
)
def test_looks_like_code(text: str, code: bool) -> None:
    assert looks_like_code(text) is code


@pytest.mark.parametrize(
    "text",
    [
        "```repl\n" + "`" * 300_000 + "x\n```",
        "```repl " + "`" * 300_000 + "x",
        "```repl " + " " * 300_000 + "x",
        ")" * 300_000 + "-",
        "for " + " in a" * 60_000,
        "a " * 150_000 + "-",
        "`" * 300_000 + "x",
        "~" * 300_000 + "x",
        " " * 300_000 + "^",
    ],
    ids=lambda text: text[:12],
)
def test_no_reply_takes_more_than_its_length(text: str) -> None:
    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)  # squared, each of these takes minutes
    try:
        parse_reply(text)
        looks_like_code(text)
        redact(text + "sk-" * 100_000)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
