"""Several prompts, several choices of each."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.services.gateway.client import CHAT, HI, TEXT, Client
from tests.services.gateway.fakes import FakeTokenizer, Submitted, until


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


def check_usage(usage: Any) -> None:
    assert (usage.prompt_tokens, usage.completion_tokens) == (1 + 2, 4 * 3)
    assert usage.prompt_tokens_details.cached_tokens == 10 + 11, "the first choices'"


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
    check_usage(reply.usage)
    assert [request.prompt.tobytes() for request in requests] == [b"a", b"bb"]
    names = [request.submit.request.partition("/") for request in requests]
    assert names[0][0] == names[1][0]
    assert [name[2] for name in names] == ["0", "1"]
    for request in requests:
        assert [start.choice for start in request.submit.choices] == [0, 1]


@pytest.mark.parametrize(("seed", "num_seeds"), [(5, 1), (None, 3), (-1, 3)])
async def test_prompts_have_the_seed_of_their_client_or_one_of_their_own(
    client: Client, seed: int | None, num_seeds: int
) -> None:
    asked = asyncio.create_task(client.post(TEXT, prompt=[[1], [1], [3]], seed=seed))
    requests = await answer_all(client.tokenizer, 3, 1)
    assert (await asked).status == 200
    seeds = {request.submit.params.seed for request in requests}
    assert len(seeds) == num_seeds
    assert seeds == {seed} or num_seeds == 3
    assert [request.prompt.tolist() for request in requests] == [[1], [1], [3]]


async def test_each_chunk_of_a_stream_has_the_index_of_its_choice(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    asked: Any = {"prompt": ["a", "b"], "n": 2, "stream_options": {"include_usage": True}}
    stream, _ = await asyncio.gather(
        openai.completions.create(model="fish", stream=True, **asked), answer_all(tokenizer, 2, 2)
    )
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
    check_usage(last.usage)


async def test_each_choice_of_a_streamed_chat_begins_with_its_role(client: Client) -> None:
    script = answer_all(client.tokenizer, 1, 3)
    roles: dict[int, list[str | None]] = {0: [], 1: [], 2: []}
    texts = dict.fromkeys(range(3), "")
    for chunk in (await client.served(script, CHAT, messages=HI, n=3, stream=True)).events:
        [choice] = chunk["choices"]
        roles[choice["index"]].append(choice["delta"].get("role"))
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == {0: "0.0", 1: "0.1", 2: "0.2"}
    for each in roles.values():
        assert each[0] == "assistant"
        assert not any(each[1:])


async def test_one_prompt_that_is_refused_refuses_all_and_cancels_the_others(
    client: Client,
) -> None:
    asked, first = await client.begun(TEXT, prompt=["a", "b"])
    second = await client.tokenizer.submitted.get()
    first.accept()
    second.fail(429, "overloaded", "no slot is free")
    assert (await asked).status == 429
    [key] = (await client.tokenizer.cancelled.get()).keys
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
    client: Client, fields: Any, param: str, named: str
) -> None:
    asked, request = await client.begun(CHAT, messages=HI, **fields)
    request.fail(400, "context_length_exceeded", "too long", param=param)
    answer = await asked
    assert (answer.status, answer.error["param"]) == (400, named)


async def test_the_stop_that_ended_a_choice_is_sent_with_its_finish_reason(client: Client) -> None:
    asked, request = await client.accepted(TEXT, prompt="a", n=3)
    request.finish("stop", 0, "\n\n")
    request.finish("stop", 1, 7)
    request.finish("length", 2)
    assert [choice["stop_reason"] for choice in (await asked).choices] == ["\n\n", 7, None]


async def test_credit_is_granted_as_a_client_takes_its_tokens(client: Client) -> None:
    asked, request = await client.accepted(TEXT, prompt="a", n=2)
    request.text(*"x" * 200, choice=1)
    request.finish(choice=0)
    await until(lambda: client.tokenizer.granted)
    request.finish(choice=1)
    assert (await asked).status == 200
    grant = client.tokenizer.granted[0]
    assert grant.request == f"{request.submit.request}/1"
    assert grant.num_tokens > 200
