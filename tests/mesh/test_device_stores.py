"""A store next to the engine for GPUs, here on a CPU, in a mesh of real processes: streams of a
killed worker, and later prompts, go on from saved bytes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from benchmarks.harness.fleet import Member, running_fleet
from tests.mesh.forks import fork
from tests.mesh.test_stores import RECOVERED, SIZES, add_tokenizer, complete, ids_of, stream
from tests.services.worker.hybrids import save_hybrid

pytestmark = pytest.mark.timeout(600)
WORKER = "tests.mesh.device_worker"
LOADED = 'shoal_kv_store_bytes_total{direction="load"}'
NUM = 200
SETTINGS = {
    "DTYPE": "float32",
    "MAX_MODEL_LEN": "512",
    "MAX_NUM_SEQS": "4",
    "MAX_NUM_BATCHED_TOKENS": "96",
    "KV_OFFLOADING_SIZE": "0.1",
    "SERVED_MODEL_NAME": "shoal-tiny",
}
DRAFTS = '{"method": "mtp", "num_speculative_tokens": 2, "adaptive": false}'


async def go_on(directory: Path, worker: str, **settings: str) -> None:
    """With the texts that are computed under another salt, without the cache."""
    settings = SETTINGS | {"KV_OFFLOADING_DIR": str(directory / "kv")} | settings
    prompts = [ids_of(number, 160) for number in range(3)]
    async with running_fleet(directory, settings, fork) as fleet:
        for kind in ("scheduler", "tokenizer"):
            await fleet.start(kind)
        victim = await fleet.start("worker", worker)
        gateway = await fleet.start("gateway")
        await fleet.until_ready()
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
            wanted = [
                (await complete(client, each, NUM, cache_salt="other"))[0] for each in prompts
            ]
            found = [list[int]() for _ in prompts]
            tasks = [
                asyncio.create_task(stream(client, prompt, NUM, ids))
                for prompt, ids in zip(prompts, found, strict=True)
            ]
            async with asyncio.timeout(60):
                while min(map(len, found)) < 20:
                    await asyncio.sleep(0.01)
            await fleet.kill(victim)
            successor = await fleet.start("worker", worker)
            await asyncio.gather(*tasks)
            _, cached = await complete(client, [*prompts[0], *wanted[0], *ids_of(6, 20)], 4)
        (scheduler,) = fleet.of("scheduler")
        metrics = await scheduler.metrics()
        num_loaded = await loaded(successor)
    assert found == wanted
    assert metrics[RECOVERED] >= 3 * 128
    assert num_loaded > 0
    assert cached >= 256


async def loaded(worker: Member) -> float:
    return (await worker.metrics())[LOADED]


async def test_streams_of_a_killed_worker_go_on_from_the_saved_bytes(tmp_path: Path) -> None:
    """With drafts, whose pairs are a part of a block."""
    await go_on(tmp_path, WORKER, SPECULATIVE_CONFIG=DRAFTS)


@pytest.mark.slow
async def test_a_hybrid_goes_on_from_its_saved_states(tmp_path: Path) -> None:
    changes: dict[str, Any] = SIZES
    save_hybrid(tmp_path / "model", "qwen3.5", **changes)
    add_tokenizer(tmp_path / "model")
    await go_on(tmp_path, WORKER, MODEL=str(tmp_path / "model"))
