"""/v1/chat/completions with OpenAI's own client."""

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.services.gateway.client import CHAT, HI, TEXT, Client
from tests.services.gateway.fakes import MODEL, NUM_PROMPT_TOKENS, FakeTokenizer, Submitted

WARNED = "session_id: it changes nothing here, store: it changes nothing here"


async def ask(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer, *texts: str, reason: Any = "stop", **fields: Any
) -> tuple[Any, Submitted]:
    """The reply or the chunks, and the request."""
    asked = {"model": "fish", "messages": HI} | fields
    reply, request = await asyncio.gather(
        openai.chat.completions.create(**asked), tokenizer.answer(*texts, reason=reason)
    )
    return [chunk async for chunk in reply] if fields.get("stream") else reply, request


async def test_a_chat_is_answered_with_its_text_and_usage(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    reply, request = await ask(openai, tokenizer, "Hel", "lo", reason="length")
    [choice] = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello")
    assert choice.finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (NUM_PROMPT_TOKENS, 2)
    assert reply.usage.total_tokens == NUM_PROMPT_TOKENS + 2
    assert (reply.object, reply.model) == ("chat.completion", "fish")
    assert reply.system_fingerprint == MODEL.fingerprint
    assert reply.id == "chatcmpl-" + request.submit.request.partition("~")[0]
    assert request.submit.request.endswith("/0")
    reply, _ = await ask(openai, tokenizer)
    assert reply.choices[0].message.content == "", "an answer without text"


async def test_the_messages_travel_as_json_as_they_came(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    parts = [{"type": "text", "text": "Grüß "}, {"type": "text", "text": "Gott"}]
    calls = [{"id": "1", "function": {"name": "f"}}]
    messages: Any = [
        {"role": "user", "content": parts, "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    _, request = await ask(openai, tokenizer, "x", messages=messages)
    assert (request.submit.kind, request.submit.attempt) == ("chat", 1)
    assert json.loads(request.prompt.tobytes()) == messages


async def test_parameters_arrive_as_the_client_gave_them(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    asked: Any = {"temperature": 0, "top_p": 0.5, "seed": -7, "stop": ["a", "bb"], "user": "ada"}
    asked |= {"model": "org/fish", "max_tokens": 1, "max_completion_tokens": 9}
    asked |= {"metadata": {"k": "v"}, "extra_body": {"top_k": -1, "ignore_eos": True}}
    _, request = await ask(openai, tokenizer, "x", **asked)
    params = request.submit.params
    assert (params.temperature, params.top_p, params.top_k) == (0, 0.5, 0)
    assert (params.seed, params.max_tokens, params.ignore_eos) == (-7, 9, True)
    assert request.submit.text.stop == ["a", "bb"]


async def test_missing_parameters_have_openais_defaults_and_a_random_seed(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    seeds = set()
    for _ in range(2):
        _, request = await ask(openai, tokenizer, "x")
        params = request.submit.params
        assert (params.temperature, params.top_p, params.top_k) == (1, 1, 0)
        assert (params.max_tokens, params.ignore_eos, request.submit.text.stop) == (None, False, [])
        seeds.add(params.seed)
    assert len(seeds) == 2


async def test_a_stream_gives_role_then_text_then_one_finish_reason(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    chunks, _ = await ask(openai, tokenizer, "Hel", "", "lo", stream=True)
    first, *others = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert "".join(choice.delta.content or "" for choice in others) == "Hello"
    assert all(choice.delta.role is None for choice in others)
    assert [choice.finish_reason for choice in others if choice.finish_reason] == ["stop"]
    assert others[-1].finish_reason == "stop"
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    chunks, _ = await ask(openai, tokenizer, stream=True)
    choices = [chunk.choices[0] for chunk in chunks]
    assert [choice.delta.role for choice in choices] == ["assistant", None]
    assert [choice.finish_reason for choice in choices] == [None, "stop"]


async def test_a_stream_ends_with_the_usage_if_the_client_asked(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    asked: Any = {"stream": True, "stream_options": {"include_usage": True}}
    (*others, last), _ = await ask(openai, tokenizer, "a", "b", **asked)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (NUM_PROMPT_TOKENS, 2)
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in others)


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "assistant", "content": None}])
async def test_a_message_without_content_is_refused_by_its_index(
    client: Client, message: dict[str, Any]
) -> None:
    error = await client.refused(400, CHAT, messages=[*HI, message])
    assert error["param"] == "messages[1].content"


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {"session_id": "s", "store": True, "service_tier": "auto"}, WARNED),
        (CHAT, {"session_id": "s", "store": True, "stream": True}, WARNED),
        (CHAT, {"tempertaure": 1, "é\r\n": 1}, "tempertaure: unknown, ignored"),
        (CHAT, {}, None),
        (TEXT, {"session_id": "s", "store": True, "guided_decoding_backend": "auto"}, WARNED),
        (TEXT, {"session_id": "s", "store": True, "user": None, "stream": True}, WARNED),
        (TEXT, {"tempertaure": 1}, "tempertaure: unknown, ignored"),
        (TEXT, {}, None),
    ],
)
async def test_fields_without_effect_are_named_in_a_header(
    client: Client, path: str, fields: dict[str, Any], expected: str | None
) -> None:
    prompt: Any = {"messages": HI} if path == CHAT else {"prompt": "a"}
    answer, _ = await client.answered(path, "x", **prompt, **fields)
    assert answer.headers.get("X-Shoal-Warnings") == expected
    assert "x" in answer.text
