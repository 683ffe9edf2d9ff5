"""/v1/completions with OpenAI's own client."""

import asyncio

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.services.gateway.fakes import MODEL, NUM_PROMPT_TOKENS, FakeTokenizer


async def test_a_text_prompt_is_completed(openai: AsyncOpenAI, tokenizer: FakeTokenizer) -> None:
    reply, request = await asyncio.gather(
        openai.completions.create(model="fish", prompt="Früh ", stop="\n"),
        tokenizer.answer("am", " Morgen"),
    )
    assert (reply.object, reply.choices[0].text) == ("text_completion", "am Morgen")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == NUM_PROMPT_TOKENS + 2
    assert reply.id.startswith("cmpl-")
    assert request.submit.kind == "text"
    assert request.prompt.tobytes().decode() == "Früh "
    assert request.submit.text.stop == ["\n"]


async def test_token_ids_travel_as_int32(openai: AsyncOpenAI, tokenizer: FakeTokenizer) -> None:
    last_id = MODEL.vocab_size - 1
    _, request = await asyncio.gather(
        openai.completions.create(model="fish", prompt=[0, 1, last_id]), tokenizer.answer("x")
    )
    assert request.submit.kind == "ids"
    assert request.prompt.dtype == "int32"
    assert request.prompt.tolist() == [0, 1, last_id]


async def test_without_max_tokens_the_rest_of_the_context_is_asked_for(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    for extra, expected in [({}, None), ({"max_tokens": None}, None), ({"max_tokens": 7}, 7)]:
        _, request = await asyncio.gather(
            openai.completions.create(model="fish", prompt="a", extra_body=extra),
            tokenizer.answer("x"),
        )
        assert request.submit.params.max_tokens == expected


async def test_a_stream_is_text_then_one_finish_reason_then_usage(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    stream, _ = await asyncio.gather(
        openai.completions.create(
            model="fish", prompt="a", stream=True, stream_options={"include_usage": True}
        ),
        tokenizer.answer("x", "y", reason="length"),
    )
    *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "xy"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "length"
    assert not any(reasons[:-1])
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 2


async def test_an_id_outside_the_vocabulary_is_named(openai: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError) as error:
        await openai.completions.create(model="fish", prompt=[1, MODEL.vocab_size])
    assert error.value.param == "prompt[1]"
    assert str(MODEL.vocab_size) in error.value.message


@pytest.mark.parametrize("stream", [False, True])
async def test_fields_of_a_completion_without_effect_are_named_in_a_header(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, stream: bool
) -> None:
    asked = {"prompt": "a", "stream": stream, "guided_decoding_backend": "auto", "user": None}
    for fields, expected in (
        (
            {"guided_decoding_backend": "xgrammar", "user": "ada"},
            "guided_decoding_backend: it changes nothing here, user: it changes nothing here",
        ),
        ({"tempertaure": 1}, "tempertaure: unknown, ignored"),
        ({}, None),
    ):
        response, _ = await asyncio.gather(
            http.post("/v1/completions", json=asked | fields), tokenizer.answer("x")
        )
        async with response:
            assert response.status == 200
            assert response.headers.get("X-Shoal-Warnings") == expected
            assert "x" in await response.text()
