"""A broken worker next to a good one."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from benchmarks.harness.fleet import running_fleet
from services.scheduler.worker_state import PROBATION_STEPS
from tests.mesh.forks import fork
from tests.mesh.wide_worker import NUM_DRAFTS

NUM_DEATHS = 4


@pytest.mark.slow
async def test_a_worker_that_dies_in_its_first_step_for_ever_fails_no_request(tmp_path: Path):
    """The good one stands still meanwhile, so that the bad one gets the most requests."""
    async with running_fleet(tmp_path, {"TEST_STEPS": str(tmp_path)}, fork) as fleet:
        for kind in ("scheduler", "tokenizer", "gateway"):
            await fleet.start(kind)
        await fleet.start("worker", module="tests.mesh.wide_worker", MAX_NUM_SEQS="4")
        await fleet.until_ready()
        (gateway,), (scheduler,) = fleet.of("gateway"), fleet.of("scheduler")
        async with aiohttp.ClientSession() as session:

            async def ask(max_tokens: int) -> int:
                body = {"prompt": [5], "max_tokens": max_tokens}
                async with session.post(f"{gateway.url}/v1/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    return (await response.json())["usage"]["completion_tokens"]

            await ask(2 * PROBATION_STEPS * (1 + NUM_DRAFTS))
            (tmp_path / "hold").touch()
            answers = [asyncio.create_task(ask(20 + number)) for number in range(12)]
            while (await scheduler.metrics())["shoal_sequences"] < len(answers):
                await asyncio.sleep(0.02)
            for _ in range(NUM_DEATHS):
                bad = await fleet.start("worker", module="tests.mesh.dying_worker")
                assert await asyncio.wait_for(bad.process.wait(), 60) == 9
            (tmp_path / "hold").unlink()
            assert await asyncio.gather(*answers) == [20 + number for number in range(12)]
        metrics = await scheduler.metrics()
        assert metrics["shoal_requeues_total"] == NUM_DEATHS, "one request each time"
