"""/v1/completions with OpenAI's own client."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.services.gateway.fakes import MODEL, NUM_PROMPT_TOKENS, FakeTokenizer, Submitted


async def ask(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer, *texts: str, reason: Any = "stop", **fields: Any
) -> tuple[Any, Submitted]:
    asked = {"model": "fish", "prompt": "a"} | fields
    return await asyncio.gather(
        openai.completions.create(**asked), tokenizer.answer(*texts, reason=reason)
    )


async def test_a_text_prompt_is_completed(openai: AsyncOpenAI, tokenizer: FakeTokenizer) -> None:
    reply, request = await ask(openai, tokenizer, "am", " Morgen", prompt="Früh ", stop="\n")
    assert (reply.object, reply.choices[0].text) == ("text_completion", "am Morgen")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == NUM_PROMPT_TOKENS + 2
    assert reply.id.startswith("cmpl-")
    assert request.submit.kind == "text"
    assert request.prompt.tobytes().decode() == "Früh "
    assert request.submit.text.stop == ["\n"]


async def test_token_ids_travel_as_int32(openai: AsyncOpenAI, tokenizer: FakeTokenizer) -> None:
    ids = [0, 1, MODEL.vocab_size - 1]
    _, request = await ask(openai, tokenizer, "x", prompt=ids)
    assert request.submit.kind == "ids"
    assert request.prompt.dtype == "int32"
    assert request.prompt.tolist() == ids


async def test_without_max_tokens_the_rest_of_the_context_is_asked_for(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    for extra, expected in [({}, None), ({"max_tokens": None}, None), ({"max_tokens": 7}, 7)]:
        _, request = await ask(openai, tokenizer, "x", extra_body=extra)
        assert request.submit.params.max_tokens == expected


async def test_a_stream_is_text_then_one_finish_reason_then_usage(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    asked: Any = {"stream": True, "stream_options": {"include_usage": True}}
    stream, _ = await ask(openai, tokenizer, "x", "y", reason="length", **asked)
    *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "xy"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "length"
    assert not any(reasons[:-1])
    assert last.choices == []
    assert last.usage.completion_tokens == 2


async def test_an_id_outside_the_vocabulary_is_named(openai: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError) as error:
        await openai.completions.create(model="fish", prompt=[1, MODEL.vocab_size])
    assert error.value.param == "prompt[1]"
    assert str(MODEL.vocab_size) in error.value.message
