"""What every backend must do alike, each through its vendor's protocol against a real server on loopback."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
from typing import Any

import anyio
import httpx
import httpx2
import pytest
from lm_backends import BACKENDS, FAMILIES, Backend, streamed, whole
from lm_serving import KEY, ask, timeless

from asyncrlm.errors import ConfigurationError, LMError
from asyncrlm.lm.base import LMClient, LMReply, LMRequest, LMUsage, Message
from asyncrlm.lm.clients import client_spec
from asyncrlm.lm.pacing import reply_text
from asyncrlm.testing import FakeReply, FakeRequest

pytestmark = pytest.mark.anyio

each = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
each_family = pytest.mark.parametrize("backend", FAMILIES, ids=lambda backend: backend.name)
both_ways = pytest.mark.parametrize("way", ["whole", "streamed"])


@each
@both_ways
async def test_a_reply_says_the_same_whoever_gives_it(backend: Backend, way: str) -> None:
    async with backend.serving(FakeReply("hällo big world", reasoning="so hm", usage=backend.usage)) as (
        server,
        client,
    ):
        request = LMRequest(messages=(Message("system", "be brief"), Message("user", "ünd nun?")))
        reply = await whole(client, request, way)
    written = 10 if backend.name == "anthropic" else None
    assert timeless(reply) == LMReply(
        text="hällo big world",
        reasoning="so hm",
        finish_reason="stop",
        usage=LMUsage(
            input_tokens=100, output_tokens=20, cached_tokens=60, cache_write_tokens=written, reasoning_tokens=5
        ),
        model="m",
    )
    (seen,) = server.requests
    assert seen.text == "ünd nun?"
    assert "be brief" in str(seen.body)
    assert seen.headers[backend.signature[0]] == backend.signature[1]
    assert KEY not in seen.path + str(seen.body)


@each
async def test_a_stream_comes_word_by_word(backend: Backend) -> None:
    async with backend.serving(FakeReply("a b c", reasoning="x y")) as (_, client):
        deltas, _ = await streamed(client, ask())
    assert [delta.text for delta in deltas if delta.text] == ["a ", "b ", "c"]
    assert "".join(delta.reasoning for delta in deltas) == "x y"
    assert len(deltas) >= 5


@each_family
async def test_a_delta_is_there_before_the_next_one_is_written(backend: Backend) -> None:
    got: list[str] = []

    async def hold(piece: int) -> None:
        while piece == 25 and len(got) < 20:
            await anyio.sleep(0.005)

    async with backend.serving(FakeReply("word " * 50, before_piece=hold)) as (_, client):
        with anyio.fail_after(10):
            async for delta in client.astream(ask()):
                got.append(delta.text)
    assert "".join(got) == "word " * 50


@each_family
async def test_a_stream_that_is_cancelled_or_too_slow_is_closed(backend: Backend) -> None:
    async def hold(piece: int) -> None:
        if piece >= 4:
            await anyio.sleep_forever()

    async with backend.serving(lambda request: FakeReply("word " * 50, before_piece=hold)) as (server, client):
        with anyio.move_on_after(0.2) as scope:
            await streamed(client, ask())
        assert scope.cancelled_caught
        with pytest.raises(LMError, match="no whole reply") as caught:
            await streamed(client, ask(sampling_args={"timeout": 0.2}))
        assert (caught.value.kind, caught.value.charged) == ("timeout", True)
        assert len(server.requests) == 2


@each
@both_ways
async def test_thoughts_alone_are_an_empty_reply(backend: Backend, way: str) -> None:
    async with backend.serving(FakeReply(None, reasoning="```repl\nx\n```", finish_reason="length")) as (_, client):
        reply = await whole(client, ask(), way)
    assert (reply.text, reply.finish_reason) == ("", "length")
    with pytest.raises(LMError) as caught:
        reply_text(reply)
    assert caught.value.kind == "empty"


@each
@both_ways
async def test_a_refusal_is_one(backend: Backend, way: str) -> None:
    async with backend.serving(FakeReply(None, refusal="I would rather not")) as (_, client):
        reply = await whole(client, ask(), way)
    assert (reply.text, reply.reasoning, reply.finish_reason) == ("", "I would rather not", "refusal")
    with pytest.raises(LMError, match="rather not") as caught:
        reply_text(reply)
    assert (caught.value.kind, caught.value.retryable) == ("refusal", False)


@each
@both_ways
async def test_a_reply_that_is_cut_off_says_so(backend: Backend, way: str) -> None:
    async with backend.serving(FakeReply("```repl\nx = [1,", finish_reason="length"), "whole") as (_, client):
        cut, other = await whole(client, ask(), way), await whole(client, ask(), way)
    assert (cut.finish_reason, cut.cut_off, cut.text) == ("length", True, "```repl\nx = [1,")
    assert (other.finish_reason, other.cut_off) == ("stop", False)


@each
@both_ways
async def test_a_server_that_does_not_say_what_it_used(backend: Backend, way: str) -> None:
    async with backend.serving(FakeReply("ok", usage=None)) as (_, client):
        reply = await whole(client, ask(), way)
    assert (reply.text, reply.usage) == ("ok", LMUsage())


@each
@both_ways
@pytest.mark.parametrize(
    ("reply", "kind", "status", "retryable", "retry_after"),
    [
        (FakeReply.fault(429, retry_after=7), "rate_limit", 429, True, 7.0),
        (FakeReply.fault(429), "rate_limit", 429, True, None),
        (FakeReply.fault(500), "server", 500, True, None),
        (FakeReply.fault(503, retry_after=2), "server", 503, True, 2.0),
        (FakeReply.fault(529), "server", 529, True, None),
        (FakeReply.fault(408), "timeout", 408, True, None),
        (FakeReply.fault(401), "authentication", 401, False, None),
        (FakeReply.fault(403), "permission", 403, False, None),
        (FakeReply.fault(404), "not_found", 404, False, None),
        (FakeReply.fault(400), "bad_request", 400, False, None),
        (FakeReply.fault(400, "prompt is too long: 9 tokens > 5 maximum"), "too_long", 400, False, None),
        (FakeReply.fault(402, "insufficient credits"), "quota", 402, False, None),
    ],
)
async def test_refusals_of_the_server_are_classified(
    backend: Backend, way: str, reply: FakeReply, kind: str, status: int, retryable: bool, retry_after: float | None
) -> None:
    async with backend.serving(reply, "works again") as (server, client):
        with pytest.raises(LMError) as caught:
            await whole(client, ask(), way)
        error = caught.value
        assert (error.kind, error.status, error.retryable) == (kind, status, retryable), error
        assert (error.retry_after, error.charged) == (retry_after, False)
        assert (await whole(client, ask(), way)).text == "works again"
    assert len(server.requests) == 2


@each
@both_ways
async def test_lost_connections_may_have_cost(backend: Backend, way: str) -> None:
    async with backend.serving(
        FakeReply("x" * 500, cut="before"), FakeReply("word " * 100, cut="within"), "works again"
    ) as (_, client):
        for _ in range(2):
            with anyio.fail_after(10), pytest.raises(LMError, match="lost the connection") as caught:
                await whole(client, ask(), way)
            error = caught.value
            assert (error.kind, error.retryable, error.charged) == ("connection", True, True)
        assert (await whole(client, ask(), way)).text == "works again"


@each
async def test_a_stream_cut_in_the_middle_has_given_what_it_had(backend: Backend) -> None:
    got: list[str] = []

    async def listen(client: LMClient) -> None:
        async for delta in client.astream(ask()):
            assert delta.reply is None
            got.append(delta.text)

    async with backend.serving(FakeReply("word " * 100, cut="within")) as (_, client):
        with pytest.raises(LMError):
            await listen(client)
    assert 20 < len(got) < 100


EVENT_STREAM = {"content-type": "text/event-stream"}


@each
async def test_a_stream_that_just_ends_or_breaks_off_with_an_error(backend: Backend) -> None:
    async with backend.serving(
        FakeReply(body=b": nothing\n\n", headers=EVENT_STREAM),
        FakeReply(body=b"data: " + backend.broken + b"\n\n", headers=EVENT_STREAM),
        FakeReply(body=b"data: " + backend.error_event + b"\n\n", headers=EVENT_STREAM),
        "works again",
    ) as (_, client):
        errors: list[LMError] = []
        for _ in range(3):
            with pytest.raises(LMError) as caught:
                await streamed(client, ask())
            errors.append(caught.value)
        assert (await streamed(client, ask()))[1].text == "works again"
    assert all(error.retryable for error in errors)
    assert errors[0].kind in ("connection", "bad_reply")
    assert [error.kind for error in errors[1:]] == ["bad_reply", "server"]
    assert errors[0].charged
    assert "verloaded" in str(errors[2])


@each
@both_ways
async def test_bodies_that_are_no_reply(backend: Backend, way: str) -> None:
    for body in (backend.broken, backend.empty, b"", b"<html>hello</html>", b"[1]", b"null"):
        async with backend.serving(FakeReply(body=body), "works again") as (_, client):
            with pytest.raises(LMError) as caught:
                await whole(client, ask(), way)
            error = caught.value
            assert (error.kind, error.retryable, error.charged) == ("bad_reply", True, True), body
            assert (await whole(client, ask(), way)).text == "works again"


@each
@both_ways
async def test_a_reply_without_anything_says_what_it_cost_all_the_same(backend: Backend, way: str) -> None:
    body = json.loads(backend.empty) | {backend.usage_name: backend.usage}
    async with backend.serving(FakeReply(body=json.dumps(body).encode())) as (_, client):
        with pytest.raises(LMError) as caught:
            await whole(client, ask(), way)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.kind, error.charged) == ("bad_reply", True)
    assert (error.usage.input_tokens, error.usage.cached_tokens, error.usage.output_tokens) == (100, 60, 20)


@each
async def test_a_whole_reply_to_who_asked_for_a_stream_is_one_delta(backend: Backend) -> None:
    async with backend.serving(FakeReply(body=backend.whole)) as (_, client):
        deltas, reply = await streamed(client, ask())
    assert (len(deltas), reply.text) == (1, "hi")


@each_family
@pytest.mark.parametrize(
    ("sampling", "cap", "sent"),
    [({"max_tokens": 64}, None, 64), ({}, 50, 50), ({"max_tokens": 10}, 50, 10), ({"max_tokens": 100}, 50, 50)],
)
async def test_a_cap_on_output_tokens_is_sent_and_lowered(
    backend: Backend, sampling: dict[str, Any], cap: int | None, sent: int
) -> None:
    async with backend.serving("a", sampling_args=sampling) as (server, client):
        await client.acomplete(ask(output_cap=cap))
    found: Any = server.requests[0].body
    for name in backend.cap:
        found = found[name]
    assert found == sent


@each_family
@both_ways
async def test_a_reply_that_is_too_late_is_a_timeout(backend: Backend, way: str) -> None:
    def reply(request: FakeRequest) -> FakeReply:
        return FakeReply("late", latency=60) if request.text == "late" else FakeReply("in time")

    # Long enough for the request to be there on a busy machine: only then may it have cost something.
    async with backend.serving(reply, timeout=1.0) as (server, client):
        with anyio.fail_after(10), pytest.raises(LMError, match="in time") as caught:
            await whole(client, ask("late"), way)
        assert (caught.value.kind, caught.value.retryable, caught.value.charged) == ("timeout", True, True)
        assert (await whole(client, ask(sampling_args={"timeout": 10}), way)).text == "in time"
        with anyio.fail_after(10):
            while server.aborted != 1:
                await anyio.sleep(0.005)


@each_family
async def test_who_leaves_a_stream_early_leaves_no_connection(backend: Backend) -> None:
    async with backend.serving(lambda request: "word " * 200) as (server, client):
        for _ in range(5):
            async with contextlib.aclosing(client.astream(ask())) as deltas:
                async for delta in deltas:
                    assert delta.reply is None
                    break
        assert (await streamed(client, ask()))[1].text == "word " * 200
        assert server.open_connections <= 2
    with anyio.fail_after(10):
        while server.open_connections:
            await anyio.sleep(0.005)


@each_family
async def test_closing_closes_and_calls_share_connections(backend: Backend) -> None:
    async with backend.server(lambda request: request.text) as server:
        async with backend.spec(server).open() as client:
            for number in range(20):
                reply = await whole(client, ask(str(number)), "streamed" if number % 2 else "whole")
                assert reply.text == str(number)
            assert server.connections == 1
        with anyio.fail_after(10):
            while server.open_connections:
                await anyio.sleep(0.005)


@each_family
@pytest.mark.soak
async def test_the_connections_of_two_thousand_calls_are_bounded(backend: Backend) -> None:
    async with backend.serving(lambda request: request.text) as (server, client):
        gate, wrong = anyio.Semaphore(32), list[str]()

        async def one(number: int) -> None:
            async with gate:
                reply = await whole(client, ask(str(number)), "streamed" if number % 10 == 0 else "whole")
                if reply.text != str(number):
                    wrong.append(reply.text)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for number in range(2_000):
                    tasks.start_soon(one, number)
        assert (wrong, len(server.requests)) == ([], 2_000)
        assert server.connections <= 64
        assert server.open_connections <= 32


@each_family
@both_ways
@pytest.mark.parametrize("library", [httpx2, httpx])
async def test_the_callers_http_client_is_used_and_not_closed(backend: Backend, way: str, library: Any) -> None:
    asked: list[str] = []

    async def hook(request: Any) -> None:
        asked.append(request.url.path)

    async with library.AsyncClient(event_hooks={"request": [hook]}) as mine:
        async with backend.serving("a b", FakeReply.fault(503), http_client=mine) as (_, client):
            assert (await whole(client, ask(), way)).text == "a b"
            with pytest.raises(LMError):
                await whole(client, ask(), way)
        assert not mine.is_closed
    assert len(asked) == 2


@pytest.mark.parametrize("library", [httpx2, httpx])
async def test_the_callers_http_client_keeps_its_cookies_login_and_hooks(library: Any) -> None:
    """Those of the server's host only, and those that it gave itself; no message repeats them."""
    seen: list[str] = []

    async def hook(request: Any) -> None:
        seen.append(request.url.path)
        if len(seen) > 3:
            raise ValueError(f"{request.headers['cookie']} and {request.headers['authorization']}")

    cookies = library.Cookies({"session": "cookie-of-mine-1234"})
    cookies.set("other", "of-another-host", domain="elsewhere.test")
    told = FakeReply("a", headers={"set-cookie": "given=by-the-server-5678; Path=/"})
    echoed = FakeReply(status=400, error={"message": "what is cookie-of-mine-1234 / by-the-server-5678?"})
    mine = library.AsyncClient(cookies=cookies, auth=("user", "password"), event_hooks={"request": [hook]})
    async with mine, FAMILIES[1].serving(told, "b", echoed, http_client=mine) as (server, client):
        await client.acomplete(ask())
        await streamed(client, ask())
        with pytest.raises(LMError, match="what is") as caught:
            await client.acomplete(ask())
        with pytest.raises(LMError, match="ValueError") as raised:
            await client.acomplete(ask())
    sent = [request.headers.get("cookie") for request in server.requests]
    assert sent == ["session=cookie-of-mine-1234", *["session=cookie-of-mine-1234; given=by-the-server-5678"] * 2]
    assert {request.headers["authorization"] for request in server.requests} == {"Basic dXNlcjpwYXNzd29yZA=="}
    for error in (caught.value, raised.value):
        assert not [secret for secret in ("1234", "5678", "dXNlcj") if secret in str(error)]


