"""Several prompts, several choices of each, with OpenAI's own client."""

import asyncio
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError, RateLimitError

from tests.services.gateway.fakes import FakeTokenizer, Submitted

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


async def answer_all(tokenizer: FakeTokenizer, num_prompts: int, n: int) -> list[Submitted]:
    """Sends ``p.c`` for choice c of prompt p, one character per message, the last choice first."""
    requests = [await tokenizer.submitted.get() for _ in range(num_prompts)]
    for number, request in enumerate(requests):
        request.accept(list(range(number + 1)))
    for position in range(3):
        for number, request in reversed(list(enumerate(requests))):
            for choice in reversed(range(n)):
                request.text(f"{number}.{choice}"[position], choice=choice)
    for number, request in enumerate(requests):
        for choice in range(n):
            reason: Any = "length" if choice else "stop"
            request.finish(reason, choice=choice, num_cached=10 + number + 100 * choice)
    return requests


async def test_choices_of_all_prompts_are_numbered_through(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    reply, requests = await asyncio.gather(
        openai.completions.create(model="fish", prompt=["a", "bb"], n=2, seed=4),
        answer_all(tokenizer, 2, 2),
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == ["0.0", "0.1", "1.0", "1.1"]
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "length"] * 2
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (1 + 2, 4 * 3)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 10 + 11, "the first choices'"
    assert [request.prompt.tobytes() for request in requests] == [b"a", b"bb"]
    names = [request.submit.request.partition("/") for request in requests]
    assert names[0][0] == names[1][0]
    assert [name[2] for name in names] == ["0", "1"]
    for request in requests:
        assert [start.choice for start in request.submit.choices] == [0, 1]


@pytest.mark.parametrize(("seed", "num_seeds"), [(5, 1), (None, 3), (-1, 3)])
async def test_prompts_have_the_seed_of_their_client_or_one_of_their_own(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer, seed: int | None, num_seeds: int
) -> None:
    _, requests = await asyncio.gather(
        openai.completions.create(model="fish", prompt=[[1], [1], [3]], seed=seed),
        answer_all(tokenizer, 3, 1),
    )
    seeds = {request.submit.params.seed for request in requests}
    assert len(seeds) == num_seeds
    assert seeds == {seed} or num_seeds == 3
    assert [request.prompt.tolist() for request in requests] == [[1], [1], [3]]


async def test_each_chunk_of_a_stream_has_the_index_of_its_choice(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    stream, _ = await asyncio.gather(
        openai.completions.create(
            model="fish", prompt=["a", "b"], n=2, stream=True,
            stream_options={"include_usage": True},
        ),
        answer_all(tokenizer, 2, 2),
    )  # fmt: skip
    texts = dict.fromkeys(range(4), "")
    reasons: dict[int, list[str]] = {index: [] for index in range(4)}
    *chunks, last = [chunk async for chunk in stream]
    for chunk in chunks:
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index].append(choice.finish_reason)
    assert texts == {0: "0.0", 1: "0.1", 2: "1.0", 3: "1.1"}
    assert reasons == {0: ["stop"], 1: ["length"], 2: ["stop"], 3: ["length"]}
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 12)
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 21


async def test_each_choice_of_a_streamed_chat_begins_with_its_role(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    stream, _ = await asyncio.gather(
        openai.chat.completions.create(model="fish", messages=MESSAGES, n=3, stream=True),
        answer_all(tokenizer, 1, 3),
    )
    roles: dict[int, list[str | None]] = {0: [], 1: [], 2: []}
    texts = dict.fromkeys(range(3), "")
    async for chunk in stream:
        [choice] = chunk.choices
        roles[choice.index].append(choice.delta.role)
        texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "0.0", 1: "0.1", 2: "0.2"}
    for each in roles.values():
        assert each[0] == "assistant"
        assert not any(each[1:])


async def test_one_prompt_that_is_refused_refuses_all_and_cancels_the_others(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    async def refuse_second() -> Submitted:
        first, second = [await tokenizer.submitted.get() for _ in range(2)]
        first.accept()
        second.fail(429, "overloaded", "no slot is free")
        return first

    creating = openai.completions.create(model="fish", prompt=["a", "b"])
    error, first = await asyncio.gather(creating, refuse_second(), return_exceptions=True)
    assert isinstance(error, RateLimitError)
    assert isinstance(first, Submitted)
    [key] = (await tokenizer.cancelled.get()).keys
    assert key.request == first.submit.request


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens"),
        ({"max_tokens": 5}, "max_tokens", "max_tokens"),
        ({}, "prompt", "messages"),
    ],
)
async def test_a_refusal_names_the_field_that_the_client_sent(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer, fields: Any, param: str, named: str
) -> None:
    async def refuse() -> None:
        request = await tokenizer.submitted.get()
        request.fail(400, "context_length_exceeded", "too long", param=param)

    creating = openai.chat.completions.create(model="fish", messages=MESSAGES, **fields)
    error, _ = await asyncio.gather(creating, refuse(), return_exceptions=True)
    assert isinstance(error, BadRequestError)
    assert error.param == named


async def test_the_stop_that_ended_a_choice_is_sent_with_its_finish_reason(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    async def answer() -> None:
        request = await tokenizer.accepted()
        request.finish("stop", 0, "\n\n")
        request.finish("stop", 1, 7)
        request.finish("length", 2)

    response, _ = await asyncio.gather(
        http.post("/v1/completions", json={"prompt": "a", "n": 3}), answer()
    )
    choices = (await response.json())["choices"]
    assert [choice["stop_reason"] for choice in choices] == ["\n\n", 7, None]


async def test_credit_is_granted_as_a_client_takes_its_tokens(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    async def answer() -> Submitted:
        request = await tokenizer.accepted()
        request.text(*"x" * 200, choice=1)
        request.finish(choice=0)
        while not tokenizer.granted:
            await asyncio.sleep(0.005)
        request.finish(choice=1)
        return request

    response, request = await asyncio.gather(
        http.post("/v1/completions", json={"prompt": "a", "n": 2}), answer()
    )
    async with response:
        assert response.status == 200
    grant = tokenizer.granted[0]
    assert grant.request == f"{request.submit.request}/1"
    assert grant.num_tokens > 200
