"""Outputs that end at a repetition, and logprobs of named ids, by real processes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from benchmarks.harness.fleet import running_fleet
from tests.mesh.forks import fork
from tests.mesh.structured import client_of

SETTINGS = {"DTYPE": "float32", "MAX_MODEL_LEN": "1024"}
# A vocabulary so small that some outputs repeat a token this often after some hundreds.
COUNT = 6
REPEATED = ["repetition", "repetition_detected"]
RULE = {"max_pattern_size": 1, "min_count": COUNT}
FIELDS = {"allowed_token_ids": [*range(300, 316)], "repetition_detection": RULE, "ignore_eos": True}
SEEDS = range(6)
Text = tuple[list[int], str, str]


async def text_of(client: AsyncOpenAI, seed: int, **more: Any) -> Text:
    """The ids of a stream, its finish reason and its stop reason."""
    extra = FIELDS | {"return_token_ids": True} | more
    stream = await client.completions.create(
        model="shoal-tiny", prompt="Once", max_tokens=400, temperature=2, seed=seed, stream=True,
        extra_body=extra,
    )  # fmt: skip
    ids: list[int] = []
    async for chunk in stream:
        (choice,) = chunk.model_dump()["choices"]
        ids += choice["token_ids"]
        reasons = choice["finish_reason"], choice.get("stop_reason")
    return ids, *reasons


async def texts_of(client: AsyncOpenAI) -> list[Text]:
    return await asyncio.gather(*(text_of(client, seed) for seed in SEEDS))


def first_end(ids: list[int]) -> int | None:
    """The number of ids when one has occurred COUNT times in a row."""
    ends = range(COUNT, len(ids) + 1)
    return next((end for end in ends if len(set(ids[end - COUNT : end])) == 1), None)


@pytest.mark.slow
async def test_texts_end_with_their_first_repetition_with_drafts_and_after_kills(tmp_path: Path):
    """The second worker has drafts, the first one none."""
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet:
        for kind in ("scheduler", "tokenizer", "gateway"):
            await fleet.start(kind)
        await fleet.start("worker", SPECULATIVE_CONFIG='{"method": "none"}')
        await fleet.until_ready()
        async with client_of(fleet.of("gateway")[0].url) as client:
            expected = await texts_of(client)
            for ids, *reasons in expected:
                end = first_end(ids)
                assert end in (None, len(ids))
                assert reasons == (["length", None] if end is None else REPEATED)
            assert {reason for _, reason, _ in expected} == {"length", "repetition"}
            running = asyncio.create_task(texts_of(client))
            (scheduler,) = fleet.of("scheduler")
            async with asyncio.timeout(30):
                while (await scheduler.metrics())["vllm:num_requests_running"] < 4:
                    await asyncio.sleep(0.01)
            for kind in ("worker", "tokenizer"):
                (victim,) = fleet.of(kind)
                await fleet.kill(victim)
                await fleet.start(kind)
            assert await running == expected
            await named_ids(client)
        await fleet.until_idle()


async def named_ids(client: AsyncOpenAI) -> None:
    """Each token has the logprobs of these ids, likeliest first, equal to those among all ids."""
    ids = [300, 7, 301, 7]
    fields: Any = {"model": "shoal-tiny", "max_tokens": 6, "temperature": 0, "logprobs": True}
    fields["messages"] = [{"role": "user", "content": "Who leads?"}]
    as_ids = {"return_tokens_as_token_ids": True}
    named, likeliest = [
        (await client.chat.completions.create(**fields, extra_body=extra | as_ids)).choices[0]
        for extra in ({"logprob_token_ids": ids}, {"top_logprobs": 20})
    ]
    assert named.message.content == likeliest.message.content
    assert named.logprobs
    assert named.logprobs.content
    assert likeliest.logprobs
    assert likeliest.logprobs.content
    for token, other in zip(named.logprobs.content, likeliest.logprobs.content, strict=True):
        values = [each.logprob for each in token.top_logprobs]
        assert {each.token for each in token.top_logprobs} == {f"token_id:{each}" for each in ids}
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert token.logprob == other.logprob
        known = {each.token: each.logprob for each in other.top_logprobs}
        for each in token.top_logprobs:
            assert known.get(each.token, each.logprob) == each.logprob