async def test_what_a_server_gives_as_a_cookie_is_not_sent_back_without_the_callers_http_client() -> None:
    """It may name one of many machines, and a burst is to go to all of them."""
    reply = FakeReply("a", headers={"set-cookie": "machine=7; Path=/"})
    async with FAMILIES[1].serving(reply, reply) as (server, client):
        for _ in range(2):
            await client.acomplete(ask())
    assert [request.headers.get("cookie") for request in server.requests] == [None, None]


@each_family
async def test_another_http_client_is_refused(backend: Backend) -> None:
    async with backend.server([]) as server:
        with pytest.raises(ConfigurationError, match=r"httpx2\.AsyncClient"):
            async with backend.spec(server, http_client=object()).open():
                pass


@each_family
@both_ways
async def test_no_secret_shows_up_anywhere(backend: Backend, way: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    headers = {"X-Extra": "header-s3cret-value"}
    echo = f"Incorrect API key {KEY} {headers['X-Extra']}"
    async with backend.serving(
        FakeReply.fault(401, echo),
        FakeReply.fault(401, "x" * 480 + KEY),
        FakeReply(body=f"{echo} {echo}".encode()),
        FakeReply(body=b"x" * 60 + KEY.encode()),
        default_headers=headers,
    ) as (server, client):
        spec = backend.spec(server, default_headers=headers)
        errors: list[LMError] = []
        for _ in range(4):
            with pytest.raises(LMError) as caught:
                await whole(client, ask(), way)
            errors.append(caught.value)
        shown = [repr(spec), repr(client), client.account, repr(spec.key), *map(str, errors), *map(repr, errors)]
    assert server.requests[0].headers["x-extra"] == headers["X-Extra"]
    for secret in (KEY, headers["X-Extra"]):
        assert secret[:12] not in "\n".join(shown)
        assert secret not in caplog.text


@each
def test_unknown_arguments_are_named(backend: Backend) -> None:
    with pytest.raises(ConfigurationError, match=r"'api_kee' .did you mean 'api_key'"):
        client_spec(backend.name, {"api_kee": "x", "model_name": "m"})


def test_one_spec_serves_any_number_of_event_loops(no_leaks: None, anyio_backend: str) -> None:
    for backend in FAMILIES:
        with backend.server.serve_in_thread(lambda request: "ok") as server:
            spec = backend.spec(server)

            async def main(spec: Any = spec) -> list[str]:
                replies: list[str] = []

                async def one() -> None:
                    replies.append((await client.acomplete(ask())).text)

                async with spec.open() as client, anyio.create_task_group() as tasks:
                    for _ in range(4):
                        tasks.start_soon(one)
                return replies

            for _ in range(2):
                assert anyio.run(main, backend=anyio_backend) == ["ok"] * 4
