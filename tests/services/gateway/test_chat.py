"""/v1/chat/completions with OpenAI's own client."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from tests.services.gateway.fakes import MODEL, NUM_PROMPT_TOKENS, FakeTokenizer

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


async def test_a_chat_is_answered_with_its_text_and_usage(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    reply, request = await asyncio.gather(
        openai.chat.completions.create(model="fish", messages=MESSAGES),
        tokenizer.answer("Hel", "lo", reason="length"),
    )
    assert reply.choices[0].message.content == "Hello"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (NUM_PROMPT_TOKENS, 2)
    assert reply.usage.total_tokens == NUM_PROMPT_TOKENS + 2
    assert (reply.object, reply.model) == ("chat.completion", "fish")
    assert reply.system_fingerprint == MODEL.fingerprint
    assert reply.id == "chatcmpl-" + request.submit.request.partition("~")[0]
    assert request.submit.request.endswith("/0")


async def test_the_messages_travel_as_json_as_they_came(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    parts = [{"type": "text", "text": "Grüß "}, {"type": "text", "text": "Gott"}]
    messages: Any = [
        {"role": "user", "content": parts, "name": "Ada"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f"}}],
        },
    ]
    _, request = await asyncio.gather(
        openai.chat.completions.create(model="fish", messages=messages), tokenizer.answer("x")
    )
    assert (request.submit.kind, request.submit.attempt) == ("chat", 1)
    assert json.loads(request.prompt.tobytes()) == messages


async def test_parameters_arrive_as_the_client_gave_them(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    _, request = await asyncio.gather(
        openai.chat.completions.create(
            model="org/fish",
            messages=MESSAGES,
            temperature=0,
            top_p=0.5,
            seed=-7,
            max_tokens=1,
            max_completion_tokens=9,
            stop=["a", "bb"],
            user="ada",
            metadata={"k": "v"},
            extra_body={"top_k": -1, "ignore_eos": True},
        ),
        tokenizer.answer("x"),
    )
    params = request.submit.params
    assert (params.temperature, params.top_p, params.top_k) == (0, 0.5, 0)
    assert (params.seed, params.max_tokens, params.ignore_eos) == (-7, 9, True)
    assert request.submit.text.stop == ["a", "bb"]


async def test_missing_parameters_have_openais_defaults_and_a_random_seed(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    seeds = set()
    for _ in range(2):
        _, request = await asyncio.gather(
            openai.chat.completions.create(model="fish", messages=MESSAGES), tokenizer.answer("x")
        )
        params = request.submit.params
        assert (params.temperature, params.top_p, params.top_k) == (1, 1, 0)
        assert (params.max_tokens, params.ignore_eos, request.submit.text.stop) == (None, False, [])
        seeds.add(params.seed)
    assert len(seeds) == 2


async def test_a_stream_gives_role_then_text_then_one_finish_reason(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    stream, _ = await asyncio.gather(
        openai.chat.completions.create(model="fish", messages=MESSAGES, stream=True),
        tokenizer.answer("Hel", "", "lo"),
    )
    chunks = [chunk async for chunk in stream]
    first, *others = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert "".join(choice.delta.content or "" for choice in others) == "Hello"
    assert all(choice.delta.role is None for choice in others)
    assert [choice.finish_reason for choice in others if choice.finish_reason] == ["stop"]
    assert others[-1].finish_reason == "stop"
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_ends_with_the_usage_if_the_client_asked(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    stream, _ = await asyncio.gather(
        openai.chat.completions.create(
            model="fish", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        ),
        tokenizer.answer("a", "b"),
    )
    *others, last = [chunk async for chunk in stream]
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (NUM_PROMPT_TOKENS, 2)
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in others)


async def test_an_answer_without_text_is_empty(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    reply, _ = await asyncio.gather(
        openai.chat.completions.create(model="fish", messages=MESSAGES), tokenizer.answer()
    )
    assert reply.choices[0].message.content == ""


async def test_a_stream_without_text_has_its_role_and_its_finish_reason(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    stream, _ = await asyncio.gather(
        openai.chat.completions.create(model="fish", messages=MESSAGES, stream=True),
        tokenizer.answer(),
    )
    choices = [chunk.choices[0] async for chunk in stream]
    assert [choice.delta.role for choice in choices] == ["assistant", None]
    assert [choice.finish_reason for choice in choices] == [None, "stop"]


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "assistant", "content": None}])
async def test_a_message_without_content_is_refused_by_its_index(
    http: aiohttp.ClientSession, message: dict[str, Any]
) -> None:
    async with http.post("/v1/chat/completions", json={"messages": [*MESSAGES, message]}) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]["param"] == "messages[1].content"


async def test_fields_of_a_chat_without_effect_are_named_in_a_header(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    asked = {"messages": MESSAGES, "session_id": "s", "store": True, "service_tier": "auto"}
    names = "session_id: it changes nothing here, store: it changes nothing here"
    for fields, expected in (
        (asked, names),
        (asked | {"stream": True}, names),
        ({"messages": MESSAGES, "tempertaure": 1, "é\r\n": 1}, "tempertaure: unknown, ignored"),
        ({"messages": MESSAGES}, None),
    ):
        response, _ = await asyncio.gather(
            http.post("/v1/chat/completions", json=fields), tokenizer.answer("x")
        )
        async with response:
            assert response.status == 200
            assert response.headers.get("X-Shoal-Warnings") == expected
