"""The fake servers speak to the vendors' own SDKs, whole and streaming, in good and bad."""

from __future__ import annotations

import anthropic
import httpx2
import openai
import pytest
from google import genai
from google.genai import errors, types

from asyncrlm.testing import FakeAnthropicServer, FakeGeminiServer, FakeOpenAIServer, FakeReply

pytestmark = pytest.mark.anyio

REPLIES = [FakeReply("plain words", reasoning="because"), FakeReply("streamed words here", reasoning="hm")]


async def test_anthropics_sdk() -> None:
    async with (
        FakeAnthropicServer([*REPLIES, FakeReply(None, refusal="no"), FakeReply.fault(529)]) as server,
        anthropic.AsyncAnthropic(base_url=server.base_url, api_key="key", max_retries=0) as client,
    ):
        asked: dict[str, object] = {"model": "c", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
        plain = await client.messages.create(**asked)  # type: ignore[call-overload]
        assert [(block.type, getattr(block, block.type)) for block in plain.content] == [
            ("thinking", "because"),
            ("text", "plain words"),
        ]
        assert (plain.stop_reason, plain.model, plain.usage.input_tokens) == ("end_turn", "c", 2)
        async with client.messages.stream(**asked) as stream:  # type: ignore[arg-type]
            texts = [text async for text in stream.text_stream]
            whole = await stream.get_final_message()
        assert texts == ["streamed ", "words ", "here"]
        assert (whole.content[0].type, whole.stop_reason, whole.usage.output_tokens) == ("thinking", "end_turn", 6)
        refused = await client.messages.create(**asked)  # type: ignore[call-overload]
        assert (refused.stop_reason, refused.stop_details.explanation) == ("refusal", "no")
        with pytest.raises(anthropic.APIStatusError, match="injected fault") as caught:
            await client.messages.create(**asked)  # type: ignore[call-overload]
    assert (type(caught.value).__name__, caught.value.status_code) == ("OverloadedError", 529)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # Google's SDK knows no other
async def test_googles_sdk() -> None:
    async with (
        FakeGeminiServer([*REPLIES, FakeReply(None, refusal="no"), FakeReply.fault(503)]) as server,
        httpx2.AsyncClient() as http,
    ):
        options = types.HttpOptions(base_url=server.base_url, httpx_async_client=http)
        client = genai.Client(api_key="key", vertexai=False, http_options=options)
        plain = await client.aio.models.generate_content(model="g", contents="hello")
        assert plain.text == "plain words"
        assert plain.candidates is not None
        assert plain.candidates[0].finish_reason == types.FinishReason.STOP
        assert plain.usage_metadata is not None
        assert plain.usage_metadata.prompt_token_count == 2
        stream = await client.aio.models.generate_content_stream(model="g", contents="hello")
        assert [chunk.text async for chunk in stream if chunk.text] == ["streamed ", "words ", "here"]
        refused = await client.aio.models.generate_content(model="g", contents="hello")
        assert refused.prompt_feedback is not None
        assert refused.prompt_feedback.block_reason_message == "no"
        with pytest.raises(errors.ServerError, match="injected fault"):
            await client.aio.models.generate_content(model="g", contents="hello")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # on trio OpenAI's SDK leaves its generators unfinished
async def test_openais_sdk_on_azure() -> None:
    async with (
        FakeOpenAIServer(REPLIES) as server,
        openai.AsyncAzureOpenAI(
            azure_endpoint=server.url, azure_deployment="d", api_version="2024-10-21", api_key="key", max_retries=0
        ) as client,
    ):
        plain = await client.chat.completions.create(model="d", messages=[{"role": "user", "content": "hello"}])
        assert plain.choices[0].message.content == "plain words"
        stream = await client.chat.completions.create(
            model="d", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        pieces = [chunk.choices[0].delta.content async for chunk in stream]
    assert "".join(piece or "" for piece in pieces) == "streamed words here"
