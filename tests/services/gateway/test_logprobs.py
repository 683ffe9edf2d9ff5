"""Logprobs in replies, whole and streamed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from openai import AsyncOpenAI

from shared.wire.messages import ALL_TOKENS
from tests.services.gateway.client import CHAT, HI, TEXT, Client, client_of, serving, with_settings
from tests.services.gateway.fakes import MODEL, FakeTokenizer, fake_tokenizer, until

BY_ID = [
    {
        "6": {"logprob": -0.5, "rank": 2, "decoded_token": " w6"},
        "7": {"logprob": -0.25, "rank": 1, "decoded_token": " w7"},
    },
    {"8": {"logprob": -0.125, "rank": 1, "decoded_token": " w8"}},
]


async def answer(tokenizer: FakeTokenizer, has_alternatives: bool = True) -> int | None:
    """Two tokens, the second without text; returns the number of requested alternatives."""
    request = await tokenizer.accepted()
    if has_alternatives:
        request.logprobs("a", [6], [[-0.5, -0.25]], [[7]], [2])
        request.logprobs("", [8], [[-0.125, -0.125]], [[8]], [1])
    else:
        request.logprobs("a", [6], [[-0.5]], None, [2])
        request.logprobs("", [8], [[-0.125]], None, [1])
    request.finish()
    return request.submit.params.logprobs


async def test_a_whole_chat_has_them_in_its_choice(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    asking = openai.chat.completions.create(
        model="fish", messages=HI, logprobs=True, top_logprobs=1
    )
    reply, asked = await asyncio.gather(asking, answer(tokenizer))
    assert asked == 1
    logprobs = reply.choices[0].logprobs
    assert logprobs.refusal is None
    assert [(each.token, each.logprob) for each in logprobs.content] == [
        (" w6", -0.5),
        (" w8", -0.125),
    ]
    [top] = logprobs.content[0].top_logprobs
    assert (top.token, top.logprob, top.bytes) == (" w7", -0.25, list(b" w7"))


async def test_a_streamed_chat_has_logprobs_of_every_token_even_without_text(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    stream, asked = await asyncio.gather(
        openai.chat.completions.create(model="fish", messages=HI, logprobs=True, stream=True),
        answer(tokenizer, has_alternatives=False),
    )
    assert asked == 0
    found = [chunk.choices[0].logprobs async for chunk in stream]
    content = [each for logprobs in found if logprobs for each in logprobs.content or []]
    assert [(each.token, each.top_logprobs) for each in content] == [(" w6", []), (" w8", [])]


async def test_a_completion_has_them_in_columns_and_a_stream_goes_on_with_its_offsets(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    fields: Any = {"model": "fish", "prompt": "a", "logprobs": 1}
    reply, asked = await asyncio.gather(openai.completions.create(**fields), answer(tokenizer))
    assert asked == 1
    logprobs = reply.choices[0].logprobs
    assert logprobs.tokens == [" w6", " w8"]
    assert logprobs.token_logprobs == [-0.5, -0.125]
    assert logprobs.top_logprobs == [{" w7": -0.25, " w6": -0.5}, {" w8": -0.125}]
    assert logprobs.text_offset == [0, 3]
    creating = openai.completions.create(**fields, stream=True)
    stream, _ = await asyncio.gather(creating, answer(tokenizer))
    found = [chunk.choices[0].logprobs async for chunk in stream]
    assert [each for one in found if one for each in one.text_offset or []] == [0, 3]


async def test_each_choice_has_its_own_whatever_its_text(client: Client) -> None:
    async def script() -> None:
        request = await client.tokenizer.accepted()
        for choice in (1, 0):
            request.logprobs('a\0"', [6 + choice], [[-0.5]], choice=choice)
            request.finish(choice=choice)

    choices = (await client.served(script(), TEXT, prompt="a", logprobs=0, n=2)).choices
    assert [choice["text"] for choice in choices] == ['a\0"', 'a\0"']
    assert [choice["logprobs"]["tokens"] for choice in choices] == [[" w6"], [" w7"]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_without_them_they_are_null(client: Client, path: str) -> None:
    body: Any = {"prompt": "a"} if path == TEXT else {"messages": HI}
    assert (await client.answered(path, "x", **body))[0].choices[0]["logprobs"] is None


async def test_tokens_are_named_by_their_ids_where_the_client_asks(client: Client) -> None:
    body = {"prompt": "a", "logprobs": 1, "return_tokens_as_token_ids": True}
    found = await client.served(answer(client.tokenizer), TEXT, **body)
    assert found.choices[0]["logprobs"]["tokens"] == ["token_id:6", "token_id:8"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_objects_by_ids_replace_the_columns_where_the_client_asks(
    client: Client, is_stream: bool
) -> None:
    body = {"prompt": "a", "logprobs": 1, "logprobs_by_token_id": True, "stream": is_stream}
    found = await client.served(answer(client.tokenizer), TEXT, **body)
    replies = found.events if is_stream else [found.json]
    lists = [each["choices"][0]["logprobs"] or [] for each in replies]
    assert [entry for each in lists for entry in each] == BY_ID


LARGE = msgspec.structs.replace(MODEL, vocab_size=20_000)
VALUES = -np.random.default_rng(0).exponential(9, LARGE.vocab_size).astype(np.float32)
ALL: Any = {"prompt": "a", "logprobs": -1}


@asynccontextmanager
async def large_mesh(tmp_path: Path, **settings: Any) -> AsyncIterator[Client]:
    """Twenty thousand tokens, all available on request."""
    async with (
        fake_tokenizer(tmp_path, model=LARGE) as tokenizer,
        serving(tmp_path, max_logprobs=-1, **settings) as gateway,
        client_of(gateway, tokenizer) as client,
    ):
        yield client


async def answer_with_all(tokenizer: FakeTokenizer) -> None:
    request = await tokenizer.accepted()
    assert request.submit.params.logprobs == ALL_TOKENS
    for token in (10, 11):
        request.logprobs("a", [token], [[VALUES[token], *VALUES]])
    request.finish()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_whole_vocabulary_arrives_sorted_and_complete(
    tmp_path: Path, is_stream: bool
) -> None:
    body = {"messages": HI, "logprobs": True, "top_logprobs": -1, "max_tokens": 2}
    async with large_mesh(tmp_path) as client:
        script = answer_with_all(client.tokenizer)
        found = await client.served(script, CHAT, **body, stream=is_stream)
    entries = []
    for reply in found.events if is_stream else [found.json]:
        entries += (reply["choices"][0]["logprobs"] or {"content": []})["content"]
    assert [entry["token"] for entry in entries] == [" w10", " w11"]
    for entry in entries:
        top = [np.float32(each["logprob"]) for each in entry["top_logprobs"]]
        assert top == sorted(VALUES)[::-1]


async def test_a_large_stream_does_not_hold_up_its_neighbour(tmp_path: Path) -> None:
    """The neighbour gets its text while the large reply is still unread."""
    async with large_mesh(tmp_path) as client:
        posting = client.http.post(TEXT, json=ALL | {"stream": True})
        asked = asyncio.create_task(posting.__aenter__())
        request = await client.tokenizer.accepted()
        for _ in range(5):
            request.logprobs("a", [10], [[VALUES[10], *VALUES]])
        response = await asked
        await response.content.readany()
        neighbour, _ = await client.answered(TEXT, "x", prompt="b")
        assert neighbour.choices[0]["text"] == "x"
        request.finish()
        assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_more_logprobs_than_can_ever_be_kept_are_400_and_streaming_is_recommended(
    tmp_path: Path,
) -> None:
    async with large_mesh(tmp_path, max_buffered_bytes=8 << 20) as client:
        message = (await client.refused(400, TEXT, **ALL))["message"]
        assert "stream=true" in message
        assert f"max-buffered-bytes = {8 << 20}" in message
        script = answer_with_all(client.tokenizer)
        assert (await client.served(script, TEXT, **ALL, stream=True)).events


@pytest.mark.parametrize(
    ("fields", "num_bytes"), [({"max_tokens": 40}, 10 << 20), ({"stream": True}, 8 << 20)]
)
async def test_logprobs_that_others_leave_no_room_for_are_429(
    tmp_path: Path, fields: Any, num_bytes: int
) -> None:
    """Of a stream, a window is 4 MiB, and a row more may come."""
    async with large_mesh(tmp_path, max_buffered_bytes=num_bytes) as client:
        asked, request = await client.accepted(TEXT, **ALL, **fields)
        await client.refused(429, TEXT, **ALL, **fields)
        await client.finish(asked, request)
        found = await client.served(answer_with_all(client.tokenizer), TEXT, **ALL, **fields)
        if "stream" not in fields:
            assert len(found.choices[0]["logprobs"]["tokens"]) == 2


@with_settings(max_buffered_bytes=10_000)
async def test_partial_whole_replies_count_and_refuse_newcomers_only(client: Client) -> None:
    body: Any = {"prompt": "a", "return_token_ids": True, "max_tokens": 50}
    asked, request = await client.accepted(TEXT, **body)
    request.text("x" * 6000, "y" * 4000)
    await until(lambda: client.gateway._admission._num_bytes > 10_000)
    await client.refused(429, TEXT, prompt="b")
    (choice,) = (await client.finish(asked, request)).choices
    assert (choice["text"], choice["token_ids"]) == ("x" * 6000 + "y" * 4000, [10, 11])
    await until(lambda: not client.gateway._admission._num_bytes)
    error = await client.refused(400, TEXT, **body, n=8)  # 400 ids are beyond the limit for ever
    assert "max-buffered-bytes = 10000" in error["message"]


@pytest.mark.parametrize("lag_s", [0, 0.001])
async def test_a_whole_reply_of_many_tokens_has_logprobs_of_each_in_order(
    client: Client, lag_s: float
) -> None:
    """They arrive one by one, and the gateway joins them into larger pieces."""
    num = 150
    body: Any = {"prompt": "a", "max_tokens": 64, "n": 2, "logprobs": 1}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}

    async def script() -> None:
        request = await client.tokenizer.accepted()
        for position in range(num):
            for choice in (0, 1):
                token = (position + choice) % 100
                values, letter = [[-position - choice / 2, 0]], chr(97 + token % 26)
                request.logprobs(letter, [token], values, [[token]], choice=choice)
            await asyncio.sleep(lag_s)
        for choice in (0, 1):
            request.finish(choice=choice)

    for number, choice in enumerate((await client.served(script(), TEXT, **body)).choices):
        tokens = [(position + number) % 100 for position in range(num)]
        assert choice["token_ids"] == tokens
        assert choice["text"] == "".join(chr(97 + token % 26) for token in tokens)
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]
        expected = [-position - number / 2 for position in range(num)]
        assert choice["logprobs"]["token_logprobs"] == expected
