"""The public fakes: `ScriptedLM` and `FakeOpenAIServer`."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request

import anyio
import openai
import pytest

import asyncrlm.testing
from asyncrlm.errors import LMError
from asyncrlm.lm.base import LMReply, LMRequest, LMUsage, Message
from asyncrlm.testing import FakeOpenAIServer, FakeReply, ScriptedLM

pytestmark = pytest.mark.anyio


def ask(text: str) -> LMRequest:
    return LMRequest(messages=(Message("system", "be brief"), Message("user", text)))


def post(server: FakeOpenAIServer, body: object) -> bytes:
    headers = {"content-type": "application/json"}
    call = urllib.request.Request(server.base_url + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(call) as response:
        return response.read()


async def test_a_script_answers_in_order_and_records() -> None:
    lm = ScriptedLM(
        [
            "one",
            LMReply(text="two", usage=LMUsage(input_tokens=7)),
            lambda request: request.messages[-1].content.upper(),
        ]
    )
    assert lm.remaining == 3
    replies = [await lm.acomplete(ask(text)) for text in ("a", "bb", "ccc")]
    assert [reply.text for reply in replies] == ["one", "two", "CCC"]
    assert replies[0].usage == LMUsage(input_tokens=3, output_tokens=1)
    assert replies[1].usage == LMUsage(input_tokens=7)
    assert lm.prompts == ["a", "bb", "ccc"]
    assert lm.remaining == 0
    assert "3 of 3 calls" in repr(lm)


async def test_a_script_that_ran_out_says_which_call_it_was() -> None:
    lm = ScriptedLM(["only"], model="little")
    await lm.acomplete(ask("first"))
    with pytest.raises(LMError, match=r"'little' has 1 reply and this is call 2; .* begins 'second'") as caught:
        await lm.acomplete(ask("second"))
    assert not caught.value.retryable


async def test_a_script_raises_its_exceptions() -> None:
    lm = ScriptedLM([LMError("slow down", kind="rate_limit", retryable=True), KeyError("bug")])
    with pytest.raises(LMError, match="slow down"):
        await lm.acomplete(ask("x"))
    with pytest.raises(KeyError):
        await lm.acomplete(ask("x"))


async def test_a_function_may_be_async_and_calls_overlap() -> None:
    arrived = 0
    everybody = anyio.Event()

    async def answer(request: LMRequest) -> str:
        nonlocal arrived
        arrived += 1
        if arrived == 5:
            everybody.set()
        await everybody.wait()
        return request.messages[-1].content

    lm = ScriptedLM(answer, usage=None)
    got: dict[int, LMReply] = {}

    async def one(number: int) -> None:
        got[number] = await lm.acomplete(ask(str(number)))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(one, number)
    assert {number: reply.text for number, reply in got.items()} == {number: str(number) for number in range(5)}
    assert got[0].usage == LMUsage()
    assert (lm.max_in_flight, lm.in_flight, lm.remaining) == (5, 0, 0)


async def test_latency_is_slept_and_a_cancelled_call_leaves_nothing_in_flight() -> None:
    lm = ScriptedLM(lambda request: "late", latency=lambda request: float(request.messages[-1].content))
    started = anyio.current_time()
    await lm.acomplete(ask("0.05"))
    assert anyio.current_time() - started >= 0.05
    with anyio.move_on_after(0.02) as scope:
        await lm.acomplete(ask("60"))
    assert scope.cancelled_caught
    assert (len(lm.calls), lm.in_flight) == (2, 0)


async def test_a_call_cancelled_before_it_began_is_not_recorded() -> None:
    lm = ScriptedLM(lambda request: "never")
    with anyio.CancelScope() as scope:
        scope.cancel()
        await lm.acomplete(ask("x"))
    assert lm.calls == []


@pytest.mark.parametrize(
    ("arguments", "error"), [({"replies": "a str"}, TypeError), ({"replies": [], "usage": "guessed"}, ValueError)]
)
def test_scripts_are_checked(arguments: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        ScriptedLM(**arguments)  # type: ignore[arg-type]


async def test_a_script_of_wrong_things_says_so() -> None:
    lm = ScriptedLM([lambda request: 5], needs_price=True)  # type: ignore[list-item, return-value]
    assert lm.needs_price
    with pytest.raises(TypeError, match="gave int"):
        await lm.acomplete(ask("x"))


async def test_the_server_speaks_to_the_sdk_plain_and_streaming() -> None:
    replies = [
        FakeReply("plain words here", reasoning="because"),
        FakeReply("streamed words here", reasoning="hm"),
        FakeReply("last", usage=None),
    ]
    async with (
        FakeOpenAIServer(replies, models=["a", "b"]) as server,
        openai.AsyncOpenAI(base_url=server.base_url, api_key="key", max_retries=0) as client,
    ):
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello there"}]
        plain = await client.chat.completions.create(model="a", messages=messages)
        assert plain.choices[0].message.content == "plain words here"
        assert plain.choices[0].message.model_extra == {"reasoning_content": "because"}
        assert plain.usage is not None
        assert (plain.usage.prompt_tokens, plain.model) == (3, "a")

        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        lines = (await anyio.to_thread.run_sync(post, server, body)).split(b"\n\n")
        assert lines[-2:] == [b"data: [DONE]", b""]
        chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-2]]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert [delta["content"] for delta in deltas if delta.get("content")] == ["streamed ", "words ", "here"]
        assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == ["hm"]
        assert chunks[-1]["usage"]["prompt_tokens"] == 3

        last = await client.chat.completions.create(model="a", messages=messages)
        assert last.usage is None
        assert [model.id async for model in client.models.list()] == ["a", "b"]
        with pytest.raises(openai.InternalServerError, match="3 replies and this is request 4"):
            await client.chat.completions.create(model="a", messages=messages)
        with pytest.raises(openai.NotFoundError):
            await client.files.list()
    assert [request.text for request in server.requests] == ["hello there"] * 4
    assert server.requests[0].headers["authorization"] == "Bearer key"
    assert server.max_in_flight == 1
    assert "not running" in repr(server)


async def test_the_server_cuts_streams_and_replies() -> None:
    replies = [FakeReply("a b c d e f", cut="within"), FakeReply("x", cut="within"), FakeReply("x", cut="before")]
    async with (
        FakeOpenAIServer(replies) as server,
        openai.AsyncOpenAI(base_url=server.base_url, api_key="key", max_retries=0) as client,
    ):
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "x"}]
        with pytest.raises(http.client.IncompleteRead) as caught:
            await anyio.to_thread.run_sync(post, server, {"messages": messages, "stream": True})
        assert b"a " in caught.value.partial
        assert b"DONE" not in caught.value.partial
        for _ in range(2):
            with pytest.raises(openai.APIConnectionError):
                await client.chat.completions.create(model="a", messages=messages)
    assert len(server.requests) == 3


def test_the_server_runs_in_a_thread_for_blocking_callers(no_leaks: None) -> None:
    with FakeOpenAIServer.serve_in_thread(lambda request: request.text.upper()) as server:
        reply = json.loads(post(server, {"model": "m", "messages": [{"role": "user", "content": "loud"}]}))
        assert reply["choices"][0]["message"]["content"] == "LOUD"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url + "/elsewhere")
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.url


async def test_errors_of_the_block_and_of_a_handler_come_out_bare() -> None:
    with pytest.raises(ZeroDivisionError):
        async with FakeOpenAIServer([]):
            raise ZeroDivisionError

    def broken(request: object) -> str:
        raise LookupError("a bug in the test")

    async def ask_broken() -> None:
        async with FakeOpenAIServer(broken) as server:
            await anyio.to_thread.run_sync(post, server, {"messages": []}, abandon_on_cancel=True)

    with pytest.raises(LookupError):
        await ask_broken()
    async with FakeOpenAIServer([]) as server:
        with pytest.raises(RuntimeError, match="running already"):
            await server.__aenter__()


@pytest.mark.parametrize(
    "sent",
    [
        b"no http at all\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n",
        b"",
    ],
)
async def test_garbage_ends_only_its_own_connection(sent: bytes) -> None:
    async with FakeOpenAIServer([]) as server:
        port = int(server.url.rpartition(":")[2])
        stream = await anyio.connect_tcp("127.0.0.1", port)
        await stream.send(sent)
        await stream.send_eof()
        with anyio.fail_after(10):
            assert [piece async for piece in stream] == []
        await stream.aclose()
        reply = await anyio.to_thread.run_sync(lambda: urllib.request.urlopen(server.base_url + "/models").read())
        assert json.loads(reply)["data"][0]["id"] == "fake"


async def test_expect_continue_is_answered() -> None:
    async with FakeOpenAIServer(["fine"]) as server:
        stream = await anyio.connect_tcp("127.0.0.1", int(server.url.rpartition(":")[2]))
        async with stream:
            body = b'{"messages": [{"role": "user", "content": "x"}], "stream": false}'
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
            await stream.send(f"{head}content-length: {len(body)}\r\n\r\n".encode())
            with anyio.fail_after(10):
                assert (await stream.receive()).startswith(b"HTTP/1.1 100")
                await stream.send(body)
                assert b"fine" in await stream.receive()


def test_the_package_exports_what_it_says() -> None:
    assert all(hasattr(asyncrlm.testing, name) for name in asyncrlm.testing.__all__)
    with pytest.raises(AttributeError):
        _ = asyncrlm.testing.nothing
