"""A mesh of real processes with workers on a GPU: answers are the CPU worker's, also after a kill.
Needs a GPU: `pytest -m gpu`."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.harness.checked_load import TIMEOUT
from benchmarks.harness.fleet import READY_TIMEOUT_S, command_line, running_fleet
from tests.mesh.test_device_engine import SETTINGS, answer, answers, bodies, num_accepted, texts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
ON_CUDA = {"DEVICE": "cuda", "KV_CACHE_MEMORY_BYTES": str(256 << 20)}
MAX_TOKENS = 150


async def test_answers_are_the_cpus(tmp_path: Path) -> None:
    """Penalties, biases, filters, logprobs, several choices, drafts; once more with hits."""
    wanted = await answers(tmp_path / "cpu", "", bodies(), DEVICE="cpu")
    found = await answers(tmp_path / "cuda", "", bodies(), **ON_CUDA)
    assert [texts(each) for each in found] == [texts(each) for each in wanted]
    assert sum(num_accepted(each) for each in found) > 0
    logs = [file.read_text() for file in (tmp_path / "cuda").rglob("w*.log")]
    assert any(" on cuda" in log for log in logs)


async def test_answers_survive_a_killed_worker(tmp_path: Path) -> None:
    """Sequences continue on the other worker, with the ids that clients have."""
    asked = [body | {"max_tokens": MAX_TOKENS} for body in bodies()[:15]]
    async with running_fleet(tmp_path, SETTINGS | ON_CUDA, command_line) as fleet:
        await fleet.start_all(scheduler=1, tokenizer=1, worker=2, gateway=1)
        url = f"{fleet.of('gateway')[0].url}/v1/"
        async with aiohttp.ClientSession(url, timeout=TIMEOUT) as session:
            wanted = [await answer(session, body) for body in asked]
            answering = asyncio.gather(*(answer(session, body) for body in asked))
            victim = await _working(fleet.of("worker"))
            await fleet.kill(victim)
            found = await answering
    assert [texts(each) for each in found] == [texts(each) for each in wanted]


async def _working(workers: list[Any]) -> Any:
    """The first worker with sequences. Raises TimeoutError."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while True:
            for each in workers:
                if (await each.status()).get("load"):
                    return each
            await asyncio.sleep(0.01)
