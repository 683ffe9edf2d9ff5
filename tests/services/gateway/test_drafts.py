"""Speculation in replies: drafts on request, and their number in the usage."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from services.gateway.chat.requests.parse import parse_completion
from services.gateway.chat.requests.reply_bytes import token_bytes
from shared.wire.messages import WINDOW_BYTES
from tests.services.gateway.client import CHAT, HI, TEXT, Client
from tests.services.gateway.fakes import LIMITS, MODEL, FakeTokenizer, fake_tokenizer

ASKS: Any = {"include_draft_logprobs": True}
OF_TEXT: Any = {"prompt": "a", "logprobs": 0}
OF_CHAT: Any = {"messages": HI, "logprobs": True}
DRAFTS = [
    {"token": " w11", "logprob": 0, "rank": 1, "accepted": True, "position": 1},
    {"token": " w12", "logprob": -0.125, "rank": 2, "accepted": True, "position": 2},
    {"token": " w20", "logprob": -0.25, "rank": 3, "accepted": False, "position": 3},
    {"token": " w21", "logprob": 0, "rank": 1, "accepted": False, "position": 4},
]
IN_BOTH = pytest.mark.parametrize(
    ("path", "body"), [(TEXT, OF_TEXT), (CHAT, OF_CHAT)], ids=["text", "chat"]
)


async def speculate(tokenizer: FakeTokenizer) -> None:
    """A token alone, then three with two accepted drafts, then one with a wrong draft."""
    request = await tokenizer.accepted()
    request.speculate("a", [10], [], 0)
    await asyncio.sleep(0.05)
    request.speculate("bcd", [11, 12, 13], [11, 12, 20], 2)
    await asyncio.sleep(0.05)
    request.speculate("e", [14], [21], 0)
    request.finish("length")


def without_bytes(draft_logprobs: Any) -> list[Any]:
    entries = draft_logprobs["content"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in entries)
    return [{key: entry[key] for key in entry if key != "bytes"} for entry in entries]


@IN_BOTH
async def test_a_whole_reply_has_all_drafts_of_a_choice_in_order(
    client: Client, path: str, body: Any
) -> None:
    answer = await client.served(speculate(client.tokenizer), path, **body, **ASKS)
    [choice] = answer.choices
    assert without_bytes(choice["draft_logprobs"]) == DRAFTS
    num_tokens = len(choice["logprobs"]["tokens" if path == TEXT else "content"])
    assert num_tokens == answer.json["usage"]["completion_tokens"] == 5


@IN_BOTH
async def test_a_stream_has_drafts_in_the_chunk_of_the_tokens_that_came_with_them(
    client: Client, path: str, body: Any
) -> None:
    script = speculate(client.tokenizer)
    by_text: dict[str, list[Any]] = {}
    for chunk in (await client.served(script, path, **body, **ASKS, stream=True)).events:
        [choice] = chunk["choices"]
        text = choice["text"] if path == TEXT else choice["delta"].get("content") or ""
        if "draft_logprobs" in choice:
            by_text[text] = without_bytes(choice["draft_logprobs"])
            assert choice["logprobs"] is not None
    assert by_text == {"bcd": DRAFTS[:3], "e": DRAFTS[3:]}


@IN_BOTH
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_that_does_not_ask_gets_no_drafts(
    client: Client, path: str, body: Any, is_stream: bool
) -> None:
    answer = await client.served(speculate(client.tokenizer), path, **body, stream=is_stream)
    assert "draft_logprobs" not in answer.text


async def test_where_nothing_is_drafted_there_are_none(client: Client) -> None:
    async def script() -> None:
        request = await client.tokenizer.accepted()
        request.logprobs("a", [10], [[-1]])
        request.finish()

    answer = await client.served(script(), TEXT, **OF_TEXT, **ASKS)
    assert answer.choices[0]["draft_logprobs"] == {"content": []}
    assert "completion_tokens_details" not in answer.json["usage"]
    stream = await client.served(script(), TEXT, **OF_TEXT, **ASKS, stream=True)
    assert "draft_logprobs" not in stream.text


async def test_drafts_stand_between_logprobs_of_a_choice_and_of_its_prompt(client: Client) -> None:
    async def script() -> None:
        request = await client.tokenizer.submitted.get()
        request.accept([6, 7])
        request.logprobs("", [7], [[-0.5]], of_prompt=True)
        for choice in range(request.submit.choices[-1].choice + 1):
            request.speculate("a", [10 + choice], [20 + choice], 0, choice=choice)
            request.finish(choice=choice)

    answer = await client.served(script(), TEXT, **OF_TEXT, **ASKS, prompt_logprobs=0, n=2)
    for index, choice in enumerate(answer.choices):
        assert choice["logprobs"]["tokens"] == [f" w{10 + index}"]
        assert choice["draft_logprobs"]["content"][0]["token"] == f" w{20 + index}"
        assert list(choice["prompt_logprobs"][1]) == ["7"]
    answer = await client.served(script(), CHAT, **OF_CHAT, **ASKS, prompt_logprobs=0)
    assert answer.choices[0]["draft_logprobs"]["content"][0]["token"] == " w20"
    assert list(answer.json["prompt_logprobs"][1]) == ["7"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_six_tokens_a_step_with_twenty_one_logprobs_each_arrive_whole(
    client: Client, is_stream: bool
) -> None:
    num_steps, num_top = 40, 20

    async def script() -> None:
        request = await client.tokenizer.accepted()
        for step in range(num_steps):
            ids = [(6 * step + number) % MODEL.vocab_size for number in range(6)]
            request.speculate("x" * 6, ids, [*ids[:4], 99], 4, num_top=num_top)
        request.finish()

    body = OF_CHAT | ASKS | {"top_logprobs": num_top, "return_tokens_as_token_ids": True}
    answer = await client.served(script(), CHAT, **body, stream=is_stream)
    choices = [each["choices"][0] for each in (answer.events if is_stream else [answer.json])]
    empty: dict[str, list[Any]] = {"content": []}
    tokens = [each for one in choices for each in (one["logprobs"] or empty)["content"]]
    drafts = [each for one in choices for each in one.get("draft_logprobs", empty)["content"]]
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
    async def script() -> None:
        for _ in range(2):
            request = await tokenizer.accepted()
            for choice in range(2):
                request.speculate("abc", [11, 12, 13], [11, 12, 20], 2, choice=choice)
                request.speculate("d", [14], [], 0, choice=choice)
                request.finish(choice=choice)

    asked: Any = {"model": "fish", "prompt": ["a", "b"], "n": 2}
    reply, _ = await asyncio.gather(openai.completions.create(**asked), script())
    events, _ = await asyncio.gather(
        openai.completions.create(**asked, stream=True, stream_options={"include_usage": True}),
        script(),
    )
    *_, last = [event async for event in events]
    for usage in (reply.usage, last.usage):
        assert usage.completion_tokens == 4 * 4
        details = usage.completion_tokens_details
        assert details.accepted_prediction_tokens == 4 * 2
        assert details.rejected_prediction_tokens == 4 * 1


async def test_drafts_that_are_all_wrong_are_counted_too(client: Client) -> None:
    async def script() -> None:
        request = await client.tokenizer.accepted()
        request.speculate("a", [11], [20], 0)
        request.finish()

    answer = await client.served(script(), CHAT, messages=HI)
    assert answer.json["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 1,
    }  # fmt: skip


async def test_after_a_replay_drafts_that_were_delivered_before_are_counted_and_sent_once(
    tmp_path: Path, client: Client
) -> None:
    async def script() -> None:
        request = await client.tokenizer.accepted()
        request.speculate("abc", [11, 12, 13], [11, 12, 20], 2)
        await asyncio.sleep(0.1)
        async with fake_tokenizer(tmp_path, "t2") as other:
            await client.tokenizer.link.close("the test wants so")
            again = await other.accepted()
            assert again.submit.params.draft_logprobs
            assert again.submit.choices[0].num_ids == 3
            again.num_sent[0] = 3
            again.speculate("de", [14, 15], [14, 21], 1)
            again.finish()

    answer = await client.served(script(), TEXT, **OF_TEXT, **ASKS)
    [choice] = answer.choices
    assert choice["text"] == "abcde"
    assert [entry["position"] for entry in choice["draft_logprobs"]["content"]] == [0, 1, 2, 3, 4]
    assert answer.json["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2,
    }  # fmt: skip


def test_memory_of_drafts_is_reckoned_with_the_tokens() -> None:
    def held(**fields: Any) -> int:
        body = json.dumps({"prompt": "a", "logprobs": 0, "max_tokens": 10} | fields).encode()
        return token_bytes(parse_completion(body, MODEL, LIMITS), MODEL)

    more = held(**ASKS) - held()
    assert more >= 10 * 5 * (4 + 4 + 4 + 4 + 1), "five drafts for each token"
    assert held(**ASKS, n=2) - held(n=2) == 2 * more
    assert held(**ASKS, stream=True) == held(**ASKS) < WINDOW_BYTES
