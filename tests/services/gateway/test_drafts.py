"""Speculation in replies: drafts on request, and their number in the usage."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from services.gateway.chat.requests.parse import parse_completion
from services.gateway.chat.requests.reply_bytes import token_bytes
from shared.wire.messages import WINDOW_BYTES
from tests.services.gateway.fakes import LIMITS, MODEL, FakeTokenizer, fake_tokenizer

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
ASKS: Any = {"include_draft_logprobs": True}
OF_TEXT: Any = {"prompt": "a", "logprobs": 0}
OF_CHAT: Any = {"messages": MESSAGES, "logprobs": True}


async def post(http: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def stream(http: aiohttp.ClientSession, path: str, **body: Any) -> list[Any]:
    async with http.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event[6:]) for event in events[:-2]]


async def speculate(tokenizer: FakeTokenizer) -> None:
    """A token alone, then three with two accepted drafts, then one with a wrong draft."""
    request = await tokenizer.accepted()
    request.speculate("a", [10], [], 0)
    await asyncio.sleep(0.05)
    request.speculate("bcd", [11, 12, 13], [11, 12, 20], 2)
    await asyncio.sleep(0.05)
    request.speculate("e", [14], [21], 0)
    request.finish("length")


DRAFTS = [
    {"token": " w11", "logprob": 0, "rank": 1, "accepted": True, "position": 1},
    {"token": " w12", "logprob": -0.125, "rank": 2, "accepted": True, "position": 2},
    {"token": " w20", "logprob": -0.25, "rank": 3, "accepted": False, "position": 3},
    {"token": " w21", "logprob": 0, "rank": 1, "accepted": False, "position": 4},
]


def without_bytes(draft_logprobs: Any) -> list[Any]:
    entries = draft_logprobs["content"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in entries)
    return [{key: entry[key] for key in entry if key != "bytes"} for entry in entries]


@pytest.mark.parametrize(("path", "body"), [(TEXT, OF_TEXT), (CHAT, OF_CHAT)])
async def test_a_whole_reply_has_all_drafts_of_a_choice_in_order(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, path: str, body: Any
) -> None:
    reply, _ = await asyncio.gather(post(http, path, **body, **ASKS), speculate(tokenizer))
    [choice] = reply["choices"]
    assert without_bytes(choice["draft_logprobs"]) == DRAFTS
    logprobs = choice["logprobs"]
    num_tokens = len(logprobs["tokens" if path == TEXT else "content"])
    assert num_tokens == reply["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(("path", "body"), [(TEXT, OF_TEXT), (CHAT, OF_CHAT)])
async def test_a_stream_has_drafts_in_the_chunk_of_the_tokens_that_came_with_them(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, path: str, body: Any
) -> None:
    chunks, _ = await asyncio.gather(stream(http, path, **body, **ASKS), speculate(tokenizer))
    by_text: dict[str, list[Any]] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        text = choice["text"] if path == TEXT else choice["delta"].get("content") or ""
        if "draft_logprobs" in choice:
            by_text[text] = without_bytes(choice["draft_logprobs"])
            assert choice["logprobs"] is not None
    assert by_text == {"bcd": DRAFTS[:3], "e": DRAFTS[3:]}


@pytest.mark.parametrize(("path", "body"), [(TEXT, OF_TEXT), (CHAT, OF_CHAT)])
async def test_a_request_that_does_not_ask_gets_no_drafts(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, path: str, body: Any
) -> None:
    reply, _ = await asyncio.gather(post(http, path, **body), speculate(tokenizer))
    chunks, _ = await asyncio.gather(stream(http, path, **body), speculate(tokenizer))
    assert "draft_logprobs" not in json.dumps([reply, chunks])


async def test_where_nothing_is_drafted_there_are_none(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    async def answer() -> None:
        request = await tokenizer.accepted()
        request.logprobs("a", [10], [[-1]])
        request.finish()

    reply, _ = await asyncio.gather(post(http, TEXT, **OF_TEXT, **ASKS), answer())
    assert reply["choices"][0]["draft_logprobs"] == {"content": []}
    assert "completion_tokens_details" not in reply["usage"]
    chunks, _ = await asyncio.gather(stream(http, TEXT, **OF_TEXT, **ASKS), answer())
    assert "draft_logprobs" not in json.dumps(chunks)


async def test_drafts_stand_between_logprobs_of_a_choice_and_of_its_prompt(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    async def answer() -> None:
        request = await tokenizer.submitted.get()
        request.accept([6, 7])
        request.logprobs("", [7], [[-0.5]], of_prompt=True)
        for choice in range(request.submit.choices[-1].choice + 1):
            request.speculate("a", [10 + choice], [20 + choice], 0, choice=choice)
            request.finish(choice=choice)

    ask = post(http, TEXT, **OF_TEXT, **ASKS, prompt_logprobs=0, n=2)
    reply, _ = await asyncio.gather(ask, answer())
    for index, choice in enumerate(reply["choices"]):
        assert choice["logprobs"]["tokens"] == [f" w{10 + index}"]
        assert choice["draft_logprobs"]["content"][0]["token"] == f" w{20 + index}"
        assert list(choice["prompt_logprobs"][1]) == ["7"]
    ask = post(http, CHAT, **OF_CHAT, **ASKS, prompt_logprobs=0)
    reply, _ = await asyncio.gather(ask, answer())
    assert reply["choices"][0]["draft_logprobs"]["content"][0]["token"] == " w20"
    assert list(reply["prompt_logprobs"][1]) == ["7"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_six_tokens_a_step_with_twenty_one_logprobs_each_arrive_whole(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, is_stream: bool
) -> None:
    num_steps, num_top = 40, 20

    async def answer() -> None:
        request = await tokenizer.accepted()
        for step in range(num_steps):
            ids = [(6 * step + number) % MODEL.vocab_size for number in range(6)]
            request.speculate("x" * 6, ids, [*ids[:4], 99], 4, num_top=num_top)
        request.finish()

    ask = (stream if is_stream else post)(
        http, CHAT, **OF_CHAT, **ASKS, top_logprobs=num_top, return_tokens_as_token_ids=True
    )
    got, _ = await asyncio.gather(ask, answer())
    choices = [chunk["choices"][0] for chunk in (got if is_stream else [got])]
    tokens: list[Any] = []
    drafts: list[Any] = []
    for choice in choices:
        tokens += (choice["logprobs"] or {"content": []})["content"]
        drafts += choice.get("draft_logprobs", {"content": []})["content"]
    assert [entry["token"] for entry in tokens] == [
        f"token_id:{position % MODEL.vocab_size}" for position in range(6 * num_steps)
    ]
    assert all(
        [each["logprob"] for each in entry["top_logprobs"]] == [-i / 8 for i in range(num_top)]
        for entry in tokens
    )
    assert [(each["position"], each["accepted"]) for each in drafts] == [
        (6 * step + number, number < 4) for step in range(num_steps) for number in range(5)
    ]
    right = [each for each in drafts if each["accepted"]]
    assert [each["token"] for each in right] == [
        f"token_id:{each['position'] % MODEL.vocab_size}" for each in right
    ]


async def test_the_usage_counts_the_drafts_of_all_choices_and_prompts(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    async def answer() -> None:
        for _ in range(2):
            request = await tokenizer.accepted()
            for choice in range(2):
                request.speculate("abc", [11, 12, 13], [11, 12, 20], 2, choice=choice)
                request.speculate("d", [14], [], 0, choice=choice)
                request.finish(choice=choice)

    asked: Any = {"model": "fish", "prompt": ["a", "b"], "n": 2}
    reply, _ = await asyncio.gather(openai.completions.create(**asked), answer())
    events, _ = await asyncio.gather(
        openai.completions.create(**asked, stream=True, stream_options={"include_usage": True}),
        answer(),
    )
    *_, last = [event async for event in events]
    for usage in (reply.usage, last.usage):
        assert usage is not None
        assert usage.completion_tokens == 4 * 4
        details = usage.completion_tokens_details
        assert details is not None
        assert details.accepted_prediction_tokens == 4 * 2
        assert details.rejected_prediction_tokens == 4 * 1


async def test_drafts_that_are_all_wrong_are_counted_too(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    async def answer() -> None:
        request = await tokenizer.accepted()
        request.speculate("a", [11], [20], 0)
        request.finish()

    reply, _ = await asyncio.gather(
        openai.chat.completions.create(model="fish", messages=MESSAGES), answer()
    )
    assert reply.usage is not None
    details = reply.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 1)


async def test_after_a_replay_drafts_that_were_delivered_before_are_counted_and_sent_once(
    tmp_path: Path, http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    async def answer() -> None:
        request = await tokenizer.accepted()
        request.speculate("abc", [11, 12, 13], [11, 12, 20], 2)
        await asyncio.sleep(0.1)
        async with fake_tokenizer(tmp_path, "t2") as other:
            await tokenizer.link.close("the test wants so")
            again = await other.accepted()
            assert again.submit.params.draft_logprobs
            assert again.submit.choices[0].num_ids == 3
            again.num_sent[0] = 3
            again.speculate("de", [14, 15], [14, 21], 1)
            again.finish()

    reply, _ = await asyncio.gather(post(http, TEXT, **OF_TEXT, **ASKS), answer())
    assert reply["choices"][0]["text"] == "abcde"
    content = reply["choices"][0]["draft_logprobs"]["content"]
    assert [entry["position"] for entry in content] == [0, 1, 2, 3, 4]
    assert reply["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 2,
    }


def test_memory_of_drafts_is_reckoned_with_the_tokens() -> None:
    def held(**fields: Any) -> int:
        body = json.dumps({"prompt": "a", "logprobs": 0, "max_tokens": 10} | fields).encode()
        return token_bytes(parse_completion(body, MODEL, LIMITS), MODEL)

    more = held(**ASKS) - held()
    assert more >= 10 * 5 * (4 + 4 + 4 + 4 + 1), "five drafts for each token"
    assert held(**ASKS, n=2) - held(n=2) == 2 * more
    assert held(**ASKS, stream=True) == held(**ASKS) < WINDOW_BYTES
