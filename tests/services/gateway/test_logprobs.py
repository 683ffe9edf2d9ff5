"""Logprobs in replies, whole and streamed, with OpenAI's own client."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from openai import AsyncOpenAI

from services.gateway.service import GatewayService
from shared.wire.messages import ALL_TOKENS, State
from tests.services.gateway.fakes import (
    MODEL,
    FakeTokenizer,
    fake_tokenizer,
    running_gateway,
    until,
)

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
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
    reply, asked = await asyncio.gather(
        openai.chat.completions.create(
            model="fish", messages=MESSAGES, logprobs=True, top_logprobs=1
        ),
        answer(tokenizer),
    )
    assert asked == 1
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.refusal is None
    assert logprobs.content is not None
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
        openai.chat.completions.create(model="fish", messages=MESSAGES, logprobs=True, stream=True),
        answer(tokenizer, has_alternatives=False),
    )
    assert asked == 0
    content = []
    async for chunk in stream:
        logprobs = chunk.choices[0].logprobs
        content += (logprobs.content or []) if logprobs else []
    assert [(each.token, each.top_logprobs) for each in content] == [(" w6", []), (" w8", [])]


async def test_a_whole_completion_has_them_in_columns(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    reply, asked = await asyncio.gather(
        openai.completions.create(model="fish", prompt="a", logprobs=1), answer(tokenizer)
    )
    assert asked == 1
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [" w6", " w8"]
    assert logprobs.token_logprobs == [-0.5, -0.125]
    assert logprobs.top_logprobs == [{" w7": -0.25, " w6": -0.5}, {" w8": -0.125}]
    assert logprobs.text_offset == [0, 3]


async def test_a_streamed_completion_goes_on_with_its_offsets(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    stream, _ = await asyncio.gather(
        openai.completions.create(model="fish", prompt="a", logprobs=1, stream=True),
        answer(tokenizer),
    )
    offsets: list[int] = []
    async for chunk in stream:
        logprobs = chunk.choices[0].logprobs
        offsets += (logprobs.text_offset or []) if logprobs else []
    assert offsets == [0, 3]


async def test_each_choice_has_its_own_whatever_its_text(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    async def answer() -> None:
        request = await tokenizer.accepted()
        for choice in (1, 0):
            request.logprobs('a\0"', [6 + choice], [[-0.5]], choice=choice)
            request.finish(choice=choice)

    reply, _ = await asyncio.gather(
        openai.completions.create(model="fish", prompt="a", logprobs=0, n=2), answer()
    )
    assert [choice.text for choice in reply.choices] == ['a\0"', 'a\0"']
    all_logprobs = [choice.logprobs for choice in reply.choices]
    assert [each.tokens for each in all_logprobs if each is not None] == [[" w6"], [" w7"]]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_without_them_they_are_null(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, path: str
) -> None:
    body = {"prompt": "a"} if path == TEXT else {"messages": MESSAGES}
    response, _ = await asyncio.gather(http.post(path, json=body), tokenizer.answer("x"))
    assert (await response.json())["choices"][0]["logprobs"] is None


async def test_tokens_are_named_by_their_ids_where_the_client_asks(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    body = {"prompt": "a", "logprobs": 1, "return_tokens_as_token_ids": True}
    response, _ = await asyncio.gather(http.post(TEXT, json=body), answer(tokenizer))
    logprobs = (await response.json())["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:6", "token_id:8"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_objects_by_ids_replace_the_columns_where_the_client_asks(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, is_stream: bool
) -> None:
    body = {"prompt": "a", "logprobs": 1, "logprobs_by_token_id": True, "stream": is_stream}
    response, _ = await asyncio.gather(http.post(TEXT, json=body), answer(tokenizer))
    content = await response.text()
    replies = [event[6:] for event in content.split("\n\n")[:-2]] if is_stream else [content]
    lists = [json.loads(each)["choices"][0]["logprobs"] or [] for each in replies]
    assert [entry for each in lists for entry in each] == BY_ID


LARGE = msgspec.structs.replace(MODEL, vocab_size=20_000)


@asynccontextmanager
async def large_mesh(
    tmp_path: Path, **settings: Any
) -> AsyncIterator[tuple[FakeTokenizer, GatewayService, aiohttp.ClientSession]]:
    """Twenty thousand tokens, all available on request."""
    async with (
        fake_tokenizer(tmp_path, model=LARGE) as tokenizer,
        running_gateway(tmp_path, max_logprobs=-1, **settings) as gateway,
    ):
        await until(lambda: gateway.status().state == State.READY)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            yield tokenizer, gateway, http


VALUES = -np.random.default_rng(0).exponential(9, LARGE.vocab_size).astype(np.float32)


async def answer_with_all(tokenizer: FakeTokenizer) -> int | None:
    request = await tokenizer.accepted()
    for token in (10, 11):
        request.logprobs("a", [token], [[VALUES[token], *VALUES]])
    request.finish()
    return request.submit.params.logprobs


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_whole_vocabulary_arrives_sorted_and_complete(
    tmp_path: Path, is_stream: bool
) -> None:
    body = {
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": -1,
        "stream": is_stream,
        "max_tokens": 2,
    }
    async with large_mesh(tmp_path) as (tokenizer, _, http):
        response, asked = await asyncio.gather(
            http.post(CHAT, json=body), answer_with_all(tokenizer)
        )
        content = await response.text()
    assert asked == ALL_TOKENS
    replies = [content]
    if is_stream:
        replies = [event[6:] for event in content.split("\n\n")[:-2]]
    entries = []
    for reply in map(json.loads, replies):
        entries += (reply["choices"][0]["logprobs"] or {"content": []})["content"]
    assert [entry["token"] for entry in entries] == [" w10", " w11"]
    for entry in entries:
        top = [np.float32(each["logprob"]) for each in entry["top_logprobs"]]
        assert top == sorted(VALUES)[::-1]


async def test_a_large_stream_does_not_hold_up_its_neighbour(tmp_path: Path) -> None:
    """The neighbour gets its text while the large reply is still unread."""
    large = {"prompt": "a", "logprobs": -1, "stream": True}
    async with large_mesh(tmp_path) as (tokenizer, _, http):
        posting = asyncio.create_task(http.post(TEXT, json=large).__aenter__())
        request = await tokenizer.accepted()
        for _ in range(5):
            request.logprobs("a", [10], [[VALUES[10], *VALUES]])
        response = await posting
        await response.content.readany()
        neighbour, _ = await asyncio.gather(
            http.post(TEXT, json={"prompt": "b"}), tokenizer.answer("x")
        )
        assert (await neighbour.json())["choices"][0]["text"] == "x"
        request.finish()
        events = (await response.text()).split("\n\n")
        assert events[-2] == "data: [DONE]"


async def test_more_logprobs_than_can_ever_be_kept_are_400_and_streaming_is_recommended(
    tmp_path: Path,
) -> None:
    body = {"prompt": "a", "logprobs": -1}
    async with large_mesh(tmp_path, max_buffered_bytes=8 << 20) as (tokenizer, _, http):
        async with http.post(TEXT, json=body) as response:
            assert response.status == 400
            message = (await response.json())["error"]["message"]
        assert "stream=true" in message
        assert f"max-buffered-bytes = {8 << 20}" in message
        response, _ = await asyncio.gather(
            http.post(TEXT, json=body | {"stream": True}), answer_with_all(tokenizer)
        )
        assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_logprobs_that_others_leave_no_room_for_are_429(tmp_path: Path) -> None:
    body = {"prompt": "a", "logprobs": -1, "max_tokens": 40}
    async with large_mesh(tmp_path, max_buffered_bytes=10 << 20) as (tokenizer, _, http):
        posting = asyncio.create_task(http.post(TEXT, json=body).__aenter__())
        request = await tokenizer.accepted()
        async with http.post(TEXT, json=body) as response:
            assert response.status == 429
        request.finish()
        async with await posting as response:
            assert response.status == 200
        response, _ = await asyncio.gather(http.post(TEXT, json=body), answer_with_all(tokenizer))
        assert len((await response.json())["choices"][0]["logprobs"]["tokens"]) == 2


async def test_streams_count_the_memory_of_their_logprobs(tmp_path: Path) -> None:
    body = {"prompt": "a", "logprobs": -1, "stream": True}
    async with large_mesh(tmp_path, max_buffered_bytes=8 << 20) as (tokenizer, _, http):
        posting = asyncio.create_task(http.post(TEXT, json=body).__aenter__())
        request = await tokenizer.accepted()
        async with http.post(TEXT, json=body) as response:
            assert response.status == 429, "a window is 4 MiB, and a row more may come"
        request.finish()
        async with await posting as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
        posted, _ = await asyncio.gather(http.post(TEXT, json=body), answer_with_all(tokenizer))
        async with posted as response:
            assert response.status == 200


async def test_partial_whole_replies_count_and_refuse_newcomers_only(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    body = {"prompt": "a", "return_token_ids": True, "max_tokens": 50}
    async with running_gateway(tmp_path, max_buffered_bytes=10_000) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            posting = asyncio.create_task(http.post(TEXT, json=body).__aenter__())
            request = await tokenizer.accepted()
            request.text("x" * 6000, "y" * 4000)
            await until(lambda: gateway._admission._num_bytes > 10_000)
            async with http.post(TEXT, json={"prompt": "b"}) as response:
                assert response.status == 429
            request.finish()
            async with await posting as response:
                (choice,) = (await response.json())["choices"]
            assert (choice["text"], choice["token_ids"]) == ("x" * 6000 + "y" * 4000, [10, 11])
            await until(lambda: not gateway._admission._num_bytes)
            async with http.post(TEXT, json={**body, "n": 8}) as response:
                assert response.status == 400, "8 × 50 ids take more than there may ever be"
                assert "max-buffered-bytes = 10000" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("lag_s", [0, 0.001])
async def test_a_whole_reply_of_many_tokens_has_logprobs_of_each_in_order(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, lag_s: float
) -> None:
    """They arrive one by one, and the gateway joins them into larger pieces."""
    num = 150
    body = {"prompt": "a", "max_tokens": 64, "n": 2, "logprobs": 1, "return_token_ids": True}
    body |= {"return_tokens_as_token_ids": True}

    async def write() -> None:
        request = await tokenizer.accepted()
        for position in range(num):
            for choice in (0, 1):
                token = (position + choice) % 100
                value = -position - choice / 2
                request.logprobs(
                    chr(97 + token % 26), [token], [[value, 0]], [[token]], choice=choice
                )
            await asyncio.sleep(lag_s)
        for choice in (0, 1):
            request.finish(choice=choice)

    posting, _ = await asyncio.gather(http.post(TEXT, json=body), write())
    async with posting as response:
        choices = (await response.json())["choices"]
    for number, choice in enumerate(choices):
        tokens = [(position + number) % 100 for position in range(num)]
        assert choice["token_ids"] == tokens
        assert choice["text"] == "".join(chr(97 + token % 26) for token in tokens)
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]
        expected = [-position - number / 2 for position in range(num)]
        assert choice["logprobs"]["token_logprobs"] == expected
