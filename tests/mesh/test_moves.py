"""Sequences that move between workers with their KV blocks, seen by clients: real processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from benchmarks.harness.fleet import Fleet, Member, running_fleet
from tests.mesh.forks import fork

pytestmark = pytest.mark.timeout(600)

NUM_STREAMS, PROMPT_LEN, REPLY_LEN = 4, 560, 160
SETTINGS = {
    "DTYPE": "float32",
    "MAX_MODEL_LEN": "1024",
    "NUM_GPU_BLOCKS_OVERRIDE": "400",
    "DRAIN_TIMEOUT_S": "60",
}
PROMPTS = [
    np.random.default_rng(number).integers(300, 8000, PROMPT_LEN + number).tolist()
    for number in range(NUM_STREAMS)
]
RECOMPUTED = "shoal_recomputed_tokens_total"
TAKEN = "shoal_blocks_taken_bytes_total"
FREE = 'shoal_kv_blocks{state="free"}'


@asynccontextmanager
async def mesh(
    directory: Path, *roles: str, num_cells: int = 1, settings: dict[str, str] = SETTINGS
) -> AsyncIterator[Fleet]:
    """With a worker for each of ``roles``, spread over the cells."""
    async with running_fleet(directory, settings, fork) as fleet:
        for role in roles:
            await fleet.start("worker", WORKER_ROLE=role)
        await fleet.start_all(scheduler=num_cells, tokenizer=1, gateway=1)
        num_blocks = len(roles) * int(settings["NUM_GPU_BLOCKS_OVERRIDE"]) // num_cells
        async with asyncio.timeout(60):
            while [each[FREE] for each in await scheduler_metrics(fleet)] != num_cells * [
                num_blocks
            ]:
                await asyncio.sleep(0.05)
        yield fleet


async def scheduler_metrics(fleet: Fleet) -> list[dict[str, float]]:
    return [await each.metrics() for each in fleet.of("scheduler")]


def moves(metrics: dict[str, float], why: str, outcome: str = "done") -> float:
    return metrics.get(f'shoal_moves_total{{outcome="{outcome}",why="{why}"}}', 0)


def recomputed(metrics: dict[str, float]) -> float:
    return sum(value for name, value in metrics.items() if name.startswith(RECOMPUTED))


async def stream(
    client: AsyncOpenAI, prompt: list[int], reply: list[Any], reply_len: int = REPLY_LEN
) -> None:
    """Adds each token's id and logprob to ``reply`` as it comes."""
    chunks = await client.completions.create(
        model="shoal-tiny", prompt=prompt, max_tokens=reply_len, temperature=0.8, seed=5,
        stream=True, logprobs=1, extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    async for chunk in chunks:
        for choice in chunk.choices:
            ids = getattr(choice, "token_ids", None) or []
            logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
            reply += zip(ids, logprobs or [], strict=True)


async def answer(fleet: Fleet, while_open: Any = None) -> list[list[Any]]:
    """The replies to all prompts; ``while_open`` runs once each has begun."""
    (gateway,) = fleet.of("gateway")
    replies = [list[Any]() for _ in PROMPTS]
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="-", max_retries=0) as client:
        tasks = [
            asyncio.create_task(stream(client, prompt, reply))
            for prompt, reply in zip(PROMPTS, replies, strict=True)
        ]
        if while_open is not None:
            async with asyncio.timeout(60):
                while min(map(len, replies)) < 8:
                    await asyncio.sleep(0.005)
            await while_open()
        await asyncio.gather(*tasks)
    return replies


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Of one worker that stays."""
    async with mesh(tmp_path_factory.mktemp("alone"), "both") as fleet:
        return await answer(fleet)


async def test_sequences_of_a_leaving_worker_go_on_without_being_computed_again(
    tmp_path: Path, wanted: list[list[Any]]
) -> None:
    async with mesh(tmp_path, "both", "both") as fleet:
        leaving: Member = fleet.of("worker")[0]
        found = await answer(fleet, lambda: fleet.stop(leaving))
        (metrics,) = await scheduler_metrics(fleet)
        await fleet.until_idle()
    assert found == wanted
    assert moves(metrics, "leaving") >= 1
    assert recomputed(metrics) == 0


@pytest.mark.slow
async def test_a_prefill_worker_hands_its_sequences_over(
    tmp_path: Path, wanted: list[list[Any]]
) -> None:
    async with mesh(tmp_path, "prefill", "decode") as fleet:
        found = await answer(fleet)
        (metrics,) = await scheduler_metrics(fleet)
        await fleet.until_idle()
    assert found == wanted
    assert moves(metrics, "role") >= 1
    assert recomputed(metrics) < 16 * NUM_STREAMS, "more than the last blocks of prompts"


async def test_a_prompt_begins_with_blocks_of_a_busy_worker(
    tmp_path: Path, wanted: list[list[Any]]
) -> None:
    async with mesh(tmp_path, "both", "both", settings=SETTINGS | {"MAX_NUM_SEQS": "1"}) as fleet:
        (gateway,) = fleet.of("gateway")
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="-", max_retries=0) as client:
            first = list[Any]()
            busy = asyncio.create_task(stream(client, PROMPTS[0], first, 400))
            async with asyncio.timeout(60):
                while len(first) < 8:
                    await asyncio.sleep(0.005)
            second = await client.completions.create(
                model="shoal-tiny", prompt=PROMPTS[0], max_tokens=REPLY_LEN, temperature=0.8,
                seed=5, logprobs=1, extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
            assert not busy.done()
            (metrics,) = await scheduler_metrics(fleet)
            await busy
        taken = [(await each.metrics())[TAKEN] for each in fleet.of("worker")]
        await fleet.until_idle()
    (choice,) = second.choices
    assert choice.logprobs is not None
    ids = choice.token_ids  # type: ignore[attr-defined]
    assert [*zip(ids, choice.logprobs.token_logprobs or [], strict=True)] == wanted[0]
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    num_cached = (PROMPT_LEN - 1) // 16 * 16
    assert second.usage.prompt_tokens_details.cached_tokens == num_cached
    assert metrics['shoal_peer_hits_total{outcome="done"}'] == 1
    assert metrics["shoal_peer_hit_tokens_total"] == num_cached
    assert recomputed(metrics) == 0
    assert sorted(taken)[0] == 0 < sorted(taken)[1]
